"""torchrl `dumps` and `loads`: a folder with a memory-mapped file for each tensor."""

from __future__ import annotations

from harness.keeper import FIRST_BATCH, Keeper
from harness.workloads import Workload
from torchrl.data import LazyTensorStorage, ReplayBuffer

from peers.torchrl import Torchrl


class TorchrlKeeper(Keeper):
    packages = ("torchrl", "tensordict", "torch")

    def fill(self, workload: Workload, capacity: int) -> None:
        self.contender, self.capacity = Torchrl(), capacity
        self.contender.fill(workload, capacity)

    def save(self, path: str) -> None:
        self.contender.buffer.dumps(path)

    def load(self, path: str) -> ReplayBuffer:
        loaded = self.contender.make(LazyTensorStorage(self.capacity))
        loaded.loads(path)
        loaded.sample(FIRST_BATCH)
        return loaded


KEEPER = TorchrlKeeper
