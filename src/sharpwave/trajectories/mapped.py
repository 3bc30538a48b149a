"""The data of a trajectory's file: mapped, or read whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from ..errors import StorageError
from .formats import check_file, read_whole
from .index import Missing, TrajectoryEntry, TrajectoryIndex
from .links import size_of

__all__ = ["Mapped", "map_slab", "read_slab"]


def read_slab(
    where: str, index: TrajectoryIndex, entry: TrajectoryEntry, path: Path, allow_pickle: bool
) -> np.ndarray[Any, Any]:
    """The bytes of a trajectory, in memory and checked."""
    layout = index.layouts[entry.layout]
    assert index.leaves is not None
    _check_there(where, path, entry)
    return read_whole(where, path, index.leaves, layout, entry.start, entry.bytes, entry.crc, allow_pickle)


class Mapped(NamedTuple):
    """The file of a trajectory, mapped."""

    file: _core.MappedFile
    slab: Any


def map_slab(where: str, index: TrajectoryIndex, entry: TrajectoryEntry, path: Path, checked: Any = None) -> Mapped:
    """A trajectory's file, mapped, and its checksum compared first unless ``checked`` is its identity (inode, size,
    time of the last write)."""
    layout = index.layouts[entry.layout]
    assert index.leaves is not None
    _check_there(where, path, entry)
    file = _core.MappedFile(str(path), entry.start + layout.bytes)
    if file.identity != checked or file.identity[1] != entry.bytes:
        check_file(where, path, index.leaves, layout, entry.start, entry.bytes, entry.crc)
        if not file.is_unchanged:
            raise StorageError(f"{where}: {path}: was written to while it was read")
    return Mapped(file, file.array(entry.start))


def _check_there(where: str, path: Path, entry: TrajectoryEntry) -> None:
    size = size_of(path)
    if size < 0:
        raise Missing(f"{where}: {path}: expected {entry.bytes} bytes, got no file")
    if size != entry.bytes:
        raise StorageError(f"{where}: {path}: expected {entry.bytes} bytes, got {size}")
