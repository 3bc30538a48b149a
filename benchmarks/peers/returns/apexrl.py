"""The loop over steps in ApexRL's documentation of its rollout buffer. The package is not needed: the loop is here."""

from __future__ import annotations

import torch
from harness.estimator import GAE_LAMBDA, GAMMA, Estimator, Rollout
from harness.worker import Operation


def estimate(
    rewards: torch.Tensor, values: torch.Tensor, dones: torch.Tensor, last_values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    advantages, carry, following = torch.zeros_like(rewards), torch.zeros_like(last_values), last_values
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + GAMMA * following * (1 - dones[t]) - values[t]
        carry = delta + GAMMA * GAE_LAMBDA * (1 - dones[t]) * carry
        advantages[t] = carry
        following = values[t]
    return advantages, advantages + values


class ApexrlEstimator(Estimator):
    packages = ("torch",)
    note = "its documented loop over steps, in torch; dones are float32"

    def gae(self, rollout: Rollout) -> dict[str, Operation]:
        inputs = [torch.from_numpy(array).float() for array in rollout]

        def run(calls: int) -> tuple[torch.Tensor, torch.Tensor]:
            for _ in range(calls):
                advantages, returns = estimate(*inputs)
            return advantages, returns

        return {"": Operation(run)}


ESTIMATOR = ApexrlEstimator
