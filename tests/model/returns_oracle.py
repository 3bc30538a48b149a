"""Returns as a textbook has them: one environment and one step at a time, in float64. The specification."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def behind(t: int, n: int, next_value: float, r: dict[str, Any]) -> tuple[float, bool]:
    """What stands behind a step, and whether the episode ended there."""
    truncated = r.get("truncated") is not None and bool(r["truncated"][t, n])
    if truncated:
        final = r["final_values"]
        return (next_value if isinstance(final, str) else float(final[t, n])), True
    if r["dones"][t, n]:
        return 0.0, True
    return next_value, False


def value_after(t: int, n: int, r: dict[str, Any]) -> float:
    return float(r["last_values"][n] if t + 1 == len(r["rewards"]) else r["values"][t + 1, n])


def counts(t: int, n: int, r: dict[str, Any]) -> bool:
    """Whether a row is a step of the policy's: what is none comes to nothing, and nothing passes it."""
    return r.get("mask") is None or bool(r["mask"][t, n])


def gae(r: dict[str, Any], gamma: float, lam: float) -> tuple[Array, Array]:
    steps, envs = r["rewards"].shape
    advantages = np.zeros((steps, envs))
    values = r["values"].astype(float)
    for n in range(envs):
        later = 0.0
        for t in reversed(range(steps)):
            boot, is_over = behind(t, n, value_after(t, n, r), r)
            delta = float(r["rewards"][t, n]) + gamma * boot - values[t, n]
            later = delta if is_over or gamma * lam == 0 else delta + gamma * lam * later
            later = later if counts(t, n, r) else 0.0
            advantages[t, n] = later
    return advantages, advantages + values


def discounted(r: dict[str, Any], gamma: float) -> Array:
    steps, envs = r["rewards"].shape
    out = np.zeros((steps, envs))
    for n in range(envs):
        later = float(r["last_values"][n])
        for t in reversed(range(steps)):
            boot, _ = behind(t, n, later, r)
            later = float(r["rewards"][t, n]) + gamma * boot
            out[t, n] = later
    return out


def vtrace(
    r: dict[str, Any], log_ratios: Array, gamma: float, lam: float, rho: float, c: float, pg: float
) -> tuple[Array, Array]:
    steps, envs = r["rewards"].shape
    targets, advantages = np.zeros((steps, envs)), np.zeros((steps, envs))
    for n in range(envs):
        correction, next_target = 0.0, float(r["last_values"][n])
        for t in reversed(range(steps)):
            ratio, value, reward = math.exp(log_ratios[t, n]), float(r["values"][t, n]), float(r["rewards"][t, n])
            boot, is_over = behind(t, n, value_after(t, n, r), r)
            after = boot if is_over else next_target
            delta = min(ratio, rho) * (reward + gamma * boot - value)
            correction = delta if is_over or gamma * lam == 0 else delta + gamma * lam * min(ratio, c) * correction
            correction = correction if counts(t, n, r) else 0.0
            next_target = value + correction
            targets[t, n] = next_target
            advantages[t, n] = min(ratio, pg) * (reward + gamma * after - value) if counts(t, n, r) else 0.0
    return targets, advantages


def group_relative(rewards: Array, groups: Array, scales: bool, others: bool, eps: float) -> Array:
    out = np.zeros(len(rewards))
    for i, reward in enumerate(rewards):
        mates = rewards[groups == groups[i]].astype(float)
        if len(mates) < 2:
            continue
        baseline = (mates.sum() - reward) / (len(mates) - 1) if others else mates.mean()
        out[i] = (reward - baseline) / (mates.std(ddof=1) + eps if scales else 1.0)
    return out
