"""SequenceBuffer against its specification: any calls in any order, with restarts from the journal in between."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from patience import HANG_S

import sharpwave as sw
from sharpwave.errors import BufferFull, ClosedError, NotReady, SchemaError, StaleHandle

sys.path.insert(0, str(Path(__file__).parent))
from sequence_model import Model, Out

SOAK = os.environ.get("SHARPWAVE_SOAK") == "1"
KEYS = ("x", "y", "z")
GROUP = 3
CALLS = (
    *("put",) * 3,
    *("work",) * 4,
    "get",
    "end",
    "amend",
    "wait",
    "version",
    "restart",
    "clear",
    "move",
)  # by how often
PUT = [("x",), ("x", "y"), ("x", "y", "z"), ("z",)]  # what comes with a put

FLOWS = {
    "one": [sw.Consumer("train", {"x"}, batch_size=2)],
    "chain": [
        sw.Consumer("ref", {"x"}, {"y"}, batch_size=2),
        sw.Consumer("reward", {"x"}, {"z"}, batch_size=3),
        sw.Consumer("train", {"x", "y", "z"}, batch_size=2),
    ],
    "reuse": [sw.Consumer("ref", {"x"}, {"y"}, batch_size=1), sw.Consumer("train", {"y"}, batch_size=2, reuse=3)],
    "window": [sw.Consumer("ref", {"x"}, {"y"}, batch_size=1), sw.Consumer("train", {"y"}, batch_size=2, window=3)],
    "group": [
        sw.Consumer("ref", {"x"}, {"y"}, batch_size=1),
        sw.Consumer("train", {"y"}, batch_size=GROUP, group_size=GROUP),
    ],
    "no inputs": [sw.Consumer("see", set(), batch_size=2), sw.Consumer("train", {"z"}, batch_size=1)],
}


def make(name: str, keys: dict[str, int], group: str) -> sw.SequenceSample:
    data = {key: np.full(length, hash((name, key)) % 1000) for key, length in keys.items()}
    return sw.SequenceSample([name], {key: [n] for key, n in keys.items()}, data, metadata={"group": [group]})


def pick(source: Any, options: Any) -> Any:
    """One of them, by hypothesis or by a random stream."""
    return source.choice(options) if isinstance(source, random.Random) else source.draw(st.sampled_from(options))


def picks(source: Any, numbers: range) -> list[int]:
    if isinstance(source, random.Random):
        return source.sample(numbers, min(len(numbers), source.randint(1, 4)))
    return source.draw(st.lists(st.sampled_from(numbers), min_size=1, max_size=4, unique=True))  # type: ignore[no-any-return]


class Threads:
    """Plain verbs; whoever waits does so in a thread of its own."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(8)

    def call(self, seq: sw.SequenceBuffer, verb: str, *args: Any, **options: Any) -> Any:
        return getattr(seq, verb)(*args, **options)

    def wait(self, seq: sw.SequenceBuffer, consumer: str) -> concurrent.futures.Future[Any]:
        return self._pool.submit(seq.get, consumer)

    def end(self) -> None:
        self._pool.shutdown()


