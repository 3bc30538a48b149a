"""Steps of two environments whose rows store their run, environment, episode and step."""

from __future__ import annotations

from typing import Any

import numpy as np

import sharpwave as sw

EPISODE = 11
ENVS = 2


def add_steps(target: Any, run: int, first: int, count: int, **options: Any) -> None:
    """Steps of both environments: obs is (run, env, episode, step)."""
    steps = np.arange(first, first + count)[:, None] + np.zeros(ENVS, int)
    envs = np.zeros((count, 1), int) + np.arange(ENVS)
    obs = np.stack([np.full_like(steps, run), envs, steps // EPISODE, steps % EPISODE], axis=-1).astype(np.float32)
    after = obs + np.array([0, 0, 0, 1], np.float32)
    done = steps % EPISODE == EPISODE - 1
    target.add(obs=obs, action=steps, reward=steps.astype(np.float32), next_obs=after, done=done, **options)


def make(address: str, **options: Any) -> sw.ReplayBuffer:
    return sw.ReplayBuffer(
        480, obs_shape=(4,), action_dtype="int64", num_envs=ENVS, storage=address, seed=1, writers=8, **options
    )
