"""Returns on a GPU: one launch per call, no wait for the device, no memory except the results.

A backward recursion ``x[t] = b[t] + a[t] * x[t + 1]`` is a scan. A program loads a tile of envs and up to 128 steps
into registers and scans it there, so it waits for memory once and not once per step. Values that do not count are
replaced by a select, never multiplied by 0: a NaN in them does not spread.

The same kernels run in Triton's interpreter on the CPU (``TRITON_INTERPRET=1``): that is how they are tested without a
GPU.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any

import torch
import triton
import triton.language as tl

from .launch import on_device_of, start

__all__ = ["discounted", "gae", "group_relative", "group_relative_of", "vtrace"]

_TILE = 512
_MOST_STEPS = 128


@triton.jit
def _follow(later_a, later_b, a, b):
    """The composition of two maps x -> a * x + b."""
    stops = a == 0
    return tl.where(stops, a, later_a * a), tl.where(stops, b, b + a * later_b)


@triton.jit
def _behind(next_value, is_done, truncated, finals, at, inside):
    """The value after each step, and whether the episode ends there, so that nothing propagates back across it."""
    value = tl.where(is_done, 0.0, next_value)
    ends = is_done
    if truncated is not None:
        is_cut = tl.load(truncated + at, inside, other=0) != 0
        other = next_value
        if finals is not None:
            other = tl.load(finals + at, inside, other=0.0)
        value = tl.where(is_cut, other, value)
        ends = is_done | is_cut
    return value, ends


@triton.jit
def _exact(near, rest, like):
    """A number passed as float32; plus ``rest``, the rounding error of that, it is exact in float64."""
    number = like + near
    if rest is not None:
        number = number + rest
    return number


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
    STEPS: tl.constexpr,
    ENVS: tl.constexpr,
):
    """GAE; without values, only the discounted returns. Absent inputs are None and cost nothing."""
    dtype = rewards.dtype.element_ty
    gamma = _exact(gamma, gamma_rest, tl.zeros((1, ENVS), dtype))
    decay = _exact(decay, decay_rest, tl.zeros((1, ENVS), dtype))
    n = tl.program_id(0) * ENVS + tl.arange(0, ENVS)
    is_env = n < envs
    last = tl.load(last_values + n, is_env, other=0.0)
    carry = tl.zeros((ENVS,), dtype)
    if values is None:
        carry = last
    row = tl.arange(0, STEPS)
    chunks = tl.cdiv(steps, STEPS)
    for chunk in range(chunks):
        t = (chunks - 1 - chunk) * STEPS + row
        inside = (t < steps)[:, None] & is_env[None, :]
        at = t.to(tl.int64)[:, None] * envs + n[None, :]
        reward = tl.load(rewards + at, inside, other=0.0)
        is_done = tl.load(dones + at, inside, other=0) != 0
        if values is not None:
            value = tl.load(values + at, inside, other=0.0)
            is_last = (t == steps - 1)[:, None]
            behind = tl.load(values + at + envs, inside & (t < steps - 1)[:, None], other=0.0)
            behind = tl.where(is_last, last[None, :], behind)
            behind, ends = _behind(behind, is_done, truncated, finals, at, inside)
            b = reward + gamma * behind - value
        else:
            nothing = tl.zeros((STEPS, ENVS), dtype)
            behind, ends = _behind(nothing, is_done, truncated, finals, at, inside)
            b = reward + gamma * behind
        a = tl.where(ends, tl.zeros((STEPS, ENVS), dtype), decay)
        if mask is not None:
            counts = tl.load(mask + at, inside, other=0) != 0
            a = tl.where(counts, a, tl.zeros((STEPS, ENVS), dtype))
            b = tl.where(counts, b, tl.zeros((STEPS, ENVS), dtype))
        # Steps past the end are identity maps.
        a = tl.where(inside, a, tl.full((STEPS, ENVS), 1.0, dtype))
        b = tl.where(inside, b, tl.zeros((STEPS, ENVS), dtype))
        a, b = tl.associative_scan((a, b), 0, _follow, reverse=True)
        x = tl.where(a == 0, b, b + a * carry[None, :])
        carry = tl.sum(tl.where((row == 0)[:, None], x, 0.0), axis=0)
        if values is not None:
            tl.store(advantages + at, x, inside)
            tl.store(returns + at, x + value, inside)
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
    log_probs,
    behaviour_log_probs,
    targets,
    advantages,
    steps,
    envs,
    gamma,
    gamma_rest,
    decay,
    decay_rest,
    rho_clip,
    rho_rest,
    c_clip,
    c_rest,
    pg_clip,
    pg_rest,
    ENVS: tl.constexpr,
):
    """One step at a time: the advantages need the next step's target."""
    dtype = rewards.dtype.element_ty
    zeros = tl.zeros((ENVS,), dtype)
    gamma = _exact(gamma, gamma_rest, zeros)
    decay = _exact(decay, decay_rest, zeros)
    rho_clip = _exact(rho_clip, rho_rest, zeros)
    c_clip = _exact(c_clip, c_rest, zeros)
    pg_clip = _exact(pg_clip, pg_rest, zeros)
    n = tl.program_id(0) * ENVS + tl.arange(0, ENVS)
    inside = n < envs
    next_value = tl.load(last_values + n, inside, other=0.0)
    next_target = next_value
    carry = zeros
    at = tl.full((ENVS,), steps - 1, tl.int64) * envs + n
    for _ in range(steps):
        reward = tl.load(rewards + at, inside, other=0.0)
        value = tl.load(values + at, inside, other=0.0)
        behaviour = tl.load(behaviour_log_probs + at, inside, other=0.0)
        rho = tl.exp(tl.load(log_probs + at, inside, other=0.0) - behaviour)
        is_done = tl.load(dones + at, inside, other=0) != 0
        behind, ends = _behind(next_value, is_done, truncated, finals, at, inside)
        # After an end comes a value; after any other step the target of the next step.
        after = tl.where(ends, behind, next_target)
        delta = tl.minimum(rho, rho_clip, propagate_nan=tl.PropagateNan.ALL) * (reward + gamma * behind - value)
        passed = decay * tl.minimum(rho, c_clip, propagate_nan=tl.PropagateNan.ALL) * carry
        carry = delta + tl.where(ends | (decay == 0), 0.0, passed)
        advantage = tl.minimum(rho, pg_clip, propagate_nan=tl.PropagateNan.ALL) * (reward + gamma * after - value)
        if mask is not None:
            counts = tl.load(mask + at, inside, other=0) != 0
            advantage = tl.where(counts, advantage, 0.0)
            carry = tl.where(counts, carry, 0.0)
        target = value + carry
        next_value = value
        next_target = target
        tl.store(targets + at, target, inside)
        tl.store(advantages + at, advantage, inside)
        at -= envs


