"""Session: this process as a client of one server."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
import time
import weakref
from typing import Any, Protocol

from .. import _core
from ..errors import ClosedError, NotReady, StorageError
from .channel import Channel, NoAnswer
from .doctor import Doctor
from .document import decode, encode
from .dropped import Dropped
from .endpoint import read_endpoint
from .keeper import keep
from .message import HEAD, HEAD_BYTES, MAGIC, VERSIONS, Status, Verb, error_of
from .zeromq import load_zmq

__all__ = ["OpenTable", "Reopened", "Session", "list_tables", "remove_table"]

OPEN_S = 5.0  # how long an open without timeout= waits for a server


class Reopened(Protocol):
    """What is opened again in a new session: tables, then streams."""

    def reopen(self, channel: Channel, timeout: float | None) -> None: ...


class OpenTable:
    """A table of a server. ``number`` changes when the server is started again; the table is then the same, or lost."""

    def __init__(self, session: Session, name: str) -> None:
        self._session, self.name = session, name
        self.number = 0
        self.facts: dict[str, Any] = {}
        self._lost: str | None = None
        self.rows_acknowledged = 0  # of all streams of this client

    def reopen(self, channel: Channel, timeout: float | None) -> None:
        where = f"{self._session.server}/{self.name}"
        facts = decode(
            channel.exchange(where, Verb.OPEN, encode({"name": self.name}, HEAD_BYTES), timeout=timeout).body
        )
        if self.facts and _identity(facts) != _identity(self.facts):
            gone = (
                f"; the {self.rows_acknowledged} rows that this client added are gone" if self.rows_acknowledged else ""
            )
            self._lost = (
                f"{where}: the server was started again with another table (incarnation {_identity(facts)}, was "
                f"{_identity(self.facts)}){gone}, and handles of the former table name none of its rows; open it again"
            )
        self.number = facts["table"]
        if not self.facts:
            self.facts = facts

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def lose(self, why: str) -> None:
        self._lost = why

    def check(self, where: str) -> None:
        if self._lost is not None:
            raise StorageError(f"{where}: {self._lost}")


def _identity(facts: dict[str, Any]) -> str:
    return f"{facts.get('uuid')}-{facts.get('incarnation')}"


class _Interrupted(Exception):
    """The session that was being made is not known to the server any more."""


class Session:
    """A client. Threads may call at once: each has a channel of its own. A forked child makes a session of its own.

    Args:
        server: The server's address, without a table.
        keys: A client's key file, or None.
        name: What the server's ``stats()`` call it.
    """

    def __init__(self, server: str, keys: Any = None, name: str | None = None) -> None:
        self.server = server
        self._name = name
        self._key: Any = None
        if keys is not None:
            from .keys import ClientKey

            self._key = ClientKey.read(keys, "open(): keys")
        self._is_closed = False
        self._tables: list[OpenTable] = []
        self._begin()
        _sessions.add(self)

    def _begin(self) -> None:
        self.token = secrets.token_bytes(16)
        self.number = 0  # the server's; 0: not introduced
        self.version = VERSIONS[1]
        self.life = ""  # of the server
        self.client_timeout = 5.0
        self.message_bytes = 0
        self.generation = 0  # how often it was introduced
        self.sent_at = 0.0
        self._local = threading.local()
        self._channels: weakref.WeakSet[Channel] = weakref.WeakSet()
        self._numbers = itertools.count(1)
        self._joining = threading.RLock()
        self._origins = itertools.count(1)
        self._counting = threading.Lock()
        self._undone: dict[int, None] = {}  # numbers of calls that must be executed once, oldest first
        self._process = os.getpid()
        self._doctor: Doctor | None = None
        self._is_joining = False
        self._joining_thread = 0
        self._streams: list[weakref.ref[Reopened]] = []
        self.dropped = Dropped()

    # ---- sockets ----------------------------------------------------------------------------------------------------

    def connect(self) -> Any:
        zmq = load_zmq()
        socket = _context().socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing waits in a queue for a server: the client itself sends again
        socket.setsockopt(zmq.SNDTIMEO, 1000)
        socket.setsockopt(zmq.RCVTIMEO, 1000)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)  # finds connections that are dead without a word
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
        socket.setsockopt(zmq.SNDHWM, 0)  # how much is under way is bounded by windows
        socket.setsockopt(zmq.RCVHWM, 0)
        if "[" in self.server:
            socket.setsockopt(zmq.IPV6, 1)
        if self._key is not None:
            self._key.protect(socket)
        if self._doctor is not None:
            self._doctor.watch(socket)
        try:
            socket.connect(self.server)
        except zmq.ZMQError as error:
            socket.close(0)
            raise StorageError(f"open(): {self.server}: {error}") from None
        return socket

    def channel(self) -> Channel:
        """This thread's."""
        found: Channel | None = getattr(self._local, "channel", None)
        if found is None:
            found = self._local.channel = self.new_channel()
        return found

    def new_channel(self) -> Channel:
        channel = Channel(self, next(self._numbers))
        self._channels.add(channel)
        return channel

    # ---- introduction -----------------------------------------------------------------------------------------------

    def join(self, where: str, channel: Channel, generation: int, deadline: float | None) -> None:
        """Introduces this client, unless another thread has since that generation; opens everything again."""
        if self._is_joining and self._joining_thread == threading.get_ident():
            raise _Interrupted  # the server was started again while things were being opened
        left = -1 if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._joining.acquire(timeout=left):
            raise NoAnswer(f"{where}: {self.server} did not answer another thread until the timeout; is it running?")
        try:
            if self.generation != generation and self.number:
                return
            self._joining_thread = threading.get_ident()
            while not self._try_to_join(where, channel, deadline):
                self.check_open(where)
        finally:
            self._joining.release()

    def _try_to_join(self, where: str, channel: Channel, deadline: float | None) -> bool:
        hello = {
            "versions": list(VERSIONS),
            "token": self.token.hex(),
            "client": self._name or f"python, process {os.getpid()}",
        }
        message = encode(hello, HEAD_BYTES)
        HEAD.pack_into(message, 0, MAGIC, VERSIONS[1], Verb.HELLO, 0, 0, 0, 0, channel.number, 0, 0, 0, 0, 0)
        answer = channel.greet(where, message, deadline)
        if answer.status != Status.OK:
            text = str(answer.body, "utf-8", "replace")
            raise error_of(answer.status, f"{where}: {self.server}: {text}")
        said = decode(answer.body)
        self.version, self.life = int(said["version"]), str(said["server"])
        self.client_timeout = float(said["client_timeout"])
        self.message_bytes = int(said["limits"]["message_bytes"])
        opener = Channel(self, next(self._numbers))
        try:
            self._is_joining = True
            opener.prepare(answer.session)
            streams = [found for stream in self._streams if (found := stream()) is not None]
            for one in [*self._tables, *streams]:
                left = OPEN_S if deadline is None else deadline - time.monotonic()
                one.reopen(opener, min(OPEN_S, max(0.0, left)))
            # Other threads use the session from here on: the numbers of tables and streams are those of this session.
            self.number, self.generation = answer.session, self.generation + 1
            keep(self)
            return True
        except (_Interrupted, NotReady):
            if deadline is not None and time.monotonic() > deadline:
                raise NoAnswer(f"{where}: {self.server} did not answer until the timeout") from None
            return False
        except BaseException:
            opener.say_goodbye(self._goodbye(answer.session))
            self.number = 0  # the next call tries again
            raise
        finally:
            self._is_joining = False
            opener.close()

    def open_table(self, name: str, timeout: float | None, waits: bool = False) -> OpenTable:
        """Meets the server and opens a table there."""
        table = OpenTable(self, name)
        self._tables.append(table)
        try:
            self.meet("open()", timeout, waits)
        except BaseException:
            self._tables.remove(table)
            raise
        return table

    def meet(self, where: str, timeout: float | None, waits: bool = False) -> None:
        """Introduces this client to a server that may be absent. Without ``waits``, a server that is not there is an
        error as soon as that is known."""
        if not waits:
            self._doctor = Doctor(self._key is not None)
        try:
            channel = self.channel()
            self.join(where, channel, 0, None if timeout is None else time.monotonic() + timeout)
            channel.follow()
        except NotReady as error:
            if waits:
                raise
            raise StorageError(str(error)) from None
        finally:
            if self._doctor is not None:
                self._doctor.close()
                self._doctor = None

    def is_hopeless(self) -> bool:
        return self._doctor is not None and self._doctor.is_hopeless()

    def why(self) -> str:
        """What is known of a connection that gives no answer."""
        return "" if self._doctor is None else self._doctor.tell()

    def also_reopen(self, stream: Reopened) -> None:
        """In new sessions too, as long as there is another reference to it."""
        with self._joining:
            self._streams = [one for one in self._streams if one() is not None]
            self._streams.append(weakref.ref(stream))

    def forget(self, stream: Reopened) -> None:
        with self._joining:
            self._streams = [one for one in self._streams if one() not in (None, stream)]

    # ---- calls ------------------------------------------------------------------------------------------------------

    def check_open(self, where: str) -> None:
        if self._is_closed:
            raise ClosedError(f"{where}: the buffer is closed")

    @property
    def closed(self) -> bool:
        return self._is_closed

    def exchange(self, where: str, verb: int, message: Any, table: OpenTable, **options: Any) -> _core.Frame:
        table.check(where)
        channel = self.channel()
        if not channel.is_busy:
            return channel.exchange(where, verb, message, table=table, **options)
        # In the middle of another call of this thread: a signal's handler, or an iterator that is being collected.
        channel = self.new_channel()
        try:
            return channel.exchange(where, verb, message, table=table, **options)
        finally:
            channel.close()

    def call(self, table: OpenTable, verb: str, args: dict[str, Any], *, timeout: float | None = None) -> Any:
        """A verb by its name. Arguments and result are documents."""
        where = f"{verb}()"
        message = encode({"verb": verb, "args": args}, HEAD_BYTES)
        self.check_size(where, message)
        return decode(self.exchange(where, Verb.CALL, message, table, timeout=timeout).body)

    def check_size(self, where: str, message: Any) -> None:
        if len(message) > self.message_bytes > 0:
            raise StorageError(
                f"{where}: the message has {len(message)} bytes, and {self.server} takes at most "
                f"{self.message_bytes}; send less at once, or give serve() limits={{'message_bytes': ...}}"
            )

    def stats(self) -> dict[str, Any]:
        channels = list(self._channels)
        return {
            "address": self.server,
            "is_direct": False,
            "sessions": self.generation,
            "channels": len(channels),
            "messages_resent": sum(channel.resent for channel in channels),
        }

    def next_origin(self, number: int | None = None) -> tuple[int, int]:
        """The number of a call that must be executed once, and the least of those that are not over. ``number``: of a
        call that is not over, and is made again."""
        with self._counting:  # a number that comes late among the open ones would be below the oldest that was told
            if number is None or number not in self._undone:
                number = next(self._origins)
                self._undone[number] = None
            return number, next(iter(self._undone))

    def done(self, number: int) -> None:
        with self._counting:
            self._undone.pop(number, None)

    def beat(self, socket: Any) -> None:
        """Tells the server that this client lives, and which replies it has. Called by the keeper, with its own
        socket."""
        pairs = [number for channel in list(self._channels) for number in (channel.number, channel.oldest)]
        message = bytearray(HEAD_BYTES) + b"".join(number.to_bytes(8, "little") for number in pairs)
        HEAD.pack_into(message, 0, MAGIC, self.version, Verb.BEAT, 0, 0, 0, self.number, 0, 0, 0, 0, 0, 0)
        zmq = load_zmq()
        with contextlib.suppress(zmq.ZMQError):
            socket.send(message, zmq.NOBLOCK)
        with contextlib.suppress(zmq.ZMQError):
            while True:
                socket.recv(zmq.NOBLOCK)  # it knows us no more: the next call introduces us again

    # ---- life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._is_closed:
            return
        if self._process == os.getpid() and self.number:
            with contextlib.suppress(StorageError):
                self.channel().say_goodbye(self._goodbye(self.number))
        self._is_closed = True
        channel = getattr(self._local, "channel", None)
        if channel is not None:
            channel.close()
            self._local.channel = None
        _sessions.discard(self)

    def _goodbye(self, number: int) -> bytearray:
        message = bytearray(HEAD_BYTES)
        HEAD.pack_into(message, 0, MAGIC, self.version, Verb.BYE, 0, 0, 0, number, 0, 0, 0, 0, 0, 0)
        return message

    def leave_to_parent(self) -> None:
        """In a forked child: sockets and streams are the parent's."""
        if not self._is_closed:
            self._begin()


