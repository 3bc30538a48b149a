"""Sharpwave: `sample(device="cpu")`."""

from __future__ import annotations

from typing import Any

import torch
from harness.trainer import Batch, Trainee
from harness.workloads import Workload

from peers.sharpwave import Sharpwave


class SharpwaveTrainee(Trainee):
    packages = ("sharpwave", "torch")
    note = 'sample(device="cpu")'

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        filled = Sharpwave(prioritized=self.prioritized)
        filled.fill(workload, capacity)
        self.buffer = filled.buffer
        self.add = self.buffer.add

    def rows(self) -> list[tuple[Any, ...]]:
        return self.workload.rows()

    def draw(self, count: int) -> Batch:
        batch = self.buffer.sample(count, device="cpu")
        return Batch(
            batch["obs"],
            batch["action"],
            batch["reward"],
            batch["next_obs"],
            batch["done"].float(),
            batch.get("weights"),
            batch["indices"],
        )

    def update(self, indices: Any, priorities: torch.Tensor) -> None:
        self.buffer.update_priorities(indices, priorities)


TRAINEE = SharpwaveTrainee
