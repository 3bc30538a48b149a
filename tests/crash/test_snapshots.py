"""Snapshots while others write: each one is the state of one instant, and every row of it can be used."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash.episodes import (
    ENVS,
    RUN,
    Process,
    add_step,
    by_priority,
    check_batch,
    check_index,
    check_rows,
    learn_forever,
    make,
    running,
    write_forever,
)
from crash.processes import child
from patience import until

import sharpwave as sw
from sharpwave.errors import NotReady, StorageError


def test_snapshot_of_a_running_buffer_is_whole(shm_address: str, tmp_path: Path) -> None:
    # Large enough that writers do not go round it while the one who saves is kept waiting for a processor.
    buffer = make(6000, sampler=by_priority(), storage=shm_address)
    processes = [Process(write_forever, shm_address, run) for run in range(2)]
    processes.append(Process(learn_forever, shm_address, 0))
    with running(*processes):
        until(lambda: len(buffer) >= 4000)
        for turn in range(8):
            buffer.save(tmp_path / "snapshot")
            loaded = sw.open(tmp_path / "snapshot")
            held = check_rows(loaded, alone=False)
            assert len(loaded) == len(held)
            assert len(held) > 100
            check_batch(loaded.sample(256))
            for step in range(20):
                add_step(loaded, 10 + turn, step)
            truncated = check_rows(loaded, alone=False)
            assert sum(number // RUN == 10 + turn for number in truncated) == 20 * ENVS
            check_batch(loaded.sample(256))
    buffer.close()


def test_every_row_of_a_snapshot_of_a_running_buffer_can_be_drawn(shm_address: str, tmp_path: Path) -> None:
    buffer = make(6000, sampler=by_priority(), writers=2, storage=shm_address)
    with running(Process(write_forever, shm_address, 0)):
        for turn in range(5):
            buffer.save(tmp_path / "snapshot")
            loaded = sw.open(tmp_path / "snapshot")
            for step in range(40):
                add_step(loaded, 10 + turn, step)
            check_index(loaded)
    buffer.close()


def numbers(first: int, count: int) -> dict[str, np.ndarray[Any, Any]]:
    number = np.arange(first, first + count, dtype=np.float32)
    return {"obs": number[:, None], "action": number, "reward": number, "done": np.zeros(count, bool)}


def make_numbered(capacity: int, **options: Any) -> sw.ReplayBuffer:
    return sw.ReplayBuffer(capacity, obs_shape=(1,), next_obs=None, **{"seed": 0, **options})


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
    buffer = make_numbered(capacity, storage=shm_address, sampler=sampler)
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
    buffer = make_numbered(1_000)
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
