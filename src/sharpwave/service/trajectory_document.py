"""Trajectories and drawn rows as documents: nested dicts of arrays, and which of the arrays are bits.

    {"fields": {"rewards": ARRAY, "curr_obs": {"state": ARRAY}}, "bits": [[["curr_obs", "state"], "BF16"]], ...}

NumPy has no bfloat16 and no float8. Their values travel as arrays of integers, and ``bits`` names them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import SchemaError, StorageError
from ..trajectories.host_arrays import DrawnArrays, TrajectoryArrays
from ..trajectories.incoming import Incoming
from ..trajectories.trajectory import BITS, DTYPES, FIELDS, Bits, Leaf, Trajectory, dtype_name, nest, walk

__all__ = ["drawn_of", "from_drawn", "from_incoming", "from_trajectory", "given_of", "trajectory_of"]

_PLACES = ("trajectory_id", "step", "env")


def _plain(leaves: tuple[Leaf, ...], arrays: list[np.ndarray[Any, Any]]) -> dict[str, Any]:
    bits = [[list(leaf.path), leaf.dtype] for leaf in leaves if leaf.dtype in BITS]
    return {"fields": nest(leaves, arrays), "bits": bits}


# ---- from the client to the server -----------------------------------------------------------------------------------


def from_incoming(one: Incoming) -> dict[str, Any]:
    """A trajectory that is about to be added."""
    facts = {"max_episode_length": one.max_episode_length, "model_weights_id": one.weights_id}
    return {**_plain(one.parts.leaves, one.parts.arrays), **facts}


def given_of(where: str, said: Any) -> Trajectory:
    """The trajectory of ``from_incoming``, for a store, which checks its arrays.

    Raises:
        SchemaError: A client sent something else.
    """
    try:
        fields, bits = dict(said["fields"]), said["bits"]
        if not fields.keys() <= set(FIELDS):
            raise ValueError("a field that trajectories do not have")
        for path, dtype in bits:
            inside = fields
            for key in path[:-1]:
                inside = inside[key]
            array = inside[path[-1]]
            size = np.dtype(DTYPES[dtype][0]).itemsize
            if dtype not in BITS or array.dtype.kind not in "iu" or array.dtype.itemsize != size:
                raise ValueError("an array that does not hold these bits")
            inside[path[-1]] = Bits(dtype, array)
        return Trajectory(said["max_episode_length"], said["model_weights_id"], **fields)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise SchemaError(f"{where}: expected the document of a trajectory: {error}") from None


# ---- from the server to the client -----------------------------------------------------------------------------------


def from_trajectory(one: TrajectoryArrays) -> dict[str, Any]:
    facts = {"max_episode_length": one.max_episode_length, "model_weights_id": one.weights_id}
    return {**_plain(one.leaves, one.arrays), **facts}


def trajectory_of(where: str, said: dict[str, Any], device: Any) -> Trajectory:
    leaves, arrays = _leaves_of(where, said, device)
    facts = said["max_episode_length"], said["model_weights_id"]
    return TrajectoryArrays(leaves, arrays, *facts).to_trajectory(device)


def from_drawn(drawn: DrawnArrays) -> dict[str, Any]:
    return {**_plain(drawn.leaves, drawn.arrays), **{name: getattr(drawn, name) for name in _PLACES}}


def drawn_of(where: str, said: dict[str, Any], device: Any) -> dict[str, Any]:
    """The batch of drawn rows, on a device."""
    leaves, arrays = _leaves_of(where, said, device)
    return DrawnArrays(leaves, arrays, *(said[name] for name in _PLACES)).to_batch(device)


def _leaves_of(where: str, said: dict[str, Any], device: Any) -> tuple[tuple[Leaf, ...], list[np.ndarray[Any, Any]]]:
    bits = {tuple(path): dtype for path, dtype in said["bits"]}
    leaves, arrays = [], []
    for name, value in said["fields"].items():
        for path, array in walk(where, (name,), value):
            dtype = bits.get(path) or dtype_name(array.dtype)
            if dtype is None or (path in bits and dtype not in BITS):
                raise StorageError(f"{where}: {'/'.join(path)}: the server sent a dtype that is not known")
            if dtype in BITS and device is None:
                kind = DTYPES[dtype][1]
                raise SchemaError(f"{where}: {'/'.join(path)}: NumPy has no {kind}; give open() device='cpu'")
            leaves.append(Leaf(path, dtype, array.shape[2:]))
            arrays.append(array)
    return tuple(leaves), arrays
