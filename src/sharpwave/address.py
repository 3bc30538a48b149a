"""Where a buffer lives, as a string: ``shm://name`` or ``file://path``; nothing is memory of this process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from . import _core
from .errors import StorageError

__all__ = ["to_path"]

_SHM_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


def to_path(address: Any, where: str) -> Path | None:
    """The file behind an address, or None for a plain path."""
    if not isinstance(address, str):
        raise StorageError(f"{where}: expected 'shm://name' or 'file://path', got {address!r}")
    if address.startswith("shm://"):
        name = address.removeprefix("shm://")
        if not _SHM_NAME.fullmatch(name):
            raise StorageError(f"{where}: expected a name of letters, digits, '_', '.', '-' after shm://, got {name!r}")
        return Path(_core.shared_memory_folder) / f"sharpwave-{name}.sw"
    if address.startswith("file://"):
        path = address.removeprefix("file://")
        if not path:
            raise StorageError(f"{where}: expected a path after file://, got {address!r}")
        return Path(path)
    if "://" in address:
        raise StorageError(f"{where}: expected 'shm://name' or 'file://path', got {address!r}")
    return None
