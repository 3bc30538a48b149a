"""The kernels of a table on a GPU. Everything that changes is on the device: a launch waits for nothing, and a captured
graph goes on from where the last replay ended.

A row is a run of bytes, as in the engine; beside it a flag byte. Priorities stand under a tree of sums with 32 children
a node. Parents are computed anew from their children and never added to, so no error builds up. Beside the sums stands
for each child what it and those before it come to: a draw finds its way by halving, in a few reads a node, without a
word from another thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .copying import below, copy_value, stream_key, unit

__all__ = [
    "ALARMS",
    "NUMBERS",
    "REALS",
    "apply",
    "draw",
    "enter",
    "mark",
    "refresh",
    "remass",
    "weigh",
    "write",
]

# Places in a table's whole numbers.
NUMBERS = (
    "head",  # rows ever written, with those that were masked out
    "origin",  # rows before it were cleared; a multiple of the capacity
    "live",
    "calls",
    "sampled",
    "redraws",
    "added",
    "voided",
    "episodes",
    "applied",
    "stale",
    "programs",  # of the launch that is under way, those that are done
    "least",  # and the smallest probability they met: the bits of a double
    "seed",
    "refused",  # whether the update that is under way has a number that is none
    "applying",  # what its programs have applied so far
    "updates",
)
HEAD = tl.constexpr(0)
ORIGIN = tl.constexpr(1)
LIVE = tl.constexpr(2)
CALLS = tl.constexpr(3)
SAMPLED = tl.constexpr(4)
REDRAWS = tl.constexpr(5)
ADDED = tl.constexpr(6)
VOIDED = tl.constexpr(7)
EPISODES = tl.constexpr(8)
APPLIED = tl.constexpr(9)
STALE = tl.constexpr(10)
PROGRAMS = tl.constexpr(11)
LEAST = tl.constexpr(12)
SEED = tl.constexpr(13)
REFUSED = tl.constexpr(14)
APPLYING = tl.constexpr(15)
UPDATES = tl.constexpr(16)

REALS = ("alpha", "beta_start", "beta_end", "beta_steps", "running_max", "eps", "mix", "reference", "beta")
ALPHA = tl.constexpr(0)
BETA_START = tl.constexpr(1)
BETA_END = tl.constexpr(2)
BETA_STEPS = tl.constexpr(3)
RUNNING_MAX = tl.constexpr(4)
EPS = tl.constexpr(5)
MIX = tl.constexpr(6)
REFERENCE = tl.constexpr(7)  # of the last draw: the probability whose weight is 1 ...
BETA = tl.constexpr(8)  # ... and the exponent

# What a kernel tells the host without being waited for: words of the host's memory.
ALARMS = ("empty", "not_finite")
EMPTY = tl.constexpr(0)
NOT_FINITE = tl.constexpr(1)

# Bits of a row's flag byte.
IS_LIVE = tl.constexpr(1)
ENDS = tl.constexpr(2)
TRUNCATED = tl.constexpr(4)
STOPS = tl.constexpr(8)  # the row after it is another stream's

_INFINITE = tl.constexpr(float("inf"))
_NO_PROBABILITY = tl.constexpr(0x7FF0000000000000)  # bits of infinity
_BLIND = tl.constexpr(1000)
_COIN = tl.constexpr(1 << 20)
_UNIFORM = tl.constexpr(1 << 21)


@triton.jit
def _is_last(state):
    """Whether all other programs of the launch are done: what they wrote can be read, and what they read can be
    changed. The barrier makes it true of every thread: one alone does the counting."""
    tl.debug_barrier()
    is_last = tl.atomic_add(state + PROGRAMS, 1) == tl.num_programs(0) * tl.num_programs(1) - 1
    if is_last:
        tl.store(state + PROGRAMS, 0)
    return is_last


# ---- rows ------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n"])
def write(
    rows,
    flags,
    numbers,
    sources,
    ends,
    truncated,
    mask,
    n,
    CAPACITY: tl.constexpr,
    STRIDE: tl.constexpr,
    OFFSETS: tl.constexpr,
    COUNTS: tl.constexpr,
    WIDTHS: tl.constexpr,
    ALIGNS: tl.constexpr,
    WIDES: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    HAS_TRUNCATED: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Puts n rows behind the newest."""
    state = numbers.to(tl.pointer_type(tl.int64))
    head = tl.load(state + HEAD)
    part = tl.program_id(1)
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = r < n
    slot = (head + r) % CAPACITY
    for k in tl.static_range(len(COUNTS)):
        source = sources[k] + r * (COUNTS[k] * WIDTHS[k])
        target = rows + slot * STRIDE + OFFSETS[k]
        copy_value(source, target, inside, part, COUNTS[k], WIDTHS[k], ALIGNS[k], WIDES[k], PARTS)
    if part == 0:
        at = flags.to(tl.pointer_type(tl.uint8)) + slot
        was_live = (tl.load(at, inside, other=0) & IS_LIVE) != 0
        is_live = inside
        if HAS_MASK:
            is_live = inside & (tl.load(mask.to(tl.pointer_type(tl.uint8)) + r, inside, other=0) != 0)
        is_end = is_live & False
        is_cut = is_end
        if HAS_ENDS:
            is_end = is_live & (tl.load(ends.to(tl.pointer_type(tl.uint8)) + r, inside, other=0) != 0)
        if HAS_TRUNCATED:
            is_cut = is_live & (tl.load(truncated.to(tl.pointer_type(tl.uint8)) + r, inside, other=0) != 0)
        is_end = is_end | is_cut
        byte = is_live.to(tl.uint8) * IS_LIVE + is_end.to(tl.uint8) * ENDS + is_cut.to(tl.uint8) * TRUNCATED
        tl.store(at, byte, inside)
        gained = tl.sum(is_live.to(tl.int64), axis=0)
        tl.atomic_add(state + LIVE, gained - tl.sum((inside & was_live).to(tl.int64), axis=0))
        tl.atomic_add(state + ADDED, gained)
        if HAS_MASK:
            tl.atomic_add(state + VOIDED, tl.sum((inside & ~is_live).to(tl.int64), axis=0))
        if HAS_ENDS or HAS_TRUNCATED:
            tl.atomic_add(state + EPISODES, tl.sum(is_end.to(tl.int64), axis=0))
    if _is_last(state):
        tl.store(state + HEAD, head + n)


