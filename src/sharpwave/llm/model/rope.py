"""Rotary positions with the scalings of config.json, after transformers' modeling_rope_utils."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .config import ModelConfig

__all__ = ["RotaryPositions", "rotate"]


class RotaryPositions(nn.Module):
    """cos and sin of positions. The frequencies stay float32 whatever dtype the model is moved to."""

    frequencies: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._config = config
        frequencies, self.factor = _frequencies(config)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> RotaryPositions:
        kept = self.frequencies
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # In bfloat16 positions above 256 would share angles.
        self.frequencies = kept.to(self.frequencies.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, [..., head_dim] each, for positions of any shape."""
        frequencies = self.frequencies
        if self._config.rope.scaling == "dynamic":
            # The longest sequence of the call sets the base for all of it, as in transformers. It is read on the host.
            length = int(positions.max()) + 1
            if length > self._config.max_position_embeddings:
                frequencies = _dynamic(self._config, length).to(positions.device)
        angles = positions[..., None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.factor).to(dtype), (angles.sin() * self.factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates heads [batch, heads, time, head_dim] by angles [batch, 1, time, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _plain(theta: float, dim: int) -> Tensor:
    # On the CPU, also where the model's parameters are made without memory (device "meta").
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)


def _frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    rope, dim = config.rope, config.head_dim
    plain = _plain(rope.theta, dim)
    if rope.scaling == "linear":
        return plain / rope.numbers["factor"], 1.0
    if rope.scaling == "llama3":
        return _llama3(plain, rope.numbers), 1.0
    if rope.scaling == "yarn":
        return _yarn(config, plain)
    return plain, 1.0


def _dynamic(config: ModelConfig, length: int) -> Tensor:
    factor, dim = config.rope.numbers["factor"], config.head_dim
    stretch = factor * length / config.max_position_embeddings - (factor - 1)
    return _plain(config.rope.theta * stretch ** (dim / (dim - 2)), dim)


def _llama3(plain: Tensor, numbers: Any) -> Tensor:
    factor, low, high = (float(numbers[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = numbers["original_max_position_embeddings"]
    lengths = 2 * math.pi / plain
    smooth = (original / lengths - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(lengths > original / low, plain / factor, between)
    return torch.where(lengths < original / high, plain, scaled)


def _yarn(config: ModelConfig, plain: Tensor) -> tuple[Tensor, float]:
    numbers, dim, theta = config.rope.numbers, config.head_dim, config.rope.theta
    factor = float(numbers["factor"])
    original = numbers.get("original_max_position_embeddings") or config.max_position_embeddings

    def mscale(weight: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    def turning(rotations: float) -> float:
        """The dimension that turns so many times over the original context."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turning(numbers.get("beta_fast") or 32), turning(numbers.get("beta_slow") or 1)
    if numbers.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    attention = numbers.get("attention_factor")
    if attention is None:
        weight, everywhere = numbers.get("mscale"), numbers.get("mscale_all_dim")
        attention = mscale(weight) / mscale(everywhere) if weight and everywhere else mscale()
    return plain / factor * ramp + plain * (1 - ramp), float(attention)
