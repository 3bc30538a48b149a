"""rlox `compute_gae_batched_f32`."""

from __future__ import annotations

import numpy as np
import rlox
from harness.estimator import GAE_LAMBDA, GAMMA, Estimator, Rollout
from harness.worker import Operation


class RloxEstimator(Estimator):
    packages = ("rlox", "numpy")
    note = "compute_gae_batched_f32; one environment's steps after the other's, ends as float32, all prebuilt"

    def gae(self, rollout: Rollout) -> dict[str, Operation]:
        steps, envs = rollout.rewards.shape
        columns = (rollout.rewards, rollout.values, rollout.dones)
        by_env = [np.ascontiguousarray(column.T, np.float32).ravel() for column in columns]
        inputs = (*by_env, rollout.last_values, steps, GAMMA, GAE_LAMBDA)

        def run(calls: int) -> tuple[np.ndarray, np.ndarray]:
            for _ in range(calls):
                advantages, returns = rlox.compute_gae_batched_f32(*inputs)
            return advantages.reshape(envs, steps).T, returns.reshape(envs, steps).T

        return {"": Operation(run)}


ESTIMATOR = RloxEstimator
