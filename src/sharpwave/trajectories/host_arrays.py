"""Drawn rows and whole trajectories as NumPy arrays, which become a batch or a Trajectory on a device.

The arrays belong to the result alone. A server sends them as they are; the client chooses the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .trajectory import Leaf, Trajectory, nest, to_device, to_trajectory

__all__ = ["DrawnArrays", "TrajectoryArrays"]


class DrawnArrays(NamedTuple):
    """Rows that were drawn: an array for each leaf, and where every row comes from. Leaves that NumPy has no dtype for
    are arrays of their bits."""

    leaves: tuple[Leaf, ...]
    arrays: list[np.ndarray[Any, Any]]
    trajectory_id: np.ndarray[Any, Any]
    step: np.ndarray[Any, Any]
    env: np.ndarray[Any, Any]

    def to_batch(self, device: Any) -> dict[str, Any]:
        """What ``sample`` returns: NumPy arrays where ``device`` is None, else tensors there."""
        batch = nest(self.leaves, _on_device(self.leaves, self.arrays, device))
        for name, column in (("trajectory_id", self.trajectory_id), ("step", self.step), ("env", self.env)):
            batch[name] = to_device("I64", column, device)
        return batch


class TrajectoryArrays(NamedTuple):
    """A copy of a trajectory: an array for each leaf, with the rows that flags and values have more than steps."""

    leaves: tuple[Leaf, ...]
    arrays: list[np.ndarray[Any, Any]]
    max_episode_length: int
    weights_id: str

    def to_trajectory(self, device: Any) -> Trajectory:
        """What ``get`` returns: with NumPy arrays where ``device`` is None, else with tensors there."""
        values = _on_device(self.leaves, self.arrays, device)
        return to_trajectory(self.leaves, values, self.max_episode_length, self.weights_id)


def _on_device(leaves: tuple[Leaf, ...], arrays: list[np.ndarray[Any, Any]], device: Any) -> list[Any]:
    return [to_device(leaf.dtype, array, device) for leaf, array in zip(leaves, arrays, strict=True)]
