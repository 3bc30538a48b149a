"""A kernel that reads rows from host memory: all fields of a batch in one launch.

A few programs with many loads each keep the bus busy. More programs would take processors from the training that runs
on the GPU at the same time. So each program copies several pieces, one after the other, each with many loads at once.
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
    zeros,
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
    MARKS: tl.constexpr,
    ZEROS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``places``: for each field the numbers of its rows, ``STACKS`` per position; the last ``DEPTHS`` of them are its
    frames (``POWERS``: rounded up to a power of two). Where a number is -1, the value is in ``spills``, at the same
    position as in the batch. The frames before a stored next observation are at ``OLDER``. Numbers below -1, in the
    fields with ``MARKS``, are frames of padding (see ``Places`` in core/views/view_config.h): with ``ZEROS`` they are
    read from ``zeros``, which has as many bytes as the longest frame. A piece is ROWS rows,
    or one of PARTS parts of a large row. ``made``: arrays that the host computed, ``words`` words of 8 bytes, copied
    unchanged. Frames that two stacks share cross the bus once: the second read hits the GPU's cache."""
    column = tl.arange(0, 512)
    for first in range(tl.program_id(0) * 512, words, tl.num_programs(0) * 512):
        there = first + column < words
        word = tl.load(made.to(tl.pointer_type(tl.int64)) + first + column, there)
        tl.store(to.to(tl.pointer_type(tl.int64)) + first + column, word, there)
    pieces = tl.cdiv(n, ROWS) * PARTS
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        part = piece % PARTS
        for k in tl.static_range(len(COUNTS)):
            turn = (part + k) % PARTS  # a small field is copied by one part: another part for each field
            item = tl.arange(0, ROWS * POWERS[k]).to(tl.int64)
            i = item // POWERS[k] + piece // PARTS * ROWS
            frame = item % POWERS[k]
            inside = (i < n) & (frame < DEPTHS[k])
            row = tl.load(places[k].to(tl.pointer_type(tl.int64)) + i * STACKS[k] + (STACKS[k] - DEPTHS[k] + frame),
                          inside, other=0)  # fmt: skip
            is_newest = frame == DEPTHS[k] - 1
            is_padding = row < -1
            if MARKS[k]:
                code = -2 - row
                is_newest = is_newest | (is_padding & (code % 2 == 1))
                row = tl.where(is_padding, code // 2, row)
            source = rows + row * STRIDE + tl.where(is_newest, OFFSETS[k], OLDER[k])
            where = (i * DEPTHS[k] + frame) * (COUNTS[k] * WIDTHS[k])
            if SPILLS[k]:
                source = tl.where(row < 0, spills[k] + where, source)
            if ZEROS[k]:
                source = tl.where(is_padding, zeros + SHIFTS[k], source)
            if SHIFTS[k] > 0:
                copy_shifted(source, outs[k] + where, inside, turn, COUNTS[k], SHIFTS[k], ALIGNS[k], WIDES[k], PARTS)
            else:
                copy_value(source, outs[k] + where, inside, turn, COUNTS[k], WIDTHS[k], ALIGNS[k], WIDES[k], PARTS)
