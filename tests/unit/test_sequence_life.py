"""Forked children, event loops, deadlines and interrupts: a SequenceBuffer never blocks or lies because of them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupts import interrupted_at
from patience import HANG_S, seconds_of_other_threads, until, until_asleep, until_thread_waits

import sharpwave as sw
from sharpwave.buffers import sequence
from sharpwave.errors import BufferFull, ClosedError, NotReady, SchemaError, StorageError
from sharpwave.sequences import commits, gate, local, turns, waiter, worker
from sharpwave.sequences import store as store_module

FLOW = sw.Dataflow([sw.Consumer("inf", {"a"}, {"b"}, 1), sw.Consumer("train", {"a", "b"}, batch_size=1)])


def sample(name: str, key: str = "a", length: int = 3) -> sw.SequenceSample:
    return sw.SequenceSample([name], {key: [length]}, {key: np.arange(length)})


def in_child(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


# ---- forks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("journal", [True, False])
def test_a_forked_child_is_refused_by_every_verb(tmp_path: Path, journal: bool) -> None:
    options: dict[str, Any] = {"journal": tmp_path / "journal"} if journal else {}
    seq = sw.SequenceBuffer(10, flow=FLOW, max_staleness=1, **options)
    handles = seq.put(sample("a"), version=0)
    lease = seq.get("inf", timeout=0)
    admission = seq.admission(4)
    verbs: list[Callable[[], Any]] = [
        lambda: seq.put(sample("child", length=5000), version=0),
        lambda: asyncio.run(seq.put_async(sample("child"), version=0)),
        lambda: seq.amend(handles, sample("a", "b")),
        lambda: asyncio.run(seq.amend_async(handles, sample("a", "b"))),
        lambda: seq.get("inf", timeout=0),
        lambda: asyncio.run(seq.get_async("inf", timeout=0)),
        lease.ack,
        lambda: asyncio.run(lease.ack_async()),
        lease.release,
        lease.renew,
        lambda: seq.release("x"),
        lambda: seq.set_version(3),
        lambda: seq.checkpoint("x"),
        lambda: asyncio.run(seq.checkpoint_async("x")),
        lambda: seq.used_ids,
        lambda: seq.mark_used(["a"]),
        lambda: seq.wanted(["a"]),
        lambda: seq.explain("inf"),
        seq.stats,
        lambda: len(seq),
        lambda: 0 in seq,
        seq.ids,
        admission.capacity,
        admission.start,
    ]

    def work() -> None:
        for verb in verbs:
            with pytest.raises(ClosedError, match="parent of this process"):
                verb()
        seq.close()

    seq._gate.lock.acquire()  # a fork while another thread is inside: the child must not wait for it
    seq._commits._writing.acquire()
    try:
        assert in_child(work) == 0
    finally:
        seq._gate.lock.release()
        seq._commits._writing.release()
    seq.put(sample("b"), version=0)
    seq.put(sample("c"), version=0)
    seq.close()
    if journal:
        again = sw.SequenceBuffer(10, flow=FLOW, max_staleness=1, **options)
        assert again.ids() == ["a", "b", "c"]
        assert again.stats()["cut_bytes"] == 0


def test_a_forked_child_may_have_a_journal_of_its_own(tmp_path: Path) -> None:
    seq = sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "parent")
    seq.put(sample("a"))

    def work() -> None:
        mine = sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "child")
        mine.put(sample("b"))
        mine.close()
        with pytest.raises(StorageError, match="has it open"):
            sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "parent")

    assert in_child(work) == 0
    assert sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "child").ids() == ["b"]


def test_a_killed_trainer_with_a_living_worker_starts_again(tmp_path: Path) -> None:
    code = f"""
import os, time, numpy as np, sharpwave as sw
flow = sw.Dataflow([sw.Consumer("train", {{"a"}}, batch_size=1)])
seq = sw.SequenceBuffer(10, flow=flow, journal={str(tmp_path / "journal")!r})
seq.put(sw.SequenceSample(["a"], {{"a": [3]}}, {{"a": np.arange(3)}}))
if os.fork() == 0:
    print(os.getpid(), flush=True)  # it runs: until then it has all that its parent has
    time.sleep(600)
