"""Addresses of servers: ``tcp://host:port`` and ``ipc:///path``, followed by the name of a table."""

from __future__ import annotations

import ipaddress
import re
from typing import Any, NamedTuple

from ..address import is_remote
from ..checks import told
from ..errors import StorageError

__all__ = ["Endpoint", "is_reachable_by_others", "read_endpoint", "read_name"]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,200}")
_SOCKET_BYTES = 100  # of the path of a local socket; the system takes 107


class Endpoint(NamedTuple):
    server: str  # as ZeroMQ takes it
    name: str | None  # of the table


def read_name(where: str, name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise StorageError(f"{where}: expected a name of letters, digits, '_', '.', '-', got {told(name)}")
    return name


def read_endpoint(where: str, address: Any, *, named: bool) -> Endpoint:
    """An address of a server, or with ``named`` of one of its tables."""
    wanted = "'tcp://host:port/name' or 'ipc:///path/name'" if named else "'tcp://host:port' or 'ipc:///path'"
    if not is_remote(address):
        raise StorageError(f"{where}: address: expected {wanted}, got {told(address)}")
    kind, _, rest = address.partition("://")
    name: str | None = None
    if named:
        rest, _, name = rest.rpartition("/")
        if not rest or not _NAME.fullmatch(name):
            raise StorageError(
                f"{where}: address: expected {wanted}, got {address!r}; the name of the table comes last"
            )
    if kind == "ipc":
        if not rest.startswith("/") or "\0" in rest:
            raise StorageError(f"{where}: address: expected an absolute path after ipc://, got {address!r}")
        if len(rest.encode()) > _SOCKET_BYTES:
            raise StorageError(
                f"{where}: address: expected a path of at most {_SOCKET_BYTES} bytes for a local socket, got "
                f"{len(rest.encode())}; give a shorter one"
            )
        return Endpoint(f"ipc://{rest}", name)
    host, colon, port = rest.rpartition(":")
    if not colon or not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535 or "/" in rest:
        raise StorageError(f"{where}: address: expected {wanted}, got {address!r}")
    return Endpoint(f"tcp://{rest}", name)


def is_reachable_by_others(server: str) -> bool:
    """Whether another machine could connect to a socket that is bound there."""
    kind, _, rest = server.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    if kind == "ipc" or host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, an interface or a star
        return True
