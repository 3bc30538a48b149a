"""torchrl `ReplayBuffer` over `LazyTensorStorage`; rows are TensorDicts made beforehand."""

from __future__ import annotations

from typing import Any

import torch
from harness.trainer import Batch, Trainee
from harness.workloads import Workload

from peers.torchrl import Prioritized, Torchrl


class TorchrlTrainee(Trainee):
    packages = ("torchrl", "tensordict", "torch")
    note = "TensorDicts prebuilt"

    def fill(self, workload: Workload, capacity: int) -> None:
        self.filled = Prioritized() if self.prioritized else Torchrl()
        self.filled.fill(workload, capacity)
        self.buffer = self.filled.buffer

    def rows(self) -> list[tuple[Any, ...]]:
        return [(row,) for row in self.filled.rows()]

    def add(self, *row: Any) -> None:
        self.buffer.add(*row)

    def draw(self, count: int) -> Batch:
        extras: tuple[Any, ...] = ()
        if self.prioritized:
            batch, info = self.buffer.sample(count, return_info=True)
            extras = (torch.as_tensor(info["priority_weight"]), info["index"])
        else:
            batch = self.buffer.sample(count)
        fields = (batch["obs"], batch["action"], batch["reward"], batch["next_obs"], batch["done"].float())
        return Batch(*fields, *extras)

    def update(self, indices: Any, priorities: torch.Tensor) -> None:
        self.buffer.update_priority(indices, priorities)


TRAINEE = TorchrlTrainee
