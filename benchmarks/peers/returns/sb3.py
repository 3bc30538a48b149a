"""Stable-Baselines3 `RolloutBuffer.compute_returns_and_advantage`."""

from __future__ import annotations

import numpy as np
import torch
from gymnasium.spaces import Box
from harness.estimator import GAE_LAMBDA, GAMMA, Estimator, Rollout
from harness.worker import Operation
from stable_baselines3.common.buffers import RolloutBuffer


class Sb3Estimator(Estimator):
    packages = ("stable-baselines3", "torch", "numpy")
    note = "a loop over steps in NumPy"

    def gae(self, rollout: Rollout) -> dict[str, Operation]:
        steps, envs = rollout.rewards.shape
        one = Box(-1.0, 1.0, (1,))
        buffer = RolloutBuffer(steps, one, one, "cpu", GAE_LAMBDA, GAMMA, envs)
        zeros, starts = np.zeros((envs, 1), np.float32), np.zeros(envs, bool)
        for rewards, values, dones in zip(rollout.rewards, rollout.values, rollout.dones, strict=True):
            buffer.add(zeros, zeros, rewards, starts, torch.from_numpy(values), torch.zeros(envs))
            starts = dones
        last_values, last_dones = torch.from_numpy(rollout.last_values), rollout.dones[-1]

        def run(calls: int) -> tuple[np.ndarray, np.ndarray]:
            for _ in range(calls):
                buffer.compute_returns_and_advantage(last_values, last_dones)
            return buffer.advantages, buffer.returns

        return {"": Operation(run)}


ESTIMATOR = Sb3Estimator
