"""Objectives: what a learner minimises. `SFT`, `GRPO`, `PPO`, and `ValueFit` for the value model of PPO.

The functions at the top are the arithmetic, on tensors of any shape with one value a token. The classes read batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..checks import number, one_of, truth
from ..errors import SchemaError
from .advantages import estimated_advantages, group_advantages
from .token_batch import REWARDS, TokenBatch

__all__ = ["GRPO", "PPO", "SFT", "Clipped", "Objective", "ValueFit", "clipped_loss", "reference_kl", "value_loss"]

Array = np.ndarray[Any, Any]
Method = Literal["naive", "recompute", "decoupled"]
Level = Literal["token", "sequence"]
# Differences of log-probabilities beyond this count as this. exp(20) is far beyond every clip, and exp() of a larger
# one overflows, which turns the gradient of a clipped token into NaN.
_FURTHEST = 20.0


class Clipped(NamedTuple):
    """`clipped_loss` of each token, without gradient but for `loss`."""

    loss: Tensor
    ratio: Tensor  # of the policy to the one that the clip is around
    is_clipped: Tensor
    weight: Tensor  # importance weight, after the cap
    is_over_cap: Tensor


def clipped_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    *,
    method: Method = "decoupled",
    clip: float | Tensor = 0.2,
    clip_high: float | Tensor | None = None,
    cap: float | None = 5.0,
    over_cap: Literal["mask", "clamp"] = "mask",
) -> Clipped:
    """PPO's clipped loss, for tokens that an older policy made.

    With `ratio = exp(logprobs - base)`, the loss of a token is
    `-weight * min(ratio * A, clamp(ratio, 1 - clip, 1 + clip_high) * A)`:

    | method | base | weight |
    |---|---|---|
    | naive | behaviour | 1 |
    | recompute | proximal | 1 |
    | decoupled | proximal | `exp(proximal - behaviour)` |

    Args:
        logprobs: Of the tokens under the policy that learns. The gradient flows through these alone.
        behaviour: Under the policy that made each token.
        proximal: Under the policy at the start of the step.
        advantages: Of the tokens.
        clip: How far the ratio may fall, and rise where `clip_high` is None. A tensor broadcasts.
        clip_high: How far it may rise.
        cap: Most that a weight may be; None for no bound.
        over_cap: A weight above the cap counts as 0 (`mask`) or as the cap (`clamp`).
    """
    base = behaviour if method == "naive" else proximal
    ratio = (logprobs - base.detach()).clamp(-_FURTHEST, _FURTHEST).exp()
    bounded = torch.minimum(torch.maximum(ratio, 1 - _as(ratio, clip)), 1 + _as(ratio, clip_high, clip))
    gain, gain_bounded = ratio * advantages, bounded * advantages
    weight, over = torch.ones_like(ratio.detach()), torch.zeros_like(ratio, dtype=torch.bool)
    if method == "decoupled":
        weight = (proximal - behaviour).detach().clamp(-_FURTHEST, _FURTHEST).exp()
        if cap is not None:
            over = weight > cap
            # where(), because a product with 0 would keep an infinite weight as NaN
            weight = torch.where(over, torch.full_like(weight, 0.0 if over_cap == "mask" else cap), weight)
    loss = -weight * torch.minimum(gain, gain_bounded)
    return Clipped(loss, ratio.detach(), (gain > gain_bounded).detach(), weight, over)


def _as(like: Tensor, value: float | Tensor | None, default: float | Tensor = 0.0) -> Tensor:
    given = default if value is None else value
    # Filled on the device: a copy from the host cannot be part of a captured pass.
    return given.to(like) if isinstance(given, Tensor) else like.new_full((), given)


def reference_kl(logprobs: Tensor, reference: Tensor) -> Tensor:
    """An estimate of KL(policy || reference) at each token: `exp(d) - d - 1` with `d = reference - logprobs`.

    Never negative, and unbiased where the policy made the token (Schulman's k3).
    """
    difference = (reference.detach() - logprobs).clamp(-_FURTHEST, _FURTHEST)
    return difference.exp() - difference - 1


def value_loss(values: Tensor, old_values: Tensor, targets: Tensor, clip: float | None = 0.2) -> Tensor:
    """Half the squared error; with `clip` the larger one of it and that of the value kept near its old one."""
    error = (values - targets) ** 2
    if clip is not None:
        near = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
        error = torch.maximum(error, (near - targets) ** 2)
    return 0.5 * error


class Scores(NamedTuple):
    """What a model says about the tokens of rows: the log-probability and entropy of each, or its value."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None = None


class Objective(Protocol):
    """What a learner needs of an objective. All methods are for tokens: columns in, one loss a token out."""

    @property
    def level(self) -> Level: ...

    @property
    def inputs(self) -> frozenset[str]:
        """Keys that a batch must have besides `input_ids` and `loss_mask`."""

    @property
    def optional(self) -> frozenset[str]:
        """Keys that are read where a batch has them."""

    @property
    def is_of_values(self) -> bool:
        """Whether it trains a value model."""

    @property
    def has_proximal(self) -> bool:
        """Whether the learner gives the column `proximal`."""

    @property
    def entropy_learns(self) -> bool:
        """Whether the gradient flows through the entropy."""

    def prepare(self, batch: TokenBatch) -> dict[str, Array]:
        """Columns for `loss`, computed once for a batch."""

    def loss(self, scores: Scores, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each token, and statistics of each token by name; a name that ends in `_max` is not averaged."""


@dataclass(frozen=True)
class SFT:
    """Supervised fine-tuning: the negative log-probability of the learned tokens."""

    level: Level = "token"
    inputs: ClassVar[frozenset[str]] = frozenset()
    optional: ClassVar[frozenset[str]] = frozenset()
    is_of_values: ClassVar[bool] = False
    has_proximal: ClassVar[bool] = False
    entropy_learns: ClassVar[bool] = False

    def __post_init__(self) -> None:
        one_of("SFT()", "level", self.level, ("token", "sequence"))

    def prepare(self, batch: TokenBatch) -> dict[str, Array]:
        return {}

    def loss(self, scores: Scores, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return -scores.logprobs, {"entropy": scores.entropy}


@dataclass(frozen=True)
class _Policy:
    """What GRPO and PPO share: all but the advantages."""

    method: Method = "decoupled"
    clip: float = 0.2
    clip_high: float | None = None
    cap: float | None = 5.0
    over_cap: Literal["mask", "clamp"] = "mask"
    level: Level = "token"
    kl: float = 0.0
    entropy: float = 0.0
    is_of_values: ClassVar[bool] = False
    _rewarded: ClassVar[frozenset[str]] = frozenset({REWARDS})

    def __post_init__(self) -> None:
        where = f"{type(self).__name__}()"
        one_of(where, "method", self.method, ("naive", "recompute", "decoupled"))
        one_of(where, "over_cap", self.over_cap, ("mask", "clamp"))
        one_of(where, "level", self.level, ("token", "sequence"))
        number(where, "clip", self.clip, 0, 1)
        if self.clip_high is not None:
            number(where, "clip_high", self.clip_high, 0, 1e9)
        if self.cap is not None:
            number(where, "cap", self.cap, 1, 1e9)
        number(where, "kl", self.kl, 0, 1e9)
        number(where, "entropy", self.entropy, 0, 1e9)

    @property
    def inputs(self) -> frozenset[str]:
        return self._rewarded | ({"logprobs", "ref_logprobs"} if self.kl > 0 else {"logprobs"})

    @property
    def optional(self) -> frozenset[str]:
        return frozenset({"prox_logprobs"} if self.has_proximal else ())

    @property
    def has_proximal(self) -> bool:
        return self.method != "naive"

    @property
    def entropy_learns(self) -> bool:
        return self.entropy > 0

    def _columns(self, batch: TokenBatch, advantages: Array) -> dict[str, Array]:
        columns = {"behaviour": batch.columns["logprobs"], "advantages": advantages}
        if self.kl > 0:
            columns["reference"] = batch.columns["ref_logprobs"]
        if "prox_logprobs" in batch.columns:
            columns["proximal"] = batch.columns["prox_logprobs"]
        return columns

    def loss(self, scores: Scores, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        behaviour = columns["behaviour"]
        made = clipped_loss(
            scores.logprobs, behaviour, columns.get("proximal", behaviour), columns["advantages"], method=self.method,
            clip=self.clip, clip_high=self.clip_high, cap=self.cap, over_cap=self.over_cap,
        )  # fmt: skip
        loss = made.loss
        said = {
            "clip_share": made.is_clipped.float(),
            "ratio": made.ratio,
            "importance_weight": made.weight,
            "importance_weight_max": made.weight,
            "over_cap_share": made.is_over_cap.float(),
            "drift": (scores.logprobs.detach() - behaviour).abs(),
            "entropy": scores.entropy.detach(),
        }
        if self.entropy > 0:
            loss = loss - self.entropy * scores.entropy
        if self.kl > 0:
            kl = reference_kl(scores.logprobs, columns["reference"])
            loss, said["kl"] = loss + self.kl * kl, kl.detach()
        return loss, said


@dataclass(frozen=True)
class GRPO(_Policy):
    """Group-relative policy optimization: an answer's advantage is its reward compared with its group's.

    Sequences of one datum are a group, and data with the same `metadata["group"]`.

    Args:
        method: Around which policy the ratio is clipped, and with which weight: see `clipped_loss`.
        clip, clip_high, cap, over_cap: As there.
        level: The loss is a mean over tokens, or a mean over sequences of their means.
        kl: Coefficient of the KL divergence to a reference model; above 0 a batch needs the key `ref_logprobs`.
        entropy: Coefficient of the entropy, which is added to the gain.
        scale: `"std"` divides advantages by the standard deviation of their group; None does not.
        baseline: The mean of the group, or of the others in it.

    Example:
        >>> sorted(GRPO(kl=0.01).inputs)
        ['logprobs', 'ref_logprobs', 'rewards']
    """

    scale: Literal["std"] | None = "std"
    baseline: Literal["mean", "others"] = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("GRPO()", "baseline", self.baseline, ("mean", "others"))
        if self.scale not in ("std", None):
            raise SchemaError(f"GRPO(): scale: expected 'std' or None, got {self.scale!r}")

    def prepare(self, batch: TokenBatch) -> dict[str, Array]:
        return self._columns(batch, group_advantages(batch, scale=self.scale, baseline=self.baseline))


@dataclass(frozen=True)
class PPO(_Policy):
    """Proximal policy optimization with advantages from a value model (the key `values`; `ValueFit` trains it).

    Args:
        method, clip, clip_high, cap, over_cap, level, kl, entropy: As of `GRPO`.
        gamma: Discount from token to token.
        gae_lambda: How far advantages look: 0 is one token, 1 all of them.
        normalise: Advantages of a batch get mean 0 and standard deviation 1.
    """

    gamma: float = 1.0
    gae_lambda: float = 0.95
    normalise: bool = True
    _rewarded: ClassVar[frozenset[str]] = frozenset({REWARDS, "values"})

    def __post_init__(self) -> None:
        super().__post_init__()
        number("PPO()", "gamma", self.gamma, 0, 1)
        number("PPO()", "gae_lambda", self.gae_lambda, 0, 1)
        truth("PPO()", "normalise", self.normalise)

    def prepare(self, batch: TokenBatch) -> dict[str, Array]:
        made, _ = estimated_advantages(batch, batch.columns["values"], self.gamma, self.gae_lambda)
        if self.normalise and batch.fresh.sum() > 1:
            used = made[batch.fresh]
            made = np.where(batch.learned, (made - used.mean()) / (used.std() + 1e-6), 0).astype(np.float32)
        return self._columns(batch, made)


@dataclass(frozen=True)
class ValueFit:
    """Fits a value model to the returns that GAE gives: the other half of `PPO`.

    Args:
        clip: See `value_loss`; None for the plain squared error.
        gamma, gae_lambda: As of `PPO`, and the same numbers as there.
        level: As of `GRPO`.
    """

    clip: float | None = 0.2
    gamma: float = 1.0
    gae_lambda: float = 0.95
    level: Level = "token"
    inputs: ClassVar[frozenset[str]] = frozenset({REWARDS, "values"})
    optional: ClassVar[frozenset[str]] = frozenset()
    is_of_values: ClassVar[bool] = True
    has_proximal: ClassVar[bool] = False
    entropy_learns: ClassVar[bool] = False

    def __post_init__(self) -> None:
        one_of("ValueFit()", "level", self.level, ("token", "sequence"))
        number("ValueFit()", "gamma", self.gamma, 0, 1)
        number("ValueFit()", "gae_lambda", self.gae_lambda, 0, 1)
        if self.clip is not None:
            number("ValueFit()", "clip", self.clip, 0, 1e9)

    def prepare(self, batch: TokenBatch) -> dict[str, Array]:
        old = batch.columns["values"]
        _, targets = estimated_advantages(batch, old, self.gamma, self.gae_lambda)
        return {"old_values": old, "targets": targets}

    def loss(self, scores: Scores, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        assert scores.values is not None
        targets = columns["targets"]
        error = (scores.values - targets).detach()
        return value_loss(scores.values, columns["old_values"], targets, self.clip), {"value_error": error.abs()}
