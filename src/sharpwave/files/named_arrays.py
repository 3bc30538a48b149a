"""Named arrays in the layout of safetensors: the header's length, a JSON header, then the bytes of the arrays.

Any reader of safetensors reads the arrays. Everything else that a file says is JSON text under the key ``sharpwave`` of
the header's ``__metadata__``. With ``crc32c`` there, header and arrays are covered by a checksum.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from .. import _core
from ..errors import SchemaError, StorageError

__all__ = [
    "DTYPES", "Header", "Place", "encode", "encode_text", "header_bytes", "open_arrays", "parse", "raw_bytes",
    "read_arrays",
]  # fmt: skip

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_ITEM_BYTES = {"BOOL": 1, **{name: int(name.lstrip("BFIU")) // 8 for name in DTYPES.values() if name != "BOOL"}}
_LONGEST_HEADER = 100_000_000  # the limit of the format's own reader


class Place(NamedTuple):
    """One array of a file: the format's name of its dtype, its shape, and its bytes behind the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Header(NamedTuple):
    """A parsed header. ``start``: where the arrays begin in the file."""

    about: Any
    places: dict[str, Place]
    start: int
    checksum: tuple[int, int] | None  # of header and arrays, and of the header alone


def raw_bytes(array: np.ndarray[Any, Any]) -> memoryview:
    """The array's bytes; no copy where it is contiguous."""
    try:
        return memoryview(array).cast("B")  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):  # not contiguous, empty, or of a dtype that has no buffer format
        pass
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)


def encode(
    arrays: Mapping[str, tuple[str, tuple[int, ...], list[Any]]], about: Any, *, checksum: bool = False
) -> list[Any]:
    """The file's bytes in pieces: the header, then the bytes of each array.

    Args:
        arrays: By name: NumPy's name of the dtype, the shape and the bytes in pieces, of which there are as many as
            dtype and shape say.
        about: Anything that JSON holds.
        checksum: Whether the header has a CRC32C over itself and the arrays.

    Raises:
        SchemaError: A dtype that safetensors lacks.
        TypeError, ValueError: ``about`` is not JSON.
    """
    return encode_text(arrays, json.dumps(about, separators=(",", ":")), checksum=checksum)


def encode_text(
    arrays: Mapping[str, tuple[str, tuple[int, ...], list[Any]]], about: str, *, checksum: bool = False
) -> list[Any]:
    """``encode`` where ``about`` is JSON text already."""
    header: dict[str, Any] = {"__metadata__": {"sharpwave": about}}
    pieces: list[Any] = []
    at = 0
    # Wide items first: every array then starts at a multiple of its item's size.
    known = {name: DTYPES.get(dtype) for name, (dtype, _, _) in arrays.items()}
    for name, dtype in known.items():
        if dtype is None:
            raise SchemaError(f"{name!r}: safetensors has no {arrays[name][0]}; cast it before")
    for name in sorted(arrays, key=lambda name: (-_ITEM_BYTES[str(known[name])], name)):
        _, shape, raws = arrays[name]
        end = at + math.prod(shape) * _ITEM_BYTES[str(known[name])]
        header[name] = {"dtype": known[name], "shape": list(shape), "data_offsets": [at, end]}
        pieces += raws
        at = end
    if checksum:
        body = _core.Checksum(pieces)
        crc = _core.crc32c_combine(_core.crc32c(_json(header)), body.finish(), body.size)
        header["__metadata__"]["crc32c"] = f"{crc:08x}"
    text = _json(header)
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)) + text, *pieces]


def _json(header: dict[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()


def header_bytes(first: bytes | memoryview, size: int) -> int:
    """The header's length, read from the first eight bytes of a file of ``size`` bytes."""
    if len(first) < 8:
        raise StorageError(f"expected a safetensors header, got {size} bytes")
    (length,) = struct.unpack_from("<Q", first)
    if length > min(_LONGEST_HEADER, size - 8):
        raise StorageError(f"the header claims {length} bytes, {size - 8} follow; cut short, or another format")
    return int(length)


def parse(text: bytes, size: int) -> Header:
    """Reads a header and checks every size in it against the file's.

    Args:
        text: The header, without its length.
        size: Bytes of the whole file.

    Raises:
        StorageError: Damaged, cut short, or a safetensors file of another program.
    """
    start = 8 + len(text)
    try:
        header = json.loads(text)
        said = header["__metadata__"]
        places = {name: _place(name, entry) for name, entry in header.items() if name != "__metadata__"}
        about = json.loads(said["sharpwave"])
        checksum = said.pop("crc32c", None)
        checksum = None if checksum is None else (int(checksum, 16), _core.crc32c(_json(header)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(f"its header is damaged, or not Sharpwave's: {type(error).__name__}: {error}") from None
    at = 0
    for name, place in sorted(places.items(), key=lambda pair: pair[1][2:]):
        if place.start != at:
            raise StorageError(f"{name!r}: expected its bytes at {at}, got {place.start}; damaged")
        at = place.end
    if start + at != size:
        raise StorageError(f"expected {start + at} bytes, got {size}; cut short, or damaged")
    return Header(about, places, start, checksum)


def _place(name: str, entry: Any) -> Place:
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        raise ValueError(f"{name!r}: expected whole numbers as shape and offsets")
    if end - start != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise ValueError(f"{name!r}: {end - start} bytes do not hold {dtype} of {shape}")
    return Place(dtype, shape, start, end)


def open_arrays(path: Path) -> tuple[BinaryIO, Header]:
    """Opens a file for ``read_arrays``. Nothing but the header is read.

    Raises:
        StorageError: It cannot be read, or is none of these files.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise StorageError(error.strerror or str(error)) from None
    try:
        size = os.fstat(file.fileno()).st_size
        length = header_bytes(file.read(8), size)
        return file, parse(file.read(length), size)
    except OSError as error:
        file.close()
        raise error if isinstance(error, StorageError) else StorageError(error.strerror or str(error)) from None
    except BaseException:
        file.close()
        raise


def read_arrays(file: BinaryIO, header: Header, into: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Fills arrays of the right size, and checks the checksum where the file has one.

    Args:
        into: A contiguous array for every name in ``header.places``.
    """
    crc = 0 if header.checksum is None else header.checksum[1]
    for name in sorted(header.places, key=lambda name: header.places[name][2:]):
        raw = raw_bytes(into[name])
        done = 0
        while done < raw.nbytes:
            got = file.readinto(raw[done:])  # type: ignore[attr-defined]
            if not got:
                raise StorageError(f"{name!r}: the file ended while it was read; cut short")
            done += got
        crc = crc if header.checksum is None else _core.crc32c(raw, crc)
    if header.checksum is not None and crc != header.checksum[0]:
        raise StorageError("the checksum does not hold: damaged")