# ---- the index -------------------------------------------------------------------------------------------------------


@triton.jit
def _mass(priority, real):
    base = priority.to(tl.float64) + tl.load(real + EPS)
    alpha = base * 0 + tl.load(real + ALPHA)
    power = tl.exp(alpha * tl.log(tl.where(base > 0, base, 1.0)))
    return tl.where((base > 0) | (alpha == 0), power, 0.0).to(tl.float32)


@triton.jit
def _refresh(leaves, nodes, node, inside, PADDED: tl.constexpr, TOTAL: tl.constexpr, ABOVE: tl.constexpr,
             BELOW: tl.constexpr, KEEPS_ZERO: tl.constexpr):  # fmt: skip
    """Nodes anew from their children, which stand from BELOW on; -1: these are leaves."""
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
    """What children come to with those before them: of nodes, then of leaves."""
    return (nodes + TOTAL * 16).to(tl.pointer_type(tl.float64))


@triton.jit
def _newest_nodes(state, n, j, CAPACITY: tl.constexpr, DIVISOR: tl.constexpr):
    """The nodes of DIVISOR rows above the newest n, and which are there: j counts to n // DIVISOR + 3. The ring's last
    node may hold fewer rows than others, so that a step leads past it: it has a place of its own."""
    start = (tl.load(state + HEAD) - n) % CAPACITY
    steps = n // DIVISOR
    row = tl.where(j <= steps, tl.minimum(j * DIVISOR, n - 1), tl.where(j == steps + 1, n - 1, CAPACITY - 1 - start))
    return (start + row) % CAPACITY // DIVISOR, (j < steps + 3) & (row < n)


