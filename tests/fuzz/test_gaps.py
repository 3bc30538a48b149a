"""Rows that a recovery dropped end their run: no window, n-step return or stack goes across them."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz import layout

import sharpwave as sw
from sharpwave.errors import StorageError

ITEMS = 1000
LOST = 10  # the step whose bytes are damaged
VIEWS: dict[str, dict[str, Any]] = {
    "n-step": {"view": sw.Transitions(n_step=3, gamma=0.5)},
    "n-step, derived": {"view": sw.Transitions(n_step=3, gamma=0.5), "next_obs": "derived"},
    "n-step, stacked, derived": {"view": sw.Transitions(n_step=3, gamma=0.5), "next_obs": "derived", "stack": 3},
    "windows": {"view": sw.Windows(4), "next_obs": None},
    "windows, stride": {"view": sw.Windows(4, stride=2, end="stop"), "next_obs": None},
    "windows, derived": {"view": sw.Windows(4), "next_obs": "derived"},
    "windows, burn-in": {"view": sw.Windows(3, burn_in=2), "next_obs": None},
    "windows, across": {"view": sw.Windows(4, end="cross"), "next_obs": None},
    "stacked": {"stack": 3},
}


def fill(buffer: sw.ReplayBuffer, envs: int, has_next: bool) -> None:
    for step in range(20):
        value = np.full((envs, ITEMS), step, np.float32)
        after = {"next_obs": value + 1} if has_next else {}
        facts = {"t": np.full(envs, step), "env": np.arange(envs)}
        buffer.add(obs=value, **facts, reward=np.ones(envs), done=np.zeros(envs, bool), **after)


def damage(path: Path, slot: int) -> None:
    """One byte in the middle of a row."""
    data = bytearray(path.read_bytes())
    rows, stride = layout.regions_of(bytes(data))["rows"], layout.field(bytes(data), "row_bytes")
    data[rows.offset + slot * stride + stride // 2] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["killed", "closed", "power went", "saved"])
@pytest.mark.parametrize("envs", [1, 2])
@pytest.mark.parametrize("name", list(VIEWS))
def test_examples_do_not_cross_a_lost_row(name: str, envs: int, kind: str, tmp_path: Path) -> None:
    options = dict(VIEWS[name])
    stack, has_next = options.pop("stack", 1), options.get("next_obs", "stored") is not None
    path, saved = tmp_path / "live.sw", tmp_path / "saved"
    buffer = sw.ReplayBuffer(
        40 * envs,
        schema={"obs": sw.Field((ITEMS,), stack=stack), "t": sw.Field((), "int64"), "env": sw.Field((), "int64")},
        num_envs=envs,
        storage=f"file://{path}",
        seed=0,
        **options,
    )
    fill(buffer, envs, has_next)
    buffer.sample(8)  # the index has numbered its rows
    buffer.save(saved)
    left = path.read_bytes()
    buffer.close()
    if kind in ("killed", "power went"):
        path.write_bytes(left)
    if kind == "power went":
        at = layout.regions_of(left)["counters"].offset
        boot = next(span for span in layout.COUNTERS if span.name == "system").offset + 8
        path.write_bytes(left[: at + boot] + b"another boot".ljust(40, b"\0") + left[at + boot + 40 :])
    target, address = (saved, str(saved)) if kind == "saved" else (path, f"file://{path}")
    damage(target, LOST * envs)
    if kind != "power went":
        with pytest.raises(StorageError, match=rf"the row in slot {LOST * envs} has a wrong checksum"):
            sw.open(address)
    with pytest.warns(UserWarning, match="rows are lost"):
        again = sw.open(address, recover=kind != "power went")
    assert again.stats()["rows_lost"] >= 1
    batch = again.sample(2_000)
    if "valid" in batch:
        steps_seen = set()
        for steps, valid, env in zip(batch["t"], batch["valid"], batch["env"], strict=True):
            seen = steps[valid]
            assert (np.diff(seen) == 1).all(), seen
            if env[0] == 0:
                steps_seen |= set(seen.tolist())
    else:
        first = batch["env"] == 0
        steps_seen = set(batch["t"][first].tolist())
        if "discount" in batch:
            ahead = np.log2(1 / batch["discount"]).astype(int)
            assert (batch["next_obs"].reshape(2_000, -1)[:, -1] == batch["t"] + ahead).all()
            assert not (first & (batch["t"] < LOST) & (batch["t"] + ahead > LOST)).any()
        if stack > 1:
            assert (np.diff(batch["obs"][:, :, 0], axis=1) <= 1).all()
    # Rows on both sides are still drawn, and the buffer goes on.
    assert {2, 18} <= steps_seen
    assert LOST not in steps_seen
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fill(again, envs, has_next)
        again.sample(256)
    again.close()


def test_old_pages_beside_new_counters_are_told(tmp_path: Path) -> None:
    """A power cut that lost some pages of a file which says it was closed."""
    path = tmp_path / "live.sw"
    buffer = sw.ReplayBuffer(200, schema={"obs": sw.Field((3_000,), "uint16")}, next_obs=None, seed=0,
                             storage=f"file://{path}", sampler=sw.Prioritized())  # fmt: skip

    def add(first: int, last: int) -> None:
        for number in range(first, last):
            buffer.add(obs=np.full(3_000, number, np.uint16), reward=float(number), done=False)

    add(0, 100)
    buffer.flush()
    old = path.read_bytes()
    add(100, 350)
    buffer.close()
    new = path.read_bytes()
    rows = layout.regions_of(new)["rows"]
    counters = layout.regions_of(new)["counters"].offset
    changed = [
        at for at in range(rows.offset, rows.offset + rows.size, 4096) if new[at : at + 4096] != old[at : at + 4096]
    ]
    stream = np.random.default_rng(0)
    for trial in range(30):
        data = bytearray(new)
        for at in stream.choice(changed, max(1, len(changed) // (2, 5, 20)[trial % 3]), replace=False).tolist():
            data[at : at + 4096] = old[at : at + 4096]
        data[counters + 584 : counters + 592] = b"deadbeef"  # of the boot's name
        if trial % 2:
            struct.pack_into("<Q", data, counters + 512, 0)  # clean
        path.write_bytes(data)
        if trial % 2 == 0:
            with pytest.raises(StorageError, match="is damaged"):
                sw.open(f"file://{path}")
            continue
        with pytest.warns(UserWarning, match="rows are lost"):
            again = sw.open(f"file://{path}")
        with again:
            for batch in again.rows():
                assert (batch["obs"] == batch["reward"][:, None]).all()
            assert again.stats()["rows_lost"] > 0


@pytest.mark.parametrize("stale", [("counters",), ("writers",), ("counters", "writers"), ("blocks",)])
def test_old_records_beside_new_rows_give_no_serial_twice(stale: tuple[str, ...], tmp_path: Path) -> None:
    """A power cut that lost the pages of counters or records, and kept those of rows."""
    path = tmp_path / "live.sw"
    buffer = sw.ReplayBuffer(1_000, obs_shape=(4,), storage=f"file://{path}", seed=0, writers=4)

    def add(into: sw.ReplayBuffer, first: int, last: int) -> None:
        for number in range(first, last):
            obs = np.full(4, number)
            into.add(obs=obs, action=0.0, reward=float(number), next_obs=obs, done=False)

    add(buffer, 0, 100)
    old = path.read_bytes()
    add(buffer, 100, 400)
    data = bytearray(path.read_bytes())
    buffer.close()
    regions = layout.regions_of(old)
    for name in stale:
        _, at, size = regions[name]
        data[at : at + size] = old[at : at + size]
    boot = regions["counters"].offset + next(span for span in layout.COUNTERS if span.name == "system").offset + 8
    data[boot : boot + 40] = b"another boot".ljust(40, b"\0")
    path.write_bytes(data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = sw.open(f"file://{path}")

    def serials() -> dict[int, float]:
        found = {}
        for batch in again.rows():
            found |= dict(zip(batch["indices"].tolist(), batch["reward"].tolist(), strict=True))
        return found

    before = serials()
    assert sorted(before.values()) == list(range(400))
    assert len(again) == 400
    add(again, 5_000, 5_060)
    after = serials()
    assert len(again) == len(after) == 460
    assert all(after[serial] == before[serial] for serial in before)
    assert set(again.sample(2_000)["reward"].tolist()) & set(range(300, 400))
    again.close()
