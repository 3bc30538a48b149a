"""The one append-only file of the package: what happened to a SequenceBuffer, or to a folder of trajectories.

A call returns after its record was written, so a killed process loses nothing that was acknowledged; with ``sync`` it
also waits for the disk, for power cuts. Opening tells two things apart. A torn last record was never acknowledged, or a
power cut took it: it is cut off, with a warning and a count. Everything else that does not hold, before a record that
does or before what was synced when the file was last closed, is damage: it is refused, or ``recover=True`` keeps the
whole records and counts the rest.

A journal has one owner: a lock on the file itself, which ends with its process and is not inherited by a forked child.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
import sys
import warnings
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from .. import _core
from ..errors import ClosedError, SchemaError, SharpwaveError, StorageError
from . import records as form
from .records import HEADER_BYTES, Entry, Header, Loss, Record
from .replaced import write_pieces

__all__ = ["Journal", "has_magic", "read_journal", "reading", "warn_caller", "write_journal"]

_PACKAGE = str(Path(__file__).parents[1])
_AT_ONCE = 512  # pieces a system call: the system takes 1024
_WRONG = (
    KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, RuntimeError,
    struct.error, UnicodeError,
)  # fmt: skip


class Journal:
    """A journal that this object owns. Not safe for threads.

    The file is read before it is appended to: ``records()`` to its end, or the first ``append`` does it.

    Args:
        path: Made where it is not there.
        kind: Whose journal it is, at most 16 letters; another kind is refused.
        where: Begins every message: the call and argument that name this file.
        sync: Whether each append waits for the disk.
        recover: Whether a damaged file is opened with its undamaged records.
        timeout: Seconds to wait for another owner to let go.

    Attributes:
        cut_bytes: Of a torn last record, cut off.
        lost_records: Whole records that damage took (``recover``), as far as their numbers tell.
        lost_bytes: That damage took.
        size: Of the file; known once it has been read.

    Raises:
        StorageError: Another owner has it, it is no journal of that kind, or it cannot be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        kind: str,
        *,
        where: str = "journal",
        sync: bool = False,
        recover: bool = False,
        timeout: float = 0.0,
    ) -> None:
        self.path = Path(os.path.abspath(path))  # a later chdir changes nothing
        self.where, self.kind, self.sync = where, kind, sync
        self.cut_bytes = self.lost_records = self.lost_bytes = 0
        self.size = 0  # 0: not read yet
        self._number = 0
        self._recover = recover
        self._why_broken: str | None = None
        self._is_damaged = False
        self._is_open = False
        if "\0" in str(self.path):
            raise SchemaError(f"{where}: expected a path, got {str(path)!r}")
        self._file = self._own(timeout)
        try:
            self._header = self._read_header()
            form.write_pid(self._file.fileno(), os.getpid())
        except BaseException as error:
            self._file.close()
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise StorageError(f"{where}: {self.path}: {error.strerror}") from None
            raise
        self._is_open = True

    # ---- opening -----------------------------------------------------------------------------------------------------

    def _own(self, timeout: float) -> _core.FileLock:
        name = str(self.path)
        if not os.path.lexists(name):
            with suppress(StorageError):  # another process made it meanwhile, or own_file says what is wrong
                made = _core.NewFile(name)
                made.write(_new_header(self.kind).to_bytes(0))
                file = made.own()
                made.sync()  # a file without its header would not be known again after a power cut
                made.publish(replace=False)
                return file
        owned = _core.own_file(name, create=True, timeout=timeout)
        if owned is None:
            raise StorageError(
                f"{self.where}: {self.path}: {_said_owner(name)} has it open; close that one first, or give this one "
                "a path of its own"
            )
        return owned

    def _read_header(self) -> Header:
        file = self._file.fileno()
        raw = os.pread(file, HEADER_BYTES, 0)
        if not raw:
            header = _new_header(self.kind)
            os.pwrite(file, header.to_bytes(os.getpid()), 0)
            os.fsync(file)
            return header
        return _parse_header(self.where, self.path, self.kind, file, raw, self._recover)

    @property
    def identity(self) -> bytes:
        """16 random bytes, of this file and of no other."""
        return self._header.identity

    # ---- reading -----------------------------------------------------------------------------------------------------

    def records(self) -> Iterator[Record]:
        """The records, in order, one at a time in memory. The first time it also finds the end of the file.

        A damaged file (``recover``) stays as it is until the first ``append``, which writes the whole records and its
        own into a new file: what follows from a loss is told in the step that forgets the loss.

        Raises:
            StorageError: Damage that ``recover`` would pass over. Nothing was changed; what was yielded before it
                holds.
        """
        file = self._descriptor("read")
        if self.size:
            yield from form.walk(file, self._header, self.size, Loss())
            return
        size = os.fstat(file).st_size
        loss = Loss()
        for record in form.walk(file, self._header, size, loss):
            if not loss or self._recover:
                yield record
        tail = _split_tail(loss, size, self._header)
        if loss:
            if not self._recover:
                raise StorageError(_said_damage(self.where, self.path, loss, "give recover=True to keep them"))
            self.lost_records, self.lost_bytes = loss.records, loss.bytes
            warn_caller(
                f"{self.where}: {self.path}: was damaged: {loss.records} records ({loss.bytes} bytes) are lost, "
                f"{loss.found} are whole"
            )
        if tail < size:
            warn_caller(
                f"{self.where}: {self.path}: its last record was not written whole: {size - tail} bytes are cut off"
            )
            self.cut_bytes = size - tail
        self._is_damaged = bool(loss)
        if tail < size and not loss:
            os.ftruncate(file, tail)
        self.size, self._number = tail, loss.expected

    def _whole(self) -> Iterator[Entry]:
        for record in self.records():
            yield Entry(record.kind, record.head, [record.body])

    @contextmanager
    def reading(self, record: Record) -> Iterator[None]:
        """``reading`` of a record of this file."""
        with reading(self.where, self.path, record):
            yield

    def head(self, record: Record) -> dict[str, Any]:
        """What a record's head says.

        Raises:
            StorageError: It is not JSON, or not an object.
        """
        with self.reading(record):
            said = json.loads(record.head)
            if not isinstance(said, dict):
                raise TypeError(f"expected an object, got {type(said).__name__}")
        return said

    # ---- writing -----------------------------------------------------------------------------------------------------

    def append(self, entries: Iterable[Entry]) -> int:
        """Writes records behind the last one; returns how many bytes they are.

        All of them, or none if the call fails. A process that is killed in this call may leave the first few: what has
        to be together goes into one record.

        Raises:
            StorageError: It cannot be written; the file is as before.
            ClosedError: The journal was closed, or belongs to the parent of this process.
        """
        file = self._descriptor("write")
        if not self.size:
            for _ in self.records():
                pass
        if self._why_broken is not None:
            raise StorageError(f"{self.where}: {self.path}: {self._why_broken}; close it and open it again")
        if self._is_damaged:
            return self._mend(list(entries))
        pieces: list[Any] = []
        number, end = self._number, self.size
        for entry in entries:
            parts, size = form.encode(entry, number, self._header.tag)
            pieces += parts
            number += 1
            end += size
        wrote = end - self.size
        try:
            _write_all(file, pieces, self.size)
            if self.sync:
                os.fdatasync(file)
            self.size, self._number = end, number
        except BaseException as error:
            # Also on an interrupt: bytes of an uncounted record would be found when the file is opened again.
            try:
                os.ftruncate(file, self.size)
            except OSError as second:
                self._why_broken = f"a failed write could not be undone ({second.strerror})"
            if isinstance(error, OSError):
                raise StorageError(f"{self.where}: {self.path}: {error.strerror}; nothing was changed") from None
            raise
        return wrote

    def _mend(self, entries: list[Entry]) -> int:
        self.replace(chain(self._whole(), entries))
        return sum(form.encode(entry, 0, self._header.tag)[1] for entry in entries)

    def replace(self, entries: Iterable[Entry]) -> None:
        """Puts a new file with these records in this one's place, in one step; they may come from ``records()``.

        It is on the disk, and owned, before it gets the name.

        Raises:
            StorageError: It cannot be written, or another file has the name by now; this one is as before.
        """
        old = self._file
        self._descriptor("write")
        if not old.is_named(str(self.path)):
            raise StorageError(
                f"{self.where}: {self.path}: another file has this name now; it was moved or replaced while it was "
                "open: nothing was changed"
            )
        made = _core.NewFile(str(self.path))
        header, records = _write_whole(made, _new_header(self.kind), entries)
        file = made.own()
        os.pwrite(file.fileno(), header.to_bytes(os.getpid()), 0)
        made.sync()
        made.publish(replace=True)
        self._file, self._header, self.size, self._number = file, header, header.synced_end, records
        self._why_broken, self._is_damaged = None, False
        old.close()

    # ---- life --------------------------------------------------------------------------------------------------------

    def _descriptor(self, verb: str) -> int:
        if not self._is_open:
            raise ClosedError(f"{self.where}: {self.path}: the journal was closed")
        try:
            return self._file.fileno()
        except ClosedError:
            raise ClosedError(
                f"{self.where}: {self.path}: cannot {verb}: the journal belongs to the parent of this process; open "
                "a journal with a path of its own after the fork"
            ) from None

    def flush(self) -> None:
        """Waits until everything that was appended is on the disk; a loss of it is reported as damage from then on.

        Raises:
            StorageError: The disk failed; the last records may be lost.
        """
        self._descriptor("write")
        if self._why_broken is not None:
            raise StorageError(f"{self.where}: {self.path}: {self._why_broken}; close it and open it again")
        try:
            self._sync()
        except OSError as error:
            raise StorageError(f"{self.where}: {self.path}: {error.strerror}; the last records may be lost") from None

    def _sync(self) -> None:
        if not self._file.is_open or not self.size or self._why_broken is not None or self._is_damaged:
            return
        if (self.size, self._number) == (self._header.synced_end, self._header.synced_records):
            return
        file = self._file.fileno()
        os.fdatasync(file)
        header = self._header._replace(synced_end=self.size, synced_records=self._number)
        form.write_synced(file, header)
        self._header = header

    def close(self) -> None:
        """Lets go of the file. What was appended is on the disk then, and a loss of it is reported as damage."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._sync()
        except OSError as error:
            raise StorageError(f"{self.where}: {self.path}: {error.strerror}; the last records may be lost") from None
        finally:
            self._file.close()


@contextmanager
def reading(where: str, path: str | os.PathLike[str], record: Record) -> Iterator[None]:
    """Goes around all code that relies on a record's content: an error there becomes a StorageError with its place."""
    try:
        yield
    except SharpwaveError as error:
        raise StorageError(f"{where}: {os.fspath(path)}: the record at byte {record.at}: {error}") from None
    except _WRONG as error:
        raise StorageError(
            f"{where}: {os.fspath(path)}: the record at byte {record.at} is whole, but does not say what it should: "
            f"{type(error).__name__}: {error}"
        ) from None


