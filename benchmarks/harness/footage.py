"""Frames of games, 84 x 84 and grey: made up, or rendered by real environments; and transitions cut from them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness.environments import environment, interpreter

SIDE, STACK = 84, 4
FILMED_STEPS = 10_000

# Name of the environment, and where it comes from in Gymnasium.
ENVIRONMENTS = {
    "cartpole": "CartPole-v1",
    "pong": "ALE/Pong-v5",
    "breakout": "ALE/Breakout-v5",
    "seaquest": "ALE/Seaquest-v5",
}


class Film(NamedTuple):
    """Frames in time order, and which of them an episode starts with. One frame more than steps in each episode."""

    frames: np.ndarray
    starts: np.ndarray


def made_up(episode_steps: np.ndarray) -> Film:
    """A still background with moving squares, in episodes of so many steps.

    Not noise, because one contender compresses what it stores and noise would be unfair to it.
    """
    lengths = np.asarray(episode_steps) + 1
    background = np.add.outer(np.arange(SIDE), np.arange(SIDE)).astype(np.uint8)
    frames = np.repeat(background[None], lengths.sum(), axis=0)
    for step, frame in enumerate(frames):
        for sprite in range(1, 5):
            y, x = sprite * step % 76, (sprite + 2) * step % 76
            frame[y : y + 8, x : x + 8] = 40 * sprite
    starts = np.zeros(len(frames), bool)
    starts[np.cumsum(lengths) - lengths] = True
    return Film(frames, starts)


def path_of(name: str) -> Path:
    return environment("frames") / f"{name}.npz"


def render(name: str) -> None:
    """Films the environment, where that has not been done yet."""
    if not path_of(name).exists():
        print(f"filming {name}", flush=True)
        command = [interpreter("frames"), "-m", "harness.film", ENVIRONMENTS[name], str(FILMED_STEPS), path_of(name)]
        subprocess.run(command, cwd=Path(__file__).parent.parent, check=True)


@cache
def load(name: str) -> Film:
    with np.load(path_of(name)) as stored:
        return Film(stored["frames"], stored["starts"])


def transitions(film: Film, chunk_rows: int) -> Iterator[dict[str, np.ndarray]]:
    """The whole film as columns of at most `chunk_rows` rows, with stacks of four frames.

    The stack of an episode's first frame is that frame four times.
    """
    count = len(film.frames)
    number = np.arange(count)
    start = np.maximum.accumulate(np.where(film.starts, number, 0))
    stack = np.maximum(number[:, None] - np.arange(STACK)[::-1], start[:, None])
    last = np.append(film.starts[1:], True)
    steps = number[~last]
    rng = np.random.default_rng(0)
    for first in range(0, len(steps), chunk_rows):
        now = steps[first : first + chunk_rows]
        yield {
            "obs": film.frames[stack[now]],
            "action": rng.integers(0, 6, len(now)),
            "reward": rng.standard_normal(len(now), np.float32),
            "next_obs": film.frames[stack[now + 1]],
            "done": last[now + 1],
        }
