"""A disk that is full: recognised in any error, and told with the run's folder and what to do."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import StorageError

__all__ = ["is_full", "tell_full_disk"]

_NUMBERS = (errno.ENOSPC, errno.EDQUOT)
_TEXTS = tuple(os.strerror(number) for number in _NUMBERS)  # safetensors and the journal give the text alone


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that led to it, says that the disk or the quota is full."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if getattr(error, "errno", None) in _NUMBERS or any(text in str(error) for text in _TEXTS):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def tell_full_disk(folder: Path) -> Iterator[None]:
    """An error of a full disk in the body becomes a `StorageError` that names the run's folder and the next command."""
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        try:
            left = f"{shutil.disk_usage(folder).free:,} bytes are left"
        except OSError:
            left = "the room that is left is unknown"
        raise StorageError(
            f"{folder}: the disk is full ({left}), so the run has ended; earlier checkpoints and logs stay. Make room, "
            f"then go on with: sharpwave resume {folder}"
        ) from error