def read_journal(
    path: str | os.PathLike[str], kind: str, *, where: str = "journal", recover: bool = False, loss: Loss | None = None
) -> Generator[Record, None, None]:
    """The whole records of a journal that another process may own; nothing is changed.

    A torn last record is left out without a warning: a live owner may be writing it.

    Args:
        loss: Counts what ``recover`` passed over; complete when the iterator ends.

    Raises:
        StorageError: It cannot be opened, is no journal of that kind, or is damaged (not with ``recover``).
    """
    name = Path(os.path.abspath(path))
    try:
        file = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise StorageError(f"{where}: {name}: {error.strerror}") from None
    try:
        size = os.fstat(file).st_size
        header = _parse_header(where, name, kind, file, os.pread(file, HEADER_BYTES, 0), recover)
        loss = Loss() if loss is None else loss
        for record in form.walk(file, header, size, loss):
            if not loss or recover:
                yield record
        _split_tail(loss, size, header)
        if loss and not recover:
            raise StorageError(_said_damage(where, name, loss, "open it with recover=True to keep them"))
    finally:
        os.close(file)


def has_magic(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as journals do. False where it cannot be read: opening it says why."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return False
    try:
        return os.pread(file, len(form.MAGIC), 0) == form.MAGIC
    except OSError:  # a folder
        return False
    finally:
        os.close(file)


def write_journal(path: str | os.PathLike[str], kind: str, entries: Iterable[Entry], sync: bool = True) -> int:
    """Writes a whole journal without an owner, in one step; returns its bytes."""
    name = os.path.abspath(path)
    made = _core.NewFile(name)
    header, _ = _write_whole(made, _new_header(kind), entries)
    file = made.own()
    os.pwrite(file.fileno(), header.to_bytes(0), 0)
    if sync:
        made.sync()
    made.publish(replace=True)
    file.close()
    return made.size


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _new_header(kind: str) -> Header:
    if not 0 < len(kind.encode()) <= 16:
        raise ValueError(f"kind: expected 1 to 16 bytes, got {kind!r}")
    return Header(kind, secrets.token_bytes(16), HEADER_BYTES, 0)


def _write_whole(made: _core.NewFile, header: Header, entries: Iterable[Entry]) -> tuple[Header, int]:
    count = 0

    def pieces() -> Iterator[Any]:
        nonlocal count
        yield header.to_bytes(0)
        for entry in entries:
            yield from form.encode(entry, count, header.tag)[0]
            count += 1

    write_pieces(made, pieces())
    return header._replace(synced_end=made.size, synced_records=count), count


def _parse_header(where: str, path: Path, kind: str, file: int, raw: bytes, recover: bool) -> Header:
    try:
        header = Header.parse(raw)
    except ValueError as error:
        tag = form.find_tag(file, os.fstat(file).st_size)
        if tag is None:
            raise StorageError(f"{where}: {path}: {error}; remove it or give another path") from None
        if not recover:
            raise StorageError(
                f"{where}: {path}: {error}, but records stand in it; restore the file from a copy, or give "
                "recover=True to keep them"
            ) from None
        return Header(kind, tag + secrets.token_bytes(12), HEADER_BYTES, 0, is_whole=False)
    if header.kind != kind:
        raise StorageError(f"{where}: {path}: expected a journal of {kind}, got one of {header.kind!r}")
    return header


def _split_tail(loss: Loss, size: int, header: Header) -> int:
    """Takes a torn tail out of the loss, and returns where it begins; the file's size where there is none."""
    tail = size
    if loss.ranges and loss.ranges[-1][1] == size and loss.ranges[-1][0] >= header.synced_end:
        tail = loss.ranges.pop()[0]
    if size < header.synced_end:  # cut short
        loss.ranges.append((size, header.synced_end))
    if loss.ranges:
        loss.records = max(loss.records, header.synced_records - loss.found)
    return tail


def _said_damage(where: str, path: Path, loss: Loss, mend: str) -> str:
    if not loss.ranges:
        return (
            f"{where}: {path}: damaged: {loss.records} records are missing between others; {loss.found} records are "
            f"whole: restore the file from a copy, or {mend}"
        )
    return (
        f"{where}: {path}: damaged at byte {loss.ranges[0][0]}: {loss.bytes} bytes with {loss.records} records or more "
        f"cannot be read; {loss.found} records are whole, before and behind it: restore the file from a copy, or {mend}"
    )


def warn_caller(message: str) -> None:
    """Warns at the line of the user's code that called the package, however deep in the package this is."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _said_owner(path: str) -> str:
    """For a message: the number is what the owner calls itself, and may be another process here."""
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            pid = form.pid_of(os.pread(file, HEADER_BYTES, 0))
        finally:
            os.close(file)
        if pid is not None:
            return f"another buffer (process {pid})"
    return "another buffer"


def _write_all(file: int, pieces: list[Any], at: int) -> None:
    for start in range(0, len(pieces), _AT_ONCE):
        views = [memoryview(piece).cast("B") for piece in pieces[start : start + _AT_ONCE]]
        while views:
            done = os.pwritev(file, views, at)  # fewer bytes where the disk is full or there are more than 2 GiB
            at += done
            while views and done >= len(views[0]):
                done -= len(views.pop(0))
            if views and done:
                views[0] = views[0][done:]
