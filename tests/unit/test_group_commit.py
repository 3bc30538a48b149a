"""Group commit: calls that come while the journal is written share the next write, and each keeps its promise."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupts import interrupted_at
from patience import HANG_S, until

import sharpwave as sw
from sharpwave.errors import BufferFull, ClosedError, NotReady, SchemaError, StaleHandle, StorageError
from sharpwave.files import journal as journal_file
from sharpwave.sequences import commits, worker

FLOW = sw.Dataflow(
    [
        sw.Consumer("ref", {"ids"}, {"ref"}, 1),
        sw.Consumer("reward", {"ids"}, {"rewards"}, 1),
        sw.Consumer("train", {"ids", "ref", "rewards"}, batch_size=1),
    ]
)


def sample(name: str, key: str = "ids", length: int = 3) -> sw.SequenceSample:
    return sw.SequenceSample([name], {key: [length]}, {key: np.full(length, len(name), np.int64)})


class SlowDisk:
    """Counts the writes of journals, and holds them back while it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.go.set()
        self.sizes: list[int] = []
        self.syncs = 0
        self.most: int | None = None  # bytes of a write for which there is space
        self.is_writing = threading.Event()
        real = journal_file.write_all

        def write(file: int, pieces: list[Any], at: int, size: int) -> None:
            assert size == sum(memoryview(piece).nbytes for piece in pieces)
            if not size:
                return
            self.sizes.append(size)
            self.is_writing.set()
            assert self.go.wait(HANG_S)
            if self.most is not None and size > self.most:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(file, pieces, at, size)

        def sync(file: int) -> None:
            self.syncs += 1

        monkeypatch.setattr(journal_file, "write_all", write)
        monkeypatch.setattr(journal_file.os, "fdatasync", sync)

    @contextmanager
    def held(self) -> Iterator[None]:
        self.go.clear()
        self.is_writing.clear()
        yield
        self.go.set()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    return SlowDisk(monkeypatch)


class Calls:
    """Calls in threads of their own, and what came of each."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.results: dict[int, Any] = {}

    def start(self, call: Callable[[], Any]) -> None:
        number = len(self.threads)

        def run() -> None:
            try:
                self.results[number] = call()
            except BaseException as error:
                self.results[number] = error

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def join(self) -> list[Any]:
        for thread in self.threads:
            thread.join(HANG_S)
            assert not thread.is_alive()
        return [self.results[number] for number in range(len(self.threads))]


def opened(path: Path, **options: Any) -> sw.SequenceBuffer:
    path.mkdir(exist_ok=True)
    made = sw.SequenceBuffer(options.pop("capacity", 1000), flow=FLOW, journal=path / "journal", **options)
    made.put(sample("first"))  # decides the form of the key: it is a group of its own
    return made


def queue_behind_a_write(seq: sw.SequenceBuffer, disk: SlowDisk, calls: Calls, *later: Callable[[], Any]) -> None:
    """The first call's record is being written, the later ones wait for it, in this order."""
    calls.start(lambda: seq.put(sample("blocks")))
    assert disk.is_writing.wait(HANG_S)
    for number, call in enumerate(later, 1):
        calls.start(call)
        until(lambda number=number: len(seq._commits._requests) == number)


def contents(seq: sw.SequenceBuffer) -> dict[int, tuple[Any, ...]]:
    return {
        serial: (entry.sample.ids, sorted(entry.sample.keys), entry.done, entry.birth)
        for serial, entry in seq._store.index.entries.items()
    }


def test_calls_that_wait_for_one_write_share_the_next(tmp_path: Path, disk: SlowDisk) -> None:
    seq, calls = opened(tmp_path, sync=True), Calls()
    writes, syncs = len(disk.sizes), disk.syncs
    with disk.held():
        queue_behind_a_write(seq, disk, calls, *(lambda n=n: seq.put(sample(f"n{n}")) for n in range(12)))
        assert len(seq) == 1
        with pytest.raises(NotReady):
            seq.get("ref", batch_size=2, timeout=0)  # nothing is handed out before its record is written
    handles = [int(one[0]) for one in calls.join()]
    assert handles == list(range(1, 14)), "handles are in the order of the calls"
    assert (len(disk.sizes) - writes, disk.syncs - syncs) == (2, 2)
    before = contents(seq)
    seq.close()
    again = sw.SequenceBuffer(1000, flow=FLOW, journal=tmp_path / "journal")
    assert contents(again) == before
    assert [one for entry in before.values() for one in entry[0]] == ["first", "blocks", *(f"n{n}" for n in range(12))]
    again.close()


def test_coroutines_share_a_write_too(tmp_path: Path, disk: SlowDisk) -> None:
    seq = opened(tmp_path)
    writes = len(disk.sizes)

    async def run() -> list[Any]:
        with disk.held():
            tasks = [asyncio.create_task(seq.put_async(sample("blocks")))]
            while not disk.is_writing.is_set():
                await asyncio.sleep(0.001)
            tasks += [asyncio.create_task(seq.put_async(sample(f"n{n}"))) for n in range(12)]
            while len(seq._commits._requests) < 12:
                await asyncio.sleep(0.001)
        return await asyncio.gather(*tasks)

    assert [int(one[0]) for one in asyncio.run(run())] == list(range(1, 14))
    assert len(disk.sizes) - writes == 2
    seq.close()


