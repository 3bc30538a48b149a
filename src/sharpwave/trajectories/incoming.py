"""Incoming: a trajectory that a caller gives, checked, before it is added here or sent to a server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..checks import whole
from ..errors import SchemaError
from .index import MOST_WEIGHTS_ID, is_weights_id
from .trajectory import Parts, read

__all__ = ["Incoming", "read_incoming"]


class Incoming(NamedTuple):
    parts: Parts
    max_episode_length: int
    weights_id: str


def read_incoming(where: str, trajectories: Any, drops_non_arrays: bool = False) -> list[Incoming]:
    """Checks each trajectory of an iterable by itself. Contiguous arrays are not copied.

    Args:
        drops_non_arrays: Leaves out values without rows, as RLinf does; else they are an error.

    Raises:
        SchemaError: It is no iterable, or one of the trajectories cannot be kept.
    """
    made = []
    for trajectory in _each(where, trajectories):
        parts = read(where, trajectory, drops_non_arrays)
        name = getattr(trajectory, "model_weights_id", None)
        if not is_weights_id(name):
            raise SchemaError(
                f"{where}: model_weights_id: expected a string of at most {MOST_WEIGHTS_ID} bytes without '/', as it "
                f"is part of a file's name, got {name!r}"
            )
        length = whole(where, "max_episode_length", getattr(trajectory, "max_episode_length", 0), 0)
        made.append(Incoming(parts, length, str(name)))
    return made


def _each(where: str, trajectories: Any) -> Iterator[Any]:
    try:
        every = iter(trajectories)
    except TypeError:
        kind = type(trajectories).__name__
        raise SchemaError(f"{where}: trajectories: expected a list of Trajectory, got {kind}") from None
    yield from every
