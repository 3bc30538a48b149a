"""The history of a SequenceBuffer as records: one for each call that changes it, or one instant of it as a whole.

The first record holds the buffer's options. ``MARK`` records the name of a checkpoint: a restart that resumes from it
undoes what trainers acknowledged after it. The last two marks can be resumed from, because a process may die between
its mark and the trainer's own checkpoint. Records that no restart can need any more are left out when the file is
rewritten.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from .. import _core
from ..checks import truth
from ..errors import SchemaError, StorageError
from ..files import Entry, Journal, Record, read_journal, reading, write_journal
from ..files.origin import Origin
from ..files.save_path import save_path
from .incoming import Survey
from .options import Options
from .origins import Origins
from .safetensors import decode, encode_arrays
from .sample import SequenceSample

__all__ = [
    "KIND",
    "Instant",
    "Kept",
    "check_journal",
    "needed",
    "pack_samples",
    "pack_survey",
    "pack_whole",
    "put_head",
    "read_blocks",
    "read_head",
    "read_options",
    "read_samples",
]

KIND = "sequences"
_LENGTH = struct.Struct("<Q")

BASE, PUT, AMEND, ACK, EVICT, VERSION, MARK, MEND, OPTIONS, CLEAR = range(10)

_RECORD_SAMPLES = 1024  # most samples of one record of an instant
_RECORD_BYTES = 16 << 20  # bytes of samples after which a record of an instant ends


class Kept(NamedTuple):
    """One sample at one instant."""

    serial: int
    sample: SequenceSample
    birth: int
    version: int | None
    bytes: int
    uses: list[int]  # one a consumer, in the order of the flow


class Instant(NamedTuple):
    """One instant of a buffer: what ``save`` writes."""

    options: Options
    base: dict[str, Any]
    has_births: bool
    kept: list[Kept]
    journal: Path | None  # of the buffer: this file is not replaced

    def write(self, where: str, path: Any) -> None:
        """Raises:
        StorageError: It cannot be written; a file that had the name before is unchanged.
        """
        path = save_path(path)
        if self.journal is not None and os.path.realpath(path) == os.path.realpath(self.journal):
            raise StorageError(f"{where}: {os.fspath(path)}: it is this buffer's own journal; give another path")
        try:
            write_journal(path, KIND, self.records())
        except StorageError as error:
            raise StorageError(f"{where}: {error}") from None

    def records(self) -> Iterator[Entry]:
        yield Entry(OPTIONS, self.options.to_json())
        yield Entry(BASE, self.base)
        start = size = 0
        for end, one in enumerate(self.kept, 1):
            size += one.bytes
            if end - start == _RECORD_SAMPLES or size >= _RECORD_BYTES or end == len(self.kept):
                yield self._record(self.kept[start:end])
                start, size = end, 0

    def _record(self, kept: list[Kept]) -> Entry:
        uses = {consumer.name: [one.uses[at] for one in kept] for at, consumer in enumerate(self.options.flow)}
        head = {
            "serials": [one.serial for one in kept],
            "births": [one.birth for one in kept] if self.has_births else None,
            "versions": [one.version for one in kept],
            "uses": uses,
        }
        return Entry(PUT, head, pack_samples([one.sample for one in kept]))


def check_journal(where: str, journal: Any, sync: bool, resume: Any, recover: Any, version: Any) -> None:
    """Raises:
    SchemaError: Arguments of the constructor that are about the journal make no sense.
    """
    truth(where, "recover", recover)
    if journal is None and (sync or recover or resume is not None):
        raise SchemaError(f"{where}: sync=, resume= and recover= need journal=")
    if journal is not None and not isinstance(journal, (str, os.PathLike)):
        raise SchemaError(f"{where}: journal: expected a path, got {journal!r}")
    if resume is not None and not isinstance(resume, str):
        raise SchemaError(f"{where}: resume: expected the name of a checkpoint, got {resume!r}")
    if journal is not None and version is not None:
        raise SchemaError(f"{where}: version= and journal= exclude each other: the journal holds the version")


def read_options(path: str | os.PathLike[str], where: str, recover: bool) -> Options:
    """The options of the buffer whose journal this is.

    Raises:
        StorageError: It is no journal of a SequenceBuffer, it is damaged, or it has no options.
    """
    with closing(read_journal(path, KIND, where=where, recover=recover)) as records:
        first = next(records, None)
    if first is None or first.kind != OPTIONS:
        raise StorageError(
            f"{where}: {os.fspath(path)}: expected the options of a SequenceBuffer in the first record; they are lost "
            "or were never written: open it with SequenceBuffer(capacity, flow=..., journal=...)"
        )
    with reading(where, path, first):
        return Options.from_json(read_head(first))


def pack_samples(samples: list[SequenceSample]) -> list[Any]:
    """The body of a record, in pieces: neighbours with the same keys and dtypes share one safetensors block."""
    survey = Survey.of(samples)
    assert survey is not None
    return pack_survey(samples, survey)


def pack_survey(samples: list[SequenceSample], survey: Survey) -> list[Any]:
    """``pack_samples`` of samples whose survey is known."""
    pieces: list[Any] = []
    start = 0
    for last in survey.ends:
        while start < last:
            end = last if len(survey.names) == len(survey.ids) else _distinct(survey.ids, start, last)
            pieces += _pack(samples[start:end], survey.ids[start:end], sum(survey.bytes[start:end]))
            start = end
    return pieces


def put_head(
    serials: list[int], births: list[int] | None, versions: list[int | None], origin: Origin | None = None
) -> bytes:
    """What the record of a put says beside its samples."""
    text = _core.to_json
    more = "" if origin is None else f',"origin":{json.dumps(origin.to_json())}'
    return f'{{"serials":{text(serials)},"births":{text(births)},"versions":{text(versions)}{more}}}'.encode()


def pack_whole(sample: SequenceSample) -> list[Any]:
    """The body of a record of one sample of several data: the bytes of its parts together."""
    return _pack([sample], sample._ids, sample.nbytes)


def _pack(samples: list[SequenceSample], ids: list[str], nbytes: int) -> list[Any]:
    header, *arrays = encode_arrays(samples, ids)
    return [_LENGTH.pack(len(header) + nbytes), header, *arrays]


def _distinct(ids: list[str], start: int, last: int) -> int:
    """The end of the longest run from ``start`` on without an id twice."""
    seen: set[str] = set()
    for at in range(start, last):
        if ids[at] in seen:
            return at
        seen.add(ids[at])
    return last


def read_samples(body: bytearray) -> list[SequenceSample]:
    """The single samples of a put or amend, in order. Their arrays look into ``body``.

    Raises:
        ValueError, StorageError: The body is not what ``pack_samples`` made.
    """
    return [part for block in read_blocks(memoryview(body)) for part in block.unpack()]


def read_blocks(view: memoryview) -> Iterator[SequenceSample]:
    """The samples of a body as they were packed, several data in one. Raises as ``read_samples``."""
    at = 0
    while at < len(view):
        if len(view) - at < _LENGTH.size:
            raise ValueError(f"expected a length of {_LENGTH.size} bytes, got {len(view) - at}")
        (length,) = _LENGTH.unpack_from(view, at)
        at += _LENGTH.size
        if length > len(view) - at:
            raise ValueError(f"samples claim {length} bytes, {len(view) - at} follow")
        yield decode(view[at : at + length])
        at += length


def read_head(record: Record) -> dict[str, Any]:
    """What a record says, every value of the type that it should have.

    Raises:
        ValueError, KeyError, TypeError: It is not what this kind of record says.
    """
    head = json.loads(record.head)
    if not isinstance(head, dict):
        raise TypeError(f"expected an object, got {type(head).__name__}")
    kind = record.kind
    if "origin" in head:
        Origin.read(head["origin"])
    if kind in (PUT, AMEND, ACK, EVICT):
        _wholes("serials", head["serials"], 0)
        if len(set(head["serials"])) != len(head["serials"]):
            raise ValueError("serials: expected each once")
    if kind == PUT:
        count = len(head["serials"])
        if head["births"] is not None:
            _wholes("births", head["births"], 1, count)
        _wholes("versions", [0 if one is None else one for one in head["versions"]], 0, count)
        for name, uses in head.get("uses", {}).items():
            _wholes(f"uses of {name!r:.100}", uses, 0, count)
    elif kind == ACK or (kind == AMEND and "consumer" in head):
        _text("consumer", head["consumer"])
    elif kind == VERSION:
        _wholes("version", [head["version"]], 0)
    elif kind == MARK:
        _text("name", head["name"])
    elif kind == BASE:
        _wholes("trained, version, next", [head["trained"], head["version"], head["next"]], 0)
        for name in head["used"]:
            _text("used", name)
        Origins().read(head.get("origins", []))
    elif kind == MEND:
        _wholes("gone", head["gone"], 0)
        _wholes("next", [head["next"]], 0)
        for serials in head["redo"].values():
            _wholes("redo", serials, 0)
    elif kind == OPTIONS:
        Options.from_json(head)
    elif kind > CLEAR:
        raise ValueError(f"a record of kind {kind}: written by a newer Sharpwave")
    return head


def _wholes(name: str, values: Any, least: int, count: int | None = None) -> None:
    if not isinstance(values, list) or (count is not None and len(values) != count):
        raise ValueError(f"{name}: expected a list{'' if count is None else f' of {count}'}, got {values!r:.100}")
    for value in values:
        if type(value) is not int or not least <= value < 2**63:
            raise ValueError(f"{name}: expected whole numbers, at least {least}, got {value!r:.100}")


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected text, got {value!r:.100}")


def needed(
    journal: Journal,
    options: Options,
    base: dict[str, Any],
    serials: set[int],
    from_mark: str | None,
    until_mark: str | None = None,
    undone: frozenset[str] = frozenset(),
) -> Iterator[Entry]:
    """The records of a journal without what no restart needs.

    Args:
        options: Of the buffer; they become the first record.
        base: What the left-out records had led to, and the origins of all calls: the records that stay have none.
        serials: The samples whose records stay.
        from_mark: Marks and versions in front of this mark go: they are in ``base``.
        until_mark: Versions and marks behind this mark go, and the acknowledgements of ``undone``: the buffer was
            resumed from it.
    """
    yield Entry(OPTIONS, options.to_json())
    yield Entry(BASE, base)
    begun, over = from_mark is None, False
    for record in journal.records():
        with journal.reading(record):
            head = read_head(record)
        kind = record.kind
        if kind == MARK:
            begun = begun or head["name"] == from_mark
            if begun and not over:
                yield _same(record, head)
            over = over or head["name"] == until_mark
        elif kind == VERSION:
            if begun and not over:
                yield _same(record, head)
        elif kind == MEND:
            yield _same(record, head)
        elif kind == CLEAR:
            # Samples that were freed since the first mark are written again with what happened to them; those that
            # were put before that mark and cleared before it are not.
            if begun and from_mark is not None:
                yield _same(record, head)
        elif kind in (OPTIONS, BASE) or (kind == ACK and over and head["consumer"] in undone):
            continue
        elif not serials.isdisjoint(head["serials"]):
            if kind == AMEND and over and head.get("consumer") in undone:  # the keys stay
                del head["consumer"]
                yield Entry(kind, {name: said for name, said in head.items() if name != "origin"}, [record.body])
                continue
            yield _same(record, head)
            if kind == PUT and (left := [serial for serial in head["serials"] if serial not in serials]):
                yield Entry(EVICT, {"serials": left})  # they came with one that stays


def _same(record: Record, head: dict[str, Any]) -> Entry:
    left = {name: said for name, said in head.items() if name != "origin"} if "origin" in head else record.head
    return Entry(record.kind, left, [record.body])
