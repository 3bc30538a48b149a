"""The ring that everyone writes once: five assignments, `take`, `torch.from_numpy`."""

from __future__ import annotations

from typing import Any

import torch
from harness.trainer import Batch, Trainee
from harness.workloads import Workload

from peers.numpy_ring import Ring


class RingTrainee(Trainee):
    packages = ("numpy", "torch")
    note = "five assignments; take, torch.from_numpy"

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload, self.ring = workload, Ring(capacity, workload.field_specs)
        for chunk in workload.chunks(capacity):
            self.ring.extend(**chunk)
        self.add = self.ring.add_plainly

    def rows(self) -> list[tuple[Any, ...]]:
        return self.workload.rows()

    def draw(self, count: int) -> Batch:
        batch = {name: torch.from_numpy(values) for name, values in self.ring.sample_take(count).items()}
        return Batch(batch["obs"], batch["action"], batch["reward"], batch["next_obs"], batch["done"].float())


TRAINEE = RingTrainee
