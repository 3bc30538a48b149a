"""cpprb, whose arrays become tensors by `torch.from_numpy`."""

from __future__ import annotations

from typing import Any

import torch
from harness.trainer import Batch, Trainee
from harness.worker import BETA
from harness.workloads import FIELDS, Workload

from peers.cpprb import Cpprb, Prioritized


class CpprbTrainee(Trainee):
    packages = ("cpprb", "torch", "numpy")
    note = "torch.from_numpy"

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        filled = Prioritized() if self.prioritized else Cpprb()
        filled.fill(workload, capacity)
        self.buffer = filled.buffer

    def rows(self) -> list[tuple[Any, ...]]:
        return self.workload.rows()

    def add(self, *row: Any) -> None:
        obs, action, reward, next_obs, done = row
        self.buffer.add(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)

    def draw(self, count: int) -> Batch:
        drawn = self.buffer.sample(count, BETA) if self.prioritized else self.buffer.sample(count)
        obs, action, reward, next_obs, done = (torch.from_numpy(drawn[name]) for name in FIELDS)
        if not self.workload.action_shape:
            action = action[:, 0]
        extras = (torch.from_numpy(drawn["weights"]), drawn["indexes"]) if self.prioritized else ()
        return Batch(obs, action, reward[:, 0], next_obs, done[:, 0].float(), *extras)

    def update(self, indices: Any, priorities: torch.Tensor) -> None:
        self.buffer.update_priorities(indices, priorities.numpy())


TRAINEE = CpprbTrainee
