"""`Channel` and `PlainChannel`: ends of a socket pair between two processes of one machine, and calls over it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from .. import errors
from ..errors import ClosedError, NotReady, SchemaError, SharpwaveError

__all__ = ["ERROR", "REPLY", "START", "Channel", "Door", "Frames", "PlainChannel", "frame"]

REPLY, ERROR = range(2)
"""Kinds of frames that both ends send; other kinds begin at 2."""
START = 0
"""The number of the reply that a child process sends by itself when it is ready."""

_HEAD = struct.Struct("<IBQ")  # bytes behind the head, kind, number of the call
_MOST_BYTES = 1 << 30
_READ_BYTES = 1 << 20


def frame(kind: int, number: int, body: bytes = b"") -> bytes:
    if len(body) > _MOST_BYTES:
        raise SchemaError(
            f"a message of {len(body):,} bytes to another process of the run, expected at most {_MOST_BYTES:,}; lower "
            "batch= or group="
        )
    return _HEAD.pack(len(body), kind, number) + body


class Frames:
    """Cuts what arrives into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def push(self, arrived: bytes) -> list[tuple[int, int, bytes]]:
        """Kind, number and body of every frame that is complete."""
        self._bytes += arrived
        found, at = [], 0
        while len(self._bytes) - at >= _HEAD.size:
            size, kind, number = _HEAD.unpack_from(self._bytes, at)
            if size > _MOST_BYTES:
                raise ValueError(f"a frame of {size} bytes, expected at most {_MOST_BYTES}")
            if len(self._bytes) - at < _HEAD.size + size:
                break
            at += _HEAD.size + size
            found.append((kind, number, bytes(self._bytes[at - size : at])))
        del self._bytes[:at]
        return found


_ends: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_inherited() -> None:
    """In a process that was forked from this one: with its copies of the ends open, no death would be seen."""
    for end in list(_ends):
        with contextlib.suppress(OSError):
            end.close()


os.register_at_fork(after_in_child=_close_inherited)


class _End:
    """What both kinds of ends have."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)  # also where a task has set a time limit for all new sockets (`setdefaulttimeout`)
        self._socket, self._frames, self._unsent = end, Frames(), bytearray()
        _ends.add(end)

    def send(self, kind: int, number: int, body: bytes = b"") -> None:
        raise NotImplementedError

    def reply(self, number: int, made: Any) -> None:
        """The result of a call of the other end."""
        self.send(REPLY, number, json.dumps(made).encode())

    def fail(self, number: int, error: BaseException, other: str = "RuntimeError") -> None:
        """A call of the other end raises this error there. `other`: the class of one that is not Sharpwave's."""
        is_ours = isinstance(error, SharpwaveError)
        said = (type(error).__name__, str(error)) if is_ours else (other, repr(error))
        self.send(ERROR, number, json.dumps(said).encode())

    def _push(self) -> bool:
        """Sends what the socket takes at once. Returns whether that was all."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent, socket.MSG_DONTWAIT)]
        except BlockingIOError:
            return False
        except OSError:  # the other end was closed; the reader sees the end of the file
            self._unsent.clear()
        return True


class Channel(_End):
    """An end for an event loop: calls to the other end, and frames from it.

    Nothing but the two processes can reach the socket.

    Args:
        what: The other process's name in errors.
        on_frame: Called with kind, number and body of frames that are not replies.
    """

    def __init__(
        self, end: socket.socket, what: str, on_frame: Callable[[int, int, bytes], None] | None = None
    ) -> None:
        super().__init__(end)
        self._what, self._on_frame = what, on_frame
        self._loop = asyncio.get_running_loop()
        self._is_due = self._is_full = False  # a write will come: at the end of this turn, or when there is room
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._number = START
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._is_closed = False
        self._loop.add_reader(end, self._read)

    @property
    def unsent_bytes(self) -> int:
        """What the socket has not taken yet."""
        return len(self._unsent)

    @property
    def has_ended(self) -> bool:
        """Whether the other process has ended, or this end was closed."""
        return self._ended.done()

    def call(self, kind: int, body: bytes = b"") -> tuple[int, asyncio.Future[Any]]:
        """Begins a call. Returns its number, and the reply to come.

        Raises:
            ClosedError: `close` was called.
            NotReady: The other process has ended.
            SchemaError: The body is too large.
        """
        if self._is_closed:
            raise ClosedError(f"{self._what} was closed")
        if self._ended.done():
            raise NotReady(str(self._ended.exception()))
        self._number += 1
        number, reply = self._number, self._loop.create_future()
        self.send(kind, number, body)
        self._calls[number] = reply
        return number, reply

    def send(self, kind: int, number: int, body: bytes = b"") -> None:
        """One more frame of a call, or one without a reply. Frames of one turn of the event loop are sent together."""
        if self._ended.done():
            return
        self._unsent += frame(kind, number, body)
        if not self._is_due and not self._is_full:
            self._is_due = True
            self._loop.call_soon(self._write)

    def answer(self, number: int, made: Any) -> None:
        """Gives a call its result, for results that are not the JSON of a reply."""
        call = self._calls.pop(number, None)
        if call is not None and not call.done():
            call.set_result(made)

    def forget(self, number: int) -> None:
        """Drops a call: its reply is ignored."""
        self._calls.pop(number, None)

    async def join(self) -> None:
        """Waits until the other process has ended.

        Raises:
            NotReady: It ended by itself.
        """
        await asyncio.shield(self._ended)

    async def close(self) -> None:
        """Calls without a reply fail with ClosedError. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._end(ClosedError(f"{self._what} was closed before the call ended"))
            self._socket.close()

    def _write(self) -> None:
        """Sends what the socket takes at once, and the rest when it has room: a stopped process blocks no other."""
        self._is_due = False
        if self._ended.done():
            return
        was_full, self._is_full = self._is_full, not self._push()
        if self._is_full and not was_full:
            self._loop.add_writer(self._socket, self._write)
        elif was_full and not self._is_full:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            arrived = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionError:
            arrived = b""
        if not arrived:
            self._end(self._lost())
            return
        try:
            for kind, number, body in self._frames.push(arrived):
                self._take(kind, number, body)
        except Exception as error:  # what has arrived is not understood: `join` says so, and every call
            self._end(error)

    def _lost(self) -> NotReady:
        """What calls raise when the other end is gone."""
        return NotReady(f"the process of {self._what} has ended; its output says why")

    def _take(self, kind: int, number: int, body: bytes) -> None:
        if kind == REPLY:
            self.answer(number, json.loads(body))
        elif kind == ERROR and number == START and START not in self._calls:  # of the other process itself, which ends
            self._end(_error_of(body))
        elif kind == ERROR:
            self._fail(number, _error_of(body))
        elif self._on_frame is not None:
            self._on_frame(kind, number, body)

    def _fail(self, number: int, error: Exception) -> None:
        call = self._calls.pop(number, None)
        if call is not None and not call.done():
            call.set_exception(error)

    def _end(self, error: Exception) -> None:
        if self._ended.done():
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._unsent.clear()
        for number in list(self._calls):
            self._fail(number, error)
        if self._is_closed:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)
            self._ended.exception()  # marked as seen: asyncio logs exceptions that were never retrieved


