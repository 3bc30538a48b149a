"""cpprb `save_transitions` and `load_transitions`: a compressed NumPy archive."""

from __future__ import annotations

from pathlib import Path

from cpprb import ReplayBuffer
from harness.keeper import FIRST_BATCH, Keeper
from harness.workloads import Workload

from peers.cpprb import Cpprb


class CpprbKeeper(Keeper):
    packages = ("cpprb", "numpy")
    note = "compresses"

    def fill(self, workload: Workload, capacity: int) -> None:
        self.contender, self.capacity = Cpprb(), capacity
        self.contender.fill(workload, capacity)

    def save(self, path: str) -> None:
        self.contender.buffer.save_transitions(path)
        Path(f"{path}.npz").rename(path)

    def load(self, path: str) -> ReplayBuffer:
        loaded = ReplayBuffer(self.capacity, self.contender.fields())
        loaded.load_transitions(path)
        loaded.sample(FIRST_BATCH)
        return loaded


KEEPER = CpprbKeeper
