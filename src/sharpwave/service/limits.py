"""Limits: what a server lets its clients take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..checks import told, whole
from ..errors import SchemaError

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """Bounds of a server.

    Args:
        message_bytes: Of one message, in either direction.
        clients: Sessions at once.
        calls: Calls of one client without a reply.
        kept_bytes: Replies that are kept for one client until it has them.
        channels: Sockets of one client.
        waiting_bytes: Calls of all clients that wait, for room, for samples or for their turn; further ones are
            refused.
    """

    message_bytes: int = 256 << 20
    clients: int = 1024
    calls: int = 256
    kept_bytes: int = 1 << 30
    channels: int = 1024
    waiting_bytes: int = 1 << 30

    @classmethod
    def read(cls, where: str, given: Any) -> Limits:
        if given is None:
            return cls()
        if isinstance(given, Limits):
            return given
        if not isinstance(given, Mapping):
            raise SchemaError(f"{where}: limits: expected a dict, got {told(given)}")
        known = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name not in known:
                raise SchemaError(f"{where}: limits: expected {', '.join(known)}, got {name!r}")
            whole(where, f"limits[{name!r}]", value, 4096 if name.endswith("bytes") else 1)
        return cls(**given)
