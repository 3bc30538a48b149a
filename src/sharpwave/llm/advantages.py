"""Advantages of tokens: relative to the group of a prompt (GRPO), or from a value model (PPO)."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from ..errors import SchemaError
from ..returns import gae, group_relative_advantages
from .token_batch import MASK, REWARDS, TokenBatch

__all__ = ["estimated_advantages", "group_advantages"]

Array = np.ndarray[Any, Any]


def group_advantages(
    batch: TokenBatch, *, scale: Literal["std"] | None = "std", baseline: Literal["mean", "others"] = "mean"
) -> Array:
    """The reward of each token's sequence compared with the other sequences of its group."""
    rewards = batch.sequence_rewards.astype(np.float32)
    made = group_relative_advantages(rewards, groups=batch.groups, baseline=baseline, scale=scale)
    return np.repeat(made, batch.lens)


def estimated_advantages(
    batch: TokenBatch, values: Array, gamma: float = 1.0, gae_lambda: float = 0.95
) -> tuple[Array, Array]:
    """Generalized advantage estimation over the learned tokens; returns advantages and value targets of all tokens.

    Tokens that are not learned (a prompt, the output of a tool) are no steps: the state after a token is the one in
    which the next learned token of the sequence is chosen. Rewards on them go to the learned token before.

    Raises:
        SchemaError: A token before the first learned one of its sequence has a reward.
    """
    at = np.flatnonzero(batch.learned)
    advantages, targets = np.zeros(len(batch.learned), np.float32), np.zeros(len(batch.learned), np.float32)
    if not len(at):
        return advantages, targets
    sequence = batch.sequence_of
    # Each token's reward belongs to the last learned token that is not behind it, of the same sequence.
    before = np.searchsorted(at, np.arange(len(batch.learned)), side="right") - 1
    owned = (before >= 0) & (sequence[at[before]] == sequence)
    early = ~owned & (batch.columns[REWARDS] != 0) & np.isin(sequence, sequence[at])
    if early.any():
        name = batch.names[sequence[early.argmax()]]
        raise SchemaError(f"{name!r}: {REWARDS} has a reward before the first token with {MASK}; no token earned it")
    rewards = np.bincount(before[owned], batch.columns[REWARDS][owned], len(at)).astype(np.float32)
    ends = np.append(sequence[at[1:]] != sequence[at[:-1]], True)
    # All sequences as one stream: nothing passes an end backwards.
    made, returns = gae(rewards, values[at].astype(np.float32), ends, 0.0, gamma, gae_lambda)
    advantages[at], targets[at] = made, returns
    return advantages, targets
