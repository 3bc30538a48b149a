"""Samples as safetensors: the format is a length, a JSON header and the arrays' bytes, so frames need no copy.

Ids, lengths and metadata stand in the header's ``__metadata__`` under ``sharpwave``; any reader of safetensors reads
the arrays. Every size is checked before memory is taken.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _core
from ..errors import SchemaError, StorageError
from ..files import named_arrays, replace_file
from .column import dtype_from_name, dtype_name, is_tensor

if TYPE_CHECKING:
    from .sample import SequenceSample

__all__ = ["decode", "encode", "encode_arrays", "load", "save"]


def encode(*samples: SequenceSample) -> list[Any]:
    """The bytes of one file with all data of these samples, in pieces: the header, then for each key one buffer a
    sample, which looks into its array where it can.

    Args:
        samples: At least one; all have the same keys, shapes, dtypes and names of metadata, and no id twice.

    Raises:
        SchemaError: A dtype that safetensors lacks, or metadata that JSON lacks.
    """
    header, *pieces = encode_arrays(samples, [one for sample in samples for one in sample._ids])
    return [header, *(named_arrays.raw_bytes(piece) if isinstance(piece, np.ndarray) else piece for piece in pieces)]


def encode_arrays(samples: Sequence[SequenceSample], ids: list[str]) -> list[Any]:
    """``encode``, with the arrays themselves as pieces where they are contiguous."""
    arrays, keys, text = {}, [], _core.to_json
    for key, (_, data, shape, dtype) in samples[0]._columns.items():
        lens, tokens, pieces = _core.pieces_of_columns([sample._columns[key] for sample in samples], _raw)
        name, has_data = dtype_name(dtype), "false" if data is None else "true"
        said = None if shape is None else list(shape)
        keys.append(f"{text(key)}:[{lens},{text(said)},{text(name)},{has_data}]")
        if data is None:
            continue
        if key == "__metadata__":
            raise SchemaError("to_bytes(): key '__metadata__' is the format's own; remap() it")
        arrays[key] = str(name).removeprefix("torch."), (tokens, *(shape or ())), pieces
    metadata = "{}"
    if names := samples[0]._metadata:
        by_name = {name: [value for sample in samples for value in sample._metadata[name]] for name in names}
        try:
            metadata = json.dumps(by_name, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise SchemaError(f"to_bytes(): metadata: expected what JSON holds: {error}") from None
    about = f'{{"ids":{text(ids)},"metadata":{metadata},"keys":{{{",".join(keys)}}}}}'
    try:
        return named_arrays.encode_text(arrays, about)
    except SchemaError as error:
        raise SchemaError(f"to_bytes(): key {error}") from None


def decode(raw: Any) -> SequenceSample:
    """The sample of these bytes.

    Raises:
        StorageError: Damaged, cut short, or not written by Sharpwave.
    """
    try:
        view = memoryview(raw).cast("B")
    except TypeError:
        raise SchemaError(f"from_bytes(): expected bytes, got {type(raw).__name__}") from None
    try:
        length = named_arrays.header_bytes(view[:8], len(view))
        header = named_arrays.parse(bytes(view[8 : 8 + length]), len(view))
        body = view[header.start :]
        keys, ids, metadata = header.about["keys"], header.about["ids"], header.about["metadata"]
        arrays = {key: _read(body, key, entry, header.places) if entry[3] else None for key, entry in keys.items()}
        from .sample import SequenceSample

        return SequenceSample(
            ids,
            {key: entry[0] for key, entry in keys.items()},
            arrays,
            trailing_shapes={key: entry[1] for key, entry in keys.items()},
            dtypes={key: dtype_from_name("from_bytes()", entry[2]) for key, entry in keys.items()},
            metadata=metadata,
        )
    except StorageError as error:
        raise StorageError(f"from_bytes(): {error}") from None
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
        OverflowError,
        RecursionError,
        RuntimeError,
    ) as error:
        raise StorageError(f"from_bytes(): not a sample, or damaged: {error}") from None


def save(sample: SequenceSample, path: Path) -> None:
    try:
        replace_file(path, encode(sample))
    except StorageError as error:
        raise StorageError(f"save(): {error}") from None


def load(path: Path) -> SequenceSample:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise StorageError(f"load(): {path}: {error.strerror}") from None
    return decode(bytearray(raw))  # writable arrays


def _raw(data: Any) -> Any:
    if is_tensor(data):
        import torch

        data = data.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return named_arrays.raw_bytes(data)


def _read(body: memoryview, key: str, described: Any, places: dict[str, named_arrays.Place]) -> Any:
    lens, shape, dtype, _ = described
    want, place = (sum(map(sum, lens)), *shape), places[key]
    kind = dtype_from_name("from_bytes()", dtype)
    if place.dtype != named_arrays.DTYPES[dtype.removeprefix("torch.")] or place.shape != want:
        raise ValueError(f"key {key!r}: the arrays and their description differ")
    start, end = place.start, place.end
    if isinstance(kind, np.dtype):
        return np.frombuffer(body, kind, math.prod(want), start).reshape(want)
    import torch

    copy = np.frombuffer(body, np.uint8, end - start, start).copy()
    return torch.from_numpy(copy).view(kind).reshape(want)
