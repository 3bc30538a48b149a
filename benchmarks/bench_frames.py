"""Times replay of image rows that keeps every frame once, and measures what that saves.

    python benchmarks/bench_frames.py                        # all, some minutes
    python benchmarks/bench_frames.py --quick sharpwave cpprb

Writes `results/frames.json`.
"""

from __future__ import annotations

from dataclasses import replace

from harness.contest import Contest
from harness.program import Run, contest_parser, parse
from harness.workloads import ATARI

MEMORY_ROWS = 20_000
CONTEST = Contest(
    "frames",
    replace(ATARI, capacity=50_000, title="obs and next_obs u8(4, 84, 84), action i64, reward, done"),
    {
        "sharpwave": "stacked",
        "sharpwave@derived": "derived",
        "sharpwave@stored": "plain",
        "sharpwave@rainbow": "rainbow",
        "c_limit": "stacked",
        "cpprb": "stacked",
        "cpprb@derived": "derived",
        "tianshou": "stacked",
        "sb3": "derived",
        "flashbax": "derived",
        "reverb": "stacked",
    },
    ("sample_256", "add_1"),
)
MEMORY = {
    "sharpwave@stored": "plain",
    "sharpwave@derived": "derived",
    "sharpwave": "stacked",
    "cpprb@stored": "plain",
    "cpprb@derived": "derived",
    "cpprb": "stacked",
    "tianshou@stored": "plain",
    "tianshou": "stacked",
    "sb3@stored": "plain",
    "sb3": "derived",
}


def main() -> None:
    run = Run(parse(contest_parser(__doc__)))
    measured = run.contest(CONTEST)
    memory = run.memory(MEMORY, replace(ATARI, capacity=MEMORY_ROWS))
    run.save("frames", workloads={CONTEST.name: measured} if measured else {}, memory=memory)


if __name__ == "__main__":
    main()