def list_tables(address: str, keys: Any = None, timeout: float = OPEN_S) -> list[dict[str, Any]]:
    """What a server has: ``name``, ``face``, ``size`` and ``capacity`` of each table."""
    session = Session(read_endpoint("ls", address, named=False).server, keys)
    try:
        session.meet("ls", timeout)
        reply = session.channel().exchange("ls", Verb.TABLES, bytearray(HEAD_BYTES), timeout=timeout)
        return [{"name": name, **facts} for name, facts in decode(reply.body).items()]
    finally:
        session.close()


def remove_table(address: str, keys: Any = None, timeout: float = OPEN_S) -> None:
    """Asks a server to close a table and to remove its file. Needs the role admin."""
    endpoint = read_endpoint("rm", address, named=True)
    session = Session(endpoint.server, keys)
    try:
        table = session.open_table(str(endpoint.name), timeout)
        session.call(table, "remove", {}, timeout=timeout)
    finally:
        session.close()


_sessions: weakref.WeakSet[Session] = weakref.WeakSet()
_contexts: dict[int, Any] = {}  # by process


def _context() -> Any:
    """One for all sessions of this process: a thread of ZeroMQ's."""
    found = _contexts.get(os.getpid())
    if found is None:
        found = load_zmq().Context()
        found.max_sockets = 1 << 16
        _contexts[os.getpid()] = found
    return found


def _after_fork() -> None:
    for session in list(_sessions):
        session.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