def test_a_record_without_space_fails_its_own_call_only(tmp_path: Path, disk: SlowDisk) -> None:
    seq, calls = opened(tmp_path), Calls()
    lease = seq.get("ref", timeout=0)
    with disk.held():
        disk.most = 20_000
        large = lambda: seq.put(sample("large", length=10_000))  # noqa: E731
        queue_behind_a_write(
            seq, disk, calls, lambda: seq.put(sample("a")), large, lambda: seq.put(sample("b")), lease.ack
        )
    _, first, error, second, acked = calls.join()
    assert isinstance(error, StorageError)
    assert "No space left" in str(error)
    assert "nothing was changed" in str(error)
    assert acked is None
    assert [int(first[0]), int(second[0])] == [2, 3], "no handle is spent on the failed call"
    before = contents(seq)
    seq.close()
    with sw.SequenceBuffer(1000, flow=FLOW, journal=tmp_path / "journal") as again:
        assert contents(again) == before
        assert [entry[0] for entry in before.values()] == [["first"], ["blocks"], ["a"], ["b"]]


def test_amends_of_one_sample_in_the_same_moment_both_stay(tmp_path: Path, disk: SlowDisk) -> None:
    seq, calls = opened(tmp_path), Calls()
    (other,) = seq.put(sample("other"))
    for key in ("ref", "rewards"):
        seq.amend([other], sample("other", key))  # decides the forms
    with disk.held():
        queue_behind_a_write(
            seq,
            disk,
            calls,
            lambda: seq.amend([0], sample("first", "ref")),
            lambda: seq.amend([0], sample("first", "rewards")),
        )
    assert calls.join()[1:] == [None, None]
    assert seq._store.index.entries[0].sample.keys == {"ids", "ref", "rewards"}
    seq.close()


def test_an_amend_behind_the_last_acknowledgement_is_refused(tmp_path: Path, disk: SlowDisk) -> None:
    seq, calls = opened(tmp_path), Calls()
    for key in ("ref", "rewards"):
        seq.amend([0], sample("first", key))
    leases = [seq.get(name, timeout=0) for name in ("ref", "reward", "train")]
    with disk.held():
        queue_behind_a_write(
            seq, disk, calls, *(lease.ack for lease in leases), lambda: seq.amend([0], sample("first", "ref"))
        )
    *acks, refused = calls.join()[1:]
    assert acks == [None, None, None]
    assert isinstance(refused, StaleHandle)
    assert 0 not in seq
    seq.close()
    sw.SequenceBuffer(1000, flow=FLOW, journal=tmp_path / "journal").close()  # the journal has no such amend


def test_one_id_put_twice_in_the_same_moment_is_held_once(tmp_path: Path, disk: SlowDisk) -> None:
    seq, calls = opened(tmp_path), Calls()
    with disk.held():
        queue_behind_a_write(seq, disk, calls, *(lambda: seq.put(sample("twice")) for _ in range(3)))
    _, first, *others = calls.join()
    assert int(first[0]) == 2
    for error in others:
        assert isinstance(error, SchemaError)
        assert "id 'twice': held already" in str(error)
    assert len(seq) == 3
    seq.close()


def test_an_id_whose_first_put_cannot_be_written_is_free_for_the_second(tmp_path: Path, disk: SlowDisk) -> None:
    seq, calls = opened(tmp_path), Calls()
    with disk.held():
        disk.most = 20_000
        large = lambda: seq.put(sample("same", length=10_000))  # noqa: E731
        queue_behind_a_write(seq, disk, calls, large, lambda: seq.put(sample("same")))
    _, error, handles = calls.join()
    assert isinstance(error, StorageError)
    assert int(handles[0]) == 2
    assert contents(seq)[2][0] == ["same"]
    seq.close()


@pytest.mark.parametrize("bound", [{"capacity": 4}, {"max_tokens": 12}, {"max_bytes": 96}])
def test_puts_in_the_same_moment_keep_within_the_bounds(tmp_path: Path, disk: SlowDisk, bound: Any) -> None:
    seq, calls = opened(tmp_path, **bound), Calls()
    with disk.held():
        queue_behind_a_write(seq, disk, calls, *(lambda n=n: seq.put(sample(f"n{n}"), timeout=0) for n in range(4)))
    _, *results = calls.join()
    assert sum(isinstance(one, BufferFull) for one in results) == 2
    assert len(seq) == 4
    seq.close()


def test_a_put_that_found_no_room_goes_on_when_the_write_before_it_fails(tmp_path: Path, disk: SlowDisk) -> None:
    seq, calls = opened(tmp_path, capacity=2), Calls()
    with disk.held():
        disk.most = 20_000
        calls.start(lambda: seq.put(sample("large", length=10_000)))
        assert disk.is_writing.wait(HANG_S)
        calls.start(lambda: seq.put(sample("small"), timeout=HANG_S))
        until(lambda: len(seq._turns.putters) == 1)
    error, handles = calls.join()
    assert isinstance(error, StorageError)
    assert int(handles[0]) == 1
    seq.close()


