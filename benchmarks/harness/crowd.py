"""One buffer and the processes that use it at once: the contender's side.

`python -m harness.crowd NAME FORM TOKEN` loads `peers/processes/NAME.py` and obeys one JSON line at a time: `fill`
makes the buffer, `gather` starts writers and a learner as processes of their own, `run` lets them work for one slice of
time. Between two slices all of them block on a read.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from harness.worker import about, batch_priorities, obey, wait_until_quiet
from harness.workloads import WORKLOADS, Workload

# A clock that all processes share: what each counts lies in the same slice.
clock = time.perf_counter_ns

# The clock is looked at between bursts only. Short ones: what a burst began, it ends, though the slice is over.
BURST_NS = 100_000
MOST_CALLS = 128
OPENING_LIMIT_S = 120
ENDING_LIMIT_S = 60

Calls = Callable[..., object]


class Peer:
    """One library's way to share a buffer between processes.

    The object that filled the buffer travels to the other processes as `multiprocessing` pickles it for a child.

    Attributes:
        learns_here: The process that made the buffer has to be the learner.
    """

    packages: tuple[str, ...] = ()
    note = ""
    facts: Mapping[str, Any] = {}
    learns_here = False

    def __init__(self, prioritized: bool) -> None:
        self.prioritized = prioritized

    def fill(self, workload: Workload, capacity: int, token: str) -> None:
        """Make a buffer and fill it. What it leaves in the machine's shared memory has `token` in its name."""
        raise NotImplementedError

    def open(self) -> None:
        """What another process does first."""

    def adding(self, count: int) -> tuple[Calls, Sequence[tuple]]:
        """The call that adds `count` rows, and arguments for it, used in turn."""
        raise NotImplementedError

    def learning(self, count: int) -> tuple[Callable[[], Any], Callable[[Any, Any], object]]:
        """The call that draws `count` rows, and the one that gives a batch new priorities."""
        raise NotImplementedError

    def priorities(self, count: int) -> Sequence[Any]:
        """Of whole batches, in the form that the library takes."""
        return batch_priorities(count)

    def close(self) -> None:
        """In the process that made the buffer: remove what would stay."""


class Adding:
    def __init__(self, add: Calls, inputs: Sequence[tuple]) -> None:
        self.add, self.inputs = add, cycle(inputs)
        self.spans: dict[str, list[int]] = {"add": []}

    def burst(self, calls: int) -> None:
        add = self.add
        for row in islice(self.inputs, calls):
            add(*row)

    def once(self) -> None:
        """One call, timed by itself."""
        add, row = self.add, next(self.inputs)
        started = clock()
        add(*row)
        self.spans["add"].append(clock() - started)


class Learning:
    def __init__(self, sample: Callable[[], Any]) -> None:
        self.sample = sample
        self.spans: dict[str, list[int]] = {"sample": []}

    def burst(self, calls: int) -> None:
        sample = self.sample
        for _ in range(calls):
            _batch = sample()

    def once(self) -> None:
        sample = self.sample
        started = clock()
        _batch = sample()
        self.spans["sample"].append(clock() - started)


class LearningByPriority(Learning):
    """Every batch gets new priorities before the next one is drawn."""

    def __init__(self, sample: Callable[[], Any], update: Callable[[Any, Any], object], values: Sequence[Any]) -> None:
        super().__init__(sample)
        self.update, self.values = update, cycle(values)
        self.spans["update"] = []

    def burst(self, calls: int) -> None:
        sample, update = self.sample, self.update
        for values in islice(self.values, calls):
            update(sample(), values)

    def once(self) -> None:
        sample, update, values = self.sample, self.update, next(self.values)
        started = clock()
        batch = sample()
        drawn = clock()
        update(batch, values)
        self.spans["update"].append(clock() - drawn)
        self.spans["sample"].append(drawn - started)


