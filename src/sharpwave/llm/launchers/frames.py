"""Messages between processes of a run: documents of the service, each behind its length."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

from ... import errors
from ...errors import NotReady, StorageError
from ...service.document import decode, encode

__all__ = ["from_error", "read_frame", "to_error", "write_frame"]

_LENGTH = struct.Struct("<Q")
_MOST_BYTES = 1 << 32


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """Raises:
    IncompleteReadError: The other side is gone.
    """
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > _MOST_BYTES:
        raise StorageError(f"a message of {size} bytes, expected at most {_MOST_BYTES}")
    return decode(bytearray(await reader.readexactly(size)))


def write_frame(writer: asyncio.StreamWriter, value: Any) -> None:
    body = encode(value, room=_LENGTH.size)
    _LENGTH.pack_into(body, 0, len(body) - _LENGTH.size)
    writer.write(body)


def from_error(error: BaseException) -> list[str]:
    return [type(error).__name__, str(error)]


def to_error(said: list[str]) -> Exception:
    """The same error, where it is one of ours."""
    kind = getattr(errors, said[0], None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        return kind(said[1])
    return NotReady(f"the controller failed: {said[0]}: {said[1]}")
