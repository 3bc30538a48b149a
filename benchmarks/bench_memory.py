"""Resident memory of a full buffer beyond the raw bytes of its rows.

    python benchmarks/bench_memory.py

A fresh process for every point: memory that a process has freed once is not returned in full, so a second
measurement in the same process reads too low. Writes `results/memory.json`.
"""

from __future__ import annotations

from harness.contest import ContenderError, LeftOut, measure_memory
from harness.program import Run, parse, parser
from harness.workloads import ATARI, W1, Workload

CONTENDERS = ("sharpwave", "numpy_ring", "rlox", "cpprb", "sb3")
ROWS = {W1.name: (10_000, 30_000, 100_000, 300_000, 1_000_000), ATARI.name: (1_000, 3_000, 10_000)}
QUICK_ROWS = {W1.name: (10_000, 100_000), ATARI.name: (1_000,)}


def measure_curve(
    contender: str, workload: Workload, sizes: tuple[int, ...], left_out: LeftOut
) -> list[dict[str, int | float]]:
    """One point for each size; cut short where the contender fails."""
    points = []
    try:
        for rows in sizes:
            points.append(measure_memory(contender, "plain", workload, rows))
            beyond = 100 * points[-1]["beyond_raw"]
            print(f"{workload.name:6}{contender:12}{rows:>10,} rows  {beyond:+.1f}%", flush=True)
    except ContenderError as reason:
        left_out.say(f"{contender} {workload.name}", reason)
    return points


def main() -> None:
    run, measured = Run(parse(parser(__doc__))), {}
    for workload in (W1, ATARI):
        sizes = (QUICK_ROWS if run.options.quick else ROWS)[workload.name]
        # rlox keeps float32 alone.
        able = [name for name in CONTENDERS if not (workload is ATARI and name == "rlox")]
        curves = {name: measure_curve(name, workload, sizes, run.left_out) for name in able}
        measured[workload.name] = {name: points for name, points in curves.items() if points}
    run.save("memory", workloads=measured)


if __name__ == "__main__":
    main()
