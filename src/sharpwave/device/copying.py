"""What every kernel that moves rows shares: random numbers, addresses, and the copy of a value.

Kernels take addresses as plain numbers: a table's memory is the same for all fields, whatever their dtypes, and memory
of the host that a GPU may read has no tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["below", "copy_shifted", "copy_value", "stream_key", "unit"]

_STEP = tl.constexpr(0x9E3779B97F4A7C15)
_CALL_STEP = tl.constexpr(0xD1342543DE82EF95)


@triton.jit
def mix64(z):
    """Finaliser of SplitMix64, as core/base/random.h has it: the same numbers on the host and here."""
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
    """In [0, 1), with 53 bits."""
    return (bits(key, i, attempt) >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def pointer(address, WIDTH: tl.constexpr):
    if WIDTH == 8:
        return address.to(tl.pointer_type(tl.int64))
    elif WIDTH == 4:
        return address.to(tl.pointer_type(tl.int32))
    elif WIDTH == 2:
        return address.to(tl.pointer_type(tl.int16))
    else:
        return address.to(tl.pointer_type(tl.int8))


@triton.jit
def copy_value(
    source,
    target,
    inside,
    part,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """COUNT units of WIDTH bytes from each address to each. WIDE of them at a time; a value of more is shared among
    PARTS programs."""
    column = tl.arange(0, WIDE)
    from_ = tl.multiple_of(pointer(source, WIDTH), ALIGN)
    to = tl.multiple_of(pointer(target, WIDTH), ALIGN)
    if COUNT <= WIDE:
        if part == 0:
            there = inside[:, None] & (column < COUNT)[None, :]
            at = from_[:, None] + column[None, :]
            tl.store(to[:, None] + column[None, :], tl.load(at, there), there)
    else:
        for first in range(part * WIDE, COUNT, PARTS * WIDE):
            there = inside[:, None] & (first + column < COUNT)[None, :]
            at = from_[:, None] + (first + column)[None, :]
            tl.store(to[:, None] + (first + column)[None, :], tl.load(at, there), there)


@triton.jit
def copy_shifted(
    source,
    target,
    inside,
    part,
    COUNT: tl.constexpr,
    SHIFT: tl.constexpr,
    ALIGN: tl.constexpr,
    WIDE: tl.constexpr,
    PARTS: tl.constexpr,
):
    """COUNT words of 4 bytes from addresses that all lie SHIFT bytes behind a multiple of 4: read as the words that
    they lie across. A byte at a time a bus would carry a quarter of what it can."""
    column = tl.arange(0, WIDE)
    from_ = tl.multiple_of(pointer(source - SHIFT, 4), ALIGN)
    to = tl.multiple_of(pointer(target, 4), 16 if COUNT % 4 == 0 else 4)
    for first in range(part * WIDE, COUNT, PARTS * WIDE):
        there = inside[:, None] & (first + column < COUNT)[None, :]
        at = from_[:, None] + (first + column)[None, :]
        low = tl.load(at, there).to(tl.uint32, bitcast=True)
        high = tl.load(at + 1, there).to(tl.uint32, bitcast=True)
        word = (low >> (8 * SHIFT)) | (high << (32 - 8 * SHIFT))
        tl.store(to[:, None] + (first + column)[None, :], word.to(tl.int32, bitcast=True), there)
