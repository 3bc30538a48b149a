"""Times `add` and `sample` of Sharpwave, its peers and two yardsticks, interleaved within one run.

    python benchmarks/bench_replay.py                        # all, some minutes
    python benchmarks/bench_replay.py --quick sharpwave numpy_ring cpprb

Writes `results/replay.json`; `report.py` turns it into tables and plots.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from harness import machine, results
from harness.contest import ENVIRONMENTS, ONLY, LeftOut, run_case, start
from harness.workloads import ATARI, W1, WORKLOADS, Workload

MEMORY_SHARE = 1.3  # of the raw bytes that a contender needs, generously


def run_workload(workload: Workload, options: argparse.Namespace, left_out: LeftOut) -> results.Document | None:
    capacity = options.rows[workload.name]
    needed = int(MEMORY_SHARE * len(options.contenders) * capacity * workload.row_bytes)
    if needed > machine.available_bytes():
        hint = f"lower --{workload.name}-rows or name fewer contenders"
        left_out.say(workload.name, f"all contenders at once need {results.size(needed)}; {hint}")
        return None
    with ExitStack() as stack:
        players, about = {}, {}
        for name in options.contenders:
            if ONLY.get(name, workload.name) != workload.name:
                continue
            print(f"{workload.name}: filling {name}", flush=True)
            if started := start(name, name, workload, capacity, left_out):
                players[name], about[name] = started
                stack.callback(players[name].close)
        cases = {}
        for case in workload.cases:
            cases[case] = run_case(case, players, options.rounds, options.burst_ms / 1e3, left_out)
            print_case(f"{workload.name} {case}", cases[case])
    facts = {"title": workload.title, "row_bytes": workload.row_bytes, "capacity": capacity}
    return facts | {"contenders": about, "cases": cases}


def print_case(title: str, summaries: dict[str, dict[str, float]]) -> None:
    print(title)
    for label, times in sorted(summaries.items(), key=lambda item: item[1]["min_ns"]):
        least, median = results.duration(times["min_ns"]), results.duration(times["median_ns"])
        print(f"    {label:22}{least:>10}  median {median}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "contenders", nargs="*", metavar="CONTENDER", help=f"all unless named: {', '.join(ENVIRONMENTS)}"
    )
    parser.add_argument("--workload", choices=WORKLOADS, help="only this kind of row")
    parser.add_argument("--rounds", type=int, default=40, help="bursts for each contender and case")
    parser.add_argument("--burst-ms", type=float, default=12.0)
    parser.add_argument("--quick", action="store_true", help="8 rounds of 5 ms: a look, not a result")
    parser.add_argument("--w1-rows", type=int, default=W1.capacity)
    parser.add_argument("--atari-rows", type=int, default=ATARI.capacity, help="56 KB each, for every contender")
    options = parser.parse_args()
    if unknown := set(options.contenders) - set(ENVIRONMENTS):
        parser.error(f"no contender {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
    options.contenders = options.contenders or list(ENVIRONMENTS)
    options.rows = {"w1": options.w1_rows, "atari": options.atari_rows}
    if options.quick:
        options.rounds, options.burst_ms = 8, 5.0

    left_out = LeftOut()
    where, measured = machine.describe(), {}
    for workload in WORKLOADS.values():
        if options.workload not in (None, workload.name):
            continue
        if result := run_workload(workload, options, left_out):
            measured[workload.name] = result
    settings = {"rounds": options.rounds, "burst_ms": options.burst_ms, "quick": options.quick}
    document = {"machine": where, "settings": settings, "workloads": measured, "left_out": left_out.lines}
    results.save("replay", document)


if __name__ == "__main__":
    main()
