"""Where a buffer lives, as a string: ``shm://name``, ``file://path``, or ``tcp://host:port/name`` and
``ipc:///path/name`` of a server; nothing is memory of this process."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from . import _core
from .errors import StorageError

__all__ = ["identity", "is_remote", "to_address", "to_path"]

_SHM_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")


def is_remote(address: Any) -> bool:
    """Whether it names a buffer of a server."""
    return isinstance(address, str) and address.startswith(("tcp://", "ipc://"))


def to_address(address: Any, where: str) -> str:
    """The address with an absolute path: what a buffer keeps, so that it names the same file after ``os.chdir``."""
    path = to_path(address, where)
    return f"file://{path}" if path is not None and address.startswith("file://") else str(address)


def identity(path: Path) -> tuple[int, int] | None:
    """Which file stands under a name now; None where there is none."""
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino


def to_path(address: Any, where: str) -> Path | None:
    """The file behind an address, as an absolute path; None for a plain path."""
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
        try:
            return Path(path).absolute()
        except OSError as error:  # the working directory is gone
            raise StorageError(f"{where}: {address!r} is relative to a folder that is gone: {error.strerror}") from None
    if "://" in address:
        raise StorageError(f"{where}: expected 'shm://name' or 'file://path', got {address!r}")
    return None
