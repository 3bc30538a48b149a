"""TorchRL's functions behind its `GAE`: a loop over steps, and one that pads episodes and convolves them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from harness.estimator import GAE_LAMBDA, GAMMA, Estimator, Rollout
from harness.worker import Operation
from torchrl.objectives.value.functional import generalized_advantage_estimate, vec_generalized_advantage_estimate


class TorchrlEstimator(Estimator):
    packages = ("torchrl", "torch")
    # Tensors of (envs, steps, 1), which its modules make, take longer in the loop.
    note = (
        "generalized_advantage_estimate, and vec_generalized_advantage_estimate as vectorized; "
        "tensors of (steps, envs), next values made beforehand"
    )

    def gae(self, rollout: Rollout) -> dict[str, Operation]:
        arrays = (rollout.values, rollout.next_values, rollout.rewards, rollout.dones)
        inputs = tuple(map(torch.from_numpy, arrays))

        def calling(estimate: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Operation:
            def run(calls: int) -> tuple[torch.Tensor, torch.Tensor]:
                for _ in range(calls):
                    advantages, returns = estimate(GAMMA, GAE_LAMBDA, *inputs)
                return advantages, returns

            return Operation(run)

        return {"": calling(generalized_advantage_estimate), "vectorized": calling(vec_generalized_advantage_estimate)}


ESTIMATOR = TorchrlEstimator
