"""Samples of sequences as bytes of a message: blocks of safetensors, whose arrays are views of the frame that came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import SchemaError, SharpwaveError
from ..files.named_arrays import raw_bytes
from ..sequences.column import Column, concatenate
from ..sequences.history import pack_samples, pack_whole, read_blocks
from ..sequences.intake import unpack
from ..sequences.sample import SequenceSample
from .document import Pieces

__all__ = ["pack_batch", "pack_given", "read_batch", "read_parts"]


def pack_given(where: str, samples: SequenceSample | Sequence[SequenceSample]) -> tuple[int, Pieces | None]:
    """What a user gives to ``put`` or ``amend``: how many data, and their bytes; None where there are none.

    Raises:
        SchemaError: They are no samples; a dtype that safetensors lacks, or metadata that JSON lacks.
    """
    if isinstance(samples, SequenceSample):
        return len(samples), pack_batch(samples) if len(samples) else None
    parts = unpack(where, samples)
    return len(parts), _pieces(pack_samples(parts)) if parts else None


def read_parts(where: str, body: Any) -> list[SequenceSample]:
    """What ``pack_given`` gave, one sample a datum.

    Raises:
        SchemaError: It is not that.
    """
    return [part for block in _read(where, body) for part in block.unpack()]


def pack_batch(batch: SequenceSample) -> Pieces:
    """A batch. An id twice in it is twice in a file of safetensors only as two blocks."""
    ids = batch._ids
    return _pieces(pack_whole(batch) if len(set(ids)) == len(ids) else pack_samples(batch.unpack()))


def read_batch(where: str, body: Any) -> SequenceSample:
    """What ``pack_batch`` gave."""
    blocks = _read(where, body)
    first = blocks[0]
    if len(blocks) == 1:
        return first
    columns = {}
    for key, column in first._columns.items():
        parts = [block._columns[key] for block in blocks]
        lens = [row for part in parts for row in part.lens]
        columns[key] = Column(lens, concatenate([part.data for part in parts]), column.shape, column.dtype)
    names = dict.fromkeys(name for block in blocks for name in block._metadata)
    metadata = {
        name: [value for block in blocks for value in block._metadata.get(name) or [None] * len(block)]
        for name in names
    }
    return SequenceSample._make([one for block in blocks for one in block._ids], columns, metadata)


def _pieces(pieces: list[Any]) -> Pieces:
    return Pieces([raw_bytes(piece) if isinstance(piece, np.ndarray) else piece for piece in pieces])


def _read(where: str, body: Any) -> list[SequenceSample]:
    if not isinstance(body, np.ndarray) or body.dtype != np.uint8 or body.ndim != 1:
        raise SchemaError(f"{where}: samples: expected an array of bytes, got {type(body).__name__}")
    try:
        return list(read_blocks(body.data))
    except (ValueError, SharpwaveError) as error:
        raise SchemaError(f"{where}: samples: {error}") from None
