"""Sharpwave: `save`, `sw.open(path)` into memory, and `sw.open("file://path")` in place."""

from __future__ import annotations

from pathlib import Path

from harness.keeper import FIRST_BATCH, Keeper
from harness.workloads import Workload

import sharpwave as sw
from peers.sharpwave import Sharpwave


class SharpwaveKeeper(Keeper):
    packages = ("sharpwave", "numpy")
    note = "a checksum of every row is written and read; open in place: a file:// buffer that was closed"

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload, self.capacity = workload, capacity
        contender = Sharpwave()
        contender.fill(workload, capacity)
        self.buffer = contender.buffer

    def save(self, path: str) -> None:
        self.buffer.save(path)

    def load(self, path: str) -> sw.ReplayBuffer:
        loaded = sw.open(path)
        loaded.sample(FIRST_BATCH)
        return loaded

    def attach(self, path: str) -> sw.ReplayBuffer:
        address = f"file://{path}"
        if not Path(path).exists():
            shapes = {"obs_shape": self.workload.obs_shape, "action_shape": self.workload.action_shape}
            with sw.ReplayBuffer(self.capacity, **shapes, storage=address) as buffer:
                for chunk in self.workload.chunks(self.capacity):
                    buffer.add(**chunk)
        attached = sw.open(address)
        attached.sample(FIRST_BATCH)
        return attached


KEEPER = SharpwaveKeeper
