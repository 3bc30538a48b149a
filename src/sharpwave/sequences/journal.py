"""An append-only file of what happened to a SequenceBuffer: after a crash the buffer is what it was.

The file is 16 bytes of name and version, then records: length and CRC-32 of what follows, a kind, a JSON head, and for
samples their safetensors bytes. A call returns after its record was written, so a killed process loses nothing that was
acknowledged; ``sync=True`` also waits for the disk, for power cuts. A torn record at the end was never acknowledged: it
is cut. Damage with whole records behind it is refused.

The trainer's own checkpoint and the journal meet by name: ``mark`` writes a name, and a restart that resumes from it
undoes what trainers acknowledged behind it. The last two marks can be resumed from: a process may die between its
mark and its own checkpoint. What nobody can ask for any more is left out when the file is rewritten.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import StorageError
from .files import decode, encode
from .sample import SequenceSample

__all__ = ["Journal", "Record", "pack_samples"]

_MAGIC = b"sharpwave seq\x00\x01\x00"
_FRAME = struct.Struct("<II")  # bytes of what follows, and their CRC-32
_HEAD = struct.Struct("<BI")  # kind, bytes of the JSON head
_LENGTH = struct.Struct("<Q")
_SLACK = 16 << 20  # bytes of waste that are not worth a rewrite

BASE, PUT, AMEND, ACK, EVICT, VERSION, MARK = range(7)


class Record(NamedTuple):
    kind: int
    head: dict[str, Any]
    body: memoryview

    def samples(self) -> list[SequenceSample]:
        """The single samples of a put or amend, in order."""
        made: list[SequenceSample] = []
        at = 0
        while at < len(self.body):
            (length,) = _LENGTH.unpack_from(self.body, at)
            at += _LENGTH.size
            made += decode(self.body[at : at + length]).unpack()
            at += length
        return made


def pack_samples(samples: list[SequenceSample]) -> list[Any]:
    """The body of a record, in pieces: neighbours with the same keys and dtypes share one safetensors block."""
    pieces: list[Any] = []
    start = 0
    while start < len(samples):
        first = _form(samples[start])
        names = {samples[start]._ids[0]}
        end = start + 1
        while end < len(samples) and samples[end]._ids[0] not in names and _form(samples[end]) == first:
            names.add(samples[end]._ids[0])
            end += 1
        block = encode(SequenceSample.gather(samples[start:end]))
        pieces += [_LENGTH.pack(sum(len(piece) for piece in block)), *block]
        start = end
    return pieces


def _form(sample: SequenceSample) -> list[Any]:
    return [(key, c.shape, c.dtype, c.data is None) for key, c in sample._columns.items()] + list(sample._metadata)


class Journal:
    """The file, owned by one process at a time. Not safe for threads: the buffer's lock is around every call."""

    def __init__(self, path: str | os.PathLike[str], sync: bool) -> None:
        self.path = Path(path)
        self.sync = sync
        self.cut_bytes = 0  # torn, and taken off
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StorageError(f"journal: {self.path}: {error.strerror}") from None
        try:
            self._lock_file()
            self._end = self._open_end()
        except BaseException:
            os.close(self._file)
            raise
        self.waste_bytes = 0  # of records that no restart needs
        self._is_open = True

    def _lock_file(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StorageError(f"journal: {self.path}: another process writes it; give this buffer its own") from None

    def _open_end(self) -> int:
        """Where the next record goes. A torn end is cut, and the magic written where there is nothing yet."""
        size = os.fstat(self._file).st_size
        head = os.pread(self._file, len(_MAGIC), 0)
        if not size or (size < len(_MAGIC) and _MAGIC.startswith(head)):
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, _MAGIC, 0)
            return len(_MAGIC)
        if head != _MAGIC:
            raise StorageError(f"journal: {self.path}: not a journal of this version; remove it or give another path")
        end = max((end for _, end in self._walk(self._file, size)), default=len(_MAGIC))
        if end < size:
            self.cut_bytes = size - end
            os.ftruncate(self._file, end)
        return end

    def _walk(self, file: int, size: int) -> Iterator[tuple[Record, int]]:
        """Whole records, and where each ends.

        Raises:
            StorageError: A damaged record that is not the last.
        """
        at = len(_MAGIC)
        while at + _FRAME.size <= size:
            length, crc = _FRAME.unpack(os.pread(file, _FRAME.size, at))
            end = at + _FRAME.size + length
            if length < _HEAD.size and not any(os.pread(file, min(size - at, 1 << 20), at)):
                return  # zeros: room that a power cut left unwritten
            if end > size:
                return
            raw = memoryview(bytearray(length))  # at most what the file has
            if os.preadv(file, [raw], at + _FRAME.size) != length or zlib.crc32(raw) != crc:
                if end == size:
                    return
                raise StorageError(
                    f"journal: {self.path}: damaged at byte {at}, and {size - end} bytes follow; restore the file, or "
                    f"truncate it to {at} bytes and lose what follows"
                )
            kind, head_bytes = _HEAD.unpack_from(raw)
            body = _HEAD.size + head_bytes
            yield Record(kind, json.loads(bytes(raw[_HEAD.size : body])), raw[body:]), end
            at = end

    def records(self) -> Iterator[Record]:
        for record, _ in self._walk(self._file, self._end):
            yield record

    def write(self, kind: int, head: dict[str, Any], body: list[Any] | None = None) -> int:
        """Appends a record; a write that fails leaves the file as it was. Returns its bytes."""
        if not self._is_open:
            raise StorageError(f"journal: {self.path} is closed")
        words = json.dumps(head, separators=(",", ":")).encode()
        pieces = [_HEAD.pack(kind, len(words)) + words, *(body or [])]
        length = crc = 0
        for piece in pieces:
            length += len(piece)
            crc = zlib.crc32(piece, crc)
        if length >= 1 << 32:
            raise StorageError(f"journal: a record of {length} bytes is over 4 GiB; put fewer samples at once")
        try:
            self._put(self._end, [_FRAME.pack(length, crc), *pieces])
            if self.sync:
                os.fdatasync(self._file)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise StorageError(f"journal: {self.path}: {error.strerror}; nothing was changed") from None
        self._end += _FRAME.size + length
        return _FRAME.size + length

    def _put(self, at: int, pieces: list[Any]) -> None:
        for start in range(0, len(pieces), 512):  # the system takes 1024 at once
            part = pieces[start : start + 512]
            size = sum(len(piece) for piece in part)
            written = os.pwritev(self._file, part, at)
            if written < size:  # a full disk says so in the next call
                rest = b"".join(part)
                while written < size:
                    written += os.pwrite(self._file, rest[written:], at + written)
            at += size

    def is_wasteful(self) -> bool:
        return self.waste_bytes > _SLACK and self.waste_bytes > self._end // 2

    def rewrite(
        self,
        base: dict[str, Any],
        needed: set[int],
        from_mark: str | None,
        until_mark: str | None = None,
        undone: frozenset[str] = frozenset(),
    ) -> None:
        """Leaves out what no restart needs, in a new file that takes the old one's name when it is whole.

        Args:
            base: What the left-out records had led to.
            needed: The samples whose records stay.
            from_mark: Marks and versions in front of this mark go: they are in ``base``.
            until_mark: Versions and marks behind this mark go, and the acknowledgements of ``undone``: the buffer was
                resumed from it.
        """
        beside = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        try:
            new = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            raise StorageError(f"journal: {beside}: {error.strerror}; nothing was changed") from None
        old, old_end = self._file, self._end
        self._file, self._end = new, len(_MAGIC)
        try:
            self._lock_file()
            os.pwrite(new, _MAGIC, 0)
            self.write(BASE, base)
            records = (record for record, _ in self._walk(old, old_end))
            for record in _needed(records, needed, from_mark, until_mark, undone):
                self.write(record.kind, record.head, [record.body])
            os.fsync(new)
            beside.replace(self.path)
        except BaseException:
            os.close(new)
            beside.unlink(missing_ok=True)
            self._file, self._end = old, old_end
            raise
        os.close(old)
        self.waste_bytes = 0
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name survives a power cut
        finally:
            os.close(folder)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._file)


def _needed(
    records: Iterator[Record],
    needed: set[int],
    from_mark: str | None,
    until_mark: str | None,
    undone: frozenset[str],
) -> Iterator[Record]:
    begun, over = from_mark is None, False
    for record in records:
        kind, head = record.kind, record.head
        if kind == MARK:
            begun = begun or head["name"] == from_mark
            if begun and not over:
                yield record
            over = over or head["name"] == until_mark
        elif kind == VERSION:
            if begun and not over:
                yield record
        elif kind == BASE or (kind == ACK and over and head["consumer"] in undone):
            continue
        elif not needed.isdisjoint(head["serials"]):
            yield record
            if kind == PUT and (left := [serial for serial in head["serials"] if serial not in needed]):
                yield Record(EVICT, {"serials": left}, memoryview(b""))  # they came with one that stays