@triton.jit
def _slots(serials, state, n, i, CAPACITY: tl.constexpr, SPAN: tl.constexpr, flags, BY_SERIAL: tl.constexpr):
    """The rows that a call names: the newest n, or those of some serials; -1 where there is none."""
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
    """One level of the tree, above the rows that a call names (WHICH 0: the newest n; 1: by serial) or whole (2). From
    TOP on, where it is not 0, levels have at most ITEMS nodes: the last program goes on to them."""
    i = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    state = numbers.to(tl.pointer_type(tl.int64))
    if WHICH == 2:
        node = i
        inside = i < n
    elif WHICH == 1:
        slot = _slots(serials, state, n, i, CAPACITY, SPAN, flags, True)
        node = slot // DIVISOR
        inside = slot >= 0
    else:
        node, inside = _newest_nodes(state, n, i, CAPACITY, DIVISOR)
    _refresh(leaves, nodes, node, inside, PADDED, TOTAL, ABOVE, BELOW, KEEPS_ZERO)
    if TOP > 0:
        if _is_last(state):
            for k in tl.static_range(TOP, len(LEVELS)):
                tl.debug_barrier()
                _refresh_whole(leaves, nodes, k, CAPACITY, PADDED, TOTAL, LEVELS, KEEPS_ZERO, ITEMS)


@triton.jit
def _refresh_whole(leaves, nodes, k: tl.constexpr, CAPACITY: tl.constexpr, PADDED: tl.constexpr, TOTAL: tl.constexpr,
                   LEVELS: tl.constexpr, KEEPS_ZERO: tl.constexpr, ITEMS: tl.constexpr):  # fmt: skip
    """A level of at most ITEMS nodes."""
    node = tl.arange(0, ITEMS).to(tl.int64)
    below_ = LEVELS[k - 1] if k > 0 else -1
    inside = node * 32 ** (k + 1) < CAPACITY
    _refresh(leaves, nodes, node, inside, PADDED, TOTAL, LEVELS[k], below_, KEEPS_ZERO)


@triton.jit
def _refresh_all(leaves, nodes, state, flags, serials, n, CAPACITY: tl.constexpr, SPAN: tl.constexpr,
                 PADDED: tl.constexpr, TOTAL: tl.constexpr, LEVELS: tl.constexpr, KEEPS_ZERO: tl.constexpr,
                 BY_SERIAL: tl.constexpr, ITEMS: tl.constexpr):  # fmt: skip
    """Every level above some rows, by one program: what it wrote it can read after a barrier."""
    for k in tl.static_range(len(LEVELS)):
        tl.debug_barrier()
        below_ = LEVELS[k - 1] if k > 0 else -1
        if (CAPACITY - 1) // 32 ** (k + 1) + 1 <= ITEMS:  # of so few all
            _refresh_whole(leaves, nodes, k, CAPACITY, PADDED, TOTAL, LEVELS, KEEPS_ZERO, ITEMS)
        elif BY_SERIAL:
            for first in range(0, n, ITEMS):
                i = first + tl.arange(0, ITEMS).to(tl.int64)
                slot = _slots(serials, state, n, i, CAPACITY, SPAN, flags, True)
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
    """Gives the newest n rows their priorities. First those leave whose places they took: what the largest priority is,
    is asked afterwards. PHASE 0: one program does all of it; 1 and 2: the two halves, by many."""
    state = numbers.to(tl.pointer_type(tl.int64))
    real = reals.to(tl.pointer_type(tl.float64))
    prior = leaves.to(tl.pointer_type(tl.float32))
    mass = prior + PADDED
    largest = (nodes + TOTAL * 8).to(tl.pointer_type(tl.float32))
    begin = tl.program_id(0) * ITEMS if PHASE > 0 else 0
    step = tl.num_programs(0) * ITEMS if PHASE > 0 else ITEMS
    if PHASE != 2:
        for first in range(begin, n, step):
            slot = _slots(0, state, n, first + tl.arange(0, ITEMS).to(tl.int64), CAPACITY, CAPACITY, flags, False)
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
            slot = _slots(0, state, n, i, CAPACITY, CAPACITY, flags, False)
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
    """Where a row is named twice the last one holds: each takes the row's place if it is later. A number that is none
    refuses the call."""
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
    slot = _slots(serials, state, n, i, CAPACITY, SPAN, flags, True)
    word = _word(state, i)
    tl.atomic_max(winners.to(tl.pointer_type(tl.int64)) + slot, word, slot >= 0)


