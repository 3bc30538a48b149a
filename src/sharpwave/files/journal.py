"""The append-only file of the package. It records the changes of a SequenceBuffer, or of a folder of trajectories.

A call returns after its record was written, so no acknowledged record is lost when the process is killed. With ``sync``
it also waits for the disk, so none is lost in a power cut.

Opening distinguishes two cases. An incomplete last record was never acknowledged, or was cut off by a power cut: it is
removed, with a warning and a count. Any other invalid bytes, before a valid record or before the size that was synced
when the file was last closed, are damage: the file is refused, or ``recover=True`` keeps the valid records and counts
the lost ones.

A journal has one owner. The owner holds a lock on the file itself, which ends with its process and is not inherited by
a forked child.
"""

from __future__ import annotations

import json
import os
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
from .new_file import write_pieces
from .pieces import write_all
from .records import HEADER_BYTES, RECORD_BYTES, Encoded, Entry, Header, Loss, Record

__all__ = ["Journal", "has_magic", "read_journal", "reading", "warn_caller", "write_journal"]

_PACKAGE = str(Path(__file__).parents[1])
_BLANK = bytes(RECORD_BYTES)
_RECORDS_AHEAD = 16
_MOST_AHEAD = 64 << 20
_LEFT_OVER = 1 << 20
_WRONG = (
    KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, RuntimeError,
    struct.error, UnicodeError,
)  # fmt: skip


class Journal:
    """A journal that this object owns. Not safe for threads.

    The file must be read to its end before a record is appended: iterate ``records()``, or the first ``append`` reads
    it.

    Args:
        path: Path of the file; it is made where it does not exist.
        kind: Kind of the journal, at most 16 letters; a file of another kind is refused.
        where: Start of every error message: the call and argument that name this file.
        sync: Whether each append waits for the disk.
        recover: Whether a damaged file is opened with its valid records.
        timeout: Seconds to wait until another owner closes the file.

    Attributes:
        cut_bytes: Bytes of an incomplete last record that were removed.
        lost_records: Records lost to damage (``recover``), as far as record numbers tell.
        lost_bytes: Bytes lost to damage.
        size: Size of the file; 0 until it has been read.
        is_open: False after ``close``.

    Raises:
        StorageError: It has another owner, is not a journal of that kind, or cannot be opened.
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
        self._reserved_end = 0  # blocks are asked for up to this byte
        self._recover = recover
        self._why_broken: str | None = None
        self._is_damaged = False
        self.is_open = False
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
        self.is_open = True

    # ---- opening -----------------------------------------------------------------------------------------------------

    def _own(self, timeout: float) -> _core.FileLock:
        name = str(self.path)
        if not os.path.lexists(name):
            with suppress(StorageError):  # another process made it meanwhile, or own_file says what is wrong
                made = _core.NewFile(name)
                made.write(_new_header(self.kind).to_bytes(0))
                file = made.own()
                made.sync()  # after a power cut, a file without its header would not be recognised
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
        """16 random bytes that identify this file."""
        return self._header.identity

    # ---- reading -----------------------------------------------------------------------------------------------------

    def records(self) -> Iterator[Record]:
        """Yields the records in order, one at a time in memory. The first iteration also finds the end of the file.

        A damaged file (``recover``) is not changed until the first ``append``. That call writes the valid records and
        its own into a new file, so the records that describe the loss appear in the same step as the repaired file.

        Raises:
            StorageError: The file is damaged and ``recover`` was not given. Nothing was changed; the records yielded
                before are valid.
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
        if not loss and (tail < size or os.fstat(file).st_blocks * 512 > size + _LEFT_OVER):
            os.ftruncate(file, tail)  # also what a killed process had reserved behind it
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
        """The head of a record, a JSON object.

        Raises:
            StorageError: The head is not JSON, or not an object.
        """
        with self.reading(record):
            said = json.loads(record.head)
            if not isinstance(said, dict):
                raise TypeError(f"expected an object, got {type(said).__name__}")
        return said

    # ---- writing -----------------------------------------------------------------------------------------------------

    def append(self, entries: Iterable[Entry]) -> int:
        """Appends records; returns their size in bytes.

        All records are written, or none if the call fails. If the process is killed in this call, the first few may be
        in the file: facts that must stay together belong into one record.

        Raises:
            StorageError: The records cannot be written; the file is unchanged.
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
        records = [Encoded(entry, number, self._header.tag) for number, entry in enumerate(entries, self._number)]
        start = at = self.size
        waiting: list[Any] = []  # pieces that are not written yet, from ``start`` on
        try:
            for record in records:
                end = at + record.size
                if record.is_long:
                    # The header last: another thread computes the checksum while the rest is written. Until then the
                    # header is blank, and a reader finds an incomplete last record.
                    record.begin()
                    self._reserve(at, end)
                    write_all(file, [*waiting, _BLANK, record.head, *record.pieces], start, end - start)
                    write_all(file, [record.header()], at, RECORD_BYTES)
                    waiting, start = [], end
                else:
                    waiting += [record.header(), record.head, *record.pieces]
                at = end
            write_all(file, waiting, start, at - start)
            if self.sync:
                os.fdatasync(file)
            wrote, self.size, self._number = at - self.size, at, self._number + len(records)
        except BaseException as error:
            # Also on an interrupt: otherwise the next open would find bytes of a record that was not acknowledged.
            try:
                os.ftruncate(file, self.size)
                self._reserved_end = 0
            except OSError as second:
                self._why_broken = f"a failed write could not be undone ({second.strerror})"
            if isinstance(error, OSError):
                raise StorageError(f"{self.where}: {self.path}: {error.strerror}; nothing was changed") from None
            raise
        return wrote

    def _reserve(self, at: int, end: int) -> None:
        """Asks for the blocks of a long record, and of some more like it: writing takes about a third less time then.
        ``close`` and a failed write give back what is left. It changes nothing else, and may fail."""
        if end > self._reserved_end:
            begin = max(at, self._reserved_end)
            self._reserved_end = max(end, begin + min(_MOST_AHEAD, _RECORDS_AHEAD * (end - at)))
            self._file.reserve(begin, self._reserved_end - begin)

    def _mend(self, entries: list[Entry]) -> int:
        self.replace(chain(self._whole(), entries))
        return sum(form.encode(entry, 0, self._header.tag)[1] for entry in entries)

    def replace(self, entries: Iterable[Entry]) -> None:
        """Replaces the file, in one step, by a new one with these records; they may come from ``records()``.

        The new file is on the disk, and owned by this object, before it gets the name.

        Raises:
            StorageError: It cannot be written, or another file has taken the name; this file is unchanged.
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
        self._why_broken, self._is_damaged, self._reserved_end = None, False, 0
        old.close()

    # ---- life --------------------------------------------------------------------------------------------------------

    def _descriptor(self, verb: str) -> int:
        if not self.is_open:
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
        """Closes the file. All appended records are on the disk then; if some are missing later, that is damage."""
        if not self.is_open:
            return
        try:
            if self._reserved_end > self.size and self._file.is_open:
                os.ftruncate(self._file.fileno(), self.size)
            self._sync()
        except OSError as error:
            raise StorageError(f"{self.where}: {self.path}: {error.strerror}; the last records may be lost") from None
        finally:
            self._file.close()
            self.is_open = False  # last: an interrupt before it leaves a journal that can be closed again


