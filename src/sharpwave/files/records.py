"""The bytes of a journal: a header, then numbered records. A record has a checksum of its header and one of the rest.

How a reader uses them:

- Header checksum: if it is right, the length is right, and the position of the next record is known.
- Number: if it is not the expected one, records were removed or a range of the file is repeated.
- Tag: it is the file's own. Bytes of another journal, inside a body or in an old disk block that appears after a power
  cut, are never taken for a record of this file.

An invalid record is an incomplete last record only if no record header of this file follows it.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .. import _core
from ..errors import StorageError

__all__ = [
    "HEADER_BYTES",
    "RECORD_BYTES",
    "Body",
    "Encoded",
    "Entry",
    "Header",
    "Loss",
    "Record",
    "encode",
    "find_tag",
    "walk",
]

MAGIC = b"sharpwave jrnl\r\n"
VERSION = 1
HEADER_BYTES = 128
# Magic, version, reserved, kind, identity, reserved, checksum of these. Written once.
_HEADER = struct.Struct("<16sII16s16sI")
# Bytes and records that are known to be on the disk, checksum of both.
_SYNCED = struct.Struct("<QQ")
_SYNCED_AT = 64
_PID_AT = 88  # process id of the present or last owner, for messages; no checksum covers it
_CRC = struct.Struct("<I")

_RECORD_MAGIC = b"\x9dSWJ"
# Magic, tag, kind, reserved, bytes of the head, number, bytes of the body, checksum of head and body; then the checksum
# of these.
_RECORD = struct.Struct("<4s4sHHIQQI")
RECORD_BYTES = _RECORD.size + _CRC.size
_CHUNK = 1 << 20
_LONG = 1 << 18


class Body:
    """The body of a record: pieces with the buffer protocol, which must not change until the record is written."""

    __slots__ = ("checksum", "pieces")

    def __init__(self, pieces: Iterable[Any] = ()) -> None:
        self.pieces = list(pieces)
        self.checksum = _core.Checksum(self.pieces)


class Entry(NamedTuple):
    """A record to be written: a kind (0 to 65535), a head (JSON, or its bytes) and a body, or its pieces."""

    kind: int
    head: Any
    body: Body | Iterable[Any] = ()


class Record(NamedTuple):
    """A record that was read and whose checksums are right."""

    kind: int
    head: bytes
    body: bytearray
    at: int  # byte of the file
    end: int


class Header(NamedTuple):
    """The first bytes of a journal."""

    kind: str
    identity: bytes
    synced_end: int
    synced_records: int
    is_whole: bool = True  # False: the header was damaged, and this one was made from the first record

    @property
    def tag(self) -> bytes:
        return self.identity[:4]

    def to_bytes(self, pid: int) -> bytes:
        first = _HEADER.pack(MAGIC, VERSION, 0, self.kind.encode(), self.identity, 0)
        first += _CRC.pack(_core.crc32c(first))
        return (first + self.synced_bytes() + _CRC.pack(0) + _CRC.pack(pid)).ljust(HEADER_BYTES, b"\0")

    def synced_bytes(self) -> bytes:
        """The bytes at ``_SYNCED_AT``. The checksum includes the identity, so the bytes of another file are refused."""
        numbers = _SYNCED.pack(self.synced_end, self.synced_records)
        return numbers + _CRC.pack(_core.crc32c(numbers + self.identity))

    @classmethod
    def parse(cls, raw: bytes) -> Header:
        """Raises:
        ValueError: It is not a header; the message says why.
        """
        if not raw.startswith(MAGIC):
            raise ValueError("it is not a journal of this Sharpwave")
        if len(raw) < HEADER_BYTES:
            raise ValueError(f"expected a header of {HEADER_BYTES} bytes, got {len(raw)}")
        _, version, _, kind, identity, _ = _HEADER.unpack_from(raw)
        (crc,) = _CRC.unpack_from(raw, _HEADER.size)
        if crc != _core.crc32c(raw[: _HEADER.size]):
            raise ValueError("its header is damaged")
        if version != VERSION:
            raise ValueError(f"expected version {VERSION} of the journal format, got {version}")
        end, records = _SYNCED.unpack_from(raw, _SYNCED_AT)
        made = cls(kind.rstrip(b"\0").decode(), identity, end, records)
        (crc,) = _CRC.unpack_from(raw, _SYNCED_AT + _SYNCED.size)
        if crc != _CRC.unpack(made.synced_bytes()[_SYNCED.size :])[0]:
            made = made._replace(synced_end=HEADER_BYTES, synced_records=0)  # forgets what was synced, loses no record
        return made


def pid_of(raw: bytes) -> int | None:
    """The process id in a header."""
    if not raw.startswith(MAGIC) or len(raw) < HEADER_BYTES:
        return None
    (pid,) = _CRC.unpack_from(raw, _PID_AT)
    return int(pid) or None


def write_pid(file: int, pid: int) -> None:
    os.pwrite(file, _CRC.pack(pid), _PID_AT)


def write_synced(file: int, header: Header) -> None:
    os.pwrite(file, header.synced_bytes(), _SYNCED_AT)


class Encoded:
    """A record as bytes: its header, its head and the pieces of its body.

    Args:
        number: Of the record.
        tag: Of the file.
    """

    def __init__(self, entry: Entry, number: int, tag: bytes) -> None:
        head = entry.head if isinstance(entry.head, bytes) else json.dumps(entry.head, separators=(",", ":")).encode()
        if len(head) >> 32:
            raise StorageError(
                f"journal: a record's head of {len(head)} bytes is over 4 GiB; write fewer entries at once"
            )
        body = entry.body if isinstance(entry.body, Body) else Body(entry.body)
        self.head, self.pieces, self._checksum = head, body.pieces, body.checksum
        self.size = RECORD_BYTES + len(head) + body.checksum.size
        self._about = tag, entry.kind, number

    @property
    def is_long(self) -> bool:
        """Whether the checksum takes so long that it is worth a thread."""
        return self._checksum.size >= _LONG

    def begin(self) -> None:
        """Another thread computes the checksum, unless one is at it."""
        self._checksum.begin()

    def header(self) -> bytes:
        tag, kind, number = self._about
        size = self._checksum.size
        crc = _core.crc32c_combine(_core.crc32c(self.head), self._checksum.finish(), size)
        first = _RECORD.pack(_RECORD_MAGIC, tag, kind, 0, len(self.head), number, size, crc)
        return first + _CRC.pack(_core.crc32c(first))


def encode(entry: Entry, number: int, tag: bytes) -> tuple[list[Any], int]:
    """The pieces of a record, and its size in bytes."""
    record = Encoded(entry, number, tag)
    return [record.header() + record.head, *record.pieces], record.size


class Loss:
    """The ranges of bytes that a walk could not read.

    A last range that reaches the end of the file may be an incomplete last record. ``records`` counts the numbers that
    are missing between records with valid headers.
    """

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.records = 0
        self.expected = 0  # the number of the next record
        self.found = 0

    @property
    def bytes(self) -> int:
        return sum(end - start for start, end in self.ranges)

    def __bool__(self) -> bool:
        return bool(self.ranges) or self.records > 0


class _Bytes:
    """Reads a file in chunks, so that small records do not need a system call each."""

    def __init__(self, file: int, size: int) -> None:
        self.file, self.size = file, size
        self._chunk, self._at = b"", 0

    def small(self, at: int, length: int) -> tuple[bytes, int]:
        """A chunk with these bytes, and their position in it. It has fewer at the end of the file or if the length is
        large."""
        if at < self._at or at + length > self._at + len(self._chunk):
            self._chunk, self._at = os.pread(self.file, min(_CHUNK, self.size - at), at), at
        return self._chunk, at - self._at

    def large(self, at: int, length: int) -> bytearray:
        made = bytearray(length)  # the caller compared the length with the file's size
        view = memoryview(made)
        done = 0
        while done < length:
            got = os.preadv(self.file, [view[done:]], at + done)
            if not got:
                break  # the file was cut while it was read: the checksum will be wrong
            done += got
        return made

    def find(self, what: bytes, at: int) -> int:
        """The first position of ``what`` from ``at`` on; the file's size if there is none."""
        while at + len(what) <= self.size:
            chunk = os.pread(self.file, min(_CHUNK, self.size - at), at)
            found = chunk.find(what)
            if found >= 0:
                return at + found
            if len(chunk) < len(what):
                break
            at += len(chunk) - len(what) + 1
        return self.size


