"""The contender's side of a contest: one process in the contender's own environment.

`python -m harness.worker NAME` loads `peers/NAME.py` and obeys one JSON line at a time: `fill`,
`prepare`, `time`, `measure_memory`. Between two lines it blocks on a read and costs nothing.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.workloads import WORKLOADS, Workload

QUIET_WINDOW_S = 0.002
QUIET_CPU_S = 0.0002
QUIET_LIMIT_S = 0.5
FIRST_USE_ROWS = 64


@dataclass(frozen=True)
class Operation:
    """A loop as a user would write it: `run(calls)` makes that many calls, with nothing of ours in between.

    A sampling loop keeps its batch in a local, as a learner holds one batch while it takes the next.
    `warm_calls` is the least number of untimed calls before a burst. A contender that works ahead in the
    background needs enough of them to use up what it prepared while others were timed.
    """

    run: Callable[[int], object]
    warm_calls: int = 1


class Contender:
    """One library, measured by its own best documented path.

    The methods answer with operations by variant; the plain form has the variant "". No answer means that
    the library has no such operation.
    """

    packages: tuple[str, ...] = ()
    note = ""

    def fill(self, workload: Workload, capacity: int) -> None:
        """Build a buffer and fill it to `capacity`, so that no later call touches a page first."""
        raise NotImplementedError

    def add_one(self) -> dict[str, Operation]:
        return {}

    def add_many(self, count: int) -> dict[str, Operation]:
        return {}

    def sample(self, count: int) -> dict[str, Operation]:
        return {}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wait_until_quiet() -> None:
    """Return once this process uses no more CPU, so that its threads do not run into a rival's burst."""
    deadline = time.monotonic() + QUIET_LIMIT_S
    while time.monotonic() < deadline:
        used = time.process_time()
        time.sleep(QUIET_WINDOW_S)
        if time.process_time() - used < QUIET_CPU_S:
            return


def time_burst(operation: Operation, calls: int) -> float:
    """Nanoseconds a call over one burst of `calls` calls."""
    gc.disable()
    # After a rival's burst the caches hold the rival's data; some calls go by untimed to get ours back.
    operation.run(max(operation.warm_calls, calls // 8))
    started = time.perf_counter_ns()
    operation.run(calls)
    elapsed = time.perf_counter_ns() - started
    gc.enable()
    wait_until_quiet()
    return elapsed / calls


def calls_for(operation: Operation, burst_s: float) -> int:
    """How many calls fill a burst; at least one."""
    calls = 1
    operation.run(operation.warm_calls)
    while (took_s := calls * time_burst(operation, calls) / 1e9) < burst_s / 2:
        calls *= 2
    return max(1, round(calls * burst_s / took_s))


class Worker:
    def __init__(self, make: Callable[[], Contender]) -> None:
        self.make = make
        self.contender = Contender()  # stands in until `fill`
        self.operations: dict[str, Operation] = {}

    def fill(self, workload: str, capacity: int) -> dict[str, object]:
        self.contender = self.make()
        self.contender.fill(WORKLOADS[workload], capacity)
        versions = {name: importlib.metadata.version(name) for name in self.contender.packages}
        return {"versions": versions, "note": self.contender.note}

    def prepare(self, case: str, burst_s: float) -> dict[str, int | str]:
        """Calls of a burst for each variant of the case, or the reason why a variant cannot run."""
        verb, count = case.split("_")
        # The last case's buffers go before this case's are made.
        self.operations = {}
        if verb == "sample":
            self.operations = self.contender.sample(int(count))
        elif count == "1":
            self.operations = self.contender.add_one()
        else:
            self.operations = self.contender.add_many(int(count))
        gc.collect()
        # The buffers and inputs are here to stay; a collection between bursts need not walk them.
        gc.freeze()
        calls: dict[str, int | str] = {}
        for variant, operation in self.operations.items():
            try:
                calls[variant] = calls_for(operation, burst_s)
            except Exception as error:
                calls[variant] = f"{type(error).__name__}: {error}"
        return calls

    def time(self, variant: str, calls: int) -> float:
        return time_burst(self.operations[variant], calls)

    def measure_memory(self, workload: str, rows: int) -> int:
        """Resident bytes that a full buffer of `rows` rows adds to a process that has already used one."""
        kind = WORKLOADS[workload]
        kind.columns(kind.chunk_rows)
        self.make().fill(kind, FIRST_USE_ROWS)
        gc.collect()
        # Free memory that the allocator still holds would take in part of the buffer unseen.
        ctypes.CDLL(None).malloc_trim(0)
        before = resident_bytes()
        self.contender = self.make()
        self.contender.fill(kind, rows)
        gc.collect()
        return resident_bytes() - before


def main() -> None:
    # Libraries print to standard output as they please; the protocol gets a descriptor of its own.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker: Worker | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if worker is None:
                worker = Worker(importlib.import_module(f"peers.{sys.argv[1]}").CONTENDER)
            answer = {"ok": getattr(worker, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(answer) + "\n")
    # Some libraries hang or crash while they tear down their threads; nothing is left to save.
    os._exit(0)


if __name__ == "__main__":
    main()
