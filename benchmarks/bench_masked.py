"""Times `sample(256)` where rows were left out when they were added: 0 to 99 % of them, at random places.

    python benchmarks/bench_masked.py                        # all, a minute
    python benchmarks/bench_masked.py --quick sharpwave

A ring in NumPy stands beside, with a list of the rows that may be drawn, made beforehand. Writes `results/masked.json`.
"""

from __future__ import annotations

from contextlib import ExitStack

from harness.contest import Player, print_case, run_case, start
from harness.program import Run, contest_parser, parse
from harness.workloads import W1

SHARES = (0, 50, 90, 99)
CONTENDERS = ("sharpwave", "numpy_ring")
CASE = "sample_256"


def main() -> None:
    run = Run(parse(contest_parser(__doc__)))
    options = run.options
    capacity = options.rows or W1.capacity
    about: dict[str, dict[str, object]] = {}
    with ExitStack() as stack:
        players: dict[str, Player] = {}
        for contender in options.contenders or CONTENDERS:
            for share in SHARES:
                label = f"{contender}@{share}"
                print(f"filling {label}", flush=True)
                if started := start(label, f"masked_{share}", W1, capacity, run.left_out):
                    players[label], about[label] = started
                    stack.callback(players[label].close)
        times = run_case(CASE, players, options.rounds, options.burst_ms / 1e3, run.left_out)
        print_case(f"masked {CASE}", times)
    run.save("masked", capacity=capacity, shares=SHARES, contenders=about, times=times)


if __name__ == "__main__":
    main()