def test_a_call_that_gave_up_before_its_turn_is_never_made(tmp_path: Path, disk: SlowDisk) -> None:
    seq, calls = opened(tmp_path), Calls()

    async def give_up() -> None:
        task = asyncio.create_task(seq.put_async(sample("cancelled")))
        while len(seq._commits._requests) < 2:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with disk.held():
        queue_behind_a_write(seq, disk, calls, lambda: seq.put(sample("late"), timeout=0.2))
        asyncio.run(give_up())
        calls.threads[1].join(HANG_S)
    late = calls.join()[1]
    assert isinstance(late, NotReady)
    assert "other calls have written the journal until the timeout" in str(late)
    seq.put(sample("next"))
    assert [entry[0] for entry in contents(seq).values()] == [["first"], ["blocks"], ["next"]]
    seq.close()


def test_a_put_that_is_cancelled_while_it_is_written_ends_when_it_is(tmp_path: Path, disk: SlowDisk) -> None:
    """Its arrays are the caller's again: a record that was read from them later would have a wrong checksum."""
    seq = opened(tmp_path)
    tokens = np.zeros(10_000, np.int64)
    put = sw.SequenceSample(["cancelled"], {"ids": [len(tokens)]}, {"ids": tokens})

    async def give_up() -> None:
        task = asyncio.create_task(seq.put_async(put))
        while not disk.is_writing.is_set():
            await asyncio.sleep(0.001)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done()
        disk.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        tokens[:] = 7

    with disk.held():
        asyncio.run(give_up())
    assert [entry[0] for entry in contents(seq).values()] == [["first"], ["cancelled"]]
    seq.close()
    sw.SequenceBuffer(1000, flow=FLOW, journal=tmp_path / "journal").close()  # every record is whole


def test_calls_that_wait_when_the_buffer_is_closed_are_told(tmp_path: Path, disk: SlowDisk) -> None:
    seq, calls = opened(tmp_path), Calls()
    with disk.held():
        queue_behind_a_write(seq, disk, calls, lambda: seq.put(sample("a")), lambda: seq.put(sample("b")))
        closing = threading.Thread(target=seq.close)
        closing.start()
    results = calls.join()
    closing.join(HANG_S)
    names = [entry[0] for entry in contents(sw.open(tmp_path / "journal")).values()]
    for name, result in zip(("blocks", "a", "b"), results, strict=True):
        assert ([name] in names) == isinstance(result, np.ndarray), "acknowledged if and only if it is there"


def test_no_call_hangs_when_the_buffer_is_closed_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seq, calls, entered = opened(tmp_path), Calls(), threading.Event()
    real = commits.Worker.hand_over

    def slow(worker: Any, task: Any) -> None:
        entered.set()
        time.sleep(0.1)  # time enough for a close() that does not wait
        real(worker, task)

    monkeypatch.setattr(commits.Worker, "hand_over", slow)
    calls.start(lambda: seq.put(sample("beside")))
    assert entered.wait(HANG_S)
    seq.close()
    (result,) = calls.join()
    is_there = ["beside"] in [entry[0] for entry in contents(sw.open(tmp_path / "journal")).values()]
    assert is_there == isinstance(result, np.ndarray)
    assert is_there or isinstance(result, ClosedError)


def test_many_threads_leave_a_journal_that_equals_the_memory(tmp_path: Path) -> None:
    seq = opened(tmp_path)

    def work(number: int) -> None:
        for turn in range(20):
            (handle,) = seq.put(sample(f"{number}-{turn}"))
            lease = seq.get("ref", timeout=HANG_S)
            seq.amend(lease.handles, sample(lease.batch.ids[0], "ref"))
            if turn % 3:
                lease.ack()
            else:
                lease.release()
            assert int(handle) in seq._store.index.entries

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    before = contents(seq)
    assert len(before) == 121
    seq.close()
    with sw.SequenceBuffer(1000, flow=FLOW, journal=tmp_path / "journal") as again:
        assert contents(again) == before


def test_put_that_is_interrupted_at_any_instruction_ends_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python raises the exception where a function begins, or behind a call: here at each of those places."""
    seq = opened(tmp_path)

    def commit() -> None:
        with suppress(NotReady):
            seq._commits.commit("put()", lambda: None)

    def all_places() -> int:
        return next(at for at in itertools.count(1) if interrupted_at(at, commit, (commits, worker)) is None)

    def all_calls() -> None:
        counts.append(all_places())
        with monkeypatch.context() as patch, seq._commits._writing:
            patch.setattr(commits, "wait_s", lambda _: 0)  # late at once, behind another write: it cancels its request
            counts.append(all_places())
        seq.put(sample("after"), timeout=HANG_S)

    counts: list[int] = []
    caller = threading.Thread(target=all_calls, daemon=True)
    caller.start()
    caller.join(HANG_S)
    assert not caller.is_alive(), "a call waits for what it has itself taken"
    assert len(counts) == 2
    assert min(counts) > 10
    assert "after" in seq.ids()
    seq.close()
