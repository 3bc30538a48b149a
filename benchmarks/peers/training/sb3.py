"""Stable-Baselines3 `ReplayBuffer`, which gives tensors by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
from harness.trainer import Batch, Trainee
from harness.workloads import Workload

from peers.sb3 import Sb3


class Sb3Trainee(Trainee):
    packages = ("stable-baselines3", "torch", "numpy")

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        filled = Sb3()
        filled.fill(workload, capacity)
        self.buffer = filled.buffer
        self.add = self.buffer.add

    def rows(self) -> list[tuple[Any, ...]]:
        return [
            (obs[None], after[None], np.asarray(action)[None], np.array([reward]), np.array([done]), [{}])
            for obs, action, reward, after, done in self.workload.rows()
        ]

    def draw(self, count: int) -> Batch:
        batch = self.buffer.sample(count)
        actions = batch.actions if self.workload.action_shape else batch.actions[:, 0]
        return Batch(batch.observations, actions, batch.rewards[:, 0], batch.next_observations, batch.dones[:, 0])


TRAINEE = Sb3Trainee
