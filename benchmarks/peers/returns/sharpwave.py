"""Sharpwave: `returns.gae` on NumPy arrays and on torch tensors, and a `RolloutBuffer` that has room for the answer."""

from __future__ import annotations

from typing import Any

import numpy as np
from harness.estimator import GAE_LAMBDA, GAMMA, Estimator, Rollout
from harness.worker import Operation

import sharpwave as sw


def fresh(*inputs: Any) -> Operation:
    """The answer in new arrays at every call."""

    def run(calls: int) -> tuple[Any, Any]:
        for _ in range(calls):
            advantages, returns = sw.returns.gae(*inputs, GAMMA, GAE_LAMBDA)
        return advantages, returns

    return Operation(run)


def stored(rollout: Rollout) -> Operation:
    steps, envs = rollout.rewards.shape
    buffer = sw.RolloutBuffer(envs, steps, obs_shape=(1,))
    beside = {"observations": np.zeros((envs, 1)), "actions": np.zeros(envs), "log_probs": np.zeros(envs)}
    for rewards, values, dones in zip(rollout.rewards, rollout.values, rollout.dones, strict=True):
        buffer.add(**beside, rewards=rewards, values=values, dones=dones)

    def run(calls: int) -> tuple[Any, Any]:
        for _ in range(calls):
            buffer.compute_returns_and_advantages(rollout.last_values, GAMMA, GAE_LAMBDA)
        return buffer.advantages, buffer.returns

    return Operation(run)


class SharpwaveEstimator(Estimator):
    packages = ("sharpwave", "torch", "numpy")
    note = "returns.gae into fresh arrays or tensors; RolloutBuffer.compute_returns_and_advantages into its own"

    def gae(self, rollout: Rollout) -> dict[str, Operation]:
        ways = {"": fresh(*rollout), "rollout": stored(rollout)}
        try:
            import torch
        except ImportError:
            return ways
        return ways | {"tensors": fresh(*map(torch.from_numpy, rollout))}


ESTIMATOR = SharpwaveEstimator