time.sleep(600)
"""
    flow = sw.Dataflow([sw.Consumer("train", {"a"}, batch_size=1)])
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        worker = int(trainer.stdout.readline())
        try:
            trainer.kill()
            trainer.wait()
            assert sw.SequenceBuffer(10, flow=flow, journal=tmp_path / "journal").ids() == ["a"]
        finally:
            os.kill(worker, signal.SIGKILL)


# ---- event loops -----------------------------------------------------------------------------------------------------


class SlowDisk:
    """The real disk calls, each of which begins once it may; and the threads that made them.

    What they wait for comes from elsewhere: where that cannot go on meanwhile, they give up, and count it.
    """

    def __init__(self, monkeypatch: Any, may_begin: Callable[[], Callable[[], bool]]) -> None:
        self.threads: set[int] = set()
        self.begun = threading.Event()
        self.given_up = 0
        for name in ("pwritev", "fdatasync", "ftruncate"):
            monkeypatch.setattr(os, name, self._slow(getattr(os, name), may_begin))

    def _slow(self, call: Any, may_begin: Callable[[], Callable[[], bool]]) -> Any:
        def slow(*arguments: Any) -> Any:
            self.threads.add(threading.get_ident())
            self.begun.set()
            may, deadline = may_begin(), time.monotonic() + HANG_S / 2
            while not may() and not self.given_up:
                if time.monotonic() > deadline:
                    self.given_up += 1
                time.sleep(0.001)
            return call(*arguments)

        return slow


class Heart:
    """Beats while an event loop goes on."""

    def __init__(self) -> None:
        self.beats = 0

    def three_more(self) -> Callable[[], bool]:
        wanted = self.beats + 3
        return lambda: self.beats >= wanted

    async def beat_during(self, work: Any) -> None:
        async def beat() -> None:
            while True:
                await asyncio.sleep(0.001)
                self.beats += 1

        beating = asyncio.create_task(beat())
        await work
        beating.cancel()


def test_no_disk_work_runs_on_an_event_loop(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(store_module.Store, "is_wasteful", lambda self, journal: True)  # every checkpoint rewrites
    seq = sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "journal", sync=True, lease_timeout=100, max_staleness=0)
    heart = Heart()
    disk = SlowDisk(monkeypatch, heart.three_more)  # every call of the disk waits for the loop

    async def work() -> None:
        await seq.put_async([sample("a"), sample("b")], version=0)
        lease = await seq.get_async("inf")
        await seq.amend_async(lease.handles, sample("a", "b"))
        await lease.ack_async()
        async with await seq.get_async("train") as lease:
            assert lease.batch.ids == ["a"]
        try:
            async with await seq.get_async("inf") as lease:
                await seq.set_version_async(1)  # 'b' is too old now, and leaves with its lease
                raise ZeroDivisionError
        except ZeroDivisionError:
            assert seq.ids() == []
        await seq.checkpoint_async("x")

    asyncio.run(heart.beat_during(work()))
    assert disk.given_up == 0, "the loop stood still"
    assert disk.threads
    assert threading.get_ident() not in disk.threads
    seq.close()
    again = sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "journal", max_staleness=0)
    assert (again.ids(), again.used_ids, again.version) == ([], ["a"], 1)


def test_an_event_loop_goes_on_while_a_thread_writes(tmp_path: Path, monkeypatch: Any) -> None:
    seq = sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "journal", sync=True)
    seq.put(sample("a"))
    done = threading.Event()
    disk = SlowDisk(monkeypatch, lambda: done.is_set)
    writer = threading.Thread(target=lambda: seq.put(sample("b")))
    writer.start()
    assert disk.begun.wait(HANG_S)

    async def work() -> None:
        assert (await seq.get_async("inf", timeout=0)).batch.ids == ["a"]
        with pytest.raises(NotReady):
            await seq.get_async("inf", timeout=0)
        assert seq.stats()["size"] == 1

    asyncio.run(work())
    done.set()
    writer.join()
    assert disk.given_up == 0, "the loop waited for the disk"
    assert seq.ids() == ["a", "b"]


def test_coroutines_put_while_the_loops_own_threads_all_wait(tmp_path: Path) -> None:
    seq = sw.SequenceBuffer(100, flow=FLOW, journal=tmp_path / "journal")

    async def run() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        getter = asyncio.create_task(asyncio.to_thread(seq.get, "inf", timeout=2 * HANG_S))
        while not seq.stats()["consumers"]["inf"]["waiting"]:
            await asyncio.sleep(0.001)
        await asyncio.wait_for(seq.put_async(sample("a")), HANG_S)
        assert (await getter).batch.ids == ["a"]

    asyncio.run(run())
    seq.close()


def test_a_write_that_fails_leaves_lease_keys_and_handles_as_they_were(tmp_path: Path, monkeypatch: Any) -> None:
    seq = sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "journal", lease_timeout=100)
    (handle,) = seq.put(sample("a"))
    lease = seq.get("inf", timeout=0)
    real = os.pwritev

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    for verb in (
        lambda: seq.put(sample("b")),
        lambda: seq.amend([handle], sw.SequenceSample(["a"], {"b": [1]}, {"b": np.ones(1)})),
        lease.ack,
        lambda: seq.set_version(4),
        lambda: seq.checkpoint("x"),
    ):
        with pytest.raises(StorageError, match="No space left on device; nothing was changed"):
            verb()
    monkeypatch.setattr(os, "pwritev", real)
    assert (seq.ids(), seq.version, seq.stats()["leases"]) == (["a"], 0, 1)
    seq.amend([handle], sample("a", "b"))  # whole numbers: the refused amend's float was not remembered
    lease.ack()
    assert seq.put(sample("b")).tolist() == [1]
    seq.close()
    assert sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "journal").ids() == ["a", "b"]


def test_a_rewrite_that_fails_is_told_and_the_checkpoint_holds(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(store_module.Store, "is_wasteful", lambda self, journal: True)
    folder = tmp_path / "folder"
    folder.mkdir()
    seq = sw.SequenceBuffer(10, flow=FLOW, journal=folder / "journal")
    seq.put(sample("a"))
    os.rename(folder / "journal", tmp_path / "moved")
    with pytest.warns(UserWarning, match="the name is written, but the journal could not be made smaller"):
        seq.checkpoint("x")
    seq.close()
    assert sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "moved", resume="x").ids() == ["a"]


# ---- deadlines and interrupts ----------------------------------------------------------------------------------------


@contextmanager
def held_elsewhere(lock: Any) -> Iterator[None]:
    """A thread that has a lock, and does not get on."""
    has, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            has.set()
            let_go.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    has.wait()
    try:
        yield
    finally:
        let_go.set()
        holder.join()


@pytest.mark.parametrize("in_main", [True, False])
def test_a_timeout_holds_while_another_thread_has_the_lock(tmp_path: Path, in_main: bool) -> None:
    seq = sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "journal")

    def work() -> None:
        for lock in (seq._gate.lock, seq._commits._writing):
            with held_elsewhere(lock):
                start = time.monotonic()
                with pytest.raises(NotReady):
                    seq.put(sample("a"), timeout=0.3)
                assert 0.25 < time.monotonic() - start < HANG_S, "the lock stays held: longer waits have no end"
        with held_elsewhere(seq._gate.lock):
            start = time.monotonic()
            with pytest.raises(NotReady, match="lock"):
                seq.get("inf", timeout=0.3)
            assert 0.25 < time.monotonic() - start < HANG_S
        assert seq.put(sample("a"), timeout=HANG_S).tolist() == [0]

    if in_main:
        work()
    else:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(work).result()
    seq.close()


def test_a_timeout_holds_behind_a_coroutines_long_write(tmp_path: Path, monkeypatch: Any) -> None:
    seq = sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "journal", sync=True)
    done = threading.Event()
    disk = SlowDisk(monkeypatch, lambda: done.is_set)

    def run() -> None:
        async def two() -> None:
            await asyncio.gather(*(seq.put_async(sample(name)) for name in "ab"))

        asyncio.run(two())

    writer = threading.Thread(target=run)
    writer.start()
    assert disk.begun.wait(HANG_S)
    with pytest.raises(NotReady, match="written the journal until the timeout"):
        seq.put(sample("c"), timeout=0.2)
    done.set()
    writer.join()
    assert disk.given_up == 0, "the put waited for the disk"
    assert seq.ids() == ["a", "b"]
    seq.close()


def test_interrupts_leave_buffer_and_journal_alike(tmp_path: Path) -> None:
    """Ctrl-C again and again, between any two instructions of the main thread, and work goes on after each."""
    seconds = 60 if os.environ.get("SHARPWAVE_SOAK") == "1" else 2
    code = f"""
