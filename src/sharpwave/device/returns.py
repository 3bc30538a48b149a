"""Returns on a GPU: one launch a call, no wait for the device, no memory but the results.

A backward recursion ``x[t] = b[t] + a[t] * x[t + 1]`` is a scan: a program takes a tile of some envs and up to 128
steps into registers at once and scans it, so that the time is that of one trip to memory and not of one a step. What
must not be used is selected away, never multiplied by 0: a NaN there stays there.

The same kernels run in Triton's interpreter on the CPU (``TRITON_INTERPRET=1``): that is how they are tested without a
GPU.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import triton
import triton.language as tl

__all__ = ["discounted", "gae", "group_relative", "vtrace"]

_TILE = 1024
_MOST_STEPS = 128


@triton.jit
def _follow(later_a, later_b, a, b):
    """Two maps x -> a * x + b, one after the other."""
    stops = a == 0
    return tl.where(stops, a, later_a * a), tl.where(stops, b, b + a * later_b)


@triton.jit
def _behind(next_value, is_done, truncated, finals, at, inside, TRUNCATES: tl.constexpr, FINALS: tl.constexpr):
    """What stands behind each step, and whether nothing passes it backwards."""
    value = tl.where(is_done, 0.0, next_value)
    ends = is_done
    if TRUNCATES:
        is_cut = tl.load(truncated + at, inside, other=0) != 0
        other = next_value
        if FINALS:
            other = tl.load(finals + at, inside, other=0.0)
        value = tl.where(is_cut, other, value)
        ends = is_done | is_cut
    return value, ends


@triton.jit
def _gae(
    rewards,
    values,
    dones,
    last_values,
    truncated,
    finals,
    mask,
    advantages,
    returns,
    steps,
    envs,
    gamma,
    gamma_rest,
    decay,
    decay_rest,
    VALUES: tl.constexpr,
    TRUNCATES: tl.constexpr,
    FINALS: tl.constexpr,
    MASKS: tl.constexpr,
    STEPS: tl.constexpr,
    ENVS: tl.constexpr,
):
    """GAE; without VALUES the discounted returns alone."""
    dtype = rewards.dtype.element_ty
    # Numbers come as float32; with what was cut off they are exact in float64 too.
    gamma = tl.zeros((1, ENVS), dtype) + gamma + gamma_rest
    decay = tl.zeros((1, ENVS), dtype) + decay + decay_rest
    n = tl.program_id(0) * ENVS + tl.arange(0, ENVS)
    is_env = n < envs
    last = tl.load(last_values + n, is_env, other=0.0)
    carry = tl.zeros((ENVS,), dtype)
    if not VALUES:
        carry = last
    row = tl.arange(0, STEPS)
    chunks = tl.cdiv(steps, STEPS)
    for chunk in range(chunks):
        t = (chunks - 1 - chunk) * STEPS + row
        inside = (t < steps)[:, None] & is_env[None, :]
        at = t.to(tl.int64)[:, None] * envs + n[None, :]
        reward = tl.load(rewards + at, inside, other=0.0)
        is_done = tl.load(dones + at, inside, other=0) != 0
        if VALUES:
            value = tl.load(values + at, inside, other=0.0)
            is_last = (t == steps - 1)[:, None]
            behind = tl.load(values + at + envs, inside & (t < steps - 1)[:, None], other=0.0)
            behind = tl.where(is_last, last[None, :], behind)
            behind, ends = _behind(behind, is_done, truncated, finals, at, inside, TRUNCATES, FINALS)
            b = reward + gamma * behind - value
        else:
            nothing = tl.zeros((STEPS, ENVS), dtype)
            behind, ends = _behind(nothing, is_done, truncated, finals, at, inside, TRUNCATES, FINALS)
            b = reward + gamma * behind
        a = tl.where(ends, tl.zeros((STEPS, ENVS), dtype), decay)
        # Rows past the end hand on what they get.
        a = tl.where(inside, a, tl.full((STEPS, ENVS), 1.0, dtype))
        b = tl.where(inside, b, tl.zeros((STEPS, ENVS), dtype))
        a, b = tl.associative_scan((a, b), 0, _follow, reverse=True)
        x = tl.where(a == 0, b, b + a * carry[None, :])
        carry = tl.sum(tl.where((row == 0)[:, None], x, 0.0), axis=0)
        if VALUES:
            y = x + value
            if MASKS:
                counts = tl.load(mask + at, inside, other=0) != 0
                x = tl.where(counts, x, 0.0)
                y = tl.where(counts, y, value)
            tl.store(advantages + at, x, inside)
            tl.store(returns + at, y, inside)
        else:
            tl.store(returns + at, x, inside)


@triton.jit
def _vtrace(
    rewards,
    values,
    dones,
    last_values,
    truncated,
    finals,
    mask,
    rhos,
    targets,
    advantages,
    steps,
    envs,
    gamma,
    gamma_rest,
    decay,
    decay_rest,
    rho_clip,
    c_clip,
    pg_rho_clip,
    TRUNCATES: tl.constexpr,
    FINALS: tl.constexpr,
    MASKS: tl.constexpr,
    ENVS: tl.constexpr,
):
    dtype = rewards.dtype.element_ty
    gamma = tl.zeros((ENVS,), dtype) + gamma + gamma_rest
    decay = tl.zeros((ENVS,), dtype) + decay + decay_rest
    n = tl.program_id(0) * ENVS + tl.arange(0, ENVS)
    inside = n < envs
    next_value = tl.load(last_values + n, inside, other=0.0)
    next_target = next_value
    carry = tl.zeros((ENVS,), dtype)
    at = tl.full((ENVS,), steps - 1, tl.int64) * envs + n
    for _ in range(steps):
        reward = tl.load(rewards + at, inside, other=0.0)
        value = tl.load(values + at, inside, other=0.0)
        rho = tl.load(rhos + at, inside, other=0.0)
        is_done = tl.load(dones + at, inside, other=0) != 0
        behind, ends = _behind(next_value, is_done, truncated, finals, at, inside, TRUNCATES, FINALS)
        # Behind an end stands a value; behind any other step the target of the next one.
        after = tl.where(ends, behind, next_target)
        delta = tl.minimum(rho, tl.zeros((ENVS,), dtype) + rho_clip) * (reward + gamma * behind - value)
        passed = decay * tl.minimum(rho, tl.zeros((ENVS,), dtype) + c_clip) * carry
        carry = delta + tl.where(ends, 0.0, passed)
        advantage = tl.minimum(rho, tl.zeros((ENVS,), dtype) + pg_rho_clip) * (reward + gamma * after - value)
        target = value + carry
        next_value = value
        next_target = target
        if MASKS:
            counts = tl.load(mask + at, inside, other=0) != 0
            advantage = tl.where(counts, advantage, 0.0)
            target = tl.where(counts, target, value)
        tl.store(targets + at, target, inside)
        tl.store(advantages + at, advantage, inside)
        at -= envs


@triton.jit
def _group(rewards, advantages, size, eps, SCALES: tl.constexpr, OTHERS: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    inside = i < size
    at = tl.program_id(0).to(tl.int64) * size + i
    reward = tl.load(rewards + at, inside, other=0.0)
    off = tl.where(inside, reward - tl.sum(reward, axis=0) / size, 0.0)
    advantage = off
    if OTHERS:
        advantage = off * (size / (size - 1))
    if SCALES:
        advantage = advantage / (tl.sqrt(tl.sum(off * off, axis=0) / (size - 1)) + eps)
    tl.store(advantages + at, advantage, inside)


@functools.lru_cache(64)
def _pair(number: float) -> tuple[float, float]:
    """As float32, and what that leaves out."""
    near = struct.unpack("f", struct.pack("f", number))[0]
    return near, number - near


@functools.lru_cache(256)
def _tile(steps: int, envs: int) -> tuple[int, int, int]:
    """Steps and envs of a tile, and how many tiles there are."""
    tall = min(triton.next_power_of_2(steps), _MOST_STEPS)
    wide = max(8, _TILE // tall)
    return tall, wide, triton.cdiv(envs, wide)


def gae(
    rewards: Any,
    values: Any,
    dones: Any,
    last_values: Any,
    truncated: Any,
    final_values: Any,
    mask: Any,
    gamma: float,
    gae_lambda: float,
    advantages: Any,
    returns: Any,
) -> None:
    """All contiguous, (steps, envs), of one float dtype; flags of any."""
    steps, envs = rewards.shape
    tall, wide, programs = _tile(steps, envs)
    _gae[(programs,)](
        rewards,
        values,
        dones,
        last_values,
        dones if truncated is None else truncated,
        values if final_values is None else final_values,
        dones if mask is None else mask,
        advantages,
        returns,
        steps,
        envs,
        *_pair(gamma),
        *_pair(gamma * gae_lambda),
        True,
        truncated is not None,
        final_values is not None,
        mask is not None,
        tall,
        wide,
    )


def discounted(
    rewards: Any, dones: Any, last_values: Any, truncated: Any, final_values: Any, gamma: float, returns: Any
) -> None:
    steps, envs = rewards.shape
    tall, wide, programs = _tile(steps, envs)
    _gae[(programs,)](
        rewards,
        rewards,
        dones,
        last_values,
        dones if truncated is None else truncated,
        rewards if final_values is None else final_values,
        dones,
        returns,
        returns,
        steps,
        envs,
        *_pair(gamma),
        *_pair(gamma),
        False,
        truncated is not None,
        final_values is not None,
        False,
        tall,
        wide,
    )


def vtrace(
    rewards: Any,
    values: Any,
    dones: Any,
    last_values: Any,
    truncated: Any,
    final_values: Any,
    mask: Any,
    rhos: Any,
    gamma: float,
    lam: float,
    rho_clip: float,
    c_clip: float,
    pg_rho_clip: float,
    targets: Any,
    advantages: Any,
) -> None:
    steps, envs = rewards.shape
    wide = 32
    _vtrace[(triton.cdiv(envs, wide),)](
        rewards,
        values,
        dones,
        last_values,
        dones if truncated is None else truncated,
        values if final_values is None else final_values,
        dones if mask is None else mask,
        rhos,
        targets,
        advantages,
        steps,
        envs,
        *_pair(gamma),
        *_pair(gamma * lam),
        rho_clip,
        c_clip,
        pg_rho_clip,
        truncated is not None,
        final_values is not None,
        mask is not None,
        wide,
        num_warps=1,
    )


def group_relative(rewards: Any, group_size: int, scales: bool, leaves_out: bool, eps: float, advantages: Any) -> None:
    """Groups of successive rows."""
    if group_size == 1:
        advantages.zero_()
        return
    _group[(rewards.numel() // group_size,)](
        rewards, advantages, group_size, eps, scales, leaves_out, triton.next_power_of_2(group_size)
    )
