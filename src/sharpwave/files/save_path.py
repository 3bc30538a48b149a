"""The path that a user gives to ``save``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..address import to_path
from ..checks import told
from ..errors import StorageError

__all__ = ["make_parents", "read_save_path", "save_path"]


def read_save_path(path: Any) -> str:
    """The path that a ``save`` writes to, here or at a server.

    Raises:
        StorageError: It is no path.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(text, str) or text == "" or "\0" in text:
        raise StorageError(f"save(): path: expected a path, got {told(path)}")
    if to_path(text, "save()") is not None:
        raise StorageError(f"save(): expected a path, got {str(path)!r}; leave out the 'file://'")
    return text


def save_path(path: str | os.PathLike[str]) -> Path:
    """The same on this machine; its folders are made.

    Raises:
        StorageError: It is no path, or a folder cannot be made.
    """
    target = Path(read_save_path(path))
    make_parents("save()", target)
    return target


def make_parents(where: str, target: Path) -> None:
    """Makes the folders that a file or folder is going to be in.

    Raises:
        StorageError: A folder cannot be made.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{where}: cannot make the folder {str(target.parent)!r}: {error.strerror}") from None