@triton.jit
def _group(rewards, advantages, size, eps, SCALES: tl.constexpr, OTHERS: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    inside = i < size
    first = tl.program_id(0).to(tl.int64) * size
    # Minus the first reward of the group: then equal rewards are exactly 0, without rounding errors.
    reward = tl.load(rewards + first + i, inside, other=0.0) - tl.load(rewards + first)
    reward = tl.where(inside, reward, 0.0)
    off = tl.where(inside, reward - tl.sum(reward, axis=0) / size, 0.0)
    advantage = off
    if OTHERS:
        advantage = off * size / (size - 1)
    if SCALES:
        squares = tl.sum(off * off, axis=0)
        advantage = tl.where(squares > 0, advantage / (tl.sqrt(squares / (size - 1)) + eps), 0.0)
    at = first + i
    tl.store(advantages + at, advantage, inside)


@functools.lru_cache(256)
def _pair(number: float, is_double: bool) -> tuple[float, float | None]:
    """The number as float32, and its rounding error where results are float64."""
    near = struct.unpack("f", struct.pack("f", number))[0]
    return near, number - near if is_double and math.isfinite(number) else None


@functools.lru_cache(256)
def _tile(steps: int, envs: int) -> tuple[int, int, tuple[int]]:
    """Steps and envs of a tile, and the number of tiles."""
    tall = min(triton.next_power_of_2(steps), _MOST_STEPS)
    wide = max(8, _TILE // tall)
    return tall, wide, (triton.cdiv(envs, wide),)


def _launch(kernel: Any, grid: tuple[int], arrays: tuple[Any, ...], numbers: tuple[Any, ...], shape: Any) -> None:
    known = [None if array is None else (array.dtype, array.data_ptr() % 16) for array in arrays]
    start((kernel, arrays[0].device, shape, *known), kernel, grid, (*arrays, *numbers))


@on_device_of
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
    """All arrays are contiguous, (steps, envs), of one float dtype; flags may have any dtype."""
    steps, envs = rewards.shape
    tall, wide, grid = _tile(steps, envs)
    is_double = rewards.dtype is torch.float64
    near, rest = _pair(gamma, is_double)
    decay, decay_rest = _pair(gamma * gae_lambda, is_double)
    arrays = rewards, values, dones, last_values, truncated, final_values, mask, advantages, returns
    _launch(_gae, grid, arrays, (steps, envs, near, rest, decay, decay_rest, tall, wide), (steps, envs, is_double))


def discounted(
    rewards: Any, dones: Any, last_values: Any, truncated: Any, final_values: Any, gamma: float, returns: Any
) -> None:
    gae(rewards, None, dones, last_values, truncated, final_values, None, gamma, 1.0, None, returns)


@on_device_of
def vtrace(
    rewards: Any,
    values: Any,
    dones: Any,
    last_values: Any,
    truncated: Any,
    final_values: Any,
    mask: Any,
    log_probs: Any,
    behaviour_log_probs: Any,
    gamma: float,
    lam: float,
    rho_clip: float,
    c_clip: float,
    pg_rho_clip: float,
    targets: Any,
    advantages: Any,
) -> None:
    steps, envs = rewards.shape
    is_double = rewards.dtype is torch.float64
    numbers = [part for x in (gamma, gamma * lam, rho_clip, c_clip, pg_rho_clip) for part in _pair(x, is_double)]
    _vtrace[(triton.cdiv(envs, 32),)](
        rewards,
        values,
        dones,
        last_values,
        truncated,
        final_values,
        mask,
        log_probs,
        behaviour_log_probs,
        targets,
        advantages,
        steps,
        envs,
        *numbers,
        32,
        num_warps=1,
    )


@on_device_of
def group_relative(rewards: Any, group_size: int, scales: bool, leaves_out: bool, eps: float, advantages: Any) -> None:
    """Groups of successive rows."""
    if group_size == 1:
        advantages.zero_()
        return
    _group[(rewards.numel() // group_size,)](
        rewards, advantages, group_size, eps, scales, leaves_out, triton.next_power_of_2(group_size)
    )


def group_relative_of(rewards: Any, group_of: Any, scales: bool, leaves_out: bool, eps: float) -> Any:
    """Groups in any order, by group number: a few launches of torch kernels."""

    def sums(values: Any) -> Any:
        return torch.zeros_like(rewards).index_add_(0, group_of, values)

    # Minus one reward of the group: then equal rewards are exactly 0, without rounding errors.
    rewards = rewards - torch.zeros_like(rewards).index_copy_(0, group_of, rewards)[group_of]
    count = sums(torch.ones_like(rewards))
    size = count[group_of]
    off = rewards - (sums(rewards) / count)[group_of]
    made = off * size / (size - 1) if leaves_out else off
    if scales:
        squares = sums(off * off)[group_of]
        made = torch.where(squares > 0, made / ((squares / (size - 1)).sqrt() + eps), 0)
    return torch.where(size > 1, made, 0)
