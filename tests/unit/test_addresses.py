"""Names of live buffers: which file one means, who makes it, who may remove it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numbered import make, row
from patience import HANG_S, seconds_of_other_threads, until_thread_waits

import sharpwave as sw
from sharpwave.compat import replay_buffer as seed
from sharpwave.errors import NotReady, SchemaError, StorageError
from sharpwave.rows.host import HostRows


def size_of(address: str) -> int:
    buffer = sw.open(address)
    try:
        return len(buffer)
    finally:
        buffer.close()


# ---- close(unlink=True) ----------------------------------------------------------------------------------------------


def test_unlinking_twice_leaves_the_next_buffer_of_that_name(shm_address: str) -> None:
    first = make(storage=shm_address)
    first.close(unlink=True)
    second = make(storage=shm_address)
    second.add(**row(1))
    first.close(unlink=True)
    assert size_of(shm_address) == 1
    second.close(unlink=True)
    with pytest.raises(StorageError):
        sw.open(shm_address)


def test_unlinking_a_replaced_buffer_leaves_the_new_one(shm_address: str) -> None:
    old = make(storage=shm_address)
    new = make(storage=shm_address, exist="replace")
    new.add(**row(1))
    old.close(unlink=True)
    assert size_of(shm_address) == 1
    new.close(unlink=True)
    assert not [name for name in os.listdir("/dev/shm") if shm_address.removeprefix("shm://") in name]


def test_buffer_closed_before_may_still_be_unlinked(shm_address: str) -> None:
    with make(storage=shm_address) as buffer:
        buffer.add(**row(1))
    assert size_of(shm_address) == 1
    buffer.close(unlink=True)
    with pytest.raises(StorageError):
        sw.open(shm_address)
    with pytest.raises(SchemaError, match=r"close\(\): unlink: expected True or False, got 'no'"):
        buffer.close(unlink="no")  # type: ignore[arg-type]


@pytest.fixture
def two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path, Path]:
    """A buffer file://x.sw with one row made in one folder, and a namesake with two rows made in another, where we
    are."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    buffer = make(storage="file://x.sw")
    buffer.add(**row(1))
    monkeypatch.chdir(there)
    other = make(storage="file://x.sw")
    other.add(**row(1))
    other.add(**row(2))
    other.close()
    return buffer, here, there


def test_relative_address_means_the_folder_it_was_given_in(two_folders: tuple[Any, Path, Path]) -> None:
    buffer, here, there = two_folders
    assert buffer.stats()["storage"] == f"file://{here}/x.sw"
    again = pickle.loads(pickle.dumps(buffer))
    assert len(again) == len(buffer) == 1
    again.close()
    child = os.fork()
    if child == 0:
        os._exit(len(buffer))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    opened = sw.open("file://x.sw")
    os.chdir(here)
    assert len(pickle.loads(pickle.dumps(opened))) == 2
    opened.close()
    os.chdir(there)
    buffer.close(unlink=True)
    assert (here / "x.sw").exists() is False
    assert size_of(f"file://{there}/x.sw") == 2


def test_relative_address_of_teacher_rows_means_the_folder_it_was_given_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    rows = sw.DistillationBuffer(8, obs_shape=(2,), storage="file://teacher.sw")
    monkeypatch.chdir(tmp_path / "other")
    rows.add(np.zeros(2, np.float32), np.int64(1))  # the first add makes the file
    assert (tmp_path / "teacher.sw").exists()
    rows.close(unlink=True)
    assert not list(tmp_path.glob("teacher*"))


def test_address_relative_to_a_folder_that_is_gone_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for call in (lambda: make(storage="file://x.sw"), lambda: sw.open("file://x.sw")):
        with pytest.raises(StorageError, match=r"'file://x\.sw' is relative to a folder that is gone"):
            call()
    monkeypatch.chdir(tmp_path)


# ---- exist="attach" --------------------------------------------------------------------------------------------------


def attach_together(address: str, count: int, rounds: int, turns: Any, said: Any) -> None:
    for number in range(rounds):
        turns.wait()
        try:
            buffer = make(storage=f"{address}-{number}", exist="attach")
            buffer.add(**row(1))
            turns.wait()  # all have added
            said.put(len(buffer))
            turns.wait()
            buffer.close(unlink=True)
        except Exception as error:  # told to the parent, which shows it
            said.put(f"{type(error).__name__}: {error}")
            turns.abort()
            return


