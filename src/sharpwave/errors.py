"""Every error that Sharpwave raises, by class. Identity is the class, never the text."""

from __future__ import annotations

__all__ = [
    "BufferFull",
    "ClosedError",
    "NotReady",
    "SchemaError",
    "SharpwaveError",
    "StaleHandle",
    "StorageError",
]


class SharpwaveError(Exception):
    """The root of all errors of this package."""


class SchemaError(SharpwaveError, ValueError):
    """A value, a shape, a dtype or a setting is not what the buffer expects. Nothing was changed."""


class NotReady(SharpwaveError, TimeoutError):
    """There is nothing to hand out, or not yet."""


class StorageError(SharpwaveError, OSError):
    """A file or memory cannot be made, opened, read or written."""


class StaleHandle(SharpwaveError, LookupError):
    """The row that an index names is no longer in the buffer."""


class ClosedError(SharpwaveError, RuntimeError):
    """The buffer or the writer was closed, or belongs to the parent process."""


class BufferFull(SharpwaveError, RuntimeError):
    """There is no room and nothing may be thrown away, or no writer is left to give."""
