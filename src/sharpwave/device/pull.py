"""A kernel that reads rows out of the host's memory: every field from the row it stands in, in one launch.

A bus is kept busy by few programs with many loads each; more would only take the processors from whoever is learning
meanwhile. So a program goes from piece to piece, and asks for a large one at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .value_copy import copy_shifted, copy_value

__all__ = ["pull"]


@triton.jit(do_not_specialize=["n", "words"])
def pull(
    rows,
    places,
    spills,
    outs,
    made,
    to,
    words,
    n,
    STRIDE: tl.constexpr,
    OFFSETS: tl.constexpr,
    OLDER: tl.constexpr,
    COUNTS: tl.constexpr,
    WIDTHS: tl.constexpr,
    ALIGNS: tl.constexpr,
    SHIFTS: tl.constexpr,
    WIDES: tl.constexpr,
    DEPTHS: tl.constexpr,
    POWERS: tl.constexpr,
    STACKS: tl.constexpr,
    SPILLS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``places``: for each field the numbers of its rows, ``STACKS`` a position, of which the last ``DEPTHS`` are its
    frames (``POWERS``: up to a power of two). A negative one: the value is in ``spills``, at the same place as in the
    batch. The frames before a stored next observation stand at ``OLDER``. A piece is ROWS rows, or one of PARTS parts
    of a large one. ``made``: what the host worked out, so many words of 8 bytes, copied as it is.
    Frames that a stack and the next one share cross the bus once by themselves: the GPU's cache has them."""
    column = tl.arange(0, 512)
    for first in range(tl.program_id(0) * 512, words, tl.num_programs(0) * 512):
        there = first + column < words
        word = tl.load(made.to(tl.pointer_type(tl.int64)) + first + column, there)
        tl.store(to.to(tl.pointer_type(tl.int64)) + first + column, word, there)
    pieces = tl.cdiv(n, ROWS) * PARTS
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        part = piece % PARTS
        for k in tl.static_range(len(COUNTS)):
            turn = (part + k) % PARTS  # small fields are the first part's: each another's
            item = tl.arange(0, ROWS * POWERS[k]).to(tl.int64)
            i = item // POWERS[k] + piece // PARTS * ROWS
            frame = item % POWERS[k]
            inside = (i < n) & (frame < DEPTHS[k])
            row = tl.load(places[k].to(tl.pointer_type(tl.int64)) + i * STACKS[k] + (STACKS[k] - DEPTHS[k] + frame),
                          inside, other=0)  # fmt: skip
            source = rows + row * STRIDE + tl.where(frame == DEPTHS[k] - 1, OFFSETS[k], OLDER[k])
            where = (i * DEPTHS[k] + frame) * (COUNTS[k] * WIDTHS[k])
            if SPILLS[k]:
                source = tl.where(row < 0, spills[k] + where, source)
            if SHIFTS[k] > 0:
                copy_shifted(source, outs[k] + where, inside, turn, COUNTS[k], SHIFTS[k], ALIGNS[k], WIDES[k], PARTS)
            else:
                copy_value(source, outs[k] + where, inside, turn, COUNTS[k], WIDTHS[k], ALIGNS[k], WIDES[k], PARTS)
