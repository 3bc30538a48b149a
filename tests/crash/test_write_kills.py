"""Processes killed while they write values back: each row has those of one write, the old ones or the new ones."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash.episodes import Process, running

import sharpwave as sw

ROWS = 400
ITEMS = 67
KILLS = 500 if os.environ.get("SHARPWAVE_SOAK") == "1" else 10
SCHEMA: dict[str, Any] = {
    "obs": sw.Field((1,)),
    "state": sw.Field((ITEMS,), "uint32", mutable=True),
    "mark": sw.Field((), "uint32", mutable=True),
}


def state_of(mark: np.ndarray) -> np.ndarray:
    """Every number follows from the mark, and differs from its neighbours."""
    return (mark[:, None] * np.uint32(2654435761) + np.arange(ITEMS, dtype=np.uint32)).astype(np.uint32)


def marks(names: np.ndarray, version: int) -> np.ndarray:
    """The row's name and the number of the write."""
    return (names.astype(np.uint32) << np.uint32(16)) | np.uint32(version % 65_536)


def add(target: Any, first: int, count: int) -> None:
    names = np.arange(first, first + count)
    mark = marks(names, 0)
    flat = names.astype(np.float32)
    target.add(obs=flat[:, None], reward=flat, next_obs=flat[:, None], done=flat < 0, state=state_of(mark), mark=mark)


def write_forever(address: str, first: int, adds: bool, ready: Any) -> None:
    """Writes to all rows, version after version; `adds`: among rows that are replaced meanwhile."""
    buffer = sw.open(address)
    writer = buffer.writer() if adds else None
    version, number = first, 10_000
    while True:
        version += 1
        rows = next(buffer.rows())
        mark = marks(rows["reward"].astype(np.int64), version)
        buffer.write(rows["indices"], state=state_of(mark), mark=mark, stale="skip")
        if writer is not None:
            add(writer, number % 60_000, 8)
            number += 8
        ready.set()


def check(buffer: sw.ReplayBuffer) -> np.ndarray:
    """No value is half written, none is another row's; returns the versions."""
    seen = []
    for batch in (*buffer.rows(), buffer.sample(256)):
        np.testing.assert_array_equal(batch["state"], state_of(batch["mark"]))
        np.testing.assert_array_equal(batch["mark"] >> 16, batch["reward"].astype(np.uint32) & 0xFFFF)
        seen.append(batch["mark"] & 0xFFFF)
    return np.concatenate(seen[:-1])


@pytest.mark.parametrize("adds", [False, True], ids=["rows stay", "rows are replaced"])
def test_killed_write_leaves_old_or_new_values_to_survivors(adds: bool, shm_address: str) -> None:
    buffer = sw.ReplayBuffer(ROWS, schema=SCHEMA, storage=shm_address, writers=4, seed=0)
    add(buffer, 0, ROWS)
    stream = np.random.default_rng(4)
    for turn in range(KILLS):
        with running(Process(write_forever, shm_address, 100 * turn, adds)):
            time.sleep(float(stream.uniform(0, 0.01)))
            check(buffer)
        versions = check(buffer)
        if not adds:  # of the write that was running, and of the one before it
            assert versions.max() - versions.min() <= 1, versions
        newest = int(versions.max()) + 1
        rows = next(buffer.rows())
        mark = marks(rows["reward"].astype(np.int64), newest)
        assert buffer.write(rows["indices"], state=state_of(mark), mark=mark, timeout=5)["stale"] == 0
        assert set(check(buffer).tolist()) == {newest}
    buffer.close()


def test_killed_write_leaves_old_or_new_values_in_a_file_and_in_its_snapshots(tmp_path: Path) -> None:
    address, saved = f"file://{tmp_path}/live.sw", tmp_path / "saved"
    buffer = sw.ReplayBuffer(ROWS, schema=SCHEMA, storage=address, writers=4, seed=0)
    add(buffer, 0, ROWS)
    buffer.close()
    stream = np.random.default_rng(5)
    for turn in range(KILLS):
        with running(Process(write_forever, address, 100 * turn, False)):
            time.sleep(float(stream.uniform(0, 0.01)))
        buffer = sw.open(address)  # every checksum is compared
        versions = check(buffer)
        assert versions.max() - versions.min() <= 1, versions
        assert buffer.stats()["rows_lost"] == 0
        buffer.save(saved, incremental=turn % 2 == 1)
        with sw.open(saved) as copy:
            np.testing.assert_array_equal(check(copy), versions)
        buffer.close()
