"""The copy of values inside a kernel.

Kernels take addresses as plain numbers, not as tensors: fields of different dtypes lie in one block of memory, and host
memory that a GPU may read has no tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["copy_shifted", "copy_value"]


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
    """Copies COUNT units of WIDTH bytes from each source address to its target, WIDE units at a time. A value of more
    than WIDE units is divided among PARTS programs."""
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
    """Copies COUNT words of 4 bytes from source addresses that are all a multiple of 4 plus SHIFT. It reads the aligned
    words around them and shifts: reading single bytes would use a quarter of the bus."""
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
