"""Times `add` and `sample` of Sharpwave, its peers and two yardsticks, interleaved within one run.

    python benchmarks/bench_replay.py                        # all, some minutes
    python benchmarks/bench_replay.py --quick sharpwave numpy_ring cpprb

Writes `results/replay.json`; `report.py` turns it into tables and plots.
"""

from __future__ import annotations

from harness.contest import ENVIRONMENTS, Contest
from harness.program import Run, contest_parser, parse
from harness.workloads import ATARI, W1

OTHERS = {"c_loop", "apexrl", "ray"}  # they meet us in other contests
ENTRANTS = [name for name in ENVIRONMENTS if name not in OTHERS]
CONTESTS = (
    Contest(
        "w1",
        W1,
        dict.fromkeys(ENTRANTS, "plain"),
        ("add_1", "add_64", "add_1024", "sample_32", "sample_256", "sample_4096"),
    ),
    Contest(
        "atari",
        ATARI,
        # rlox keeps float32 alone.
        {name: "plain" for name in ENTRANTS if name not in ("engine", "rlox")},
        ("add_1", "sample_256"),
    ),
)


def main() -> None:
    parser = contest_parser(__doc__)
    parser.add_argument("--workload", choices=[contest.name for contest in CONTESTS], help="only this kind of row")
    run = Run(parse(parser))
    wanted = [contest for contest in CONTESTS if run.options.workload in (None, contest.name)]
    measured = {contest.name: run.contest(contest) for contest in wanted}
    run.save("replay", workloads={name: result for name, result in measured.items() if result})


if __name__ == "__main__":
    main()
