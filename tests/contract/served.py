"""Buffers behind a server of the same process: the face that a client has, over a real socket."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sharpwave as sw

__all__ = ["TRANSPORTS", "close_servers", "new_endpoint", "serve", "served"]

TRANSPORTS = ("tcp", "ipc")
_running: list[tuple[Any, Any]] = []
_numbers = itertools.count()


def new_endpoint(transport: str) -> str:
    if transport == "tcp":
        return "tcp://127.0.0.1:0"
    folder = Path(tempfile.mkdtemp(prefix="sw-"))  # short: a local socket's path has at most 100 bytes
    return f"ipc://{folder}/{next(_numbers)}"


def serve(buffer: Any, transport: str, **options: Any) -> str:
    """The address of a buffer that a new server has; ``close_servers`` ends it."""
    server = sw.serve({"it": buffer}, new_endpoint(transport), **options)
    _running.append((server, buffer))
    return f"{server.address}/it"


def served(make: Callable[[Path, str], Any], transport: str) -> Callable[[Path, str], Any]:
    """What ``make`` makes, at a distance."""

    def made(folder: Path, name: str) -> Any:
        return sw.open(serve(make(folder, name), transport, folder=folder), direct=False)

    return made


def close_servers() -> None:
    while _running:
        server, buffer = _running.pop()
        server.close()
        buffer.close()
        if server.address.startswith("ipc://"):
            Path(server.address.removeprefix("ipc://")).parent.rmdir()
