"""How the time of drawing 64 windows of 80 steps grows with the number of rows stored, 10^5 to 10^7, interleaved.

    python benchmarks/bench_windows.py                       # all; needs about 16 GB of memory
    python benchmarks/bench_windows.py --quick sharpwave

Which rows may start a window is known beforehand or looked for at every draw; the curve tells which.
Writes `results/windows.json`.
"""

from __future__ import annotations

from contextlib import ExitStack

from harness import machine, results
from harness.contest import MEMORY_SHARE, Player, contender_of, run_case, start
from harness.program import Run, contest_parser, parse
from harness.worker import WINDOW_STEPS
from harness.workloads import W1

# Those that fit whole first: most draw no others. Padded ones may start at any row.
ENTRANTS = {
    "sharpwave": "stop",
    "sharpwave@pad": "pad",
    "numpy_ring": "stop",
    "rlox": "stop",
    "torchrl": "stop",
    "torchrl@cached": "stop_cached",
    "flashbax": "stop",
}
ROWS = (100_000, 1_000_000, 10_000_000)
WINDOWS = 64
CASE = f"sample_{WINDOWS}"


def main() -> None:
    run = Run(parse(contest_parser(__doc__)))
    options = run.options
    wanted = options.contenders or ENTRANTS
    entrants = {label: form for label, form in ENTRANTS.items() if contender_of(label) in wanted}
    curves: dict[str, dict[str, dict[str, float]]] = {}
    notes: dict[str, str] = {}
    with ExitStack() as stack:
        players: dict[str, Player] = {}
        for label, form in entrants.items():
            for rows in [options.rows] if options.rows else ROWS:
                if MEMORY_SHARE * rows * W1.row_bytes > machine.available_bytes():
                    run.left_out.say(f"{label}, {rows:,} rows", "not enough memory beside the others")
                    continue
                print(f"filling {label}, {rows:,} rows", flush=True)
                if started := start(label, form, W1, rows, run.left_out):
                    player, about = started
                    players[f"{label}:{rows}"], notes[label] = player, about["note"]
                    stack.callback(player.close)
        summaries = run_case(CASE, players, options.rounds, options.burst_ms / 1e3, run.left_out)
    for timed, times in summaries.items():
        name, slash, variant = timed.partition("/")
        label, _, count = name.partition(":")
        curves.setdefault(label + slash + variant, {})[count] = times
        print(f"{label + slash + variant:24}{int(count):>12,} rows  {results.duration(times['min_ns'])}")
    run.save("windows", curves=curves, notes=notes, steps=WINDOW_STEPS, windows=WINDOWS)


if __name__ == "__main__":
    main()
