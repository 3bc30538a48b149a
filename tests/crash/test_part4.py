"""Many processes, one buffer: who lives goes on, what is saved is one instant, what is damaged is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patience import HANG_S

import sharpwave as sw
from sharpwave.errors import BufferFull, NotReady, StorageError


@contextmanager
def child(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that says "ready" when it has begun; killed at the end, wherever it is."""
    head = "import sys, numpy as np, sharpwave as sw\n"
    process = subprocess.Popen([sys.executable, "-c", head + code, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def numbers(first: int, count: int) -> dict[str, np.ndarray[Any, Any]]:
    number = np.arange(first, first + count, dtype=np.float32)
    return {"obs": number[:, None], "action": number, "reward": number, "done": np.zeros(count, bool)}


def make(capacity: int, **options: Any) -> sw.ReplayBuffer:
    return sw.ReplayBuffer(capacity, obs_shape=(1,), next_obs=None, **{"seed": 0, **options})


# ---- those who live go on --------------------------------------------------------------------------------------------


@pytest.mark.timing
def test_learner_goes_on_within_100_ms_of_work_at_a_million_rows(shm_address: str) -> None:
    buffer = make(1_000_000, storage=shm_address, sampler=sw.Prioritized())
    for first in range(0, 1_000_000, 10_000):
        buffer.add(**numbers(first, 10_000))
    buffer.sample(8)
    learner = """
buf = sw.open(sys.argv[1])
batch = buf.sample(4096)
print("ready", flush=True)
while True:
    buf.update_priorities(batch["indices"], np.ones(4096))
"""
    for deaths in (1, 2):
        with child(learner, shm_address) as other:
            deadline = time.monotonic() + HANG_S
            while True:  # until it was stopped inside the lock
                other.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
                try:
                    buffer.sample(8, timeout=0)
                except NotReady:
                    break
                assert time.monotonic() < deadline, "it was never stopped inside the lock"
                other.send_signal(signal.SIGCONT)
                time.sleep(0.001)
        began = time.thread_time()  # work, not the wait for a processor that others have
        buffer.sample(8)
        took = time.thread_time() - began
        assert buffer.stats()["index_takeovers"] == deaths
        assert took < 0.1
    buffer.close(unlink=True)


def test_full_writer_table_names_the_processes_that_hold_it(shm_address: str) -> None:
    buffer = make(100, storage=shm_address, writers=2)
    writer = "w = sw.open(sys.argv[1]).writer()\nprint('ready', flush=True)\nimport time\ntime.sleep(600)\n"
    mine = buffer.writer()
    with child(writer, shm_address) as other:
        wanted = rf"all 2 writers are taken; .*1 by process {os.getpid()} \(this one\)"
        with pytest.raises(BufferFull, match=wanted) as caught:
            buffer.writer()
        assert f"1 by process {other.pid}" in str(caught.value)
    buffer.writer().close()  # the dead one's
    assert buffer.stats()["writers_reclaimed"] == 1
    mine.close()
    buffer.close(unlink=True)


def test_open_waits_for_a_creator(shm_address: str) -> None:
    creator = """
print("ready", flush=True)
import time
time.sleep(0.3)  # mostly the other one waits by then; where it does not yet, it finds the buffer
buf = sw.ReplayBuffer(7, obs_shape=(1,), storage=sys.argv[1])
time.sleep(600)
"""
    with pytest.raises(StorageError, match="No such file"):
        sw.open(shm_address, timeout=0.05)
    with child(creator, shm_address):
        buffer = sw.open(shm_address, timeout=60)
        assert buffer.capacity == 7
    buffer.close(unlink=True)


# ---- what is saved is one instant ------------------------------------------------------------------------------------

WRITER = """
buf = sw.open(sys.argv[1])
n = int(sys.argv[2])
rows = int(sys.argv[3])
ready = False
while True:
    number = np.arange(n, n + rows, dtype=np.float32)
    buf.add(obs=number[:, None], action=number, reward=number, done=number % 13 == 0)
    n += rows
    if not ready:
        print("ready", flush=True)
        ready = True
"""


@pytest.mark.parametrize("sampler", [sw.Uniform(), sw.Prioritized()], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("incremental", [False, True], ids=["whole", "incremental"])
def test_snapshot_under_fire_is_one_instant(sampler: Any, incremental: bool, shm_address: str, tmp_path: Path) -> None:
    capacity = 300_000
    buffer = make(capacity, storage=shm_address, sampler=sampler)
    buffer.add(**numbers(0, capacity))
    buffer.save(tmp_path / "snapshot")
    with child(WRITER, shm_address, str(capacity), "16"):
        newest = capacity
        for _ in range(4):
            buffer.sample(64)
            buffer.save(tmp_path / "snapshot", incremental=incremental)
            copy = sw.open(tmp_path / "snapshot")
            held = np.concatenate([rows["reward"] for rows in copy.rows()]).astype(np.int64)
            assert held.tolist() == list(range(held[0], held[0] + len(held))), "rows are missing, or not in order"
            assert capacity - 64 <= len(held) <= capacity
            assert held[-1] + 1 >= newest, "a snapshot of the past"
            assert copy.stats()["rows_lost"] == 0
            copy.sample(512)
            newest = held[-1] + 1
    buffer.close(unlink=True)


@pytest.mark.parametrize("kind", ["plain", "prioritized", "derived", "packed", "windows"])
def test_increments_give_what_whole_snapshots_give(kind: str, tmp_path: Path) -> None:
    options: dict[str, dict[str, Any]] = {
        "plain": {"obs_shape": (3,)},
        "prioritized": {"obs_shape": (3,), "sampler": sw.Prioritized()},
        "derived": {"obs_shape": (3,), "next_obs": "derived", "num_envs": 2},
        "packed": {"schema": {"obs": sw.Field((40,), "uint8", compression="lz4"), "action": sw.Field(())}},
        "windows": {"obs_shape": (3,), "view": sw.Windows(4), "num_envs": 2},
    }
    buffer = sw.ReplayBuffer(4_000, seed=5, **options[kind])
    random = np.random.default_rng(3)
    envs = buffer.num_envs or 1
    shape = (40,) if kind == "packed" else (3,)
    dtype = np.uint8 if kind == "packed" else np.float32
    obs = np.zeros((envs, *shape), dtype)
    increments = 0
    for turn in range(30):
        for _ in range(int(random.integers(1, 120 if turn else 2_000))):
            after = random.integers(0, 100, (envs, *shape)).astype(dtype)
            done = random.random(envs) < 0.05
            row = {"obs": obs, "action": np.zeros(envs), "reward": random.random(envs), "next_obs": after, "done": done}
            buffer.add(**(row if buffer.num_envs else {name: value[0] for name, value in row.items()}))
            obs = after
        if kind == "prioritized":
            drawn = buffer.sample(32)["indices"]
            buffer.update_priorities(drawn, random.random(32))
        buffer.save(tmp_path / "grown", incremental=True)
        increments += (tmp_path / "grown.delta").exists()
        buffer.save(tmp_path / "whole")
        grown, whole = sw.open(tmp_path / "grown"), sw.open(tmp_path / "whole")
        for one, other in zip(grown.rows(), whole.rows(), strict=True):
            for name in one:
                np.testing.assert_array_equal(one[name], other[name], err_msg=f"turn {turn}, {name}")
        for _ in range(3):
            one, other = grown.sample(16), whole.sample(16)
            for name in one:
                np.testing.assert_array_equal(one[name], other[name], err_msg=f"turn {turn}, {name}")
    assert 10 < increments < 30, "never incremental, or never whole again"


def test_increment_of_another_snapshot_counts_for_nothing(tmp_path: Path) -> None:
    buffer = make(1_000)
    buffer.add(**numbers(0, 500))
    buffer.save(tmp_path / "snapshot")
    buffer.add(**numbers(500, 10))
    buffer.save(tmp_path / "snapshot", incremental=True)
    delta = (tmp_path / "snapshot.delta").read_bytes()
    buffer.save(tmp_path / "snapshot")
    assert not (tmp_path / "snapshot.delta").exists()
    (tmp_path / "snapshot.delta").write_bytes(delta)  # as a kill between the two steps leaves it
    buffer.add(**numbers(510, 5))
    assert len(sw.open(tmp_path / "snapshot")) == 510
    with pytest.raises(StorageError, match="holds changes to a snapshot; open the snapshot"):
        sw.open(tmp_path / "snapshot.delta")


# ---- what is damaged is told -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["snapshot", "live"])
def test_damaged_rows_are_lost_and_counted(place: str, tmp_path: Path) -> None:
    storage = {"storage": f"file://{tmp_path}/live.sw"} if place == "live" else {}
    buffer = make(1_000, **storage)
    buffer.add(**numbers(0, 400))
    path = tmp_path / ("live.sw" if place == "live" else "snapshot")
    if place == "snapshot":
        buffer.save(path)
    buffer.close()
    address = f"file://{path}" if place == "live" else str(path)
    whole = path.read_bytes()
    marks = [whole.index(np.array([number], np.float32).tobytes() * 3) for number in (123, 321)]
    damaged = bytearray(whole)
    for mark in marks:
        damaged[mark] ^= 1
    path.write_bytes(damaged)
    if place == "snapshot":
        with pytest.raises(StorageError, match="has a wrong checksum; open it with recover=True"):
            sw.open(address)
    with pytest.warns(UserWarning, match="was damaged: 2 rows are lost, 398 are whole"):
        opened = sw.open(address, recover=True)
    (rows,) = opened.rows()
    assert set(range(400)) - set(rows["reward"].astype(int).tolist()) == {123, 321}
    assert opened.stats()["rows_lost"] == 2
    opened.add(**numbers(400, 100))
    opened.sample(64)
    if place == "snapshot":
        opened.save(path)
    opened.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that loss was told
        assert sw.open(address, recover=True).stats()["rows_lost"] == 2


def test_damaged_priorities_cost_no_row(tmp_path: Path) -> None:
    buffer = make(1_000, sampler=sw.Prioritized(alpha=1.0))
    priorities = np.linspace(0.5, 2, 400, dtype=np.float32)
    buffer.add(**numbers(0, 400), priority=priorities)
    buffer.save(tmp_path / "snapshot")
    path = tmp_path / "snapshot"
    whole = bytearray(path.read_bytes())
    at = whole.index((-priorities[200]).tobytes())  # as it is kept
    whole[at + 3] ^= 0x7F
    path.write_bytes(whole)
    with pytest.raises(StorageError, match="its index has a wrong checksum; open it with recover=True"):
        sw.open(path)
    opened = sw.open(path, recover=True)
    assert len(opened) == 400
    batch = opened.sample(256)
    assert np.isfinite(batch["weights"]).all()
    opened.update_priorities(batch["indices"], np.ones(256))


def test_empty_values_and_cleared_rows_are_no_damage(tmp_path: Path) -> None:
    address = f"file://{tmp_path / 'live.sw'}"
    schema = {"obs": sw.Field((5,), "int16", ragged=True), "action": sw.Field()}
    with sw.ReplayBuffer(20, schema=schema, next_obs=None, storage=address) as buffer:
        for number in range(10):
            buffer.add(obs=np.arange(number % 3), action=number, reward=0.0, done=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a loss would be told
        with sw.open(address, recover=True) as again:
            assert len(again) == 10
            assert again.stats()["rows_lost"] == 0


def test_snapshot_of_derived_rows_loses_none(tmp_path: Path) -> None:
    buffer = sw.ReplayBuffer(64, obs_shape=(2,), next_obs="derived", num_envs=1, seed=0)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            buffer.add([number, 0], 0, 0.0, [number + 1, 0], False)
            number += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(150):
            try:
                buffer.save(tmp_path / "snapshot")
            except NotReady:
                continue
            loaded = sw.open(tmp_path / "snapshot")
            assert loaded.stats()["rows_lost"] == 0
            if len(loaded):
                batch = loaded.sample(64)
                np.testing.assert_array_equal(batch["next_obs"][:, 0], batch["obs"][:, 0] + 1)
    finally:
        stop.set()
        thread.join()