@triton.jit
def _word(state, i):
    """Who named a row: a later call has a larger one, so those of earlier calls need not be forgotten."""
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
    """New priorities for the rows of some serials. PHASE 0: one program does all of it; 1: many, behind mark()."""
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
        slot = _slots(serials, state, n, i, CAPACITY, SPAN, flags, True)
        there = slot >= 0
        value = tl.abs(tl.load(priorities.to(tl.pointer_type(tl.float32)) + i, there, other=0.0))
        is_last = there & (tl.load(winner + slot, there, other=0, volatile=True) == _word(state, i))
        if not is_refused:
            tl.store(prior + slot, value, is_last)
            tl.store(prior + PADDED + slot, _mass(value, real), is_last)
            tl.atomic_max(real + RUNNING_MAX, tl.max(tl.where(there, value, 0.0), axis=0).to(tl.float64))
            applied += tl.sum(there.to(tl.int64), axis=0)
    if PHASE == 0:
        tl.debug_barrier()  # every thread has read which call this is
        _settle(state, counts, n, applied, is_refused)
        _refresh_all(leaves, nodes, state, flags, serials, n, CAPACITY, SPAN, PADDED, TOTAL, LEVELS, KEEPS_ZERO, True,
                     NODES)  # fmt: skip
    else:
        tl.atomic_add(state + APPLYING, applied)
        if _is_last(state):
            applied = tl.load(state + APPLYING, volatile=True)
            tl.store(state + APPLYING, 0)
            _settle(state, counts, n, applied, is_refused)


@triton.jit
def _settle(state, counts, n, applied, is_refused):
    """The end of an update."""
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
    """All masses anew, for another alpha."""
    i = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    prior = leaves.to(tl.pointer_type(tl.float32))
    priority = tl.load(prior + i, i < n, other=-1.0)
    mass = _mass(priority, reals.to(tl.pointer_type(tl.float64)))
    tl.store(prior + PADDED + i, tl.where(priority >= 0, mass, 0.0), i < n)


# ---- drawing ---------------------------------------------------------------------------------------------------------


@triton.jit
def _child(upto, x, node, NODES: tl.constexpr):
    """Which child a target lies in, and how far: the first that reaches beyond it."""
    at = upto + node * 32
    end = tl.load(at + 31)
    x = tl.minimum(x, end - end * (1.0 / 9007199254740992.0))  # rounding leads past the end at most
    passed = node * 0
    for k in tl.static_range(5):
        passed += tl.where(tl.load(at + passed + ((16 >> k) - 1)) <= x, 16 >> k, 0)
    passed = tl.where(end > 0, passed, 0)
    before = tl.load(at + passed - 1, passed > 0, other=0.0)
    return tl.minimum(node * 32 + passed, NODES - 1), tl.maximum(x - before, 0.0)


