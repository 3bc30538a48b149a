"""SequenceBuffer against its specification: any calls in any order, with restarts from the journal in between."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import sharpwave as sw
from sharpwave.errors import BufferFull, ClosedError, NotReady, SchemaError, StaleHandle

sys.path.insert(0, str(Path(__file__).parent))
from sequence_model import Model, Out

SOAK = os.environ.get("SHARPWAVE_SOAK") == "1"
KEYS = ("x", "y", "z")
GROUP = 3

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
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

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
        self.made = 0

    @initialize(
        flow=st.sampled_from(sorted(FLOWS)),
        capacity=st.integers(4, 12),
        max_tokens=st.none() | st.integers(20, 40),
        max_staleness=st.none() | st.integers(0, 2),
        births=st.booleans(),
        journal=st.booleans(),
    )
    def begin(
        self, flow: str, capacity: int, max_tokens: int | None, max_staleness: int | None, births: bool, journal: bool
    ) -> None:
        self.flow = sw.Dataflow(FLOWS[flow])
        self.options: dict[str, Any] = {"max_tokens": max_tokens, "max_staleness": max_staleness}
        if journal:
            self.options["journal"] = self.folder / "journal"
        self.capacity, self.has_births = capacity, births
        self.model = Model(self.flow, capacity, max_tokens, max_staleness)
        self.seq = sw.SequenceBuffer(self.flow, capacity, **self.options)
        self.leases: list[tuple[Out, Any]] = []

    @rule(
        count=st.integers(1, 4),
        keys=st.sets(st.sampled_from(KEYS), min_size=1),
        length=st.integers(1, 6),
        births=st.lists(st.integers(1, 6), min_size=4, max_size=4),
        old=st.integers(0, 2),
        again=st.booleans(),
    )
    def put(self, count: int, keys: set[str], length: int, births: list[int], old: int, again: bool) -> None:
        names = [f"s{self.made + at}" for at in range(count)]
        if again and self.model.held:
            names[-1] = self.model.held[0].id
        groups = [f"g{(self.made + at) // GROUP}" for at in range(count)]
        samples = [
            (name, dict.fromkeys(sorted(keys), length), group) for name, group in zip(names, groups, strict=True)
        ]
        version = max(0, self.model.version - old)
        given = births[:count] if self.has_births else None
        expected = self.model.put(samples, version, given)
        if self.has_group() and expected != "full":
            self.made += count  # a member that is refused would leave its group short: the model has none of these
        try:
            put = [make(*sample) for sample in samples]
            got: Any = self.way.call(self.seq, "put", put, version=version, births=given).tolist()
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
        handles = data.draw(st.lists(st.integers(0, self.model.next + 1), min_size=1, max_size=4, unique=True))
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
        consumer = data.draw(st.sampled_from(list(self.flow)))
        count = consumer.batch_size if consumer.group_size or consumer.window else consumer.batch_size + more
        options = {"batch_size": count, "timeout": 0, "partial": partial, "owner": owner}
        expected = self.model.get(consumer.name, count, partial, owner)
        if expected is None:
            with pytest.raises(NotReady):
                self.way.call(self.seq, "get", consumer.name, **options)
            return
        self.same(expected, self.way.call(self.seq, "get", consumer.name, **options))

    @rule(data=st.data())
    def wait(self, data: Any) -> None:
        consumer = data.draw(st.sampled_from(list(self.flow)))
        enough = self.model.groups(consumer.name) if consumer.group_size else self.model.ready(consumer.name)
        if consumer.name in self.pending or len(enough) >= consumer.batch_size // (consumer.group_size or 1):
            return
        self.pending[consumer.name] = self.way.wait(self.seq, consumer.name)
        deadline = time.monotonic() + 10
        while not self.seq.stats()["consumers"][consumer.name]["waiting"]:
            assert time.monotonic() < deadline

    def settle(self) -> None:
        """Whoever can be served by now has been; all others still wait."""
        for name, future in list(self.pending.items()):
            expected = self.model.get(name, self.flow[name].batch_size, False, None)
            if expected is None:
                assert not future.done()
                continue
            self.same(expected, future.result(10))
            del self.pending[name]

    def same(self, expected: Out, lease: Any) -> None:
        consumer = self.flow[expected.consumer]
        assert lease.batch.ids == [one.id for one in expected.members]
        assert lease.handles.tolist() == [one.handle for one in expected.members]
        assert lease.batch.keys == consumer.inputs
        for key in consumer.inputs:
            assert lease.batch.seqlens[key] == [[one.tokens[key]] for one in expected.members]
        self.leases.append((expected, lease))

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), done=st.booleans())
    def end(self, data: Any, done: bool) -> None:
        expected, lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
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

    @precondition(lambda self: "journal" in self.options)
    @rule(torn=st.integers(0, 30))
    def restart(self, torn: int) -> None:
        self.close()
        with (self.folder / "journal").open("ab") as file:
            file.write(b"\x01\x02\x03\x00\x7f"[: torn % 6] + bytes(torn // 6))
        self.seq = sw.SequenceBuffer(self.flow, self.capacity, **self.options)
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


BOUNDS = settings(max_examples=400 if SOAK else 60, stateful_step_count=60 if SOAK else 40)
Machine.TestCase.settings = AsyncMachine.TestCase.settings = BOUNDS
TestAnyCallsInAnyOrder = Machine.TestCase
TestAnyCallsInAnyOrderAwaited = AsyncMachine.TestCase
