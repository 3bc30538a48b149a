"""The contender's side of a contest: one process in the contender's own environment.

`python -m harness.worker NAME FORM` loads `peers/NAME.py` and obeys one JSON line at a time: `fill`,
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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from harness.workloads import STATE_ITEMS, WORKLOADS, Workload

QUIET_WINDOW_S = 0.002
QUIET_CPU_S = 0.0002
QUIET_LIMIT_S = 0.5
FIRST_USE_ROWS = 64
UPDATES_A_GROUP = 8
PRIORITY_BATCHES = 7

# What every prioritized buffer is set to.
ALPHA, BETA = 0.6, 0.4
# What every n-step buffer is set to.
STEPS, GAMMA = 3, 0.99
# What every buffer of sequences gives, and what every hindsight buffer is set to.
WINDOW_STEPS = 80
GOAL_RATIO = 0.8


@dataclass(frozen=True)
class Operation:
    """A loop as a user would write it: `run(calls)` makes that many calls, with nothing of ours in between.

    A sampling loop keeps its batch in a local, as a learner holds one batch while it takes the next.

    Attributes:
        warm_calls: The least number of untimed calls before a burst. A contender that works ahead in the
            background needs enough of them to use up what it prepared while others were timed.
        least_calls: The least number of calls of a burst. With a few batches prepared ahead, a burst of one or two
            calls would time how fast a finished batch is handed over, not how fast batches are made.
        before: Called untimed with the number of calls that follow: it makes their inputs.
        group: With `before`, the most calls between two of its calls.
    """

    run: Callable[[int], object]
    warm_calls: int = 1
    least_calls: int = 1
    before: Callable[[int], object] | None = None
    group: int = 0

    def run_timed(self, calls: int) -> int:
        """Nanoseconds of so many calls."""
        elapsed = 0
        while calls > 0:
            count = calls
            if self.before:
                count = min(calls, self.group)
                self.before(count)
            started = time.perf_counter_ns()
            self.run(count)
            elapsed += time.perf_counter_ns() - started
            calls -= count
        return elapsed


def random_priorities(count: int) -> np.ndarray:
    """Between 0.1 and 1.1; the same ones for everybody."""
    return np.random.default_rng(count).random(count, np.float32) + np.float32(0.1)


def batch_priorities(count: int) -> list[np.ndarray]:
    """Priorities of some batches. Several, so that a row gets another value at its next update."""
    return list(random_priorities(PRIORITY_BATCHES * count).reshape(PRIORITY_BATCHES, count))


def batch_states(count: int) -> list[np.ndarray]:
    """Recurrent states of some batches; the same ones for everybody."""
    states = np.random.default_rng(count).standard_normal((PRIORITY_BATCHES, count, STATE_ITEMS), np.float32)
    return list(states)


def kept_rows(count: int, percent_masked: int) -> np.ndarray:
    """Which of so many rows may be drawn; the same ones for everybody."""
    return np.random.default_rng(percent_masked).random(count) >= percent_masked / 100


def goal_reward(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    """0 where the goal is reached, else -1, for many pairs at once: the reward of robots that reach and push."""
    distance = np.sqrt(np.square(achieved - desired).sum(axis=-1))
    return -(distance > np.float32(0.05)).astype(np.float32)


def updating(draw: Callable[[], Any], update: Callable[[Any, Any], object], priorities: Iterable[Any]) -> Operation:
    """Updates of batches just drawn: a few are drawn untimed, then updated once each, and so on.

    Args:
        draw: Answers with the indices of a new batch.
        update: The library's own method, called with indices and new values.
        priorities: New values for a whole batch, priorities or states, used in turn.
    """
    drawn, endless = [], cycle(priorities)

    def before(calls: int) -> None:
        drawn[:] = [draw() for _ in range(calls)]

    def run(_calls: int) -> None:
        for indices, values in zip(drawn, endless, strict=False):
            update(indices, values)

    return Operation(run, before=before, group=UPDATES_A_GROUP)


class Contender:
    """One library in one form (plain, prioritized, ...), measured by its own best documented path.

    The methods answer with operations by variant; the plain form has the variant "". No answer means that
    the library has no such operation.
    """

    packages: tuple[str, ...] = ()
    note = ""
    facts: Mapping[str, Any] = {}  # what else the results keep about it, known once it is filled

    def fill(self, workload: Workload, capacity: int) -> None:
        """Build a buffer and fill it to `capacity`, so that no later call touches a page first."""
        raise NotImplementedError

    def add_one(self) -> dict[str, Operation]:
        return {}

    def add_many(self, count: int) -> dict[str, Operation]:
        return {}

    def sample(self, count: int) -> dict[str, Operation]:
        return {}

    def update(self, count: int) -> dict[str, Operation]:
        """New priorities for a batch of `count` rows that was just drawn."""
        return {}

    def write(self, count: int) -> dict[str, Operation]:
        """New recurrent states for a batch of `count` rows that was just drawn."""
        return {}

    def learn(self, count: int) -> dict[str, Operation]:
        """What a learner with priorities does in a step: add one row, draw `count`, update these."""
        return {}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settled_bytes() -> int:
    """Resident bytes without what is free: free memory that the allocator still holds takes in part of a buffer
    unseen, and inputs that are gone seem to be part of one."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()


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
    operation.run_timed(max(operation.warm_calls, calls // 8))
    elapsed = operation.run_timed(calls)
    gc.enable()
    wait_until_quiet()
    return elapsed / calls


def calls_for(operation: Operation, burst_s: float) -> int:
    """How many calls fill a burst; at least as many as the operation asks for."""
    calls = operation.least_calls
    operation.run_timed(operation.warm_calls)
    while (took_s := calls * time_burst(operation, calls) / 1e9) < burst_s / 2:
        calls *= 2
    return max(operation.least_calls, round(calls * burst_s / took_s))


class Described(Protocol):
    packages: tuple[str, ...]
    note: str
    facts: Mapping[str, Any]


def about(who: Described) -> dict[str, object]:
    """What the results say about a contender beside its figures."""
    versions = {name: importlib.metadata.version(name) for name in who.packages}
    return {"versions": versions, "note": who.note, **who.facts}


class Worker:
    def __init__(self, make: Callable[[], Contender]) -> None:
        self.make = make
        self.contender = Contender()  # stands in until `fill`
        self.operations: dict[str, Operation] = {}

    def fill(self, workload: str, capacity: int) -> dict[str, object]:
        self.contender = self.make()
        self.contender.fill(WORKLOADS[workload], capacity)
        return about(self.contender)

    def prepare(self, case: str, burst_s: float) -> dict[str, int | str]:
        """Calls of a burst for each variant of the case, or the reason why a variant cannot run."""
        # The last case's buffers go before this case's are made.
        self.operations = {}
        self.operations = self.operations_of(case)
        gc.collect()
        # The buffers and inputs are here to stay; a collection between bursts need not walk them.
        gc.freeze()
        calls: dict[str, int | str] = {}
        for variant, operation in self.operations.items():
            try:
                self.check(operation)
                calls[variant] = calls_for(operation, burst_s)
            except Exception as error:
                calls[variant] = f"{type(error).__name__}: {error}"
        return calls

    def operations_of(self, case: str) -> dict[str, Operation]:
        verb, count = case.split("_")
        if case == "add_1":
            return self.contender.add_one()
        make = self.contender.add_many if verb == "add" else getattr(self.contender, verb)
        return make(int(count))

    def check(self, operation: Operation) -> None:
        """Raises where an operation does not do what is asked for; batches are random, and each library's own."""

    def time(self, variant: str, calls: int) -> float:
        return time_burst(self.operations[variant], calls)

    def measure_memory(self, workload: str, rows: int) -> int:
        """Resident bytes that a full buffer of `rows` rows adds to a process that has already used one."""
        kind = WORKLOADS[workload]
        kind.columns(kind.chunk_rows)
        self.make().fill(kind, FIRST_USE_ROWS)
        before = settled_bytes()
        self.contender = self.make()
        self.contender.fill(kind, rows)
        return settled_bytes() - before


def obey(make: Callable[[], object]) -> None:
    """Do what the lines on standard input ask, by the methods of what is made at the first one; never returns."""
    # Libraries print to standard output as they please; the protocol gets a descriptor of its own.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    servant: object = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if servant is None:
                servant = make()
            answer = {"ok": getattr(servant, request.pop("do"))(**request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(answer) + "\n")
    if (close := getattr(servant, "close", None)) is not None:
        close()
    # Some libraries hang or crash while they tear down their threads; nothing is left to save.
    os._exit(0)


def main() -> None:
    name, form = sys.argv[1:]
    obey(lambda: Worker(importlib.import_module(f"peers.{name}").FORMS[form]))


if __name__ == "__main__":
    main()
