"""Times one buffer that several processes use at once: writers add while a learner draws.

    python benchmarks/bench_processes.py                          # all, about six minutes
    python benchmarks/bench_processes.py --quick sharpwave cpprb

Then one call at a time, in shared memory and in memory of the process. Writes `results/processes.json`.
"""

from __future__ import annotations

from harness import results
from harness.contest import Contest
from harness.program import Run, parse, parser
from harness.rotation import Case, Slices, run_rotation
from harness.workloads import W1

BATCH = 256
ROWS_AN_ADD = (1, 64)
CONTENDERS = {
    "uniform": ("sharpwave", "cpprb", "torchrl", "reverb", "ray", "numpy_ring"),
    "prioritized": ("sharpwave", "cpprb", "torchrl", "reverb", "ray"),
}
WARM_S = 0.2
# Of the rounds; two writers and a learner on two cores are for information.
TWO_WRITERS_SHARE = 0.6
QUICK_ROWS = 100_000

CALLS = (
    Contest("shm", W1, {"sharpwave": "plain", "sharpwave@shm": "shm"}, ("add_1", "sample_256")),
    Contest(
        "shm_prioritized",
        W1,
        {"sharpwave": "prioritized", "sharpwave@shm": "shm_prioritized"},
        ("add_1", "sample_256", "update_256"),
    ),
)


def main() -> None:
    made = parser(__doc__)
    named = dict.fromkeys(name for names in CONTENDERS.values() for name in names)
    made.add_argument("contenders", nargs="*", metavar="CONTENDER", help=f"all unless named: {', '.join(named)}")
    made.add_argument("--slices", type=int, default=5, help="for each contender and case")
    made.add_argument("--slice-s", type=float, default=1.0)
    made.add_argument("--rounds", type=int, default=40, help="bursts of the single calls")
    made.add_argument("--burst-ms", type=float, default=12.0)
    made.add_argument("--rows", type=int, help=f"capacity; {W1.capacity:,} unless given")
    options = parse(made)
    if options.quick:
        options.slices, options.slice_s, options.rows = 2, 0.3, options.rows or QUICK_ROWS
    run = Run(options)

    counted = Slices(options.slices, options.slice_s, WARM_S)
    informed = Slices(max(2, round(TWO_WRITERS_SHARE * options.slices)), options.slice_s, WARM_S)
    cases = {Case(1, rows, BATCH): counted for rows in ROWS_AN_ADD}
    cases |= {Case(2, rows, BATCH): informed for rows in ROWS_AN_ADD}
    capacity = options.rows or W1.capacity
    crowds = {}
    for form, contenders in CONTENDERS.items():
        wanted = tuple(name for name in contenders if not options.contenders or name in options.contenders)
        about, measured = run_rotation(form, wanted, cases, W1, capacity, run.left_out)
        crowds[form] = {"contenders": about, "cases": measured}
    calls = {contest.name: measured for contest in CALLS if (measured := run.contest(contest))}
    for name, measured in calls.items():
        for label, about in measured["contenders"].items():
            got, whole = (results.size(about[key]) for key in ("huge_page_bytes", "storage_bytes"))
            print(f"{name} {label}: {got} of {whole} in huge pages")
    facts = {"title": W1.title, "row_bytes": W1.row_bytes, "capacity": capacity, "batch": BATCH}
    run.save("processes", **facts, crowds=crowds, workloads=calls)


if __name__ == "__main__":
    main()
