"""How the time of `sample(256)` grows with the number of rows stored, 10^4 to 10^7, interleaved.

    python benchmarks/bench_scaling.py

A uniform draw does the same work at every size; what grows is how far away the rows are (caches, page
tables). The bare C gather beside it shows how much of the growth is the machine's.
Writes `results/scaling.json`.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from harness import machine, results
from harness.contest import LeftOut, run_case, start
from harness.workloads import W1

CONTENDERS = ("sharpwave", "numpy_ring", "c_limit")
ROWS = (10_000, 100_000, 1_000_000, 10_000_000)
CASE = "sample_256"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="bursts for each contender and size")
    parser.add_argument("--burst-ms", type=float, default=12.0)
    parser.add_argument("--quick", action="store_true", help="8 rounds of 5 ms: a look, not a result")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.burst_ms = 8, 5.0

    left_out = LeftOut()
    where = machine.describe()
    with ExitStack() as stack:
        players = {}
        for name in CONTENDERS:
            for rows in ROWS:
                label = f"{name}@{rows}"
                if started := start(label, name, W1, rows, left_out):
                    players[label] = started[0]
                    stack.callback(started[0].close)
        summaries = run_case(CASE, players, options.rounds, options.burst_ms / 1e3, left_out)
    curves: dict[str, dict[str, dict[str, float]]] = {}
    for label, times in summaries.items():
        player, slash, variant = label.partition("/")
        name, _, count = player.partition("@")
        curves.setdefault(name + slash + variant, {})[count] = times
        print(f"{name + slash + variant:20}{int(count):>12,} rows  {results.duration(times['min_ns'])}")
    settings = {"rounds": options.rounds, "burst_ms": options.burst_ms, "quick": options.quick}
    document = {"machine": where, "settings": settings, "curves": curves, "left_out": left_out.lines}
    results.save("scaling", document)


if __name__ == "__main__":
    main()
