"""tianshou `save_hdf5` and `load_hdf5`."""

from __future__ import annotations

from harness.keeper import FIRST_BATCH, Keeper
from harness.workloads import Workload
from tianshou.data import ReplayBuffer

from peers.tianshou import Tianshou


class TianshouKeeper(Keeper):
    packages = ("tianshou", "numpy")
    note = "HDF5"

    def fill(self, workload: Workload, capacity: int) -> None:
        contender = Tianshou()
        contender.fill(workload, capacity)
        self.buffer = contender.buffer

    def save(self, path: str) -> None:
        self.buffer.save_hdf5(path)

    def load(self, path: str) -> ReplayBuffer:
        loaded = ReplayBuffer.load_hdf5(path)
        loaded.sample(FIRST_BATCH)
        return loaded


KEEPER = TianshouKeeper
