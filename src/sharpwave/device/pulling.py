"""A kernel that reads rows out of the host's memory: every field from the row it stands in, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from .copying import copy_value

__all__ = ["pull"]


@triton.jit(do_not_specialize=["n"])
def pull(
    rows,
    places,
    spills,
    outs,
    n,
    STRIDE: tl.constexpr,
    OFFSETS: tl.constexpr,
    OLDER: tl.constexpr,
    COUNTS: tl.constexpr,
    WIDTHS: tl.constexpr,
    ALIGNS: tl.constexpr,
    WIDES: tl.constexpr,
    DEPTHS: tl.constexpr,
    STACKS: tl.constexpr,
    SPILLS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``places``: for each field the numbers of its rows, ``STACKS`` a position, of which the last ``DEPTHS`` are its
    frames. A negative one: the value is in ``spills``, at the same place as in the batch. The frames before a stored
    next observation stand at ``OLDER``."""
    part = tl.program_id(1)
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = i < n
    for k in tl.static_range(len(COUNTS)):
        size: tl.constexpr = COUNTS[k] * WIDTHS[k]
        numbers = places[k].to(tl.pointer_type(tl.int64))
        for frame in tl.static_range(DEPTHS[k]):
            row = tl.load(numbers + i * STACKS[k] + (STACKS[k] - DEPTHS[k] + frame), inside, other=0)
            at: tl.constexpr = OFFSETS[k] if frame == DEPTHS[k] - 1 else OLDER[k]
            source = rows + row * STRIDE + at
            where = (i * DEPTHS[k] + frame) * size
            if SPILLS[k]:
                source = tl.where(row < 0, spills[k] + where, source)
            copy_value(source, outs[k] + where, inside, part, COUNTS[k], WIDTHS[k], ALIGNS[k], WIDES[k], PARTS)
