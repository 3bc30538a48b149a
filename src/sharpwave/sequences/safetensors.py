"""Samples as safetensors: the format is a length, a JSON header and the arrays' bytes, so frames need no copy.

Ids, lengths and metadata stand in the header's ``__metadata__`` under ``sharpwave``; any reader of safetensors reads
the arrays. Every size is checked before memory is taken.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import SchemaError, StorageError
from ..files import replace_file
from .column import Column, dtype_from_name, dtype_name, is_tensor

if TYPE_CHECKING:
    from .sample import SequenceSample

__all__ = ["decode", "encode", "load", "save"]

_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_WRONG = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError, RuntimeError)
_LONGEST_HEADER = 100_000_000  # what the format's own reader accepts


def encode(sample: SequenceSample) -> list[Any]:
    """The file's bytes in pieces: the header, then one buffer a key, which looks into the array where it can.

    Raises:
        SchemaError: A dtype that safetensors lacks, or metadata that JSON lacks.
    """
    header: dict[str, Any] = {}
    pieces: list[Any] = []
    at = 0
    # Wide items first: every array then starts at a multiple of its item's size.
    order = sorted(sample._columns.items(), key=lambda pair: (-_item_bytes(pair[1]), pair[0]))
    for key, column in order:
        if column.data is None:
            continue
        if key == "__metadata__":
            raise SchemaError("to_bytes(): key '__metadata__' is the format's own; remap() it")
        name = _NAMES.get(str(column.dtype).removeprefix("torch."))
        if name is None:
            raise SchemaError(f"to_bytes(): key {key!r}: safetensors has no {column.dtype}; cast it before")
        raw = _raw(column.data)
        header[key] = {"dtype": name, "shape": list(column.data.shape), "data_offsets": [at, at + raw.nbytes]}
        pieces.append(raw)
        at += raw.nbytes
    about = {
        "ids": sample._ids,
        "metadata": sample._metadata,
        "keys": {key: [c.lens, c.shape, dtype_name(c.dtype), c.data is not None] for key, c in sample._columns.items()},
    }
    try:
        words = json.dumps(about, separators=(",", ":"), allow_nan=True)
    except (TypeError, ValueError) as error:
        raise SchemaError(f"to_bytes(): metadata: expected what JSON holds: {error}") from None
    header["__metadata__"] = {"sharpwave": words}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)) + text, *pieces]


def decode(raw: Any) -> SequenceSample:
    """The sample of these bytes.

    Raises:
        StorageError: Damaged, cut short, or not written by Sharpwave.
    """
    try:
        view = memoryview(raw).cast("B")
    except TypeError:
        raise SchemaError(f"from_bytes(): expected bytes, got {type(raw).__name__}") from None
    if len(view) < 8:
        raise StorageError(f"from_bytes(): expected a safetensors header, got {len(view)} bytes")
    (length,) = struct.unpack_from("<Q", view)
    if length > min(_LONGEST_HEADER, len(view) - 8):
        raise StorageError(f"from_bytes(): the header claims {length} bytes, {len(view) - 8} follow; cut short?")
    body = view[8 + length :]
    try:
        header = json.loads(bytes(view[8 : 8 + length]))
        about = json.loads(header.pop("__metadata__")["sharpwave"])
        keys, ids, metadata = about["keys"], about["ids"], about["metadata"]
        columns = {key: (entry, header.get(key)) for key, entry in keys.items()}
        arrays = {key: None if not entry[3] else _read(body, key, entry, at) for key, (entry, at) in columns.items()}
        from .sample import SequenceSample

        return SequenceSample(
            ids,
            {key: entry[0] for key, entry in keys.items()},
            arrays,
            trailing_shapes={key: entry[1] for key, entry in keys.items()},
            dtypes={key: dtype_from_name("from_bytes()", entry[2]) for key, entry in keys.items()},
            metadata=metadata,
        )
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


def _item_bytes(column: Column) -> int:
    return 0 if column.data is None else int(column.data.dtype.itemsize)


def _raw(data: Any) -> Any:
    if is_tensor(data):
        import torch

        data = data.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    flat: Any = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return memoryview(flat)


def _read(body: memoryview, key: str, described: Any, entry: Any) -> Any:
    lens, shape, dtype, _ = described
    start, end = entry["data_offsets"]
    want = (sum(map(sum, lens)), *shape)
    kind = dtype_from_name("from_bytes()", dtype)
    if entry["dtype"] != _NAMES[dtype.removeprefix("torch.")] or tuple(entry["shape"]) != want:
        raise ValueError(f"key {key!r}: the arrays and their description differ")
    if not 0 <= start <= end <= len(body) or end - start != math.prod(want) * kind.itemsize:
        raise ValueError(f"key {key!r}: {end - start} bytes at {start} do not hold {want} {dtype} in {len(body)}")
    if isinstance(kind, np.dtype):
        return np.frombuffer(body, kind, math.prod(want), start).reshape(want)
    import torch

    copy = np.frombuffer(body, np.uint8, end - start, start).copy()
    return torch.from_numpy(copy).view(kind).reshape(want)
