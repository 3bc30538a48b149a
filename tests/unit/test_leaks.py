"""A million calls leave nothing behind: no memory, no references, no descriptors, no files."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numbered import filled, make, row, rows

import sharpwave as sw
from sharpwave.errors import SchemaError, StaleHandle

LIMIT_BYTES = 8 << 20


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(call: Callable[[], Any], times: int) -> int:
    """Bytes by which the process grows over the calls, once a tenth of them has warmed it up.

    The least of up to three rounds: what the calls leave behind is there in each of them. In one of them the process
    may grow for another reason, as when the system makes huge pages of memory that other tests have used.
    """
    for _ in range(times // 10):
        call()
    least = sys.maxsize
    for _ in range(3):
        before = resident_bytes()
        for _ in range(times):
            call()
        least = min(least, resident_bytes() - before)
        if least < LIMIT_BYTES:
            break
    return least


def calls() -> dict[str, tuple[Callable[[], Any], int]]:
    buffer = filled(50, capacity=100)
    one, many = row(1), rows(range(32))
    careful = row(1, obs=[1, 2], reward=np.float16(1))
    nested = sw.ReplayBuffer(10, schema={"obs": {"a": (sw.Field(3), sw.Field())}}, next_obs=None)
    inner = {"a": (np.zeros(3, np.float32), 1.0)}
    nested.add(obs=inner, reward=0.0, done=False)
    positional = tuple(one.values())
    out, nested_out = buffer.sample(32), nested.sample(4)
    indices = np.asarray(next(buffer.rows())["indices"])
    fixed = filled(10)
    known = next(fixed.rows())["indices"]

    def failing_add() -> None:
        with pytest.raises(SchemaError):
            buffer.add(**{**one, "obs": many["obs"]})

    def failing_out() -> None:
        with pytest.raises(SchemaError):
            buffer.sample(32, out={"obs": None})

    def failing_get() -> None:
        with pytest.raises(StaleHandle):
            fixed.get([10**9])

    assert len(indices) == 50
    return {
        "add by position": (lambda: buffer.add(*positional), 1_000_000),
        "add by name": (lambda: buffer.add(**one, truncated=False), 300_000),
        "add many": (lambda: buffer.add(**many), 100_000),
        "add with care": (lambda: buffer.add(**careful), 30_000),
        "add nested": (lambda: nested.add(obs=inner, reward=0.0, done=False), 200_000),
        "sample": (lambda: buffer.sample(32), 300_000),
        "sample one": (lambda: buffer.sample(1), 300_000),
        "sample large": (lambda: buffer.sample(10_000), 2_000),
        "sample into out": (lambda: buffer.sample(32, out=out), 500_000),
        "sample nested": (lambda: nested.sample(4), 100_000),
        "sample nested into out": (lambda: nested.sample(4, out=nested_out), 100_000),
        "get": (lambda: fixed.get(known), 100_000),
        "rows": (lambda: list(fixed.rows(3)), 20_000),
        "stats": (lambda: fixed.stats(), 300),
        "clear": (lambda: nested.clear() or nested.add(obs=inner, reward=0.0, done=False), 50_000),
        "writer": (lambda: fixed.writer().close(), 50_000),
        "failing add": (failing_add, 10_000),
        "failing out": (failing_out, 20_000),
        "failing get": (failing_get, 20_000),
    }


NAMES = ["add by position", "add by name", "add many", "add with care", "add nested", "sample", "sample one"]
NAMES += ["sample large", "sample into out", "sample nested", "sample nested into out", "get", "rows", "stats", "clear"]
NAMES += ["writer", "failing add", "failing out", "failing get"]


@pytest.mark.parametrize("name", NAMES)
def test_memory_does_not_grow_with_calls_of(name: str) -> None:
    call, times = calls()[name]
    assert growth(call, times) < LIMIT_BYTES


def test_memory_does_not_grow_with_tensors() -> None:
    pytest.importorskip("torch")
    buffer = filled(10)
    assert growth(lambda: buffer.sample(32, device="cpu"), 20_000) < LIMIT_BYTES


def references(values: dict[str, Any]) -> dict[str, int]:
    return {name: sys.getrefcount(value) for name, value in values.items()}


@pytest.mark.parametrize("good", [True, False])
def test_add_keeps_no_reference_to_its_arguments(good: bool) -> None:
    buffer = make()
    values = rows(range(4), truncated=np.zeros(4, bool), mask=np.ones(4, bool))
    if not good:
        values["next_obs"] = np.zeros((4, 3), np.float32)
    values["obs"] = np.asfortranarray(values["obs"]) if good else values["obs"]
    singles = {"obs": np.zeros(2, np.float32), "reward": np.float32(12.5), "action": 12345.678}
    before = references(values), references(singles)
    for _ in range(100):
        if good:
            buffer.add(**values)
            buffer.add(**row(0, **singles))
        else:
            with pytest.raises(SchemaError):
                buffer.add(**values)
            with pytest.raises(SchemaError):
                buffer.add(**row(0, **singles), unknown=1)
    assert (references(values), references(singles)) == before


def test_out_keeps_no_reference_to_its_arrays() -> None:
    buffer = filled(10)
    out = buffer.sample(8)
    before = references(out), sys.getrefcount(out)
    for _ in range(100):
        buffer.sample(8, out=out)
    assert (references(out), sys.getrefcount(out)) == before
    wrong = {**out, "obs": None}
    for _ in range(100):
        with pytest.raises(SchemaError):
            buffer.sample(8, out=wrong)
    assert sys.getrefcount(wrong) == 2


@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
def test_two_thousand_buffers_leave_nothing(close: bool) -> None:
    def life() -> None:
        buffer = filled(3)
        buffer.sample(4)
        if close:
            buffer.close()

    gc.collect()  # what earlier tests left behind does not go meanwhile
    maps = len(Path("/proc/self/maps").read_text().splitlines())
    assert growth(life, 2000) < LIMIT_BYTES
    assert len(Path("/proc/self/maps").read_text().splitlines()) < maps + 50


def test_files_leave_no_descriptors_and_no_mappings(shm_address: str, tmp_path: Path) -> None:
    def life() -> None:
        for storage in (shm_address, f"file://{tmp_path}/live.sw"):
            filled(3, storage=storage).close()
            other = sw.open(storage)
            other.save(tmp_path / "snapshot")
            sw.open(tmp_path / "snapshot").sample(2)
            with pytest.raises(sw.errors.StorageError):
                sw.open(f"file://{tmp_path}/snapshot")
            with pytest.raises(sw.errors.StorageError):
                make(storage=storage)
            other.close(unlink=True)

    life()
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())
    assert growth(life, 100) < LIMIT_BYTES
    after = len(os.listdir("/proc/self/fd")), len(Path("/proc/self/maps").read_text().splitlines())
    assert after[0] <= before[0]
    assert after[1] < before[1] + 20
    assert os.listdir(tmp_path) == ["snapshot"]
