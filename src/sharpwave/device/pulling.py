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
    POWERS: tl.constexpr,
    STACKS: tl.constexpr,
    SPILLS: tl.constexpr,
    NEXTS: tl.constexpr,
    NOWS: tl.constexpr,
    LATER: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """``places``: for each field the numbers of its rows, ``STACKS`` a position, of which the last ``DEPTHS`` are its
    frames (``POWERS``: up to a power of two). A negative one: the value is in ``spills``, at the same place as in the
    batch. The frames before a stored next observation stand at ``OLDER``. A piece is ROWS rows, or one of PARTS parts
    of a large one. ``made``: what the host worked out, so many words of 8 bytes, copied as it is.

    A stack and the next one share frames: the next has them LATER places earlier. They cross the bus once. NEXTS: for
    each field the one with its next stack, or -1; NOWS: the other way round."""
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
            source = _source(rows, places[k], spills[k], i, frame, inside, STRIDE, OFFSETS[k], OLDER[k],
                             COUNTS[k] * WIDTHS[k], DEPTHS[k], STACKS[k], SPILLS[k])  # fmt: skip
            target = outs[k] + (i * DEPTHS[k] + frame) * (COUNTS[k] * WIDTHS[k])
            second = target
            also = inside
            if NEXTS[k] >= 0:
                later = frame - LATER
                also = inside & (later >= 0)
                other = _source(rows, places[NEXTS[k]], spills[NEXTS[k]], i, later, also, STRIDE, OFFSETS[NEXTS[k]],
                                OLDER[NEXTS[k]], COUNTS[k] * WIDTHS[k], DEPTHS[k], STACKS[NEXTS[k]],
                                SPILLS[NEXTS[k]])  # fmt: skip
                also = also & (other == source)
                second = outs[NEXTS[k]] + (i * DEPTHS[k] + later) * (COUNTS[k] * WIDTHS[k])
            if NOWS[k] >= 0:
                earlier = frame + LATER
                known = inside & (earlier < DEPTHS[k])
                other = _source(rows, places[NOWS[k]], spills[NOWS[k]], i, earlier, known, STRIDE, OFFSETS[NOWS[k]],
                                OLDER[NOWS[k]], COUNTS[k] * WIDTHS[k], DEPTHS[k], STACKS[NOWS[k]],
                                SPILLS[NOWS[k]])  # fmt: skip
                inside = inside & ~(known & (other == source))
            if SHIFTS[k] > 0:
                copy_shifted(source, target, inside, turn, COUNTS[k], SHIFTS[k], ALIGNS[k], WIDES[k], PARTS, second,
                             also, NEXTS[k] >= 0)  # fmt: skip
            else:
                copy_value(source, target, inside, turn, COUNTS[k], WIDTHS[k], ALIGNS[k], WIDES[k], PARTS, second, also,
                           NEXTS[k] >= 0)  # fmt: skip


@triton.jit
def _source(rows, places, spill, i, frame, inside, STRIDE: tl.constexpr, OFFSET: tl.constexpr, OLDER: tl.constexpr,
            SIZE: tl.constexpr, DEPTH: tl.constexpr, STACK: tl.constexpr, SPILLS: tl.constexpr):  # fmt: skip
    """Where frames are."""
    row = tl.load(places.to(tl.pointer_type(tl.int64)) + i * STACK + (STACK - DEPTH + frame), inside, other=0)
    source = rows + row * STRIDE + tl.where(frame == DEPTH - 1, OFFSET, OLDER)
    if SPILLS:
        source = tl.where(row < 0, spill + (i * DEPTH + frame) * SIZE, source)
    return source
