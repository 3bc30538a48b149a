"""Rows that carry their number in every field, and the check that a failed call changed nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import sharpwave as sw


def make(capacity: int = 10, **options: Any) -> sw.ReplayBuffer:
    """A buffer for numbered rows: obs (2,), action (), seed 0."""
    return sw.ReplayBuffer(capacity, **{"obs_shape": (2,), "seed": 0, **options})


def row(number: int, **changes: Any) -> dict[str, Any]:
    """One row by name; `changes` replace or add arguments."""
    obs = np.full(2, number, np.float32)
    values = {"obs": obs, "action": float(number), "reward": float(number), "next_obs": obs + 1, "done": False}
    return {**values, **changes}


def rows(numbers: Iterable[int], **changes: Any) -> dict[str, Any]:
    """Several rows by name, with a leading axis."""
    flat = np.asarray(list(numbers), np.float32)
    obs = np.repeat(flat[:, None], 2, axis=1)
    values = {"obs": obs, "action": flat, "reward": flat, "next_obs": obs + 1, "done": np.zeros(len(flat), bool)}
    return {**values, **changes}


def filled(count: int, capacity: int = 10, **options: Any) -> sw.ReplayBuffer:
    """A buffer that was given the rows 0 .. count-1, one by one."""
    buffer = make(capacity, **options)
    for number in range(count):
        buffer.add(**row(number))
    return buffer


def numbers_in(buffer: sw.ReplayBuffer) -> list[int]:
    """The rows held, oldest first, by their number; each must be whole."""
    found: list[int] = []
    for batch in buffer.rows():
        check_whole(batch)
        found += batch["reward"].astype(int).tolist()
    return found


def check_whole(batch: dict[str, Any]) -> None:
    """Every field of a numbered row says the same number."""
    number = batch["reward"]
    assert (batch["obs"] == number[:, None]).all()
    assert (batch["next_obs"] == number[:, None] + 1).all()
    assert (batch["action"] == number).all()


def state_of(buffer: sw.ReplayBuffer) -> Any:
    """Everything that a failed call must leave as it was."""
    held = [
        {name: np.asarray(value).tobytes() for name, value in batch.items() if isinstance(value, np.ndarray)}
        for batch in buffer.rows()
    ]
    stats = buffer.stats()
    # sample_calls is the position of the random stream.
    names = ("size", "rows_added", "rows_voided", "episodes", "sample_calls", "rows_sampled", "redraws")
    return len(buffer), held, {name: stats[name] for name in names}


@contextmanager
def unchanged(buffer: sw.ReplayBuffer) -> Iterator[None]:
    before = state_of(buffer)
    yield
    assert state_of(buffer) == before
