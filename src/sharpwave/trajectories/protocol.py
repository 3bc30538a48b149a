"""The operations that the face calls on its trajectories, in this process or on a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from .trajectory import Trajectory

__all__ = ["Trajectories"]


class Trajectories(Protocol):
    """Trajectories that are added in order and drawn from. ``TrajectoryStore`` is one.

    ``where`` is the name of the face's call, for messages; the face has checked the arguments. Arguments and results
    are arrays, numbers and text, so that the trajectories may as well be in another process or on another machine.
    Paths are those of the process that holds the trajectories: the face neither makes nor reads them.
    """

    @property
    def folder(self) -> Path | str | None: ...  # None: in memory only; text: a path of another machine
    @property
    def capacity(self) -> int | None: ...
    @property
    def device(self) -> Any: ...  # where batches and trajectories go; None: NumPy arrays
    @property
    def address(self) -> str | None: ...  # by which another process opens it; None: it belongs to this one
    @property
    def open_options(self) -> dict[str, Any]: ...  # of such an open
    @property
    def place(self) -> str: ...  # for repr: 'in memory', the folder, or the address
    def summary(self) -> str: ...  # for repr: counts, or that it is closed; it does not raise

    def add(self, where: str, trajectories: Any) -> None: ...  # all of an iterable, or after an error none
    def sample(self, where: str, batch_size: int, recent: int | None, device: Any) -> dict[str, Any]: ...
    def get(self, where: str, trajectory_id: int) -> Trajectory: ...
    def trajectories(self, where: str) -> Iterator[tuple[int, Trajectory]]: ...

    # ``count`` raises where it is closed, and no failure of earlier writes.
    def count(self, where: str) -> int: ...
    def stats(self, where: str) -> dict[str, Any]: ...

    def save(self, where: str, path: Path) -> None: ...
    def load(self, where: str, path: Path, part: tuple[int, int, str] | None) -> None: ...  # rank, ranks, split_by
    def clear(self, where: str, *, set_aside: bool) -> None: ...
    def flush(self, where: str) -> None: ...
    def close(self, where: str) -> None: ...