@triton.jit
def _descend(nodes, x, TOTAL: tl.constexpr, LEVELS: tl.constexpr, CAPACITY: tl.constexpr):
    """The row that a target lies in."""
    upto = _upto(nodes, TOTAL)
    slot = tl.zeros_like(x).to(tl.int64)
    for k in tl.static_range(len(LEVELS) - 1, 0, -1):
        slot, x = _child(upto + LEVELS[k - 1], x, slot, (CAPACITY - 1) // 32**k + 1)
    slot, x = _child(upto + TOTAL, x, slot, CAPACITY)
    return slot


@triton.jit
def _target(u, i, n, total, NEWEST: tl.constexpr, STRATIFIED: tl.constexpr):
    if STRATIFIED:
        x = ((i - NEWEST).to(tl.float64) + u) / (n - NEWEST).to(tl.float64) * total
    else:
        x = u * total
    return tl.maximum(x, 0.0)


@triton.jit
def _blind(flags, key, reach, i, slot, bad, FIRST: tl.constexpr):
    """Draws again where no row is. Returns the slots, and how often a draw met nothing."""
    misses = tl.sum(bad.to(tl.int64), axis=0)
    attempt = tl.full((), FIRST, tl.int64)
    tries = tl.full((), 0, tl.int32)
    while (tl.sum(bad.to(tl.int32), axis=0) > 0) & (tries < _BLIND):
        again = below(key, reach, i, attempt)
        slot = tl.where(bad, again, slot)
        byte = tl.load(flags.to(tl.pointer_type(tl.uint8)) + slot, bad, other=1)
        bad = bad & ((byte & IS_LIVE) == 0)
        attempt += 1
        tries += 1
    return slot, misses


@triton.jit
def _newest(flags, head, live, i, slot, CAPACITY: tl.constexpr, NEWEST: tl.constexpr):
    """The newest rows for the first positions, newest first; where there are fewer, they come again."""
    most = tl.minimum(live, NEWEST)
    wanted = i % tl.maximum(most, 1)
    found = head * 0
    t = head - 1
    while (found < most) & (t >= 0) & (t >= head - CAPACITY):
        byte = tl.load(flags.to(tl.pointer_type(tl.uint8)) + t % CAPACITY)
        if (byte & IS_LIVE) != 0:
            slot = tl.where((i < NEWEST) & (wanted == found), t % CAPACITY, slot)
            found += 1
        t -= 1
    return slot


@triton.jit
def _weigh(weights, probabilities, first, n, reference, beta, NEWEST: tl.constexpr, ITEMS: tl.constexpr):
    i = first + tl.arange(0, ITEMS)
    p = tl.load(probabilities.to(tl.pointer_type(tl.float64)) + i, i < n, other=1.0, volatile=True)
    weight = tl.exp(-beta * tl.log(p / reference))
    weight = tl.where(i < NEWEST, 1.0, weight)
    tl.store(weights.to(tl.pointer_type(tl.float32)) + i, weight.to(tl.float32), i < n)


@triton.jit(do_not_specialize=["n"])
def draw(
    rows,
    flags,
    numbers,
    reals,
    leaves,
    nodes,
    alarms,
    outs,
    discounts,
    weights,
    probabilities,
    serials,
    powers,
    n,
    CAPACITY: tl.constexpr,
    SPAN: tl.constexpr,
    STRIDE: tl.constexpr,
    OFFSETS: tl.constexpr,
    COUNTS: tl.constexpr,
    WIDTHS: tl.constexpr,
    ALIGNS: tl.constexpr,
    WIDES: tl.constexpr,
    LASTS: tl.constexpr,
    REWARD: tl.constexpr,
    REWARD_ITEMS: tl.constexpr,
    IS_DOUBLE: tl.constexpr,
    N_STEP: tl.constexpr,
    ENVS: tl.constexpr,
    NEWEST: tl.constexpr,
    PADDED: tl.constexpr,
    TOTAL: tl.constexpr,
    LEVELS: tl.constexpr,
    STRATIFIED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_MIX: tl.constexpr,
    WEIGH_ALONE: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Draws n rows and makes examples of them. Without LEVELS uniformly, with them by priority."""
    state = numbers.to(tl.pointer_type(tl.int64))
    real = reals.to(tl.pointer_type(tl.float64))
    part = tl.program_id(1)
    head = tl.load(state + HEAD)
    origin = tl.load(state + ORIGIN)
    live = tl.load(state + LIVE)
    call = tl.load(state + CALLS)
    key = stream_key(tl.load(state + SEED), call)
    reach = tl.minimum(head - origin, CAPACITY)
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = i < n
    flag = flags.to(tl.pointer_type(tl.uint8))
    zero = i * 0
    misses = live * 0
    share = tl.full((), 0.0, tl.float64)
    floor = share
    if len(LEVELS) > 0:
        sums = nodes.to(tl.pointer_type(tl.float64))
        mass = leaves.to(tl.pointer_type(tl.float32)) + PADDED
        total = tl.load(sums + LEVELS[len(LEVELS) - 1])
        slot = _descend(nodes, _target(unit(key, i, zero), i, n, total, NEWEST, STRATIFIED), TOTAL, LEVELS, CAPACITY)
        # Sums of the same numbers in two orders may differ by their last bit, and a target may fall in between, where
        # nobody is. It is drawn anew then.
        bad = inside & (zero + total > 0) & (tl.load(mass + slot) <= 0)
        attempt = tl.full((), 1, tl.int64)
        while (tl.sum(bad.to(tl.int32), axis=0) > 0) & (attempt < _BLIND):
            x = _target(unit(key, i, zero + attempt), i, n, total, NEWEST, STRATIFIED)
            slot = tl.where(bad, _descend(nodes, x, TOTAL, LEVELS, CAPACITY), slot)
            bad = bad & (tl.load(mass + slot) <= 0)
            attempt += 1
        rows_ = live.to(tl.float64)
        mix = tl.load(real + MIX)
        floor = tl.where(total > 0, mix / rows_, 1.0 / rows_)
        share = tl.where(total > 0, (1.0 - mix) / total, 0.0)
        is_uniform = inside & (zero + total <= 0)
        if HAS_MIX:
            is_uniform = is_uniform | (inside & (unit(key, i, zero + _COIN) < mix))
        if tl.sum(is_uniform.to(tl.int32), axis=0) > 0:
            slot, _ = _blind(flags, key, reach, i, slot, is_uniform & (zero + live > 0), _UNIFORM)
    else:
        slot = below(key, reach, i, zero)
        byte = tl.load(flag + slot, inside, other=1)
        bad = inside & ((byte & IS_LIVE) == 0) & (zero + live > 0) & (i >= NEWEST)
        if tl.sum(bad.to(tl.int32), axis=0) > 0:
            slot, misses = _blind(flags, key, reach, i, slot, bad, 1)
    if NEWEST > 0:
        if tl.program_id(0) * ROWS < NEWEST:
            slot = _newest(flags, head, live, i, slot, CAPACITY, NEWEST)
    if live <= 0:
        slot = zero
        if part == 0:
            tl.store(alarms.to(tl.pointer_type(tl.int64)) + EMPTY, 1)

    # How far the example goes, and what it earned.
    lap = head // CAPACITY - (slot >= head % CAPACITY).to(tl.int64)
    t = lap * CAPACITY + slot
    last = t
    if N_STEP > 1:
        steps = zero + 1
        going = inside & (zero + live > 0)
        item = tl.arange(0, REWARD_ITEMS)
        is_item = (item < COUNTS[REWARD] * WIDTHS[REWARD] // (8 if IS_DOUBLE else 4))[None, :]
        power = powers.to(tl.pointer_type(tl.float64))
        got = tl.zeros((ROWS, REWARD_ITEMS), tl.float64)
        for k in tl.static_range(N_STEP):
            if k > 0:
                ended = tl.load(flag + last % CAPACITY, going, other=0) & (ENDS | STOPS)
                ahead = last + ENVS
                going = going & (ended == 0) & (ahead < head)
                byte = tl.load(flag + ahead % CAPACITY, going, other=0)
                passes = going & ((byte & IS_LIVE) == 0)  # masked out: the episode goes on behind it
                while tl.sum(passes.to(tl.int32), axis=0) > 0:
                    ahead = tl.where(passes, ahead + ENVS, ahead)
                    going = going & (ahead < head)
                    byte = tl.load(flag + ahead % CAPACITY, going, other=0)
                    passes = going & ((byte & IS_LIVE) == 0)
                last = tl.where(going, ahead, last)
                steps += going.to(tl.int64)
            address = rows + (last % CAPACITY) * STRIDE + OFFSETS[REWARD]
            there = going[:, None] & is_item
            if IS_DOUBLE:
                reward = tl.load(address.to(tl.pointer_type(tl.float64))[:, None] + item[None, :], there, other=0.0)
            else:
                reward = tl.load(address.to(tl.pointer_type(tl.float32))[:, None] + item[None, :], there, other=0.0)
            got += tl.load(power + k) * reward.to(tl.float64)
        if part == 0:
            width: tl.constexpr = COUNTS[REWARD] * WIDTHS[REWARD]
            to = outs[REWARD] + i * width
            there = inside[:, None] & is_item
            if IS_DOUBLE:
                tl.store(to.to(tl.pointer_type(tl.float64))[:, None] + item[None, :], got, there)
            else:
                tl.store(to.to(tl.pointer_type(tl.float32))[:, None] + item[None, :], got.to(tl.float32), there)
            gone = tl.load(power + steps, inside, other=1.0)
            tl.store(discounts.to(tl.pointer_type(tl.float32)) + i, gone.to(tl.float32), inside)
    last_slot = last % CAPACITY
    for k in tl.static_range(len(COUNTS)):
        if N_STEP == 1 or k != REWARD:
            from_ = last_slot if LASTS[k] else slot
            source = rows + from_ * STRIDE + OFFSETS[k]
            target = outs[k] + i * (COUNTS[k] * WIDTHS[k])
            copy_value(source, target, inside, part, COUNTS[k], WIDTHS[k], ALIGNS[k], WIDES[k], PARTS)
    if part == 0:
        tl.store(serials.to(tl.pointer_type(tl.int64)) + i, lap * SPAN + slot, inside)
        if len(LEVELS) > 0:
            chance = share * tl.load(mass + slot, inside, other=0.0).to(tl.float64) + floor
            chance = tl.where(i < NEWEST, 1.0, chance)
            tl.store(probabilities.to(tl.pointer_type(tl.float64)) + i, chance, inside)
            if NORMALIZE == 0:
                counted = tl.where(inside & (i >= NEWEST), chance, _INFINITE)
                tl.atomic_min(state + LEAST, tl.min(counted, axis=0).to(tl.int64, bitcast=True))
        else:
            if misses > 0:
                tl.atomic_add(state + REDRAWS, misses)
    if _is_last(state):
        tl.store(state + CALLS, call + 1)
        tl.store(state + SAMPLED, tl.load(state + SAMPLED) + n)
        if len(LEVELS) > 0:
            reference = 1.0 / rows_
            if NORMALIZE == 0:
                reference = tl.load(state + LEAST, volatile=True).to(tl.float64, bitcast=True)
                reference = tl.where(reference == _INFINITE, 1.0, reference)
                tl.debug_barrier()  # every thread has read it
                tl.store(state + LEAST, _NO_PROBABILITY)
            if NORMALIZE == 1:
                lows = (nodes + TOTAL * 12).to(tl.pointer_type(tl.float32))
                smallest = tl.load(lows + LEVELS[len(LEVELS) - 1]).to(tl.float64)
                reference = tl.where(total > 0, share * smallest, 0.0) + floor
            start = tl.load(real + BETA_START)
            end = tl.load(real + BETA_END)
            length = tl.load(real + BETA_STEPS)
            way = tl.minimum(1.0, call.to(tl.float64) / tl.maximum(length, 1.0))
            beta = tl.where(length > 0, start + (end - start) * way, end)
            if n <= WEIGH_ALONE:
                for first in range(0, n, ITEMS):
                    _weigh(weights, probabilities, first, n, reference, beta, NEWEST, ITEMS)
            else:
                tl.store(real + REFERENCE, reference)
                tl.store(real + BETA, beta)


@triton.jit(do_not_specialize=["n"])
def weigh(reals, weights, probabilities, n, NEWEST: tl.constexpr, ITEMS: tl.constexpr):
    """The weights of a large draw, by many programs."""
    real = reals.to(tl.pointer_type(tl.float64))
    first = tl.program_id(0) * ITEMS
    _weigh(weights, probabilities, first, n, tl.load(real + REFERENCE), tl.load(real + BETA), NEWEST, ITEMS)
