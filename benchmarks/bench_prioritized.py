"""Times prioritized replay: sampling, updates, adds, and the three together; and what priorities cost in memory.

    python benchmarks/bench_prioritized.py                   # all, some minutes
    python benchmarks/bench_prioritized.py --quick sharpwave cpprb

A uniform sample of the same rows stands beside: what is above it is the price of the priorities.
Writes `results/prioritized.json`.
"""

from __future__ import annotations

from harness.contest import Contest
from harness.program import Run, contest_parser, parse
from harness.workloads import W1

FORM = "prioritized"
CONTEST = Contest(
    "prioritized",
    W1,
    {
        "sharpwave": FORM,
        "sharpwave@uniform": "plain",
        "engine": FORM,
        "rlox": FORM,
        "cpprb": FORM,
        "tianshou": FORM,
        "torchrl": FORM,
        "flashbax": FORM,
        "reverb": FORM,
    },
    ("sample_32", "sample_256", "update_256", "add_1", "learn_256"),
)
PEERS = ("rlox", "cpprb", "tianshou", "torchrl")
MEMORY = {"sharpwave": FORM, "sharpwave@uniform": "plain"} | dict.fromkeys(PEERS, FORM)


def main() -> None:
    run = Run(parse(contest_parser(__doc__)))
    measured = run.contest(CONTEST)
    memory = run.memory(MEMORY, W1)
    run.save("prioritized", workloads={CONTEST.name: measured} if measured else {}, memory=memory)


if __name__ == "__main__":
    main()