def fitting(calls: int, took_ns: int) -> int:
    """How many calls the next burst has."""
    if took_ns < BURST_NS // 2:
        return min(2 * calls, MOST_CALLS)
    return max(1, calls // 2) if took_ns > 2 * BURST_NS else calls


def run_slice(part: Adding | Learning, start: int, end: int) -> tuple[int, dict[str, np.ndarray]]:
    """Calls that ended within the slice, and how long single calls took; what comes before `start` is to warm up."""
    done, calls = 0, 1
    main = next(iter(part.spans.values()))
    for spans in part.spans.values():
        spans.clear()
    gc.disable()
    while (began := clock()) < end:
        part.burst(calls)
        ended = clock()
        done += calls * (start < ended <= end)
        if start <= ended < end:
            part.once()
            done += clock() <= end
        elif ended >= end and not main:
            main.append((ended - began) // calls)  # a call as long as the slice: better than no figure
        calls = fitting(calls, ended - began)
    gc.enable()
    wait_until_quiet()
    return done, {verb: np.array(spans, np.int64) for verb, spans in part.spans.items()}


class Parts:
    """What one process does with the buffer; each part is made once."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.made: dict[tuple[str, int], Adding | Learning] = {}

    def prepare(self, role: str, count: int) -> None:
        if (role, count) not in self.made:
            self.made[role, count] = self.make(role, count)
        self.made[role, count].burst(1)
        gc.collect()
        gc.freeze()

    def make(self, role: str, count: int) -> Adding | Learning:
        if role == "add":
            return Adding(*self.peer.adding(count))
        sample, update = self.peer.learning(count)
        if self.peer.prioritized:
            return LearningByPriority(sample, update, self.peer.priorities(count))
        return Learning(sample)

    def run(self, role: str, count: int, start: int, end: int) -> tuple[int, dict[str, np.ndarray]]:
        return run_slice(self.made[role, count], start, end)


def take_part(peer: Peer, pipe: Connection) -> None:
    """The whole life of a writer or learner; it ends with the pipe."""
    parts: Parts | None = None
    while True:
        try:
            what, *arguments = pipe.recv()
        except (EOFError, OSError):  # the host has gone
            os._exit(0)
        try:
            if parts is None:
                peer.open()
                parts = Parts(peer)
            pipe.send((getattr(parts, what)(*arguments), None))
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}"))


class Member:
    """A process that takes part, as the host sees it."""

    def __init__(self, peer: Peer) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=take_part, args=(peer, theirs), daemon=True)
        self.process.start()
        theirs.close()  # or the member would not hear that this process has gone

    def ask(self, *request: object) -> None:
        self.pipe.send(request)

    def answer(self, limit_s: float) -> Any:
        if not self.pipe.poll(limit_s):
            raise RuntimeError(f"a process did not answer within {limit_s:g} s")
        answer, error = self.pipe.recv()
        if error:
            raise RuntimeError(error)
        return answer

    def close(self) -> None:
        self.pipe.close()
        self.process.join(2)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class Host:
    """The process that makes the buffer, and starts those that use it."""

    def __init__(self, make: Callable[..., Peer], token: str) -> None:
        self.peer, self.token = make(), token
        self.writers: list[Member] = []
        self.learner: Member | None = None
        self.own: Parts | None = None

    def fill(self, workload: str, capacity: int) -> dict[str, object]:
        self.peer.fill(WORKLOADS[workload], capacity, self.token)
        return about(self.peer)

    def gather(self, writers: int, rows: int, batch: int) -> None:
        """See to it that so many writers and a learner are there and ready."""
        while len(self.writers) < writers:
            self.writers.append(Member(self.peer))
        if self.peer.learns_here:
            self.own = self.own or Parts(self.peer)
            self.own.prepare("sample", batch)
        else:
            self.learner = self.learner or Member(self.peer)
        for member, *request in self.roles(writers, rows, batch):
            member.ask("prepare", *request)
            member.answer(OPENING_LIMIT_S)

    def roles(self, writers: int, rows: int, batch: int) -> Iterator[tuple[Member, str, int]]:
        for member in self.writers[:writers]:
            yield member, "add", rows
        if self.learner:
            yield self.learner, "sample", batch

    def run(self, writers: int, rows: int, batch: int, warm_s: float, slice_s: float) -> dict[str, float]:
        """Rows a second and how long a call takes, in one slice with everybody at work."""
        start = clock() + round(warm_s * 1e9)
        end = start + round(slice_s * 1e9)
        for member, *request in self.roles(writers, rows, batch):
            member.ask("run", *request, start, end)
        answers = [("sample", self.own.run("sample", batch, start, end))] if self.own else []
        for member, role, _ in self.roles(writers, rows, batch):
            answers.append((role, member.answer(warm_s + slice_s + ENDING_LIMIT_S)))
        wait_until_quiet()
        figures: dict[str, float] = {}
        for role, count, rate in (("add", rows, "inserts_per_s"), ("sample", batch, "samples_per_s")):
            shares = [answer for who, answer in answers if who == role]
            figures[rate] = count * sum(done for done, _ in shares) / slice_s
            for verb in shares[0][1]:
                spans = np.concatenate([spans[verb] for _, spans in shares])
                if len(spans):
                    figures |= {f"{verb}_p{share}_ns": float(np.percentile(spans, share)) for share in (50, 99)}
        return figures

    def close(self) -> None:
        for member in [*self.writers, *([self.learner] if self.learner else [])]:
            member.close()
        self.peer.close()


def main() -> None:
    name, form, token = sys.argv[1:]
    obey(lambda: Host(importlib.import_module(f"peers.processes.{name}").FORMS[form], token))


if __name__ == "__main__":
    # By its own name: what is pickled for the other processes must not be of `__main__`.
    importlib.import_module("harness.crowd").main()
