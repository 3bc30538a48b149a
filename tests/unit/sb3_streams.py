"""Streams of steps for buffers with the interface of Stable-Baselines3's, and the examples that come back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from gymnasium import spaces

from sharpwave.adapters.sb3 import ReplayBuffer

BOX = spaces.Box(-1e6, 1e6, (3,))
DICT = spaces.Dict({"where": BOX, "image": spaces.Box(0, 255, (1, 4, 4), np.uint8), "mode": spaces.Discrete(1000)})
NAMES = ("observations", "actions", "next_observations", "dones", "rewards")


def value_of(space: spaces.Space[Any], number: int) -> Any:
    """A value of the space that tells which number it was made from."""
    if isinstance(space, spaces.Dict):
        return {name: value_of(part, number) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return np.int64(number % 1000)
    return np.full(space.shape, number % 256 if space.dtype == np.uint8 else number, space.dtype)


def stacked(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: stacked([value[name] for value in values]) for name in values[0]}
    return np.stack(values)


def fill(steps: int, n_envs: int, space: spaces.Space[Any], *targets: Any, seed: int = 0) -> None:
    """Adds one stream to every buffer: each observation is a number of its own, ends are of both kinds."""
    rng = np.random.default_rng(seed)
    number = 0

    def fresh() -> int:
        nonlocal number
        number += 1
        return number

    now = [fresh() for _ in range(n_envs)]
    for _ in range(steps):
        after = [fresh() for _ in range(n_envs)]
        action = rng.integers(0, 5, n_envs)
        reward = rng.normal(size=n_envs).astype(np.float32)
        done = rng.random(n_envs) < 0.2
        timeout = done & (rng.random(n_envs) < 0.5)
        infos = [
            {"TimeLimit.truncated": bool(flag)} if ended else {} for flag, ended in zip(timeout, done, strict=True)
        ]
        for target in targets:
            obs, next_obs = (stacked([value_of(space, n) for n in numbers]) for numbers in (now, after))
            target.add(obs, next_obs, action, reward, done, infos)
        now = [fresh() if ended else n for ended, n in zip(done, after, strict=True)]


def rows_of(samples: Any) -> dict[Any, dict[str, Any]]:
    """Each example of a batch by its observation."""

    def at(value: Any, i: int) -> Any:
        return {name: at(part, i) for name, part in value.items()} if isinstance(value, dict) else value[i].tolist()

    filled = [name for name, value in samples._asdict().items() if value is not None]
    rows = ({name: at(getattr(samples, name), i) for name in filled} for i in range(len(samples.rewards)))
    return {repr(row["observations"]): row for row in rows}


def assert_same_examples(mine: Any, theirs: Any, rows: int, **tolerance: float) -> None:
    """Both buffers give the same examples; many more draws than rows bring each of them up."""
    one, other = (rows_of(buffer.sample(rows * 25)) for buffer in (mine, theirs))
    assert len(one) == len(other) == rows
    for key, row in one.items():
        assert set(row) == set(other[key])
        for name, value in row.items():
            if tolerance and name in ("rewards", "discounts"):
                assert value == pytest.approx(other[key][name], **tolerance)
            else:
                assert value == other[key][name], name


class Recorded(ReplayBuffer):
    """Our buffer, which notes the rows of each batch."""

    drawn: list[Any]

    def _draw(self, batch_size: int) -> dict[str, Any]:
        batch = super()._draw(batch_size)
        self.__dict__.setdefault("drawn", []).append(batch["indices"].copy())
        return batch


def following(base: Any, drawn: list[Any]) -> Any:
    """Stable-Baselines3's own buffer, which draws the rows that ours drew."""
    batches = iter(drawn)

    class Following(base):  # type: ignore[misc]
        def sample(self, batch_size: int, env: Any = None) -> Any:
            steps, environments = np.divmod(next(batches), self.n_envs)
            with mock.patch.object(np.random, "randint", return_value=environments):
                return self._get_samples(steps % self.buffer_size, env=env)

    return Following


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small networks lose more to handing work over than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
