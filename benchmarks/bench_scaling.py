"""How the time of `sample(256)` grows with the number of rows stored, 10^4 to 10^7, interleaved.

    python benchmarks/bench_scaling.py

A uniform draw does the same work at every size; what grows is how far away the rows are (caches, page
tables). The bare C gather beside it shows how much of the growth is the machine's.
Writes `results/scaling.json`.
"""

from __future__ import annotations

from contextlib import ExitStack

from harness import results
from harness.contest import run_case, start
from harness.program import Run, add_rounds, parse, parser
from harness.workloads import W1

CONTENDERS = ("sharpwave", "numpy_ring", "c_limit")
ROWS = (10_000, 100_000, 1_000_000, 10_000_000)
CASE = "sample_256"


def main() -> None:
    made = parser(__doc__)
    add_rounds(made)
    run = Run(parse(made))
    with ExitStack() as stack:
        players = {}
        for name in CONTENDERS:
            for rows in ROWS:
                label = f"{name}@{rows}"
                if started := start(label, "plain", W1, rows, run.left_out):
                    players[label] = started[0]
                    stack.callback(started[0].close)
        summaries = run_case(CASE, players, run.options.rounds, run.options.burst_ms / 1e3, run.left_out)
    curves: dict[str, dict[str, dict[str, float]]] = {}
    for label, times in summaries.items():
        player, slash, variant = label.partition("/")
        name, _, count = player.partition("@")
        curves.setdefault(name + slash + variant, {})[count] = times
        print(f"{name + slash + variant:20}{int(count):>12,} rows  {results.duration(times['min_ns'])}")
    run.save("scaling", curves=curves)


if __name__ == "__main__":
    main()