def _error_of(body: bytes) -> Exception:
    name, text = json.loads(body)
    kind = getattr(errors, name, None)
    return kind(text) if isinstance(kind, type) and issubclass(kind, SharpwaveError) else RuntimeError(text)


class PlainChannel(_End):
    """An end for a process without an event loop. One thread reads; any may send, and no call waits but `flush`."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end)
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def frames(self) -> Iterator[tuple[int, int, bytes]]:
        """What arrives, until the other process has ended or has closed its end."""
        while (arrived := self.read()) is not None:
            yield from arrived

    def read(self) -> list[tuple[int, int, bytes]] | None:
        """The frames that have arrived; waits where nothing has. None where `frames` would end."""
        try:
            arrived = self._socket.recv(_READ_BYTES)
        except ConnectionError:
            return None
        return self._frames.push(arrived) if arrived else None

    def send(self, kind: int, number: int, body: bytes = b"") -> None:
        """Sends what the socket takes at once; `flush` sends the rest."""
        with self._sending:
            self._unsent += frame(kind, number, body)
            self._push()

    def flush(self, *, waits: bool = False) -> bool:
        """Sends what the socket takes at once, or waits until it has taken all. Returns whether all was sent."""
        while True:
            with self._sending:
                if self._push():
                    return True
            if not waits:
                return False
            has_room = select.poll()  # `select` knows no file numbers from 1,024 on
            has_room.register(self._socket, select.POLLOUT)
            has_room.poll()

    def is_ready(self, said: Any = None) -> None:
        """This child process can be called from now on."""
        self.reply(START, said)

    def fail_all(self, error: Exception) -> None:
        """This child process cannot go on, or not begin: every call raises this error in the parent."""
        self.fail(START, error, "NotReady")
        self.flush(waits=True)

    def close(self) -> None:
        self._socket.close()


class Door:
    """Gives other processes channels to the one that has the other end of this door, at any time.

    Example:
        >>> door = Door()
        >>> ours, its = door.open(), Door.take(door.inside)
        >>> ours.send(b"a"), its.recv(1)
        (1, b'a')
    """

    def __init__(self) -> None:
        self._ours, self.inside = socket.socketpair()
        _ends.add(self._ours)

    def open(self) -> socket.socket:
        """An end whose other end the process behind the door gets.

        Raises:
            NotReady: That process has ended.
        """
        ours, its = socket.socketpair()
        with its:
            try:
                socket.send_fds(self._ours, [b"."], [its.fileno()])
            except OSError as error:
                ours.close()
                raise NotReady(f"the process behind the door has ended: {error}") from error
        return ours

    @staticmethod
    def take(inside: socket.socket) -> socket.socket | None:
        """The next end that came through a door; None where the door was closed.

        Raises:
            NotReady: This process has too many open files. The process that opened the door sees its end closed.
        """
        said, files, _, _ = socket.recv_fds(inside, 1, 1)
        if not said:
            return None
        if not files:
            raise NotReady("no file number is left for a channel; raise the limit of open files (ulimit -n)")
        end = socket.socket(fileno=files[0])
        end.set_inheritable(False)
        return end

    def close(self) -> None:
        self._ours.close()
        self.inside.close()
