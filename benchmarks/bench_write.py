"""Times `write`: new recurrent states for 256 rows that were just drawn, and what the states cost a sample.

    python benchmarks/bench_write.py                         # all, a minute
    python benchmarks/bench_write.py --quick sharpwave

A ring in NumPy stands beside: one assignment of the states into their column, by the numbers of the rows. A buffer
whose states are written once shows what a sample costs without them being mutable. Writes `results/write.json`.
"""

from __future__ import annotations

from harness.contest import Contest
from harness.program import Run, contest_parser, parse
from harness.workloads import RECURRENT

CONTEST = Contest(
    "write",
    RECURRENT,
    {"sharpwave": "mutable", "sharpwave@written_once": "written_once", "numpy_ring": "mutable"},
    ("write_256", "sample_256", "add_1"),
)


def main() -> None:
    run = Run(parse(contest_parser(__doc__)))
    measured = run.contest(CONTEST)
    run.save("write", workloads={CONTEST.name: measured} if measured else {})


if __name__ == "__main__":
    main()
