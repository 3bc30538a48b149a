"""Kernels that give rows new values of some fields, by serial."""

from __future__ import annotations

import triton
import triton.language as tl

from .state import APPLYING, UPDATES, is_last
from .tree import last_call, slots_of
from .value_copy import copy_value

__all__ = ["mark_rows", "put"]


@triton.jit(do_not_specialize=["n"])
def mark_rows(numbers, flags, winners, serials, n, CAPACITY: tl.constexpr, SPAN: tl.constexpr, ITEMS: tl.constexpr):
    """Where a serial comes twice the last one holds: it is found by an atomic maximum."""
    state = numbers.to(tl.pointer_type(tl.int64))
    i = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    slot = slots_of(serials, state, n, i, CAPACITY, SPAN, flags, True)
    tl.atomic_max(winners.to(tl.pointer_type(tl.int64)) + slot, last_call(state, i), slot >= 0)


@triton.jit(do_not_specialize=["n"])
def put(
    rows,
    flags,
    numbers,
    winners,
    serials,
    counts,
    sources,
    n,
    CAPACITY: tl.constexpr,
    SPAN: tl.constexpr,
    STRIDE: tl.constexpr,
    OFFSETS: tl.constexpr,
    COUNTS: tl.constexpr,
    WIDTHS: tl.constexpr,
    ALIGNS: tl.constexpr,
    WIDES: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """After mark_rows(): copies the values of the fields into the rows. ``counts``: serials that named a row, and
    serials that did not; -1 names none and is not counted."""
    state = numbers.to(tl.pointer_type(tl.int64))
    tell = counts.to(tl.pointer_type(tl.int64))
    part = tl.program_id(1)
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    slot = slots_of(serials, state, n, i, CAPACITY, SPAN, flags, True)
    there = slot >= 0
    won = tl.load(winners.to(tl.pointer_type(tl.int64)) + slot, there, other=0)
    holds = there & (won == last_call(state, i))
    for k in tl.static_range(len(COUNTS)):
        source = sources[k] + i * (COUNTS[k] * WIDTHS[k])
        target = rows + slot * STRIDE + OFFSETS[k]
        copy_value(source, target, holds, part, COUNTS[k], WIDTHS[k], ALIGNS[k], WIDES[k], PARTS)
    if part == 0:
        serial = tl.load(serials.to(tl.pointer_type(tl.int64)) + i, i < n, other=-1)
        tl.atomic_add(state + APPLYING, tl.sum(there.to(tl.int64), axis=0))
        tl.atomic_add(tell + 1, tl.sum(((serial != -1) & ~there).to(tl.int64), axis=0))
    if is_last(state):
        tl.store(tell, tl.load(state + APPLYING, volatile=True))
        tl.store(state + APPLYING, 0)
        tl.store(state + UPDATES, tl.load(state + UPDATES) + 1)
