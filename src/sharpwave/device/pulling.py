"""A kernel that reads rows out of the host's memory: every field from the row it stands in, in one launch.

A bus is kept busy by few programs with many loads each; more would only take the processors from whoever is learning
meanwhile. So a program goes from piece to piece, and asks for a large one at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .copying import copy_shifted, copy_value

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
    STACKS: tl.constexpr,
    SPILLS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``places``: for each field the numbers of its rows, ``STACKS`` a position, of which the last ``DEPTHS`` are its
    frames. A negative one: the value is in ``spills``, at the same place as in the batch. The frames before a stored
    next observation stand at ``OLDER``. A piece is ROWS rows, or one of PARTS parts of a large one. ``made``: what the
    host worked out, so many words of 8 bytes, copied as it is."""
    column = tl.arange(0, 512)
    for first in range(tl.program_id(0) * 512, words, tl.num_programs(0) * 512):
        there = first + column < words
        word = tl.load(made.to(tl.pointer_type(tl.int64)) + first + column, there)
        tl.store(to.to(tl.pointer_type(tl.int64)) + first + column, word, there)
    pieces = tl.cdiv(n, ROWS) * PARTS
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        part = piece % PARTS
        i = tl.arange(0, ROWS).to(tl.int64) + piece // PARTS * ROWS
        inside = i < n
        for k in tl.static_range(len(COUNTS)):
            turn = (part + k) % PARTS  # small fields are the first part's: each another's
            _field(rows, places[k], spills[k], outs[k], i, inside, turn, STRIDE, OFFSETS[k], OLDER[k], COUNTS[k],
                   WIDTHS[k], ALIGNS[k], SHIFTS[k], WIDES[k], DEPTHS[k], STACKS[k], SPILLS[k], PARTS)  # fmt: skip


@triton.jit
def _field(rows, places, spill, out, i, inside, part, STRIDE: tl.constexpr, OFFSET: tl.constexpr, OLDER: tl.constexpr,
           COUNT: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr, SHIFT: tl.constexpr, WIDE: tl.constexpr,
           DEPTH: tl.constexpr, STACK: tl.constexpr, SPILLS: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    for frame in tl.static_range(DEPTH):
        row = tl.load(places.to(tl.pointer_type(tl.int64)) + i * STACK + (STACK - DEPTH + frame), inside, other=0)
        source = rows + row * STRIDE + (OFFSET if frame == DEPTH - 1 else OLDER)
        where = (i * DEPTH + frame) * (COUNT * WIDTH)
        if SPILLS:
            source = tl.where(row < 0, spill + where, source)
        if SHIFT > 0:
            copy_shifted(source, out + where, inside, part, COUNT, SHIFT, ALIGN, WIDE, PARTS)
        else:
            copy_value(source, out + where, inside, part, COUNT, WIDTH, ALIGN, WIDE, PARTS)
