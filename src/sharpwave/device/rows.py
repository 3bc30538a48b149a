"""Kernels that write and draw rows. A row is a sequence of bytes, as in the engine, and has a flag byte."""

from __future__ import annotations

import triton
import triton.language as tl

from .random import below, stream_key, unit
from .state import (
    ADDED,
    BETA,
    BETA_END,
    BETA_START,
    BETA_STEPS,
    CALLS,
    EMPTY,
    ENDS,
    EPISODES,
    HEAD,
    IS_LIVE,
    LEAST,
    LIVE,
    MIX,
    ORIGIN,
    REDRAWS,
    REFERENCE,
    SAMPLED,
    SEED,
    STOPS,
    TRUNCATED,
    VOIDED,
    is_last,
)
from .tree import descend
from .value_copy import copy_value

__all__ = ["draw", "name_newest", "weigh", "write"]

_INFINITE = tl.constexpr(float("inf"))
_NO_PROBABILITY = tl.constexpr(0x7FF0000000000000)  # bits of infinity
_BLIND = tl.constexpr(1000)
_COIN = tl.constexpr(1 << 20)
_UNIFORM = tl.constexpr(1 << 21)


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
    """Appends n rows."""
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
    if is_last(state):
        tl.store(state + HEAD, head + n)


@triton.jit(do_not_specialize=["n"])
def name_newest(flags, numbers, serials, n, CAPACITY: tl.constexpr, SPAN: tl.constexpr, ITEMS: tl.constexpr):
    """The serials of the n newest rows, in the order in which they were written; -1 for masked rows."""
    head = tl.load(numbers.to(tl.pointer_type(tl.int64)) + HEAD)
    r = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    t = head - n + r
    slot = t % CAPACITY
    byte = tl.load(flags.to(tl.pointer_type(tl.uint8)) + slot, r < n, other=0)
    serial = tl.where((byte & IS_LIVE) != 0, t // CAPACITY * SPAN + slot, -1)
    tl.store(serials.to(tl.pointer_type(tl.int64)) + r, serial, r < n)


@triton.jit
def _target(u, i, n, total, NEWEST: tl.constexpr, STRATIFIED: tl.constexpr):
    if STRATIFIED:
        x = ((i - NEWEST).to(tl.float64) + u) / (n - NEWEST).to(tl.float64) * total
    else:
        x = u * total
    return tl.maximum(x, 0.0)


@triton.jit
def _blind(flags, key, reach, i, slot, bad, FIRST: tl.constexpr):
    """Draws again where a slot has no live row. Returns the slots, and the number of positions drawn again."""
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
    """The newest rows for the first positions, newest first; repeated where there are fewer rows than positions."""
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
    TELLS_TRUNCATED: tl.constexpr,
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
    """Draws n rows and makes examples of them: uniformly without LEVELS, by priority with LEVELS. ``outs`` has an
    address for each field, and one more for the flags of TELLS_TRUNCATED."""
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
        slot = descend(nodes, _target(unit(key, i, zero), i, n, total, NEWEST, STRATIFIED), TOTAL, LEVELS, CAPACITY)
        # Sums of the same numbers in different orders may differ in the last bit, so a target may fall on a row without
        # mass. Such a target is drawn again.
        bad = inside & (zero + total > 0) & (tl.load(mass + slot) <= 0)
        attempt = tl.full((), 1, tl.int64)
        while (tl.sum(bad.to(tl.int32), axis=0) > 0) & (attempt < _BLIND):
            x = _target(unit(key, i, zero + attempt), i, n, total, NEWEST, STRATIFIED)
            slot = tl.where(bad, descend(nodes, x, TOTAL, LEVELS, CAPACITY), slot)
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

    # The last step of the example, and its discounted reward.
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
                passes = going & ((byte & IS_LIVE) == 0)  # a masked row: the episode continues after it
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
        if TELLS_TRUNCATED:
            cut = (tl.load(flag + last_slot, inside, other=0) & TRUNCATED) != 0
            tl.store(outs[len(COUNTS)].to(tl.pointer_type(tl.uint8)) + i, cut.to(tl.uint8), inside)
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
    if is_last(state):
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
            tl.store(real + REFERENCE, reference)
            tl.store(real + BETA, beta)
            if n <= WEIGH_ALONE:
                for first in range(0, n, ITEMS):
                    _weigh(weights, probabilities, first, n, reference, beta, NEWEST, ITEMS)


@triton.jit(do_not_specialize=["n"])
def weigh(reals, weights, probabilities, n, NEWEST: tl.constexpr, ITEMS: tl.constexpr):
    """Computes the weights of a large draw with many programs."""
    real = reals.to(tl.pointer_type(tl.float64))
    first = tl.program_id(0) * ITEMS
    _weigh(weights, probabilities, first, n, tl.load(real + REFERENCE), tl.load(real + BETA), NEWEST, ITEMS)