import faulthandler, os, random, signal, sys, threading, time
from pathlib import Path
faulthandler.dump_traceback_later(240, exit=True)  # before it is killed: a hang tells where each thread stands
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from crash.journal_ops import Driver, Model, observe, open_journal
from sharpwave.errors import SchemaError, StaleHandle
from sharpwave.sequences import store

store._SLACK = 3000
path, stop, armed, interrupts = Path({str(tmp_path / "journal")!r}), False, False, 0

def interrupt(*_):
    global armed
    if armed:  # one at a time, and only where the loop below expects it
        armed = False
        raise KeyboardInterrupt

def pester():
    stream = random.Random(3)
    while not stop:
        time.sleep(stream.uniform(0, 0.005))
        os.kill(os.getpid(), signal.SIGINT)

def state(seq):
    told = seq.stats()
    return seq.ids(), list(seq.used_ids), seq.version, [one["done"] for one in told["consumers"].values()]

signal.signal(signal.SIGINT, interrupt)
for seed in range(1, {seconds} + 1):
    seq = open_journal(path, epoch_size=100)
    driver = Driver(seq, Model(), seed)
    pesterer = threading.Thread(target=pester)
    end, stop = time.monotonic() + 1, False
    pesterer.start()
    while time.monotonic() < end or interrupts <= 5 * seed:
        try:
            armed = True
            try:
                driver.step()
            except (KeyError, SchemaError, StaleHandle):
                pass  # the driver itself was interrupted before, and knows less than the buffer
            armed = False
        except KeyboardInterrupt:
            interrupts += 1
    stop = True
    pesterer.join()
    seq.release("driver")  # leases that an interrupt took from the driver
    before = state(seq)
    seq.close()
    seq = open_journal(path, epoch_size=100)
    assert state(seq) == before
    assert seq.stats()["cut_bytes"] == 0
    observe(seq)
    seq.close()
