"""Times a full buffer's way to disk and back, and what saving takes in memory.

    python benchmarks/bench_snapshot.py                  # all, about two minutes
    python benchmarks/bench_snapshot.py --quick sharpwave sb3

`save` is compared with NumPy's `tofile` of the same rows. Both wait for the disk in the end; a clock around fsync and
its like (`harness/sync_clock.c`) takes that time apart. Files are written to the temporary folder, or to `--folder`.
Writes `results/snapshot.json`.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

from harness import machine, results
from harness.contest import ContenderError, LeftOut, Player
from harness.environments import BENCHMARKS
from harness.program import Run, parse, parser
from harness.results import Document
from harness.workloads import W1

CONTENDERS = ("sharpwave", "numpy_ring", "sb3", "cpprb", "torchrl", "tianshou", "reverb")
SAVED_AGAIN = ("sharpwave", "numpy_ring")  # the others once: what is compared with them is loading
SLOW_NS, SLOW_ROUNDS = 1e9, 2  # who takes so long to load is asked less often
QUICK_ROWS, QUICK_ROUNDS = 100_000, 3


class KeeperPlayer(Player):
    module: ClassVar[str] = "harness.keeper"


def sync_clock(folder: Path, left_out: LeftOut) -> dict[str, str]:
    """The variables with which a process times its waits for the disk; none where there is no compiler."""
    library = folder / "sync_clock.so"
    source = BENCHMARKS / "harness" / "sync_clock.c"
    command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"]
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as reason:
        left_out.say("fsync apart from save", reason)
        return {}
    return {"LD_PRELOAD": str(library)}


def summary(times: list[int]) -> dict[str, float]:
    return {"min_ns": min(times), "median_ns": statistics.median(times), "bursts": len(times)}


class Contest:
    """Every contender filled, and asked in turn."""

    def __init__(self, players: dict[str, Player], folder: Path, left_out: LeftOut) -> None:
        self.players, self.folder, self.left_out = players, folder, left_out
        self.times: dict[str, dict[str, list[int]]] = {"save": {}, "fsync": {}, "load": {}, "attach": {}}
        self.memory: dict[str, int] = {}
        self.sizes: dict[str, int] = {}

    def ask(self, label: str, do: str, file: str) -> Any:
        """The answer; None, and out of the contest, when there is none."""
        try:
            return self.players[label].ask(do, path=str(self.folder / f"{label}{file}"))
        except ContenderError as reason:
            self.left_out.say(f"{label}, {do}", reason)
            del self.players[label]
            return None

    def save(self, label: str) -> None:
        if not (answer := self.ask(label, "save", "")):
            return
        # The first save of a process tells what memory it takes; later ones find some of it still there.
        self.memory.setdefault(label, answer["extra_bytes"])
        self.sizes[label] = answer["bytes"]
        if answer["fsync_ns"] is None:
            return
        self.times["save"].setdefault(label, []).append(answer["save_ns"])
        if answer["fsync_ns"]:  # most do not wait for the disk
            self.times["fsync"].setdefault(label, []).append(answer["fsync_ns"])

    def open(self, label: str, do: str, file: str = "") -> None:
        if took := self.ask(label, do, file):
            self.times[do].setdefault(label, []).append(took)

    def run(self, rounds: int) -> None:
        order = random.Random(0)
        for label in list(self.players):
            self.save(label)
            self.open(label, "load")
        if "sharpwave" in self.players:
            self.open("sharpwave", "attach", ".live")
        slow = [label for label, (took,) in self.times["load"].items() if took > SLOW_NS]
        # The first times have page faults and imports in them that the others have not.
        for times in (self.times["load"], self.times["attach"]):
            times.clear()
        for label in SAVED_AGAIN:
            for what in ("save", "fsync"):
                self.times[what].pop(label, None)
        for turn in range(rounds):
            for label in order.sample(list(self.players), len(self.players)):
                if label in SAVED_AGAIN:
                    self.save(label)
                if label in self.players and (label not in slow or turn < SLOW_ROUNDS):
                    self.open(label, "load")
            if "sharpwave" in self.players:
                self.open("sharpwave", "attach", ".live")

    def cases(self) -> dict[str, dict[str, dict[str, float]]]:
        return {case: {label: summary(times) for label, times in of.items()} for case, of in self.times.items()}


def print_results(cases: Document, memory: dict[str, int]) -> None:
    for case, summaries in cases.items():
        print(case)
        for label, times in sorted(summaries.items(), key=lambda item: item[1]["min_ns"]):
            least, median = results.duration(times["min_ns"]), results.duration(times["median_ns"])
            print(f"    {label:16}{least:>10}  median {median}")
    print("memory besides, while saving")
    for label, extra in memory.items():
        print(f"    {label:16}{results.size(extra):>10}")


def main() -> None:
    made = parser(__doc__)
    made.add_argument("contenders", nargs="*", metavar="CONTENDER", help=f"all unless named: {', '.join(CONTENDERS)}")
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--rows", type=int, help=f"capacity; {W1.capacity:,} unless given")
    made.add_argument("--folder", type=Path, help="where files are written")
    options = parse(made)
    if options.quick:
        options.rounds, options.rows = QUICK_ROUNDS, options.rows or QUICK_ROWS
    run = Run(options)
    capacity = options.rows or W1.capacity
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sw-", dir=options.folder)))
        variables = {"TMPDIR": str(folder), **sync_clock(folder, run.left_out)}
        players: dict[str, Player] = {}
        about = {}
        for label in options.contenders or CONTENDERS:
            print(f"snapshot: filling {label}", flush=True)
            try:
                player = KeeperPlayer(label, **variables)
                stack.callback(player.close)
                about[label] = player.ask("fill", workload=W1.name, capacity=capacity)
            except ContenderError as reason:
                run.left_out.say(f"{label}, snapshot", reason)
                continue
            players[label] = player
        contest = Contest(players, folder, run.left_out)
        contest.run(options.rounds)
        system = machine.file_system(folder)
    measured = {
        "title": W1.title,
        "row_bytes": W1.row_bytes,
        "capacity": capacity,
        "contenders": about,
        "cases": contest.cases(),
    }
    print_results(measured["cases"], contest.memory)
    facts = {"file_system": system, "file_bytes": contest.sizes, "save_memory": contest.memory}
    run.save("snapshot", workloads={"snapshot": measured}, **facts)


if __name__ == "__main__":
    main()
