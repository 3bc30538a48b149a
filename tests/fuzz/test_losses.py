"""Damaged rows are lost, counted and reported; damaged priorities cost no row; empty values are no damage."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import StorageError


def numbers(first: int, count: int) -> dict[str, np.ndarray[Any, Any]]:
    number = np.arange(first, first + count, dtype=np.float32)
    return {"obs": number[:, None], "action": number, "reward": number, "done": np.zeros(count, bool)}


def make(capacity: int, **options: Any) -> sw.ReplayBuffer:
    return sw.ReplayBuffer(capacity, obs_shape=(1,), next_obs=None, **{"seed": 0, **options})


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