print(interrupts)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5 * seconds


@pytest.mark.parametrize("journal", [True, False])
def test_a_call_that_is_interrupted_at_any_instruction_leaves_no_lock_taken_and_no_place_in_a_queue(
    tmp_path: Path, journal: bool
) -> None:
    seq = sw.SequenceBuffer(2, flow=FLOW, journal=tmp_path / "journal" if journal else None)
    seq.put([sample("a"), sample("b")])
    calls: dict[str, Callable[[], Any]] = {
        "get that finds samples": lambda: seq.get("inf", timeout=0, owner="me").release(),
        "get without a timeout": lambda: seq.get("inf", owner="me").release(),
        "get that finds none": lambda: seq.get("train", timeout=0),
        "get that waits": lambda: seq.get("train", timeout=0.001),
        "put that finds no room": lambda: seq.put(sample("c"), timeout=0),
        "put that waits": lambda: seq.put(sample("c"), timeout=0.001),
    }
    modules = (gate, turns, waiter, commits, worker, local, sequence)
    for name, call in calls.items():

        def tried(call: Callable[[], Any] = call) -> None:
            with contextlib.suppress(NotReady, BufferFull):
                call()

        for at in itertools.count(1):
            place = interrupted_at(at, tried, modules)
            if place is None:
                break
            assert not seq._gate.lock._is_owned(), f"{name}, interrupted at {place}: every other thread waits for ever"
            seq.release("me")  # a lease that the interrupt took
            told = seq.stats()
            waiting = told["waiting_puts"], *(one["waiting"] for one in told["consumers"].values())
            assert waiting == (0, 0, 0), f"{name}, interrupted at {place}: other calls wait behind one that has ended"
        assert at > 20, name
    assert seq.ids() == ["a", "b"]
    seq.close()


def test_a_first_put_that_is_interrupted_at_any_instruction_leaves_a_buffer_that_works(tmp_path: Path) -> None:
    """It starts the thread that writes."""
    for at in itertools.count(1):
        seq = sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / f"{at}")
        place = interrupted_at(at, lambda seq=seq: seq.put(sample("a")), (commits, worker, threading))  # type: ignore[misc]
        assert seq.put(sample("b"), timeout=HANG_S).size == 1, place
        seq.close()
        if place is None:
            break
    assert at > 10


def test_waiting_takes_no_processor_time() -> None:
    seq = sw.SequenceBuffer(1, flow=FLOW, lease_timeout=1000, watchdog_timeout=1000)
    seq.put(sample("a"))
    seq.get("inf", timeout=0)

    def wait(call: Callable[..., Any], what: Any) -> None:
        with pytest.raises(ClosedError):
            call(what, timeout=None)

    threads = [threading.Thread(target=wait, args=job) for job in ((seq.get, "train"), (seq.put, sample("b")))]
    for thread in threads:
        thread.start()
        until_thread_waits(thread)
    assert seconds_of_other_threads(0.5) < 0.15
    seq.close()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()


def test_waiting_in_threads_leaves_no_descriptor_behind() -> None:
    seq = sw.SequenceBuffer(10, flow=FLOW)
    gc.collect()  # what earlier tests left behind is not closed meanwhile
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        with pytest.raises(NotReady):
            seq.get("inf", timeout=0.001)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("timeout", ["None", "600"])
