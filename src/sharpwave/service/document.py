"""Documents: JSON with arrays in it, as bodies of messages. docs/protocol.md has the form.

Nothing in a document is executed, and every size is checked against the bytes that came.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np

from ..errors import SchemaError, StorageError

__all__ = ["Pieces", "decode", "encode"]

_LENGTHS = struct.Struct("<II")
_ALIGNMENT = 64
_TEXT_BYTES = 128  # where the arrays begin, unless the JSON is longer
_KINDS = "biufc"  # of dtypes: numbers and truth values


def _aligned(at: int) -> int:
    return (at + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


class Pieces:
    """Bytes that stand in several buffers. They are sent as one array of bytes, each copied once."""

    __slots__ = ("buffers", "size")

    def __init__(self, buffers: list[Any]) -> None:
        self.buffers = buffers
        self.size = sum(map(len, buffers))


class _Encoder:
    """Collects the arrays of a value, in their order, while it is made plain. The first one stands at ``first``."""

    def __init__(self, first: int) -> None:
        self.pieces: list[tuple[int, Any]] = []  # offset from the body's start, bytes
        self.end = first

    def plain(self, value: Any) -> Any:
        if value is None or isinstance(value, (str, bool)):
            return value
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, (int, np.integer)):
            return int(value)
        if isinstance(value, (float, np.floating)):
            number = float(value)
            return number if math.isfinite(number) else {"$float": repr(number)}
        if isinstance(value, np.bool_):
            return bool(value)
        if isinstance(value, dict):
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: self.plain(item) for key, item in value.items()}
            return {"$dict": [[self.plain(key), self.plain(item)] for key, item in value.items()]}
        if isinstance(value, list):
            return [self.plain(item) for item in value]
        if isinstance(value, tuple):
            return {"$tuple": [self.plain(item) for item in value]}
        if isinstance(value, (bytes, bytearray, memoryview)):
            return {"$bytes": [self._keep(value, len(value)), len(value)]}
        if isinstance(value, Pieces):
            return {"$": ["|u1", [value.size], self._keep_pieces(value)]}
        raise SchemaError(
            f"expected numbers, text, arrays, and dicts, lists or tuples of them, got {type(value).__name__}"
        )

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        if array.dtype.kind not in _KINDS or array.dtype.byteorder == ">":
            raise SchemaError(f"expected an array of numbers or truth values, got dtype {array.dtype}")
        flat = np.ascontiguousarray(array)
        view = flat.reshape(-1).view(np.uint8).data if flat.size else b""
        return {"$": [array.dtype.str, list(array.shape), self._keep(view, flat.nbytes)]}

    def _keep_pieces(self, value: Pieces) -> int:
        offset = at = self.end
        for buffer in value.buffers:
            self.pieces.append((at, buffer))
            at += len(buffer)
        self.end = _aligned(at)
        return offset

    def _keep(self, data: Any, size: int) -> int:
        offset = self.end
        self.pieces.append((offset, data))
        self.end = _aligned(offset + size)
        return offset


def encode(value: Any, room: int = 0) -> bytearray:
    """The value behind ``room`` free bytes, which the head of a message takes."""
    # Offsets are from the body's start, and so depend on the length of the JSON, which has them: the arrays begin
    # behind a space that most texts fit into, else behind one that is large enough for this one with any offsets.
    first = _TEXT_BYTES
    while True:
        encoder = _Encoder(first)
        raw = json.dumps(encoder.plain(value), ensure_ascii=False, separators=(",", ":")).encode()
        if not encoder.pieces:
            return bytearray(room) + _LENGTHS.pack(len(raw), 0) + raw
        if _LENGTHS.size + len(raw) <= first:
            break
        first = _aligned(_LENGTHS.size + len(raw) + 12 * len(encoder.pieces))
    body = bytearray(room + encoder.end)
    _LENGTHS.pack_into(body, room, len(raw), 0)
    body[room + _LENGTHS.size : room + _LENGTHS.size + len(raw)] = raw
    view = memoryview(body)
    for offset, data in encoder.pieces:
        begin = room + offset
        view[begin : begin + len(data)] = data
    return body


def decode(body: Any) -> Any:
    """The value. Its arrays are views of ``body``, a contiguous buffer."""
    try:
        length, zero = _LENGTHS.unpack_from(body)
        if zero or _LENGTHS.size + length > len(body):
            raise ValueError("lengths")
        plain = json.loads(str(body[_LENGTHS.size : _LENGTHS.size + length], "utf-8"), parse_constant=_refuse_constant)
        return _Decoder(body).value(plain)
    except (struct.error, ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise StorageError(f"a document of the protocol is damaged: {error}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


class _Decoder:
    def __init__(self, body: Any) -> None:
        self.body = body
        # A frame may begin at any address; an array of whole items needs one that fits its dtype.
        base = np.frombuffer(body, np.uint8)
        self.is_aligned = len(base) == 0 or base.__array_interface__["data"][0] % 16 == 0

    def value(self, plain: Any) -> Any:
        if isinstance(plain, list):
            return [self.value(item) for item in plain]
        if not isinstance(plain, dict):
            return plain
        if len(plain) == 1:
            (key, inner), *_ = plain.items()
            if key == "$":
                return self._array(*inner)
            if key == "$bytes":
                begin, size = inner
                self._check(begin, size)
                return bytes(self.body[begin : begin + size])
            if key == "$tuple":
                return tuple(self.value(item) for item in inner)
            if key == "$float":
                return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[inner]
            if key == "$dict":
                return {self.value(name): self.value(item) for name, item in inner}
        return {key: self.value(item) for key, item in plain.items()}

    def _check(self, begin: Any, size: Any) -> None:
        if type(begin) is not int or type(size) is not int or not 0 <= begin <= begin + size <= len(self.body):
            raise ValueError("an array is not inside the body")

    def _array(self, text: Any, shape: Any, offset: Any) -> np.ndarray[Any, Any]:
        if not isinstance(text, str) or len(text) > 8:
            raise ValueError("an unknown dtype")
        dtype = np.dtype(text)
        if dtype.kind not in _KINDS or not isinstance(shape, list) or len(shape) > 32:
            raise ValueError("an unknown dtype or shape")
        count = 1
        for axis in shape:
            if type(axis) is not int or axis < 0:
                raise ValueError("a negative shape")
            count *= axis
        self._check(offset, count * dtype.itemsize)
        array: np.ndarray[Any, Any] = np.ndarray(shape, dtype, self.body, offset) if count else np.empty(shape, dtype)
        if dtype.kind == "b" and count and int(array.view(np.uint8).max()) > 1:
            raise ValueError("a truth value is neither 0 nor 1")
        return array if array.flags.aligned and array.flags.writeable else array.copy()
