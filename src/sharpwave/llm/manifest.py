"""Sizes and checksums of the files of a folder, and their way to the disk."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .. import _core
from ..errors import StorageError

__all__ = ["compare", "describe", "sync_to_disk"]

_PIECE_BYTES = 1 << 18  # stays in the processor's cache between reading and summing


def describe(path: Path) -> dict[str, int]:
    return {"bytes": path.stat().st_size, "crc32c": _checksum(path)}


def compare(path: Path, said: Mapping[str, int], check: bool = True) -> None:
    """Raises StorageError unless the file has the size and, where `check` is true, the checksum of `describe`."""
    size = path.stat().st_size
    if size != said["bytes"]:
        raise StorageError(f"{path} has {size} bytes, {said['bytes']} were published")
    if check and _checksum(path) != said["crc32c"]:
        raise StorageError(f"{path} is damaged: its checksum is not the published one")


def sync_to_disk(path: Path) -> None:
    """Waits until a file or folder is on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _checksum(path: Path) -> int:
    crc = 0
    piece = memoryview(bytearray(min(_PIECE_BYTES, max(1, path.stat().st_size))))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            crc = _core.crc32c(piece[:count], crc)
    return crc