class Coroutines:
    """Awaited verbs, in an event loop in another thread than the one that checks."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def call(self, seq: sw.SequenceBuffer, verb: str, *args: Any, **options: Any) -> Any:
        coroutine = getattr(seq, f"{verb}_async")(*args, **options)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(HANG_S)

    def wait(self, seq: sw.SequenceBuffer, consumer: str) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(seq.get_async(consumer), self._loop)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Machine(RuleBasedStateMachine):
    """Both sides get the same calls; what they answer and what they hold must agree.

    A get that cannot be served may be left waiting: it must be served by the very call that makes it possible.
    """

    ways: type[Threads] | type[Coroutines] = Threads

    def __init__(self) -> None:
        super().__init__()
        self.way = self.ways()
        self.pending: dict[str, concurrent.futures.Future[Any]] = {}
        self.folder = Path(tempfile.mkdtemp())
        self.made = self.moves = 0

    @initialize(
        flow=st.sampled_from(sorted(FLOWS)),
        capacity=st.integers(6, 40),
        max_tokens=st.none() | st.integers(40, 100),
        max_staleness=st.none() | st.integers(0, 2),
        births=st.booleans(),
        journal=st.booleans(),
        seed=st.integers(0, 2**32),
    )
    def begin(
        self,
        flow: str,
        capacity: int,
        max_tokens: int | None,
        max_staleness: int | None,
        births: bool,
        journal: bool,
        seed: int,
    ) -> None:
        self.flow = sw.Dataflow(FLOWS[flow])
        if self.has_group():
            max_staleness = None  # a group that loses a member has its own test: the model's groups are whole
        self.options: dict[str, Any] = {"max_tokens": max_tokens, "max_staleness": max_staleness}
        if journal:
            self.options["journal"] = self.folder / "journal"
        self.capacity, self.has_births = capacity, births
        self.model = Model(self.flow, capacity, max_tokens, max_staleness)
        self.seq = sw.SequenceBuffer(capacity, flow=self.flow, **self.options)
        self.leases: list[tuple[Out, Any]] = []
        self.burst(seed)

    @rule(
        count=st.integers(1, 4),
        keys=st.sampled_from(PUT),
        length=st.integers(1, 6),
        births=st.lists(st.integers(1, 6), min_size=4, max_size=4),
        old=st.integers(0, 2),
        again=st.integers(0, 9),
    )
    def put(self, count: int, keys: tuple[str, ...], length: int, births: list[int], old: int, again: int) -> None:
        names = [f"s{self.made + at}" for at in range(count)]
        if again == 9 and self.model.held:
            names[-1] = self.model.held[0].id
        groups = [f"g{(self.made + at) // GROUP}" for at in range(count)]
        samples = [(name, dict.fromkeys(keys, length), group) for name, group in zip(names, groups, strict=True)]
        version = max(0, self.model.version - old)
        given = births[:count] if self.has_births else None
        expected = self.model.put(samples, version, given)
        if self.has_group() and expected != "full":
            self.made += count  # a member that is refused would leave its group short: the model has none of these
        try:
            put = [make(*sample) for sample in samples]
            got: Any = self.way.call(self.seq, "put", put, version=version, births=given, timeout=0).tolist()
        except BufferFull:
            got = "full"
        except SchemaError:
            got = "duplicate"
        assert got == expected
        if not self.has_group():
            self.made += count

    def has_group(self) -> bool:
        return any(consumer.group_size for consumer in self.flow)

    @rule(data=st.data(), key=st.sampled_from(KEYS), length=st.integers(1, 6))
    def amend(self, data: Any, key: str, length: int) -> None:
        handles = picks(data, range(self.model.next + 2))
        by_handle = {one.handle: one for one in self.model.held}
        names = [by_handle[h].id if h in by_handle else f"s{h}" for h in handles]
        parts = [sw.SequenceSample([n], {key: [length]}, {key: np.zeros(length, np.int64)}) for n in names]
        if self.model.amend(handles, key, length):
            self.way.call(self.seq, "amend", handles, parts)
        else:
            with pytest.raises(StaleHandle):
                self.way.call(self.seq, "amend", handles, parts)

    @rule(data=st.data(), more=st.integers(0, 1), partial=st.booleans(), owner=st.sampled_from([None, "a", "b"]))
    def get(self, data: Any, more: int, partial: bool, owner: str | None) -> None:
        consumer = pick(data, list(self.flow))
        count = consumer.batch_size if consumer.group_size or consumer.window else consumer.batch_size + more
        options = {"batch_size": count, "timeout": 0, "partial": partial, "owner": owner}
        expected = self.model.get(consumer.name, count, partial, owner)
        if expected is None:
            with pytest.raises(NotReady):
                self.way.call(self.seq, "get", consumer.name, **options)
            return
        self.same(expected, self.way.call(self.seq, "get", consumer.name, **options))

    @rule(data=st.data(), done=st.sampled_from([True, True, False]), at_once=st.booleans())
    def work(self, data: Any, done: bool, at_once: bool) -> None:
        """What a consumer does: takes what there is, adds what it makes, says that it is done; in one call or two."""
        consumer = pick(data, list(self.flow))
        if consumer.name in self.pending:
            return
        expected = self.model.get(consumer.name, consumer.batch_size, True, None)
        if expected is None:
            return
        lease = self.way.call(self.seq, "get", consumer.name, timeout=0, partial=True)
        self.same(expected, lease)
        self.leases.pop()
        if at_once and done and consumer.outputs:
            keys = sorted(consumer.outputs)
            made = [
                sw.SequenceSample([one.id], {key: [2] for key in keys}, {key: np.zeros(2, np.int64) for key in keys})
                for one in expected.members
            ]
            for key in keys:
                self.model.amend([one.handle for one in expected.members], key, 2)
            self.model.end(expected, True)
            lease.ack(made)
            self.settle()
            return
        for key in sorted(consumer.outputs):
            self.model.amend([one.handle for one in expected.members], key, 2)
            made = [sw.SequenceSample([one.id], {key: [2]}, {key: np.zeros(2, np.int64)}) for one in expected.members]
            self.way.call(self.seq, "amend", lease.handles, made)
        self.settle()
        self.model.end(expected, done)
        if done:
            lease.ack()
        else:
            lease.release()

    @rule(data=st.data())
    def wait(self, data: Any) -> None:
        consumer = pick(data, list(self.flow))
        enough = self.model.groups(consumer.name) if consumer.group_size else self.model.ready(consumer.name)
        if consumer.name in self.pending or len(enough) >= consumer.batch_size // (consumer.group_size or 1):
            return
        self.pending[consumer.name] = self.way.wait(self.seq, consumer.name)
        deadline = time.monotonic() + HANG_S
        while not self.seq.stats()["consumers"][consumer.name]["waiting"]:
            assert time.monotonic() < deadline

    def settle(self) -> None:
        """Whoever can be served by now has been; all others still wait."""
        for name, future in list(self.pending.items()):
            expected = self.model.get(name, self.flow[name].batch_size, False, None)
            if expected is None:
                assert not future.done()
                continue
            self.same(expected, future.result(HANG_S))
            del self.pending[name]

    def same(self, expected: Out, lease: Any) -> None:
        consumer = self.flow[expected.consumer]
        assert lease.batch.ids == [one.id for one in expected.members]
        assert lease.handles.tolist() == [one.handle for one in expected.members]
        assert lease.batch.keys == consumer.inputs
        for key in consumer.inputs:
            assert lease.batch.seqlens[key] == [[one.tokens[key]] for one in expected.members]
        self.leases.append((expected, lease))

    @rule(seed=st.integers(0, 2**32))
    def burst(self, seed: int) -> None:
        """Many calls at once, so that every case has some of each kind."""
        stream = random.Random(seed)
        put = {"count": (1, 2, 3, 4), "length": (1, 2, 6), "old": (0, 0, 1, 2), "again": tuple(range(10)), "keys": PUT}
        some: dict[str, Any] = {
            "amend": {"key": KEYS, "length": (1, 6)},
            "get": {"more": (0, 1), "partial": (True, False), "owner": (None, "a", "b")},
            "end": {"done": (True, False)},
            "work": {"done": (True, True, True, False), "at_once": (True, False)},
            "wait": {},
        }
        for _ in range(80):
            name = stream.choice(CALLS)
            if name == "put":
                births = [stream.randint(1, 6) for _ in range(4)]
                self.put(births=births, **{key: stream.choice(options) for key, options in put.items()})
            elif name == "version":
                self.set_version(more=stream.choice((0, 0, 1)))
            elif name == "clear":
                if stream.random() < 0.2:
                    self.clear()
            elif name == "move":
                if stream.random() < 0.3:
                    self.move(in_place=stream.choice((True, False)))
            elif name == "restart":
                if "journal" in self.options and stream.random() < 0.5:
                    self.restart(torn=stream.randint(0, 30))
            elif name != "end" or self.leases:
                getattr(self, name)(data=stream, **{key: stream.choice(options) for key, options in some[name].items()})
            self.agree()

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), done=st.booleans())
    def end(self, data: Any, done: bool) -> None:
        expected, lease = self.leases.pop(pick(data, range(len(self.leases))))
        if expected not in self.model.leases:  # its owner was released
            if done:
                with pytest.raises(StaleHandle):
                    lease.ack()
            else:
                lease.release()
            return
        self.model.end(expected, done)
        if done:
            lease.ack()
        else:
            lease.release()

    @rule(owner=st.sampled_from(["a", "b"]))
    def release(self, owner: str) -> None:
        self.model.release(owner)
        self.seq.release(owner)

    @rule(more=st.integers(0, 2))
    def set_version(self, more: int) -> None:
        self.model.set_version(self.model.version + more)
        self.seq.set_version(self.model.version)

    @rule()
    def clear(self) -> None:
        self.model.clear()
        self.way.call(self.seq, "clear")

    @rule(in_place=st.booleans())
    def move(self, in_place: bool) -> None:
        """Goes on with what ``save`` wrote: a copy in memory, or the file itself as the journal."""
        self.moves += 1
        path = self.folder / f"saved-{self.moves}"
        self.way.call(self.seq, "save", path)
        self.close()
        self.seq = sw.open(f"file://{path}" if in_place else path)
        self.options = {name: value for name, value in self.options.items() if name != "journal"}
        if in_place:
            self.options["journal"] = path
        self.leases = []
        self.model.restart()

    @precondition(lambda self: "journal" in self.options)
    @rule(torn=st.integers(0, 30))
    def restart(self, torn: int) -> None:
        self.close()
        rest = b"\x01\x02\x03\x00\x7f"[: torn % 6] + bytes(torn // 6)
        with self.options["journal"].open("ab") as file:
            file.write(rest)
        with pytest.warns(UserWarning, match=f"{len(rest)} bytes are cut off") if rest else nullcontext():
            self.seq = sw.SequenceBuffer(self.capacity, flow=self.flow, **self.options)
        assert self.seq.stats()["cut_bytes"] == len(rest)
        self.leases = []
        self.model.restart()

    def close(self) -> None:
        self.seq.close()
        for future in self.pending.values():
            assert isinstance(future.exception(10), ClosedError)
        self.pending = {}

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "seq"):
            return
        self.settle()
        stats = self.seq.stats()
        assert self.seq.ids() == [one.id for one in self.model.held]
        assert (stats["size"], stats["tokens"]) == (len(self.model.held), self.model.tokens())
        assert self.seq.used_ids == self.model.used
        assert stats["leased"] == sum(len(out.members) for out in self.model.leases)
        assert sum(stats["staleness"].values()) == len(self.model.held)
        for consumer in self.flow:
            if consumer.group_size is None:
                assert stats["consumers"][consumer.name]["ready"] == len(self.model.ready(consumer.name))
            else:
                groups = self.model.groups(consumer.name)
                assert stats["consumers"][consumer.name]["ready"] == GROUP * len(groups)
            assert f"{stats['consumers'][consumer.name]['ready']} of" in self.seq.explain(consumer.name)

    def teardown(self) -> None:
        if hasattr(self, "seq"):
            self.close()
        self.way.end()
        shutil.rmtree(self.folder)


class AsyncMachine(Machine):
    ways = Coroutines


# Bursts are long: making a failure of theirs smaller takes longer than reading it.
PHASES = [phase for phase in Phase if phase is not Phase.shrink]
BOUNDS = settings(phases=PHASES, max_examples=400 if SOAK else 30, stateful_step_count=20 if SOAK else 10)
Machine.TestCase.settings = AsyncMachine.TestCase.settings = BOUNDS
TestAnyCallsInAnyOrder = Machine.TestCase
TestAnyCallsInAnyOrderAwaited = AsyncMachine.TestCase
