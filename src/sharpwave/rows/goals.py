"""Goals of hindsight: new goals in a batch, with the rewards, ends and discounts that follow from them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import SchemaError
from ..views import Hindsight
from .spec import RowSpec

__all__ = ["put_drawn_goals", "put_goals"]

Array = np.ndarray[Any, Any]


def put_drawn_goals(spec: RowSpec, placed: bool, drawn: dict[str, Any]) -> None:
    """``put_goals`` for a batch of ``HostRows.draw_goals``, here or at the client of a server."""
    assert spec.hindsight is not None
    put_goals(spec.hindsight, n_step=spec.n_step, gamma=getattr(spec.view, "gamma", 1.0), placed=placed, **drawn)


def put_goals(
    hindsight: Hindsight,
    batch: dict[str, Any],
    rows: Array,
    desired: Array,
    achieved: Array,
    n_step: int,
    gamma: float,
    after: Array | None,
    steps: Array | None,
    placed: bool,
) -> None:
    """Writes new goals into a batch, and the rewards, ends and discounts that follow from them.

    Args:
        rows: The examples that get another goal.
        desired: Of these, what was achieved at the steps that were chosen: the goals.
        achieved: Of these, what was achieved after their first step.
        placed: Whether the engine has written the goals into the batch.
        after: The goals achieved after each step of an example; only where n_step > 1.
        steps: The number of steps of each example; only where n_step > 1.
    """
    if len(rows) == 0:
        return
    if hindsight.goal is not None:
        desired = np.asarray(hindsight.goal(desired))
    for part in () if placed else ("obs", "next_obs"):
        place = batch[part][hindsight.desired]
        if desired.shape != (len(rows), *place.shape[1:]):
            raise SchemaError(
                f"sample(): hindsight: goal(): expected shape {(len(rows), *place.shape[1:])}, got {desired.shape}"
            )
        place[rows] = desired
    if after is None or steps is None:
        batch["reward"][rows] = _call(hindsight, "reward", achieved, desired)
        if hindsight.terminated is not None:
            batch["done"][rows] = _call(hindsight, "terminated", achieved, desired)
        return
    counts = steps[rows]
    taken = np.arange(n_step) < counts[:, None]
    each = after[rows][taken], np.repeat(desired, counts, axis=0)
    rewards = np.zeros(taken.shape)
    rewards[taken] = _call(hindsight, "reward", *each)
    if hindsight.terminated is not None:
        ends = np.zeros(taken.shape, bool)
        ends[taken] = _call(hindsight, "terminated", *each)
        done = ends.any(axis=1)
        counts = np.where(done, ends.argmax(axis=1) + 1, counts)  # rewards after the first end do not count
        rewards[np.arange(n_step) >= counts[:, None]] = 0
        batch["done"][rows] = done
        batch["discount"][rows] = gamma**counts
        if "truncated" in batch:
            batch["truncated"][rows] &= counts == steps[rows]  # the last step that counts is another one
    batch["reward"][rows] = rewards @ gamma ** np.arange(n_step)


def _call(hindsight: Hindsight, name: str, achieved: Array, desired: Array) -> Array:
    result = getattr(hindsight, name)(achieved, desired)
    values: Array = result
    if not isinstance(result, np.ndarray):
        values = np.asarray(result.detach().cpu() if hasattr(result, "detach") else result)
    if values.shape != (len(achieved),) or values.dtype.kind not in "biuf":
        raise SchemaError(
            f"sample(): hindsight: {name}(): expected one number per example, shape {(len(achieved),)}, got "
            f"{values.dtype} of shape {values.shape}"
        )
    return values
