"""tianshou's compiled loop, with which `Algorithm.compute_episodic_return` works on one row of steps."""

from __future__ import annotations

import numpy as np
from harness.estimator import GAE_LAMBDA, GAMMA, Estimator, Rollout
from harness.worker import Operation
from tianshou.algorithm.algorithm_base import _gae


class TianshouEstimator(Estimator):
    packages = ("tianshou", "numba", "numpy")
    note = (
        "the Numba loop of compute_episodic_return and its sum, compiled beforehand; "
        "one environment's steps after the other's, next values masked and ends marked beforehand"
    )

    def gae(self, rollout: Rollout) -> dict[str, Operation]:
        steps, envs = rollout.rewards.shape
        rewards, values = rollout.rewards.T.ravel(), rollout.values.T.ravel()
        next_values = (rollout.next_values * ~rollout.dones).T.ravel()
        # As it marks unfinished episodes: the next row is another environment's.
        ends = rollout.dones.copy()
        ends[-1] = True
        ends = ends.T.ravel()

        def run(calls: int) -> tuple[np.ndarray, np.ndarray]:
            for _ in range(calls):
                advantages = _gae(values, next_values, rewards, ends, GAMMA, GAE_LAMBDA)
                returns = advantages + values
            return advantages.reshape(envs, steps).T, returns.reshape(envs, steps).T

        return {"": Operation(run)}


ESTIMATOR = TianshouEstimator
