"""Values that are written back, the engine and the oracle side by side: on every storage and on a device."""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from contract.device_place import HAS_GPU, SOAK, on_device
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model.write_model import MUTABLE, SCHEMA, VIEWS, WritePair, host

import sharpwave as sw
from sharpwave import _core

CAPACITY = 20
SAMPLERS = {"uniform": sw.Uniform(), "prioritized": sw.Prioritized()}


class WriteBack(RuleBasedStateMachine):
    place = "memory"
    views = tuple(VIEWS)

    @initialize(view=st.sampled_from(list(VIEWS)), sampler=st.sampled_from(list(SAMPLERS)))
    def make(self, view: str, sampler: str) -> None:
        self.view = view if view in self.views else self.views[-1]
        self.folder = Path(tempfile.mkdtemp(dir=_core.shared_memory_folder))
        self.address = {"shm": f"shm://test-{uuid.uuid4().hex}", "file": f"file://{self.folder}/live.sw"}.get(
            self.place
        )
        options: dict[str, Any] = {
            "schema": SCHEMA,
            "view": VIEWS[self.view],
            "sampler": SAMPLERS[sampler],
            "num_envs": 1,
            "writers": 1,
            "seed": 3,
        }
        if self.place == "device":
            buffer = on_device(CAPACITY, device="cuda" if HAS_GPU else "cpu", **options)
        else:
            buffer = sw.ReplayBuffer(CAPACITY, storage=self.address, **options)
        self.pair = WritePair(buffer, CAPACITY)
        self.snapshots = 0

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.buffer.close(unlink=True)
            for path in self.folder.iterdir():
                path.unlink()
            self.folder.rmdir()

    @rule(ends=st.lists(st.sampled_from("....TU"), min_size=1, max_size=9))
    def add(self, ends: list[str]) -> None:
        self.pair.add(ends)

    @rule(
        picked=st.lists(st.integers(-2, 40), min_size=0, max_size=8),
        paths=st.lists(st.sampled_from(MUTABLE), min_size=1, max_size=4, unique=True),
        seed=st.integers(0, 1000),
        stale=st.sampled_from(["error", "skip", "skip"]),
        is_folded=st.booleans(),
    )
    def write(self, picked: list[int], paths: list[str], seed: int, stale: str, is_folded: bool) -> None:
        """The newest handles that were ever given, some of rows that are gone; -1, and one that was never given."""
        known = sorted(self.pair.rows)[-40:]
        handles = [-1 if at == -1 else 10**9 if at == -2 or at >= len(known) else known[-1 - at] for at in picked]
        array = np.array(handles, np.int64)
        self.pair.write(array.reshape(2, -1) if is_folded and len(array) % 2 == 0 else array, paths, seed, stale)

    @precondition(lambda self: len(self.pair.oracle.rows()) > 0)
    @rule(size=st.integers(1, 12))
    def sample(self, size: int) -> None:
        self.pair.check_batch(self.pair.buffer.sample(size), self.view)

    @precondition(lambda self: len(self.pair.oracle.rows()) > 0)
    @rule(size=st.integers(1, 12))
    def write_what_was_drawn(self, size: int) -> None:
        handles = host(self.pair.buffer.sample(size)["indices"])
        self.pair.write(handles, ["state/h", "state/steps"], size, "error")

    @rule()
    def clear(self) -> None:
        self.pair.buffer.clear()
        self.pair.oracle.clear()
        self.pair.is_new = True

    @precondition(lambda self: self.place != "device")
    @rule(incremental=st.booleans(), goes_on=st.booleans())
    def save(self, incremental: bool, goes_on: bool) -> None:
        path = self.folder / "snapshot"
        self.pair.buffer.save(path, incremental=incremental)
        copy = sw.open(path)
        twin = WritePair(copy, CAPACITY)
        twin.oracle, twin.rows, twin.starts = self.pair.oracle, self.pair.rows, self.pair.starts
        twin.check_rows()
        if goes_on and self.place == "memory":  # with the copy: its next row begins an episode
            self.pair.buffer.close()
            self.pair.buffer, self.pair.is_new = copy, True
        else:
            copy.close()

    @precondition(lambda self: self.address is not None)
    @rule()
    def close_and_open(self) -> None:
        self.pair.buffer.close()
        self.pair.oracle.close_writer()
        self.pair.buffer, self.pair.is_new = sw.open(self.address), True

    @precondition(lambda self: self.place != "device")
    @invariant()
    def rows_agree(self) -> None:
        self.pair.check_rows()


class InSharedMemory(WriteBack):
    place = "shm"


class InAFile(WriteBack):
    place = "file"


class OnADevice(WriteBack):
    place = "device"
    views = tuple(VIEWS)[:2]


TestWriteBackInMemory = WriteBack.TestCase
TestWriteBackInSharedMemory = InSharedMemory.TestCase
TestWriteBackInAFile = InAFile.TestCase
TestWriteBackOnADevice = OnADevice.TestCase
on_the_host = settings(max_examples=200 if SOAK else 15, stateful_step_count=25)
TestWriteBackInMemory.settings = on_the_host
TestWriteBackInSharedMemory.settings = on_the_host
TestWriteBackInAFile.settings = on_the_host
# Kernels take long in Triton's interpreter.
TestWriteBackOnADevice.settings = settings(max_examples=100 if SOAK or HAS_GPU else 4, stateful_step_count=10)


@pytest.mark.parametrize("view", list(VIEWS)[:2])
def test_rows_of_a_device_keep_what_was_written_through_a_snapshot(view: str, tmp_path: Path) -> None:
    buffer = on_device(
        CAPACITY, device="cuda" if HAS_GPU else "cpu", schema=SCHEMA, view=VIEWS[view], num_envs=1, writers=1, seed=3
    )
    pair = WritePair(buffer, CAPACITY)
    pair.add([*"..T....U.."])
    pair.write(np.array([1, 4, 4, 9]), ["reward", "state/h"], 5, "error")
    buffer.save(tmp_path / "snapshot")
    pair.buffer = sw.open(tmp_path / "snapshot")
    pair.check_rows()
    pair.write(np.array([2, 3]), ["seen", "state/steps"], 6, "error")
    pair.check_rows()
