"""Files that are replaced in one step: a reader finds the complete old file or the complete new one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from .. import _core

__all__ = ["replace_file"]

_TOGETHER = 1 << 20  # bytes of small pieces that are joined before they are written


def replace_file(path: str | os.PathLike[str], pieces: Iterable[Any], sync: bool = True) -> int:
    """Writes a file that gets the name ``path`` when it is complete. Only its owner may read it.

    Args:
        path: Name of the file. An existing file of this name is replaced.
        pieces: The bytes of the file, in order: objects with the buffer protocol.
        sync: Whether the bytes are on the disk before the file gets its name. Without it, a power cut may leave the
            name without the bytes.

    Returns:
        The size of the file in bytes.

    Raises:
        StorageError: It cannot be written; the old file is unchanged.
    """
    made = _core.NewFile(os.path.abspath(path))
    write_pieces(made, pieces)
    if sync:
        made.sync()
    made.publish(replace=True, sync=sync)
    return made.size


def write_pieces(made: _core.NewFile, pieces: Iterable[Any]) -> None:
    """Writes the pieces in order; small ones are joined."""
    waiting: list[Any] = []
    size = 0
    for piece in pieces:
        waiting.append(piece)
        size += memoryview(piece).nbytes
        if size >= _TOGETHER:
            made.write(waiting[0] if len(waiting) == 1 else b"".join(waiting))
            waiting, size = [], 0
    if waiting:
        made.write(b"".join(waiting))
