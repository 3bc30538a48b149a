"""rlox, whose arrays become tensors by `torch.from_numpy`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from harness.trainer import Batch, Trainee
from harness.workloads import Workload

from peers.rlox import Prioritized, Rlox


class RloxTrainee(Trainee):
    packages = ("rlox", "torch", "numpy")
    note = "torch.from_numpy; discrete actions come back as float32 and are converted"

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        filled = Prioritized() if self.prioritized else Rlox()
        filled.fill(workload, capacity)
        self.buffer, self.seeds = filled.buffer, filled.seeds
        self.add = self.buffer.push

    def rows(self) -> list[tuple[Any, ...]]:
        # Discrete actions, too, are arrays of float32.
        return [
            (obs, np.atleast_1d(np.float32(action)), reward, done, False, after)
            for obs, action, reward, after, done in self.workload.rows()
        ]

    def draw(self, count: int) -> Batch:
        drawn = self.buffer.sample(count, next(self.seeds))
        names = ("obs", "actions", "rewards", "next_obs", "terminated")
        obs, action, reward, next_obs, done = (torch.from_numpy(drawn[name]) for name in names)
        if not self.workload.action_shape:
            action = action.reshape(-1).long()
        extras = (torch.from_numpy(drawn["weights"]), drawn["indices"]) if self.prioritized else ()
        return Batch(obs, action, reward, next_obs, done.float(), *extras)

    def update(self, indices: Any, priorities: torch.Tensor) -> None:
        self.buffer.update_priorities(indices, priorities.double().numpy())


TRAINEE = RloxTrainee
