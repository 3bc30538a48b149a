"""Trajectories, slow and obvious: lists of rows, cut and aligned one at a time. The specification."""

from __future__ import annotations

from typing import Any

import numpy as np

import sharpwave as sw

Row = dict[str, Any]


def align(name: str, rows: list[Any], steps: int) -> list[Any]:
    """What belongs to each step: flags lose the first row of every epoch, values the last."""
    extra = len(rows) - steps
    if extra == 0:
        return rows
    length = steps // extra
    kept = []
    for epoch in range(extra):
        part = rows[epoch * (length + 1) : (epoch + 1) * (length + 1)]
        kept += part[:-1] if name == "prev_values" else part[1:]
    return kept


def leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        return [leaf for key, part in value.items() for leaf in leaves(part, (*path, key))]
    return [(path, value)]


def rows_of(trajectory: sw.Trajectory) -> list[Row]:
    """One dict a transition, time-major: row t * envs + env."""
    steps, envs = trajectory.shape
    fields = {name: value for name, value in vars(trajectory).items() if value is not None and name not in FACTS}
    flat: list[Row] = []
    columns = [(path, align(path[0], list(np.asarray(array)), steps)) for path, array in leaves(fields)]
    for step in range(steps):
        for env in range(envs):
            flat.append({"/".join(path): column[step][env] for path, column in columns} | {"step": step, "env": env})
    return flat


FACTS = ("max_episode_length", "model_weights_id")


class Model:
    """A buffer that holds everything as rows."""

    def __init__(self, window: int, max_trajectories: int | None) -> None:
        self.window, self.most = window, max_trajectories
        self.held: list[tuple[int, list[Row]]] = []
        self.next_id = 0

    def add(self, trajectories: list[sw.Trajectory]) -> None:
        for trajectory in trajectories:
            self.held.append((self.next_id, rows_of(trajectory)))
            self.next_id += 1
        if self.most is not None:
            self.held = self.held[-self.most :]

    def clear(self) -> None:
        self.held = []

    def sampleable(self) -> list[tuple[int, list[Row]]]:
        return self.held[-self.window :] if self.window else self.held

    def row(self, trajectory_id: int, step: int, env: int) -> Row:
        rows = dict(self.sampleable())[trajectory_id]
        return next(row for row in rows if row["step"] == step and row["env"] == env)

    @property
    def total(self) -> int:
        return sum(len(rows) for _, rows in self.held)
