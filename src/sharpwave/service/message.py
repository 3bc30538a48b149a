"""A message of the protocol: a head of 64 bytes and a body, in one frame. docs/protocol.md has every field."""

from __future__ import annotations

import struct
from typing import NamedTuple

from ..errors import BufferFull, ClosedError, NotReady, SchemaError, StaleHandle, StorageError

__all__ = [
    "ADD_TELLS_INDICES",
    "FOREVER",
    "HEAD",
    "HEAD_BYTES",
    "MAGIC",
    "SAMPLE_HOLDS",
    "SAMPLE_TELLS_ODDS",
    "VERB_NAMES",
    "VERSIONS",
    "Head",
    "Status",
    "Verb",
    "error_of",
    "status_of",
    "to_microseconds",
    "to_seconds",
]

MAGIC = b"SHPW"
VERSIONS = 1, 1  # the oldest and the newest that this package speaks: its own and the one before
HEAD = struct.Struct("<4sHHHHIQIIQQQQ")
HEAD_BYTES = 64
assert HEAD.size == HEAD_BYTES
FOREVER = 2**64 - 1

ADD_TELLS_INDICES = 1
SAMPLE_HOLDS = 1
SAMPLE_TELLS_ODDS = 2


class Verb:
    """Plain numbers: every message is compared with several, and the members of an ``enum`` are slow to look up."""

    HELLO = 1
    OPEN = 2
    BEAT = 3
    PROBE = 4
    BYE = 5
    CALL = 6
    ADD = 7
    SAMPLE = 8
    UPDATE = 9
    SETTLE = 10
    TABLES = 11


VERB_NAMES: dict[int, str] = {number: name for name, number in vars(Verb).items() if name.isupper()}


class Status:
    """Plain numbers, as verbs are."""

    OK = 0
    SCHEMA = 1
    NOT_READY = 2
    STORAGE = 3
    STALE = 4
    CLOSED = 5
    FULL = 6
    TYPE = 7
    FAILURE = 8
    UNKNOWN_SESSION = 16
    UNKNOWN_CALL = 17
    WORKING = 18
    BAD_MESSAGE = 19
    VERSION = 20
    FORBIDDEN = 21
    BUSY = 22


class Head(NamedTuple):
    magic: bytes
    version: int
    verb: int
    status: int
    flags: int
    table: int
    session: int
    channel: int
    stream: int
    call: int
    oldest: int
    timeout: int
    argument: int


_ERRORS: dict[int, type[Exception]] = {
    Status.SCHEMA: SchemaError,
    Status.NOT_READY: NotReady,
    Status.STORAGE: StorageError,
    Status.STALE: StaleHandle,
    Status.CLOSED: ClosedError,
    Status.FULL: BufferFull,
    Status.TYPE: TypeError,
    Status.FAILURE: RuntimeError,
    Status.BAD_MESSAGE: StorageError,
    Status.VERSION: StorageError,
    Status.FORBIDDEN: StorageError,
    Status.BUSY: StorageError,
}


def status_of(error: BaseException) -> int:
    for status, kind in _ERRORS.items():
        if isinstance(error, kind):
            return status
    if isinstance(error, OSError):
        return Status.STORAGE
    return Status.TYPE if isinstance(error, TypeError) else Status.FAILURE


def error_of(status: int, message: str) -> Exception:
    """The error that a reply brings: the same class, with the same words, as where it was raised."""
    return _ERRORS.get(status, RuntimeError)(message)


def to_microseconds(timeout: float | None) -> int:
    return FOREVER if timeout is None else int(timeout * 1e6)


def to_seconds(timeout: int) -> float | None:
    return None if timeout == FOREVER else timeout / 1e6
