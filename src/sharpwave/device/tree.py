"""Kernels of the priorities: a tree of sums with 32 children per node.

A parent is always computed from its children and never incremented, so rounding errors do not build up. Each child also
stores the sum of itself and the children before it: a draw finds its child by binary search, with a few reads per node
and no communication between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .state import (
    ALPHA,
    APPLIED,
    APPLYING,
    EPS,
    HEAD,
    IS_LIVE,
    NOT_FINITE,
    ORIGIN,
    REFUSED,
    RUNNING_MAX,
    STALE,
    UPDATES,
    is_last,
)

__all__ = ["apply", "descend", "enter", "last_call", "mark", "refresh", "remass", "slots_of"]

_INFINITE = tl.constexpr(float("inf"))


@triton.jit
def _mass(priority, real):
    base = priority.to(tl.float64) + tl.load(real + EPS)
    alpha = base * 0 + tl.load(real + ALPHA)
    power = tl.exp(alpha * tl.log(tl.where(base > 0, base, 1.0)))
    return tl.where((base > 0) | (alpha == 0), power, 0.0).to(tl.float32)


@triton.jit
def _refresh(leaves, nodes, node, inside, PADDED: tl.constexpr, TOTAL: tl.constexpr, ABOVE: tl.constexpr,
             BELOW: tl.constexpr, KEEPS_ZERO: tl.constexpr):  # fmt: skip
    """Computes nodes from their children, which begin at BELOW; -1: the children are leaves."""
    prior = leaves.to(tl.pointer_type(tl.float32))
    mass = prior + PADDED
    sums = nodes.to(tl.pointer_type(tl.float64))
    largest = (nodes + TOTAL * 8).to(tl.pointer_type(tl.float32))
    least = largest + TOTAL
    upto = _upto(nodes, TOTAL)
    at = node[:, None] * 32 + tl.arange(0, 32)[None, :]
    there = inside[:, None] & (at >= 0)
    if BELOW < 0:
        p = tl.load(prior + at, there, other=-1.0)
        m = tl.load(mass + at, there, other=0.0)
        counts = p >= 0
        if not KEEPS_ZERO:
            counts = m > 0
        part = m.to(tl.float64)
        high = tl.max(p, axis=1)
        low = tl.min(tl.where(counts, m, _INFINITE), axis=1)
        tl.store(upto + TOTAL + at, tl.cumsum(part, axis=1), there)
    else:
        part = tl.load(sums + BELOW + at, there, other=0.0)
        high = tl.max(tl.load(largest + BELOW + at, there, other=-1.0), axis=1)
        low = tl.min(tl.load(least + BELOW + at, there, other=_INFINITE), axis=1)
        tl.store(upto + BELOW + at, tl.cumsum(part, axis=1), there)
    tl.store(sums + ABOVE + node, tl.sum(part, axis=1), inside)
    tl.store(largest + ABOVE + node, high, inside)
    tl.store(least + ABOVE + node, low, inside)


@triton.jit
def _upto(nodes, TOTAL: tl.constexpr):
    """The sums of each child and the children before it: of nodes, then of leaves."""
    return (nodes + TOTAL * 16).to(tl.pointer_type(tl.float64))


@triton.jit
def _newest_nodes(state, n, j, CAPACITY: tl.constexpr, DIVISOR: tl.constexpr):
    """The nodes of DIVISOR rows each above the newest n rows, and which of them exist; j counts to n // DIVISOR + 3.
    The last node of the ring may have fewer rows, and a step of DIVISOR rows could skip it: it is listed separately."""
    start = (tl.load(state + HEAD) - n) % CAPACITY
    steps = n // DIVISOR
    row = tl.where(j <= steps, tl.minimum(j * DIVISOR, n - 1), tl.where(j == steps + 1, n - 1, CAPACITY - 1 - start))
    return (start + row) % CAPACITY // DIVISOR, (j < steps + 3) & (row < n)


@triton.jit
def slots_of(serials, state, n, i, CAPACITY: tl.constexpr, SPAN: tl.constexpr, flags, BY_SERIAL: tl.constexpr):
    """The slots of a call's rows: the newest n, or those of ``serials``; -1 where there is no such row."""
    head = tl.load(state + HEAD)
    inside = i < n
    if BY_SERIAL:
        serial = tl.load(serials.to(tl.pointer_type(tl.int64)) + i, inside, other=-1)
        slot = serial % SPAN
        t = serial // SPAN * CAPACITY + slot
        there = inside & (serial >= 0) & (slot < CAPACITY) & (t < head) & (t >= head - CAPACITY)
        there = there & (t >= tl.load(state + ORIGIN))
        byte = tl.load(flags.to(tl.pointer_type(tl.uint8)) + slot, there, other=0)
        return tl.where(there & ((byte & IS_LIVE) != 0), slot, -1)
    else:
        return tl.where(inside, (head - n + i) % CAPACITY, -1)


