"""Times hindsight replay: examples whose goal is one that the same episode reached later.

    python benchmarks/bench_hindsight.py                     # all, a minute
    python benchmarks/bench_hindsight.py --quick sharpwave

The same rows drawn with their own goals stand beside: what is above that is the price of new goals and rewards.
Writes `results/hindsight.json`.
"""

from __future__ import annotations

from harness.contest import Contest
from harness.program import Run, contest_parser, parse
from harness.workloads import GOALS

CONTEST = Contest(
    "hindsight",
    GOALS,
    {
        "sharpwave": "hindsight",
        "sharpwave@own_goals": "own_goals",
        "numpy_ring": "hindsight",
        "rlox": "hindsight",
        "cpprb": "hindsight",
        "sb3": "hindsight",
    },
    ("sample_256", "add_1"),
)


def main() -> None:
    run = Run(parse(contest_parser(__doc__)))
    measured = run.contest(CONTEST)
    run.save("hindsight", workloads={CONTEST.name: measured} if measured else {})


if __name__ == "__main__":
    main()