@pytest.mark.parametrize("verb", ["get", "put"])
def test_an_interrupt_ends_a_wait_at_once(verb: str, timeout: str) -> None:
    code = f"""
import numpy as np, sharpwave as sw
flow = sw.Dataflow([sw.Consumer("train", {{"a"}}, batch_size=2)])
seq = sw.SequenceBuffer(2, flow=flow)
one = lambda name: sw.SequenceSample([name], {{"a": [3]}}, {{"a": np.arange(3)}})
seq.put(one("a"))
print("waits", flush=True)
try:
    seq.get("train", timeout={timeout}) if {verb == "get"} else seq.put([one("b"), one("c")], timeout={timeout})
except KeyboardInterrupt:
    print("interrupted", seq.stats()["waiting_puts"], seq.stats()["consumers"]["train"]["waiting"])
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as waiter:
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == "waits\n"
        until_asleep(waiter.pid)
        start = time.monotonic()
        waiter.send_signal(signal.SIGINT)
        assert waiter.stdout.readline() == "interrupted 0 0\n"
        assert time.monotonic() - start < HANG_S, "without the signal it waits ten times as long, or for ever"


def test_arguments_of_the_wrong_kind_are_schema_errors(tmp_path: Path) -> None:
    seq = sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "journal")
    seq.put(sample("a"))
    wrong: list[Callable[[], Any]] = [
        lambda: seq.amend([0.9], sample("a", "b")),
        lambda: seq.amend(["0"], sample("a", "b")),
        lambda: seq.amend([True], sample("a", "b")),
        lambda: seq.amend([[0], [1, 2]], sample("a", "b")),
        lambda: seq.amend(None, sample("a", "b")),
        lambda: seq.amend([0], None),  # type: ignore[arg-type]
        lambda: seq.amend([0], [3]),  # type: ignore[list-item]
        lambda: seq.put(None),  # type: ignore[arg-type]
        lambda: seq.put(sample("b"), births=3),  # type: ignore[arg-type]
        lambda: seq.put(sample("b"), births=[1.5]),  # type: ignore[list-item]
        lambda: seq.put(sample("b"), version=0.5),  # type: ignore[arg-type]
        lambda: seq.put(sample("b"), version="12"),  # type: ignore[arg-type]
        lambda: seq.put(sample("b"), timeout="1"),  # type: ignore[arg-type]
        lambda: seq.put(sample("b"), timeout=float("nan")),
        lambda: seq.get(["inf"]),  # type: ignore[arg-type]
        lambda: seq.get("inf", batch_size=1.5),  # type: ignore[arg-type]
        lambda: seq.get("inf", partial="False"),  # type: ignore[arg-type]
        lambda: seq.get("inf", owner=3),  # type: ignore[arg-type]
        lambda: seq.release(None),  # type: ignore[arg-type]
        lambda: seq.explain(None),  # type: ignore[arg-type]
        lambda: seq.checkpoint(3),  # type: ignore[arg-type]
        lambda: seq.mark_used(3),  # type: ignore[arg-type]
        lambda: seq.wanted(3),  # type: ignore[arg-type]
        lambda: sw.SequenceBuffer(10, flow=FLOW, journal=3),  # type: ignore[arg-type]
        lambda: sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "j", sync="False"),  # type: ignore[arg-type]
        lambda: sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "j", resume=3),  # type: ignore[arg-type]
        lambda: sw.SequenceBuffer(10, flow=FLOW, journal="a\0b"),
    ]
    for verb in wrong:
        with pytest.raises(SchemaError):
            verb()
    assert seq.ids() == ["a"]
    assert 0 in seq
    assert [] not in seq  # type: ignore[operator]


def test_a_buffer_that_nobody_holds_lets_its_journal_go(tmp_path: Path) -> None:
    seq = sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "journal")
    seq.put(sample("a"))
    asyncio.run(seq.put_async(sample("b")))
    gc.disable()  # no cycle of references: it goes when the last thread lets go of it, not when the collector runs
    try:
        del seq
        again: list[sw.SequenceBuffer] = []

        def is_free() -> bool:
            with contextlib.suppress(StorageError):
                again.append(sw.SequenceBuffer(10, flow=FLOW, journal=tmp_path / "journal"))
            return bool(again)

        until(is_free)
    finally:
        gc.enable()
    assert again[0].ids() == ["a", "b"]