@triton.jit(do_not_specialize=["n"])
def refresh(
    leaves,
    nodes,
    numbers,
    flags,
    serials,
    n,
    CAPACITY: tl.constexpr,
    SPAN: tl.constexpr,
    PADDED: tl.constexpr,
    TOTAL: tl.constexpr,
    ABOVE: tl.constexpr,
    BELOW: tl.constexpr,
    DIVISOR: tl.constexpr,
    KEEPS_ZERO: tl.constexpr,
    WHICH: tl.constexpr,
    TOP: tl.constexpr,
    LEVELS: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Computes one level of the tree: the nodes above a call's rows (WHICH 0: the newest n; 1: by serial) or all nodes
    (2). If TOP is not 0, levels from TOP on have at most ITEMS nodes, and the last program computes them too."""
    i = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    state = numbers.to(tl.pointer_type(tl.int64))
    if WHICH == 2:
        node = i
        inside = i < n
    elif WHICH == 1:
        slot = slots_of(serials, state, n, i, CAPACITY, SPAN, flags, True)
        node = slot // DIVISOR
        inside = slot >= 0
    else:
        node, inside = _newest_nodes(state, n, i, CAPACITY, DIVISOR)
    _refresh(leaves, nodes, node, inside, PADDED, TOTAL, ABOVE, BELOW, KEEPS_ZERO)
    if TOP > 0:
        if is_last(state):
            for k in tl.static_range(TOP, len(LEVELS)):
                tl.debug_barrier()
                _refresh_whole(leaves, nodes, k, CAPACITY, PADDED, TOTAL, LEVELS, KEEPS_ZERO, ITEMS)


@triton.jit
def _refresh_whole(leaves, nodes, k: tl.constexpr, CAPACITY: tl.constexpr, PADDED: tl.constexpr, TOTAL: tl.constexpr,
                   LEVELS: tl.constexpr, KEEPS_ZERO: tl.constexpr, ITEMS: tl.constexpr):  # fmt: skip
    """Computes all nodes of a level that has at most ITEMS nodes."""
    node = tl.arange(0, ITEMS).to(tl.int64)
    below_ = LEVELS[k - 1] if k > 0 else -1
    inside = node * 32 ** (k + 1) < CAPACITY
    _refresh(leaves, nodes, node, inside, PADDED, TOTAL, LEVELS[k], below_, KEEPS_ZERO)


@triton.jit
def _refresh_all(leaves, nodes, state, flags, serials, n, CAPACITY: tl.constexpr, SPAN: tl.constexpr,
                 PADDED: tl.constexpr, TOTAL: tl.constexpr, LEVELS: tl.constexpr, KEEPS_ZERO: tl.constexpr,
                 BY_SERIAL: tl.constexpr, ITEMS: tl.constexpr):  # fmt: skip
    """Computes every level above some rows, in one program: after a barrier it can read its own writes."""
    for k in tl.static_range(len(LEVELS)):
        tl.debug_barrier()
        below_ = LEVELS[k - 1] if k > 0 else -1
        if (CAPACITY - 1) // 32 ** (k + 1) + 1 <= ITEMS:  # a small level is computed whole
            _refresh_whole(leaves, nodes, k, CAPACITY, PADDED, TOTAL, LEVELS, KEEPS_ZERO, ITEMS)
        elif BY_SERIAL:
            for first in range(0, n, ITEMS):
                i = first + tl.arange(0, ITEMS).to(tl.int64)
                slot = slots_of(serials, state, n, i, CAPACITY, SPAN, flags, True)
                _refresh(leaves, nodes, slot // 32 ** (k + 1), slot >= 0, PADDED, TOTAL, LEVELS[k], below_, KEEPS_ZERO)
        else:
            for first in range(0, n // 32 ** (k + 1) + 3, ITEMS):
                i = first + tl.arange(0, ITEMS).to(tl.int64)
                node, inside = _newest_nodes(state, n, i, CAPACITY, 32 ** (k + 1))
                _refresh(leaves, nodes, node, inside, PADDED, TOTAL, LEVELS[k], below_, KEEPS_ZERO)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["n"])
def enter(
    leaves,
    nodes,
    numbers,
    reals,
    flags,
    alarms,
    given,
    n,
    CAPACITY: tl.constexpr,
    PADDED: tl.constexpr,
    TOTAL: tl.constexpr,
    LEVELS: tl.constexpr,
    KEEPS_ZERO: tl.constexpr,
    NEW_ROWS: tl.constexpr,
    PRIORITY: tl.constexpr,
    HAS_GIVEN: tl.constexpr,
    PHASE: tl.constexpr,
    NODES: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Sets the priorities of the newest n rows. The overwritten rows are removed first, because the largest priority is
    read after that. PHASE 0: one program does both; 1 and 2: many programs do the removal, then the rest."""
    state = numbers.to(tl.pointer_type(tl.int64))
    real = reals.to(tl.pointer_type(tl.float64))
    prior = leaves.to(tl.pointer_type(tl.float32))
    mass = prior + PADDED
    largest = (nodes + TOTAL * 8).to(tl.pointer_type(tl.float32))
    begin = tl.program_id(0) * ITEMS if PHASE > 0 else 0
    step = tl.num_programs(0) * ITEMS if PHASE > 0 else ITEMS
    if PHASE != 2:
        for first in range(begin, n, step):
            slot = slots_of(0, state, n, first + tl.arange(0, ITEMS).to(tl.int64), CAPACITY, CAPACITY, flags, False)
            tl.store(prior + slot, -1.0, slot >= 0)
            tl.store(mass + slot, 0.0, slot >= 0)
    if PHASE == 0:
        _refresh_all(leaves, nodes, state, flags, 0, n, CAPACITY, CAPACITY, PADDED, TOTAL, LEVELS, KEEPS_ZERO, False,
                     NODES)  # fmt: skip
    if PHASE != 1:
        if NEW_ROWS == 0:
            top = tl.load(largest + LEVELS[len(LEVELS) - 1])
            fallback = tl.where(top >= 0, top, 1.0)
        elif NEW_ROWS == 1:
            fallback = tl.load(real + RUNNING_MAX).to(tl.float32)
        else:
            fallback = tl.full((), PRIORITY, tl.float32)
        for first in range(begin, n, step):
            i = first + tl.arange(0, ITEMS).to(tl.int64)
            slot = slots_of(0, state, n, i, CAPACITY, CAPACITY, flags, False)
            byte = tl.load(flags.to(tl.pointer_type(tl.uint8)) + slot, slot >= 0, other=0)
            is_live = (byte & IS_LIVE) != 0
            priority = tl.zeros((ITEMS,), tl.float32) + fallback
            if HAS_GIVEN:
                value = tl.abs(tl.load(given.to(tl.pointer_type(tl.float32)) + i, is_live, other=0.0))
                is_number = value < _INFINITE
                priority = tl.where(is_number, value, priority)
                if tl.min(is_number.to(tl.int32), axis=0) == 0:
                    tl.store(alarms.to(tl.pointer_type(tl.int64)) + NOT_FINITE, 1)
                tl.atomic_max(real + RUNNING_MAX, tl.max(tl.where(is_live, priority, 0.0), axis=0).to(tl.float64))
            tl.store(prior + slot, priority, is_live)
            tl.store(mass + slot, _mass(priority, real), is_live)
    if PHASE == 0:
        _refresh_all(leaves, nodes, state, flags, 0, n, CAPACITY, CAPACITY, PADDED, TOTAL, LEVELS, KEEPS_ZERO, False,
                     NODES)  # fmt: skip


@triton.jit(do_not_specialize=["n"])
def mark(numbers, flags, winners, serials, priorities, alarms, n, CAPACITY: tl.constexpr, SPAN: tl.constexpr,
         ITEMS: tl.constexpr):  # fmt: skip
    """Where a row is given twice, the last one counts: it is found by an atomic maximum. A priority that is not finite
    makes the call fail."""
    state = numbers.to(tl.pointer_type(tl.int64))
    first = tl.program_id(0).to(tl.int64) * ITEMS
    _mark(state, flags, winners, serials, priorities, alarms, n, first, CAPACITY, SPAN, ITEMS)


@triton.jit
def _mark(state, flags, winners, serials, priorities, alarms, n, first, CAPACITY: tl.constexpr, SPAN: tl.constexpr,
          ITEMS: tl.constexpr):  # fmt: skip
    i = first + tl.arange(0, ITEMS).to(tl.int64)
    value = tl.load(priorities.to(tl.pointer_type(tl.float32)) + i, i < n, other=0.0)
    if tl.max(((value != value) | (tl.abs(value) == _INFINITE)).to(tl.int32), axis=0) > 0:
        tl.atomic_max(state + REFUSED, 1)
        tl.store(alarms.to(tl.pointer_type(tl.int64)) + NOT_FINITE, 1)
    slot = slots_of(serials, state, n, i, CAPACITY, SPAN, flags, True)
    word = last_call(state, i)
    tl.atomic_max(winners.to(tl.pointer_type(tl.int64)) + slot, word, slot >= 0)


@triton.jit
def last_call(state, i):
    """Call and position that gave a row its priority or values. Later calls have larger words, so old ones need no
    reset."""
    return ((tl.load(state + UPDATES) + 1) << 32) + i + 1


@triton.jit(do_not_specialize=["n"])
def apply(
    leaves,
    nodes,
    numbers,
    reals,
    flags,
    winners,
    serials,
    priorities,
    alarms,
    counts,
    n,
    CAPACITY: tl.constexpr,
    SPAN: tl.constexpr,
    PADDED: tl.constexpr,
    TOTAL: tl.constexpr,
    LEVELS: tl.constexpr,
    KEEPS_ZERO: tl.constexpr,
    PHASE: tl.constexpr,
    NODES: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Sets the priorities of rows by serial. PHASE 0: one program does everything; 1: many programs, after mark()."""
    state = numbers.to(tl.pointer_type(tl.int64))
    real = reals.to(tl.pointer_type(tl.float64))
    prior = leaves.to(tl.pointer_type(tl.float32))
    winner = winners.to(tl.pointer_type(tl.int64))
    begin = tl.program_id(0) * ITEMS if PHASE > 0 else 0
    step = tl.num_programs(0) * ITEMS if PHASE > 0 else ITEMS
    if PHASE == 0:
        for first in range(0, n, ITEMS):
            _mark(state, flags, winners, serials, priorities, alarms, n, first, CAPACITY, SPAN, ITEMS)
        tl.debug_barrier()
    is_refused = tl.load(state + REFUSED, volatile=True) != 0
    applied = tl.full((), 0, tl.int64)
    for first in range(begin, n, step):
        i = first + tl.arange(0, ITEMS).to(tl.int64)
        slot = slots_of(serials, state, n, i, CAPACITY, SPAN, flags, True)
        there = slot >= 0
        value = tl.abs(tl.load(priorities.to(tl.pointer_type(tl.float32)) + i, there, other=0.0))
        holds = there & (tl.load(winner + slot, there, other=0, volatile=True) == last_call(state, i))
        if not is_refused:
            tl.store(prior + slot, value, holds)
            tl.store(prior + PADDED + slot, _mass(value, real), holds)
            tl.atomic_max(real + RUNNING_MAX, tl.max(tl.where(there, value, 0.0), axis=0).to(tl.float64))
            applied += tl.sum(there.to(tl.int64), axis=0)
    if PHASE == 0:
        tl.debug_barrier()  # every thread has read which call this is
        _settle(state, counts, n, applied, is_refused)
        _refresh_all(leaves, nodes, state, flags, serials, n, CAPACITY, SPAN, PADDED, TOTAL, LEVELS, KEEPS_ZERO, True,
                     NODES)  # fmt: skip
    else:
        tl.atomic_add(state + APPLYING, applied)
        if is_last(state):
            applied = tl.load(state + APPLYING, volatile=True)
            tl.store(state + APPLYING, 0)
            _settle(state, counts, n, applied, is_refused)


@triton.jit
def _settle(state, counts, n, applied, is_refused):
    """Writes the result and the counters of an update."""
    tell = counts.to(tl.pointer_type(tl.int64))
    stale = tl.where(is_refused, 0, n - applied)
    tl.store(tell, applied)
    tl.store(tell + 1, stale)
    tl.store(state + APPLIED, tl.load(state + APPLIED) + applied)
    tl.store(state + STALE, tl.load(state + STALE) + stale)
    tl.store(state + UPDATES, tl.load(state + UPDATES) + 1)
    tl.store(state + REFUSED, 0)


@triton.jit(do_not_specialize=["n"])
def remass(leaves, reals, n, PADDED: tl.constexpr, ITEMS: tl.constexpr):
    """Computes all masses for a new alpha."""
    i = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    prior = leaves.to(tl.pointer_type(tl.float32))
    priority = tl.load(prior + i, i < n, other=-1.0)
    mass = _mass(priority, reals.to(tl.pointer_type(tl.float64)))
    tl.store(prior + PADDED + i, tl.where(priority >= 0, mass, 0.0), i < n)


@triton.jit
def _child(upto, x, node, NODES: tl.constexpr):
    """The child that a target falls into, the first whose sum is above it, and the target's offset in that child."""
    at = upto + node * 32
    end = tl.load(at + 31)
    x = tl.minimum(x, end - end * (1.0 / 9007199254740992.0))  # by rounding, x may be past the end
    passed = node * 0
    for k in tl.static_range(5):
        passed += tl.where(tl.load(at + passed + ((16 >> k) - 1)) <= x, 16 >> k, 0)
    passed = tl.where(end > 0, passed, 0)
    before = tl.load(at + passed - 1, passed > 0, other=0.0)
    return tl.minimum(node * 32 + passed, NODES - 1), tl.maximum(x - before, 0.0)


@triton.jit
def descend(nodes, x, TOTAL: tl.constexpr, LEVELS: tl.constexpr, CAPACITY: tl.constexpr):
    """The row that a target falls into."""
    upto = _upto(nodes, TOTAL)
    slot = tl.zeros_like(x).to(tl.int64)
    for k in tl.static_range(len(LEVELS) - 1, 0, -1):
        slot, x = _child(upto + LEVELS[k - 1], x, slot, (CAPACITY - 1) // 32**k + 1)
    slot, x = _child(upto + TOTAL, x, slot, CAPACITY)
    return slot
