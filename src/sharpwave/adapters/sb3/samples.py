"""Batches as Stable-Baselines3 and CleanRL read them: named tuples of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sharpwave.errors import SchemaError

__all__ = ["HAS_SB3", "DictReplayBufferSamples", "PrioritizedSamples", "ReplayBufferSamples"]

try:
    import stable_baselines3
except ModuleNotFoundError as error:
    if error.name != "stable_baselines3":
        raise
    HAS_SB3, SB3_VERSION = False, ""
else:
    HAS_SB3, SB3_VERSION = True, stable_baselines3.__version__

if HAS_SB3 and not TYPE_CHECKING:
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
else:

    class ReplayBufferSamples(NamedTuple):
        """A batch. ``actions`` is (rows, size of an action); rewards, dones and discounts are (rows, 1)."""

        observations: Any
        actions: torch.Tensor
        next_observations: Any
        dones: torch.Tensor
        rewards: torch.Tensor
        discounts: torch.Tensor | None = None
        """What n-step targets multiply the next value by; None for one step."""

    DictReplayBufferSamples = ReplayBufferSamples


class PrioritizedSamples(NamedTuple):
    """A batch drawn by priority: the fields of Stable-Baselines3's batches, and two more. Every column is (rows, 1)."""

    observations: Any
    actions: torch.Tensor
    next_observations: Any
    dones: torch.Tensor
    rewards: torch.Tensor
    discounts: torch.Tensor | None
    weights: torch.Tensor
    """Importance weights, to multiply the rows' losses by."""
    indices: torch.Tensor
    """Serial numbers of the rows, (rows,), for ``update_priorities``."""

    def weighted_mean(self, losses: torch.Tensor) -> torch.Tensor:
        """The mean of the rows' losses, each multiplied by its weight.

        Args:
            losses: One per row, (rows,) or (rows, 1). (The plain product of a (rows,) loss and the (rows, 1) weights
                would be a matrix.)
        """
        if losses.shape not in (self.weights.shape, self.weights.shape[:1]):
            raise SchemaError(
                f"weighted_mean(): losses: expected shape {tuple(self.weights.shape)} or "
                f"{tuple(self.weights.shape[:1])}, one loss per row, got {tuple(losses.shape)}; give the loss "
                "reduction='none'"
            )
        return (losses.reshape(self.weights.shape) * self.weights).mean()