@contextmanager
def reading(where: str, path: str | os.PathLike[str], record: Record) -> Iterator[None]:
    """A context in which a record's content is read: errors become a StorageError that names the record."""
    try:
        yield
    except SharpwaveError as error:
        raise StorageError(f"{where}: {os.fspath(path)}: the record at byte {record.at}: {error}") from None
    except _WRONG as error:
        raise StorageError(
            f"{where}: {os.fspath(path)}: the record at byte {record.at} has right checksums and wrong content: "
            f"{type(error).__name__}: {error}"
        ) from None


def read_journal(
    path: str | os.PathLike[str], kind: str, *, where: str = "journal", recover: bool = False, loss: Loss | None = None
) -> Generator[Record, None, None]:
    """Yields the valid records of a journal without owning it; nothing is changed.

    An incomplete last record is left out without a warning: the owner may be writing it.

    Args:
        loss: Counts what ``recover`` passed over; complete when the iterator ends.

    Raises:
        StorageError: It cannot be opened, is not a journal of that kind, or is damaged and ``recover`` was not given.
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
    """Writes a whole journal in one step and does not keep it open; returns its size in bytes."""
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
    return Header(kind, os.urandom(16), HEADER_BYTES, 0)


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
                f"{where}: {path}: {error}, but the file has records; restore it from a copy, or give "
                "recover=True to keep them"
            ) from None
        return Header(kind, tag + os.urandom(12), HEADER_BYTES, 0, is_whole=False)
    if header.kind != kind:
        raise StorageError(f"{where}: {path}: expected a journal of {kind}, got one of {header.kind!r}")
    return header


def _split_tail(loss: Loss, size: int, header: Header) -> int:
    """Removes an incomplete last record from the loss. Returns where it begins; the file's size if there is none."""
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
        f"cannot be read; {loss.found} records before and after it are whole: restore the file from a copy, or {mend}"
    )


def warn_caller(message: str) -> None:
    """Warns at the line of the user's code that called the package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def _said_owner(path: str) -> str:
    """The owner, for a message. The process id is from the owner's PID namespace."""
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            pid = form.pid_of(os.pread(file, HEADER_BYTES, 0))
        finally:
            os.close(file)
        if pid is not None:
            return f"another buffer (process {pid})"
    return "another buffer"
