"""Listener: the socket of a server."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket as sockets
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import StorageError
from .limits import Limits
from .zeromq import load_zmq

__all__ = ["Listener"]

# The last replies go out, on a busy machine too: a client without its answer would wait for the next server. Only one
# that does not read makes the end of a server take so long.
_LINGER_MS = 5000


class Listener:
    """A bound ROUTER socket. A desk receives and sends; any thread may ``ring``.

    Args:
        keys: The server's ``Keys``, or None: connections are then neither authenticated nor encrypted.
    """

    def __init__(self, where: str, endpoint: str, keys: Any, limits: Limits) -> None:
        zmq = self._zmq = load_zmq()
        self._context = zmq.Context()
        self._context.max_sockets = max(1024, 2 * limits.clients)
        socket = self._socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, limits.message_bytes)
        # Of one connection: what waits for the server's thread, and what waits for a slow client. A reply that finds no
        # room is dropped: it is kept, and the client asks for it.
        socket.setsockopt(zmq.RCVHWM, 16)
        socket.setsockopt(zmq.SNDHWM, 64)
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        self._gatekeeper: Any = None
        self._bell: Any = None
        self._file: tuple[Path, int] | None = None  # of a local socket: its path and inode
        self._ringing = threading.Lock()
        try:
            if keys is not None:
                from .gatekeeper import Gatekeeper

                self._gatekeeper = Gatekeeper(self._context, keys)
                keys.protect(socket)
            if endpoint.startswith("ipc://"):
                self._bind_file(Path(endpoint.removeprefix("ipc://")), endpoint)
            else:
                socket.bind(endpoint)
            self.address: str = socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
            inside = f"inproc://sharpwave-{id(self)}"
            socket.bind(inside)
            self._bell = self._context.socket(zmq.DEALER)
            self._bell.connect(inside)
        except BaseException as error:
            self.close()
            if not isinstance(error, (zmq.ZMQError, OSError)):
                raise
            raise StorageError(
                f"{where}: address: cannot listen on {endpoint!r}: {error}; give another address"
            ) from None

    def _bind_file(self, path: Path, endpoint: str) -> None:
        """ZeroMQ removes a file that is in its way, of whatever kind. Here only the socket of a dead server is one."""
        with _alone_in(path.parent):
            if _is_in_use(path):
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            before = os.umask(0o177)  # the socket's file is for this user alone
            try:
                self._socket.bind(endpoint)
            finally:
                os.umask(before)
            self._file = path, path.stat().st_ino

    @property
    def socket_address(self) -> int:
        """Of libzmq's socket in this process, for the desk."""
        address: int = self._socket.underlying
        return address

    def wait_at_most(self, milliseconds: int) -> None:
        """For a message; -1 waits for ever."""
        self._socket.setsockopt(self._zmq.RCVTIMEO, milliseconds)

    def ring(self) -> None:
        """From any thread: an empty message comes."""
        with self._ringing, contextlib.suppress(self._zmq.ZMQError):
            self._bell.send(b"", self._zmq.NOBLOCK)

    def close(self) -> None:
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        with self._ringing:
            if self._bell is not None:
                self._bell.close(0)
        self._socket.close()
        self._context.term()
        if self._file is not None:
            path, inode = self._file
            with _alone_in(path.parent), contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == inode:  # else another server's
                    path.unlink()


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Servers that begin or end in a folder at the same time do so one after the other."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _is_in_use(path: Path) -> bool:
    """Whether a server listens on this local socket, or the file is none."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return True
    except FileNotFoundError:
        return False
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as probe:
        probe.setblocking(False)
        answer = probe.connect_ex(str(path))
    return answer != errno.ECONNREFUSED
