"""A file that is replaced in one step: readers find the old one or the new one, whole."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from .. import _core

__all__ = ["replace_file"]

_TOGETHER = 1 << 20  # bytes of small pieces that are joined before they are written


def replace_file(path: str | os.PathLike[str], pieces: Iterable[Any], sync: bool = True) -> int:
    """Writes a file that takes the name ``path`` when it is whole, readable by its owner only.

    Args:
        path: Its name. What has the name already is replaced.
        pieces: Its bytes, in order: anything with the buffer protocol.
        sync: Whether the bytes are on the disk before the file gets its name: without it a power cut may leave the name
            and no bytes.

    Returns:
        Its bytes.

    Raises:
        StorageError: It cannot be written; what had the name before is unchanged.
    """
    made = _core.NewFile(os.path.abspath(path))
    write_pieces(made, pieces)
    if sync:
        made.sync()
    made.publish(replace=True, sync=sync)
    return made.size


def write_pieces(made: _core.NewFile, pieces: Iterable[Any]) -> None:
    """Writes each piece behind the last one; small ones together."""
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