def test_processes_that_attach_at_once_all_succeed_and_share_one_table(shm_address: str) -> None:
    count, rounds = 3, int(os.environ.get("SHARPWAVE_SOAK", "20"))
    context = multiprocessing.get_context("spawn")
    turns, said = context.Barrier(count), context.Queue()
    processes = [
        context.Process(target=attach_together, args=(shm_address, count, rounds, turns, said)) for _ in range(count)
    ]
    for process in processes:
        process.start()
    told = [said.get(timeout=2 * HANG_S) for _ in range(count * rounds)]
    for process in processes:
        process.join(HANG_S)
    assert told == [count] * (count * rounds)


def test_attach_that_loses_the_race_to_create_attaches(shm_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other creator comes between the look and the making."""
    others: list[Any] = []
    exists = Path.exists

    def late(path: Path, **options: Any) -> bool:
        there = exists(path, **options)
        if not others and not there:
            others.append(None)
            others[0] = make(storage=shm_address)
            others[0].add(**row(1))
        return there

    monkeypatch.setattr(Path, "exists", late)
    buffer = make(storage=shm_address, exist="attach")
    monkeypatch.undo()
    assert len(buffer) == 1
    buffer.close()
    others[0].close(unlink=True)


# ---- the first add ---------------------------------------------------------------------------------------------------


@pytest.fixture
def _eager_switches() -> Any:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def add_together(buffer: Any, threads: int, *values: Any) -> None:
    barrier = threading.Barrier(threads)
    failed: list[BaseException] = []

    def work() -> None:
        barrier.wait()
        try:
            buffer.add(*values)
        except BaseException as error:
            failed.append(error)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failed


@pytest.mark.usefixtures("_eager_switches")
def test_first_adds_of_several_threads_make_one_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    new_writer = HostRows.new_writer
    monkeypatch.setattr(HostRows, "new_writer", lambda self: (made.append(1), time.sleep(0), new_writer(self))[-1])
    for _ in range(50):
        made.clear()
        buffer = sw.ReplayBuffer(100, obs_shape=2, seed=0)
        add_together(buffer, 6, np.zeros(2), 0.0, 0.0, np.zeros(2), False)
        assert (len(made), len(buffer), buffer.stats()["writers"]) == (1, 6, 1)
        buffer.close()


@pytest.mark.usefixtures("_eager_switches")
def test_first_adds_of_several_threads_to_a_seeds_buffer_keep_every_row() -> None:
    torch = pytest.importorskip("torch")
    from sharpwave.compat import apexrl

    for _ in range(50):
        buffer: Any = seed.ReplayBuffer(seed.BufferConfig(100), (2,), 1)
        add_together(buffer, 6, np.zeros(2), np.zeros(1), 0.0, np.zeros(2), False)
        assert len(buffer) == 6
        other = apexrl.ReplayBuffer(100, (2,))
        zeros = torch.zeros(2)
        add_together(other, 6, zeros, torch.tensor(0.0), torch.tensor(0.0), zeros, torch.tensor(False))
        assert len(other) == 6


def test_threads_of_a_forked_child_open_one_table(shm_address: str) -> None:
    buffer = make(storage=shm_address)
    buffer.add(**row(0))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sys.setswitchinterval(1e-6)
            tables: list[Any] = []
            workers = [threading.Thread(target=lambda: tables.append(buffer._rows.table)) for _ in range(8)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            code = 0 if len(tables) == 8 and len(set(map(id, tables))) == 1 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    buffer.close(unlink=True)


# ---- batches() -------------------------------------------------------------------------------------------------------


def test_batches_of_an_empty_buffer_wait_without_work() -> None:
    buffer = make()
    found: list[Any] = []
    taker = threading.Thread(target=lambda: found.append(next(buffer.batches(4))))
    taker.start()
    until_thread_waits(taker)
    assert seconds_of_other_threads(0.5) < 0.15, "a thread that tries again and again would take 0.5 s"
    buffer.add(**row(1))
    taker.join(HANG_S)
    assert len(found[0]["reward"]) == 4
    began = time.monotonic()
    with pytest.raises(NotReady):
        next(make().batches(4, timeout=0.2))
    assert 0.15 < time.monotonic() - began < HANG_S
