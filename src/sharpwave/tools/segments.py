"""Live buffers seen from outside: lists, reads and removes them without opening them.

Opening would take one of the places for processes, and could repair what a killed process left before it was seen.
Numbers are read from the file at the offsets of docs/format.md.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .. import _core
from ..address import to_path
from ..errors import StorageError

__all__ = ["Damaged", "Removed", "Segment", "find", "read", "remove"]

_PAGE = 4096
_MAGIC = b"SHRPWAVE"
_LIVE = 1
_RUNTIME, _COUNTERS, _WRITERS, _DESCRIPTION = 0, 1, 2, 5  # regions
_VERSION = 2
_WRITER = struct.Struct("<Q16xQqQ208x")  # owner, origin, live, added
_SHM_FILE = re.compile(r"sharpwave-([A-Za-z0-9_.-]{1,200})\.sw")
_TEMPORARY = r"\.(?:[A-Za-z0-9]{6}|next)"  # suffix of a file that is being created or replaced


@dataclass(frozen=True)
class Segment:
    """The numbers of a live buffer at one moment."""

    address: str
    uuid: str
    face: str
    size: int
    capacity: int
    rows_added: int
    rows_sampled: int
    writers: int
    max_writers: int
    waiting: int  # calls that wait for their turn
    recoveries: int
    rows_lost: int
    bytes: int
    allocated_bytes: int  # less than `bytes` where heaps are not full yet
    age_s: float
    pids: list[int]  # processes that have it open; each number is from the PID namespace of that process


@dataclass(frozen=True)
class Damaged:
    """A file with the name of a live buffer that is not one, or that a killed creator left."""

    address: str
    problem: str


def find() -> Iterator[Segment | Damaged]:
    """All files in the shared-memory folder that are named like ours, sorted by name."""
    folder = Path(_core.shared_memory_folder)
    left = re.compile(rf"({_SHM_FILE.pattern}){_TEMPORARY}")
    for name in sorted(os.listdir(folder)):
        if matched := _SHM_FILE.fullmatch(name):
            address = f"shm://{matched[1]}"
            try:
                yield read(address)
            except FileNotFoundError:  # removed since the folder was listed
                continue
            except OSError as error:
                yield Damaged(address, error.strerror or str(error))
        elif matched := left.fullmatch(name):
            table = folder / matched[1]
            if folder / name in _leftovers(table):
                address = f"shm://{matched[2]}"
                yield Damaged(address, f"its creator was killed; 'sharpwave rm {address}' removes what it left")


def read(address: str) -> Segment:
    """Reads a live buffer's numbers without attaching.

    Raises:
        StorageError: It is foreign, truncated or damaged; the message says which.
        FileNotFoundError: There is none.
    """
    path = _live_path(address, "info")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return _read(address, path, descriptor)
    finally:
        os.close(descriptor)


def _read(address: str, path: Path, descriptor: int) -> Segment:
    info = os.fstat(descriptor)

    def damaged(why: str) -> StorageError:
        return StorageError(f"'{path}' {why}")

    def take(offset: int, length: int) -> bytes:
        data = os.pread(descriptor, length, offset) if offset + length <= info.st_size else b""
        if len(data) != length:
            raise damaged("is damaged: a region does not fit its header")
        return data

    if not stat.S_ISREG(info.st_mode):
        raise damaged("is not a file")
    page = os.pread(descriptor, _PAGE, 0)
    if len(page) < _PAGE or page[:8] != _MAGIC:
        raise damaged("is not a Sharpwave table")
    version, _, kind, checksum, total = struct.unpack_from("<IIIIQ", page, 8)
    if version != _VERSION:
        raise damaged(f"has format version {version}, this Sharpwave reads version {_VERSION}")
    if checksum != _core.crc32c(page[:20] + bytes(4) + page[24:816]):
        raise damaged("is damaged: its header has a wrong checksum")
    if kind != _LIVE:
        raise damaged("is a snapshot, not a live buffer")
    if total != info.st_size:
        raise damaged(f"is truncated or has grown: its header says {total} bytes, the file has {info.st_size}")
    capacity, max_writers, created_ns = (struct.unpack_from("<Q", page, at)[0] for at in (32, 80, 120))
    regions = [struct.unpack_from("<QQ", page, 432 + 16 * region) for region in range(24)]

    counters = take(regions[_COUNTERS][0], 1920)
    sampled, used, origin, recoveries, lost = (
        struct.unpack_from("<Q", counters, at)[0] for at in (128, 256, 320, 640, 704)
    )
    if used > max_writers or max_writers > 4096 or max_writers * _WRITER.size != regions[_WRITERS][1]:
        raise damaged("is damaged: its counters contradict its header")
    writers = list(_WRITER.iter_unpack(take(regions[_WRITERS][0], used * _WRITER.size)))
    # Writers keep adding rows while this reads, so the sum may be a few rows too large or too small.
    size = sum(live for _, its_origin, live, _ in writers if its_origin == origin)
    try:
        face = json.loads(take(regions[_DESCRIPTION][0], min(regions[_DESCRIPTION][1], 1 << 20)))["face"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise damaged("is damaged: its description cannot be read") from None
    return Segment(
        address=address,
        uuid=page[160:176].hex(),
        face=str(face),
        size=min(max(size, 0), capacity),
        capacity=capacity,
        rows_added=sum(added for _, _, _, added in writers),
        rows_sampled=sampled,
        writers=sum(taken != 0 for taken, *_ in writers),
        max_writers=max_writers,
        waiting=struct.unpack("<I", take(regions[_RUNTIME][0] + 516, 4))[0],
        recoveries=recoveries,
        rows_lost=lost,
        bytes=total,
        allocated_bytes=info.st_blocks * 512,
        age_s=max(0.0, time.time() - created_ns / 1e9),
        pids=sorted(_core.Table.holders(str(path))),
    )


# ---- removing --------------------------------------------------------------------------------------------------------


@dataclass
class Removed:
    """What `remove` removed."""

    paths: list[Path] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)  # processes that had it open; their mapping stays valid


def remove(address: str) -> Removed:
    """Removes a live buffer's file, and files that killed creators left under the same address.

    Processes that have the buffer open keep their mapping. The name is free at once.

    Raises:
        StorageError: Nothing has that address, or the file is not ours. Nothing was removed.
    """
    path = _live_path(address, "rm")
    removed = Removed()
    left = _leftovers(path)  # before the table is removed: one of them may be a second name of the same file
    _refuse_foreign(path)
    with contextlib.suppress(StorageError):  # no process has a damaged file open
        removed.pids = sorted(_core.Table.holders(str(path)))
    for name in [path, *left]:
        try:
            name.unlink()
        except FileNotFoundError:
            continue
        removed.paths.append(name)
    if not removed.paths:
        raise StorageError(f"rm: there is no {address!r}")
    return removed


def _refuse_foreign(path: Path) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise StorageError(f"rm: '{path}' is not a file; it was not made by Sharpwave and is left alone")
    with path.open("rb") as file:
        page = file.read(_PAGE)
    if page[:8] != _MAGIC:
        raise StorageError(f"rm: '{path}' is not a Sharpwave table and is left alone")
    if len(page) == _PAGE and struct.unpack_from("<I", page, 16)[0] != _LIVE:
        raise StorageError(f"rm: '{path}' is a snapshot, not a live buffer, and is left alone")


def _leftovers(path: Path) -> list[Path]:
    """Files that a killed creator of `path` left: named like its temporary files, without rows, open in no process.

    A user's copy under such a name (`live.sw.backup`) has rows, or is not ours.
    """
    pattern = re.compile(re.escape(path.name) + _TEMPORARY)
    try:
        names = [name for name in os.listdir(path.parent) if pattern.fullmatch(name)]
    except OSError:
        return []
    found = []
    for name in sorted(names):
        try:
            descriptor = os.open(path.parent / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            if _is_second_name(path, descriptor) or _is_unfinished(descriptor):
                found.append(path.parent / name)
        finally:
            os.close(descriptor)
    return found


def _is_second_name(path: Path, descriptor: int) -> bool:
    """Whether a creator was killed after link() and before it removed the temporary name: both name the table."""
    if path.parent != Path(_core.shared_memory_folder):
        return False  # in other folders a second name may be a user's hard link
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _is_unfinished(descriptor: int) -> bool:
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode) or _is_open_elsewhere(info):
        return False
    if info.st_size == 0:
        return True
    page = os.pread(descriptor, _PAGE, 0)
    if page[:8] == _MAGIC and len(page) == _PAGE:
        (counters,) = struct.unpack_from("<Q", page, 432 + 16 * _COUNTERS)
        return counters < info.st_size and os.pread(descriptor, 8, counters) == bytes(8)  # no block was ever claimed
    try:
        # The header is written last. Until then its page is allocated and not written: the file has a hole there.
        return os.lseek(descriptor, 0, os.SEEK_DATA) >= _PAGE
    except OSError as error:
        return error.errno == errno.ENXIO


def _is_open_elsewhere(info: os.stat_result) -> bool:
    """Whether another process has the file open for writing. A creator at work does; one that lists files reads."""
    for process in Path("/proc").glob("[0-9]*"):
        if process.name == str(os.getpid()):
            continue
        try:
            descriptors = os.listdir(process / "fd")
        except OSError:
            continue  # it has ended, or belongs to another user, who cannot have this file open
        for descriptor in descriptors:
            try:
                if os.path.samestat(os.stat(process / "fd" / descriptor), info) and _writes(process, descriptor):
                    return True
            except OSError:
                continue
    return False


def _writes(process: Path, descriptor: str) -> bool:
    flags = (process / "fdinfo" / descriptor).read_text().partition("flags:")[2].split()[0]
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY


# ---- addresses -------------------------------------------------------------------------------------------------------


def _live_path(address: str, where: str) -> Path:
    path = to_path(address, where)
    if path is None:
        raise StorageError(f"{where}: expected 'shm://name' or 'file://path', got {address!r}")
    return path
