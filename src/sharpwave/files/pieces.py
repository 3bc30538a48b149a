"""Pieces: objects with the buffer protocol whose bytes are written one behind the other."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["write_all"]

_AT_ONCE = 512  # pieces per system call; the limit of the system is 1024


def write_all(file: int, pieces: list[Any], at: int, size: int) -> None:
    """Writes the pieces, which have ``size`` bytes in all."""
    while size:
        done = os.pwritev(file, pieces[:_AT_ONCE], at)  # fewer bytes if the disk is full, or above 2 GiB
        at += done
        size -= done
        if size:
            pieces = _behind(pieces, done)


def _behind(pieces: list[Any], done: int) -> list[Any]:
    """What follows the first ``done`` bytes."""
    for number, piece in enumerate(pieces):
        view = memoryview(piece)
        if view.nbytes > done:
            return [view.cast("B")[done:] if done else piece, *pieces[number + 1 :]]
        done -= view.nbytes
    return []
