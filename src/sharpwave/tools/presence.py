"""Who has a live buffer open: the locks that its processes hold on its lock file, as the kernel tells them.

core/storage/presence.cpp is the other side of this. The layout of macOS is written and untested.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import StorageError

__all__ = ["at_the_door", "lock_path", "who_has_open"]

# Byte 0 is the door, every process that has the buffer open holds one of the bytes behind it.
_DOOR, _SEATS = 0, 1024
_DOOR_PATIENCE_S = 5.0
# The kernel's `struct flock`: Linux on 64 bits, and macOS.
_IS_MAC = sys.platform == "darwin"
_FLOCK = struct.Struct("qqihh" if _IS_MAC else "hhqqi4x")
# Locks of an open file, where there are any: they also meet those that this very process holds.
_GET_LOCK = getattr(fcntl, "F_OFD_GETLK", fcntl.F_GETLK)
_SET_LOCK = getattr(fcntl, "F_OFD_SETLK", fcntl.F_SETLK)

_open_locks: dict[tuple[int, int], int] = {}


def lock_path(path: Path) -> Path:
    """The lock file of a live buffer's file."""
    return Path(f"{os.path.realpath(path)}.lock")


def _lock_descriptor(lock: Path) -> int | None:
    """A descriptor of the lock file, kept for good.

    Closing any descriptor of a file drops all locks that the process has on it: also those of a buffer that is open in
    this process.
    """
    try:
        info = os.stat(lock)
        key = info.st_dev, info.st_ino
        if key not in _open_locks:
            _open_locks[key] = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    return _open_locks[key]


def _pack(kind: int, start: int, length: int) -> bytes:
    if _IS_MAC:
        return _FLOCK.pack(start, length, 0, kind, os.SEEK_SET)
    return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)


def _holder(descriptor: int, start: int, length: int) -> tuple[int, int, int] | None:
    """Some lock on these bytes, as (pid, start, length); None if there is none."""
    answer = _FLOCK.unpack(fcntl.fcntl(descriptor, _GET_LOCK, _pack(fcntl.F_WRLCK, start, length)))
    if _IS_MAC:
        answer = (answer[3], answer[4], *answer[:3])
    kind, _, begin, bytes_held, pid = answer
    return None if kind == fcntl.F_UNLCK else (max(pid, 0), begin, bytes_held)


def who_has_open(lock: Path) -> list[int]:
    """Ids of the processes inside, in order; 0 for one of another PID namespace, which has no number here."""
    descriptor = _lock_descriptor(lock)
    if descriptor is None:
        return []
    pids = []
    ranges = [(_DOOR + 1, _DOOR + _SEATS)]
    while ranges:
        first, last = ranges.pop()
        held = _holder(descriptor, first, last - first + 1) if first <= last else None
        if held is None:
            continue
        pid, begin, length = held
        pids.append(pid)
        # The kernel tells some lock, not the first one.
        ranges += [(first, begin - 1), (begin + length, last)] if length else [(first, begin - 1)]
    return sorted(pids)


@contextmanager
def at_the_door(lock: Path) -> Iterator[None]:
    """Nobody comes in or goes out meanwhile: whoever opens or closes the buffer holds the door for that moment."""
    deadline = time.monotonic() + _DOOR_PATIENCE_S
    while (descriptor := _lock_descriptor(lock)) is not None:
        try:
            fcntl.fcntl(descriptor, _SET_LOCK, _pack(fcntl.F_WRLCK, _DOOR, 1))
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                held = _holder(descriptor, _DOOR, 1)
                who = f"process {held[0]}" if held else "a process"
                raise StorageError(f"{who} is at the door of '{lock}' and does not go on; end it first") from None
            time.sleep(0.01)
            continue
        if _lock_descriptor(lock) == descriptor:
            break
        # Removed, and perhaps made anew, while this one waited: the door of another house.
        fcntl.fcntl(descriptor, _SET_LOCK, _pack(fcntl.F_UNLCK, _DOOR, 1))
    try:
        yield
    finally:
        if descriptor is not None:
            fcntl.fcntl(descriptor, _SET_LOCK, _pack(fcntl.F_UNLCK, _DOOR, 1))
