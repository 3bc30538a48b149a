"""Random numbers in kernels: those of core/base/random.h, so that the host and a GPU draw the same ones."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["below", "stream_key", "unit"]

_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_CALL_STEP = tl.constexpr(0xD1342543DE82EF95)


@triton.jit
def mix64(z):
    """Finaliser of SplitMix64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def stream_key(seed, call):
    return mix64(mix64(seed.to(tl.uint64) + _STEP) ^ (call.to(tl.uint64) * _CALL_STEP))


@triton.jit
def bits(key, i, attempt):
    return mix64(key + ((attempt.to(tl.uint64) << 40) + i.to(tl.uint64) + 1) * _STEP)


@triton.jit
def below(key, most, i, attempt):
    """Uniform over [0, most), exactly."""
    word = bits(key, i, attempt)
    span = tl.zeros_like(word) + most.to(tl.uint64)
    low = word * span
    least = (tl.zeros_like(span) - span) % tl.maximum(span, 1)
    wrong = low < least
    while tl.sum(wrong.to(tl.int32), axis=0) > 0:
        word = tl.where(wrong, mix64(word + _STEP), word)
        low = word * span
        wrong = low < least
    return tl.umulhi(word, span).to(tl.int64)


@triton.jit
def unit(key, i, attempt):
    """Uniform over [0, 1), with 53 bits."""
    return (bits(key, i, attempt) >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)
