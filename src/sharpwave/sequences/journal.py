"""What a SequenceBuffer writes into its journal, one record a call, and what a restart needs of it.

The trainer's own checkpoint and the journal meet by name: ``MARK`` writes a name, and a restart that resumes from it
undoes what trainers acknowledged behind it. The last two marks can be resumed from: a process may die between its
mark and its own checkpoint. What no restart can ask for any more is left out when the file is rewritten.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from ..files import Entry, Journal, Record
from .files import decode, encode
from .sample import SequenceSample

__all__ = ["KIND", "needed", "pack_samples", "read_head", "read_samples"]

KIND = "sequences"
_LENGTH = struct.Struct("<Q")

BASE, PUT, AMEND, ACK, EVICT, VERSION, MARK, MEND = range(8)


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


def read_samples(body: bytearray) -> list[SequenceSample]:
    """The single samples of a put or amend, in order. Their arrays look into ``body``.

    Raises:
        ValueError, StorageError: The body is not what ``pack_samples`` made.
    """
    made: list[SequenceSample] = []
    view = memoryview(body)
    at = 0
    while at < len(view):
        if len(view) - at < _LENGTH.size:
            raise ValueError(f"expected a length of {_LENGTH.size} bytes, got {len(view) - at}")
        (length,) = _LENGTH.unpack_from(view, at)
        at += _LENGTH.size
        if length > len(view) - at:
            raise ValueError(f"samples claim {length} bytes, {len(view) - at} follow")
        made += decode(view[at : at + length]).unpack()
        at += length
    return made


def read_head(record: Record) -> dict[str, Any]:
    """What a record says, every value of the type that it should have.

    Raises:
        ValueError, KeyError, TypeError: It is not what this kind of record says.
    """
    head = json.loads(record.head)
    if not isinstance(head, dict):
        raise TypeError(f"expected an object, got {type(head).__name__}")
    kind = record.kind
    if kind in (PUT, AMEND, ACK, EVICT):
        _wholes("serials", head["serials"], 0)
        if len(set(head["serials"])) != len(head["serials"]):
            raise ValueError("serials: expected each once")
    if kind == PUT:
        count = len(head["serials"])
        if head["births"] is not None:
            _wholes("births", head["births"], 1, count)
        _wholes("versions", [0 if one is None else one for one in head["versions"]], 0, count)
    elif kind == ACK:
        _text("consumer", head["consumer"])
    elif kind == VERSION:
        _wholes("version", [head["version"]], 0)
    elif kind == MARK:
        _text("name", head["name"])
    elif kind == BASE:
        _wholes("trained, version, next", [head["trained"], head["version"], head["next"]], 0)
        for name in head["used"]:
            _text("used", name)
    elif kind == MEND:
        _wholes("gone", head["gone"], 0)
        _wholes("next", [head["next"]], 0)
        for serials in head["redo"].values():
            _wholes("redo", serials, 0)
    elif kind > MEND:
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
    base: dict[str, Any],
    serials: set[int],
    from_mark: str | None,
    until_mark: str | None = None,
    undone: frozenset[str] = frozenset(),
) -> Iterator[Entry]:
    """The records of a journal without what no restart needs.

    Args:
        base: What the left-out records had led to.
        serials: The samples whose records stay.
        from_mark: Marks and versions in front of this mark go: they are in ``base``.
        until_mark: Versions and marks behind this mark go, and the acknowledgements of ``undone``: the buffer was
            resumed from it.
    """
    yield Entry(BASE, base)
    begun, over = from_mark is None, False
    for record in journal.records():
        with journal.reading(record):
            head = read_head(record)
        kind = record.kind
        if kind == MARK:
            begun = begun or head["name"] == from_mark
            if begun and not over:
                yield _same(record)
            over = over or head["name"] == until_mark
        elif kind == VERSION:
            if begun and not over:
                yield _same(record)
        elif kind == MEND:
            yield _same(record)
        elif kind == BASE or (kind == ACK and over and head["consumer"] in undone):
            continue
        elif not serials.isdisjoint(head["serials"]):
            yield _same(record)
            if kind == PUT and (left := [serial for serial in head["serials"] if serial not in serials]):
                yield Entry(EVICT, {"serials": left})  # they came with one that stays


def _same(record: Record) -> Entry:
    return Entry(record.kind, record.head, [record.body])
