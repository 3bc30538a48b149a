"""Hard links: second names of files, of which checkpoints, merges and splits are made."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from .. import _core
from ..errors import StorageError
from .index import INDEX

__all__ = ["is_link", "link", "remove_folder", "size_of"]


def is_link(one: Path, other: Path) -> bool:
    """Whether two names are of one file."""
    try:
        return one.samefile(other)
    except OSError:
        return False


def size_of(path: Path) -> int:
    """Bytes of a file; -1: there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def link(source: Path, target: Path) -> None:
    """Gives a file a second name, or copies it where the file system has no hard links. Written files never change.

    Raises:
        StorageError: Another file has the name.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        if not is_link(source, target):
            raise StorageError(f"{target}: another file has this name") from None
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES):
            raise
        made = _core.NewFile(str(target))
        with source.open("rb", buffering=0) as file:
            while piece := file.read(1 << 20):
                made.write(piece)
        made.publish(replace=False, sync=False)


def remove_folder(path: Path, names: Iterable[str]) -> bool:
    """Removes these files and then the folder; False if the folder holds other files. The journal is removed last: if
    this process is killed, the rest is recognised by it."""
    for name in sorted(names, key=lambda name: name == INDEX):
        (path / name).unlink(missing_ok=True)
    try:
        path.rmdir()
    except OSError:
        return False
    return True
