"""Times `add` and `sample` with a pace whose bounds are never met, beside a buffer that has none.

    python benchmarks/bench_pace.py                          # all, a few minutes
    python benchmarks/bench_pace.py --quick sharpwave

What is measured is the price of asking and counting, not of waiting. Reverb, whose tables always have a rate limiter,
stands for the peers. Writes `results/pace.json`.
"""

from __future__ import annotations

from harness.contest import Contest
from harness.program import Run, contest_parser, parse
from harness.workloads import W1

CONTEST = Contest(
    "pace",
    W1,
    {"sharpwave": "paced", "sharpwave@free": "plain", "reverb": "plain"},
    ("add_1", "sample_256"),
)


def main() -> None:
    run = Run(parse(contest_parser(__doc__)))
    measured = run.contest(CONTEST)
    run.save("pace", workloads={CONTEST.name: measured} if measured else {})


if __name__ == "__main__":
    main()
