"""What the benchmark scripts have in common: options, and results with where and how they were measured."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from harness import machine, results
from harness.contest import (
    ENVIRONMENTS,
    ContenderError,
    Contest,
    LeftOut,
    contender_of,
    measure_memory,
    run_contest,
)
from harness.workloads import Workload

# What was asked for and stands with the results.
SETTINGS = ("rounds", "burst_ms", "slices", "slice_s", "quick")
# By default glibc gives the memory of a large batch back to the system and asks for it again at the next one: a page
# fault for every 4 KB. With these settings it keeps the memory. (32 MiB is the highest threshold that glibc accepts.)
ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
LOOKS = Path(tempfile.gettempdir()) / "sharpwave-look"


def tune_allocator() -> None:
    """Start this program again where the allocator is not set: the C library reads its settings when a process begins.
    The contenders' processes inherit them."""
    if any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | ALLOCATOR)


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="8 rounds of 5 ms: a look, not a result")
    made.add_argument("--results", type=Path, help=f"the folder to write to; {LOOKS} for a quick run unless given")
    return made


def contest_parser(description: str | None) -> argparse.ArgumentParser:
    made = parser(description)
    names = ", ".join(ENVIRONMENTS)
    made.add_argument("contenders", nargs="*", metavar="CONTENDER", help=f"all unless named: {names}")
    add_rounds(made)
    return made


def add_rounds(made: argparse.ArgumentParser) -> None:
    made.add_argument("--rounds", type=int, default=40, help="bursts for each contender and case")
    made.add_argument("--burst-ms", type=float, default=12.0)
    made.add_argument("--rows", type=int, help="capacity; every kind of row has its own unless given")


def parse(made: argparse.ArgumentParser) -> argparse.Namespace:
    options = made.parse_args()
    if unknown := set(getattr(options, "contenders", ())) - set(ENVIRONMENTS):
        made.error(f"no contender {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
    if options.quick and "rounds" in options:
        options.rounds, options.burst_ms = 8, 5.0
    return options


class Run:
    """One run of a benchmark: collects what was measured and what was left out, then writes it.

    Only whole runs on an idle machine are published: such a run waits until the load falls, and stops with an error if
    it does not. With `--results` it measures on a busy machine, too, and its tables say so.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        tune_allocator()
        self.folder = options.results or (LOOKS if options.quick else results.RESULTS)
        is_published = self.folder.resolve() == results.RESULTS
        if is_published and options.quick:
            sys.exit("a quick run is not published: give another folder with --results")
        load = machine.settled_load() if is_published else machine.busy_cores()
        if load > machine.MOST_LOAD:
            if is_published:
                sys.exit(
                    f"expected a load of at most {machine.MOST_LOAD}, got {load:.2f}: nothing is published from a busy "
                    "machine; end the other programs, or write to another folder with --results"
                )
            print(f"load {load:.2f}, more than {machine.MOST_LOAD}: a look, not a result", flush=True)
        self.options, self.left_out, self.machine = options, LeftOut(), machine.describe(load)

    def contest(self, contest: Contest) -> results.Document | None:
        options = self.options
        if options.contenders:
            contest = contest.only(options.contenders)
        capacity = options.rows or contest.workload.capacity
        return run_contest(contest, capacity, options.rounds, options.burst_ms / 1e3, self.left_out)

    def memory(self, entrants: dict[str, str], workload: Workload) -> dict[str, dict[str, int | float]]:
        """Resident memory of each entrant's full buffer."""
        rows = self.options.rows or workload.capacity
        measured = {}
        for label, form in entrants.items():
            if self.options.contenders and contender_of(label) not in self.options.contenders:
                continue
            try:
                measured[label] = measure_memory(label, form, workload, rows)
            except ContenderError as reason:
                self.left_out.say(f"{label}, memory", reason)
                continue
            share = measured[label]["resident_bytes"] / rows
            print(f"{workload.name} {label:26}{rows:>10,} rows  {results.size(share)} a row", flush=True)
        return measured

    def save(self, name: str, **measured: object) -> None:
        given = vars(self.options)
        settings = {key: given[key] for key in SETTINGS if key in given}
        document = {"machine": self.machine, "settings": settings, **measured, "left_out": self.left_out.lines}
        results.save(name, document, self.folder)
