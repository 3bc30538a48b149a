"""Times 3-step replay, and plain replay of the same rows beside it.

    python benchmarks/bench_nstep.py                         # all, a few minutes
    python benchmarks/bench_nstep.py --quick sharpwave sb3

Some fold the steps when they sample, as Sharpwave does, some when they add: `add` is timed for that reason.
Writes `results/nstep.json`.
"""

from __future__ import annotations

from harness.contest import Contest
from harness.program import Run, contest_parser, parse
from harness.workloads import W1

CONTEST = Contest(
    "nstep",
    W1,
    {
        "sharpwave": "nstep",
        "sharpwave@one_step": "plain",
        "engine": "nstep",
        "sb3": "nstep",
        "cpprb": "nstep",
        "tianshou": "nstep",
        "torchrl": "nstep",
    },
    ("sample_256", "add_1"),
)


def main() -> None:
    run = Run(parse(contest_parser(__doc__)))
    measured = run.contest(CONTEST)
    run.save("nstep", workloads={CONTEST.name: measured} if measured else {})


if __name__ == "__main__":
    main()