def walk(file: int, about: Header, size: int, loss: Loss) -> Iterator[Record]:
    """The valid records of a file up to ``size``, in order; ``loss`` is complete when the iterator ends."""
    raw = _Bytes(file, size)
    unpack, crc32c, mark = _RECORD.unpack_from, _core.crc32c, _RECORD_MAGIC + about.tag
    at = HEADER_BYTES if about.is_whole else 0
    while at < size:
        chunk, off = raw.small(at, RECORD_BYTES)
        header = chunk[off : off + _RECORD.size]
        number = -1
        if len(chunk) - off >= RECORD_BYTES and header[:8] == mark:
            _, _, kind, _, head_bytes, number, body_bytes, crc = unpack(header)
            if _CRC.unpack_from(chunk, off + _RECORD.size)[0] != crc32c(header):
                number = -1
        if number >= loss.expected:
            loss.records += number - loss.expected
            loss.expected = number
            end = at + RECORD_BYTES + head_bytes + body_bytes
            if end <= size:
                if end - at <= _CHUNK:
                    chunk, off = raw.small(at, end - at)
                    middle = off + RECORD_BYTES + head_bytes
                    head, body = chunk[off + RECORD_BYTES : middle], bytearray(chunk[middle : middle + body_bytes])
                else:
                    head = bytes(raw.large(at + RECORD_BYTES, head_bytes))
                    body = raw.large(at + RECORD_BYTES + head_bytes, body_bytes)
                if (crc32c(body, crc32c(head)) if body_bytes else crc32c(head)) == crc:
                    loss.expected, loss.found = number + 1, loss.found + 1
                    yield Record(kind, head, body, at, end)
                    at = end
                    continue
        # A repeated record, whose number is below the expected one, is skipped like damage.
        further = _find_record(raw, at + 1, mark)
        loss.ranges.append((at, further))
        at = further


def _find_record(raw: _Bytes, at: int, mark: bytes) -> int:
    """The position of the next valid record header."""
    while (at := raw.find(mark, at)) < raw.size:
        chunk, off = raw.small(at, RECORD_BYTES)
        header = chunk[off : off + _RECORD.size]
        if len(chunk) - off >= RECORD_BYTES and _CRC.unpack_from(chunk, off + _RECORD.size)[0] == _core.crc32c(header):
            return at
        at += 1
    return raw.size


def find_tag(file: int, size: int) -> bytes | None:
    """The tag of a file's first record, for a file without a valid header."""
    raw = _Bytes(file, size)
    at = _find_record(raw, 0, _RECORD_MAGIC)
    return None if at >= size else os.pread(file, 4, at + 4)
