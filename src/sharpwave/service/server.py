"""Server: buffers of this process for clients in other processes and on other machines."""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import _core
from ..checks import number, told
from ..errors import SchemaError, StorageError
from .calls import Calls
from .document import encode
from .endpoint import is_reachable_by_others, read_endpoint, read_name
from .guests import Guests, Refusal
from .hosted import Hosted
from .hosting import host
from .limits import Limits
from .listener import Listener
from .message import HEAD_BYTES, VERB_NAMES, Status
from .zeromq import zmq_functions

__all__ = ["Server", "serve"]

_DRAIN_S = 10.0
# That clients have to read a last reply: ZeroMQ drops what a client has not read when its connection ends.
_READ_S = 0.5


def serve(
    buffers: Mapping[str, Any],
    address: str,
    *,
    keys: str | os.PathLike[str] | None = None,
    client_timeout: float = 5.0,
    folder: str | os.PathLike[str] | None = None,
    limits: Mapping[str, int] | None = None,
) -> Server:
    """Serves buffers to other processes and machines. ``sharpwave.open("tcp://host:port/name")`` opens one there.

    The server has threads of its own; this process may use the buffers meanwhile. Closing the server does not close
    them.

    Args:
        buffers: Buffers by name: ``ReplayBuffer``, ``DistillationBuffer``, ``TrajectoryReplayBuffer``,
            ``SequenceBuffer``.
        address: Where to listen: ``"tcp://127.0.0.1:7001"`` or ``"ipc:///path"``. Port 0 takes a free one, which
            ``server.address`` tells.
        keys: A folder of keys that ``sharpwave keys new`` wrote: clients need one of them, and everything is encrypted.
            Without keys the server listens on the loopback or on a local socket only.
        client_timeout: Seconds of silence after which a client is dead: its open episodes end as truncated, its leases
            and reservations return.
        folder: Where clients may ``save`` to, on this machine. Without it ``save`` needs the role admin of a key, or a
            local socket.
        limits: Bounds by name: ``message_bytes``, ``clients``, ``calls``, ``kept_bytes``, ``channels``,
            ``waiting_bytes``.

    Raises:
        StorageError: It cannot listen there, or others could connect without keys.

    Example:
        >>> import sharpwave as sw
        >>> replay = sw.ReplayBuffer(1000, obs_shape=(4,), seed=0)
        >>> with sw.serve({"replay": replay}, "tcp://127.0.0.1:0") as server:
        ...     with sw.open(server.address + "/replay") as remote:
        ...         remote.add([0, 0, 0, 0], 0, 1.0, [0, 0, 0, 1], False)
        >>> len(replay)
        1
    """
    return Server(buffers, address, keys=keys, client_timeout=client_timeout, folder=folder, limits=limits)


class Server:
    """A running server; made by ``sharpwave.serve``. Leaving its ``with`` block closes it."""

    def __init__(
        self,
        buffers: Mapping[str, Any],
        address: str,
        *,
        keys: Any = None,
        client_timeout: float = 5.0,
        folder: Any = None,
        limits: Any = None,
    ) -> None:
        where = "serve()"
        if not isinstance(buffers, Mapping):
            raise SchemaError(f"{where}: buffers: expected a dict of buffers by name, got {told(buffers)}")
        self._endpoint = read_endpoint(where, address, named=False).server
        self._timeout = number(where, "client_timeout", client_timeout, 0.1, 1e6)
        self._look_s = self._timeout / 10  # how often the desk looks for dead clients
        self._limits = Limits.read(where, limits)
        self.folder = None if folder is None else Path(folder).absolute()
        self._keys = None
        if keys is not None:
            from .keys import Keys

            self._keys = Keys.read_folder(keys, where)
        elif is_reachable_by_others(self._endpoint):
            raise StorageError(
                f"{where}: address: {address!r} can be reached from other machines; give keys= (sharpwave keys new "
                "NAME), or listen on tcp://127.0.0.1 or ipc://"
            )
        self.has_keys = self._keys is not None
        self.message_bytes = self._limits.message_bytes
        self._tables: list[tuple[str, Hosted]] = []
        for name, buffer in buffers.items():
            self._tables.append((read_name(f"{where}: buffers", name), host(where, name, buffer, self)))
        self._life = secrets.token_hex(16)
        self._refused: dict[str, int] = {}
        self._drain_s = _DRAIN_S
        self._is_closing = False
        self._is_closed = False
        self._closing = threading.Lock()
        functions = zmq_functions()
        self._listener = Listener(where, self._endpoint, self._keys, self._limits)
        self.address = self._listener.address
        try:
            self._desk = _core.Desk(functions, self._listener.socket_address, asdict(self._limits))
            for number_, (_, hosted) in enumerate(self._tables, 1):
                hosted.attach(self._desk, number_)
            self._guests = Guests(self._desk, self._keys, self._limits, self._timeout, self._tables)
        except BaseException:
            self._listener.close()  # else its address would stay in use
            raise
        from .chores import Chores

        self._chores = Chores(self._listener.ring)
        self._calls = Calls(self._desk, self._chores, self._tables, self._limits)
        self._thread = threading.Thread(target=self._run, name="sharpwave-server", daemon=True)
        self._process = os.getpid()
        self._thread.start()
        _running.add(self)

    # ---- for other threads ------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """``clients`` with their verbs (count, bytes, times), ``refused`` messages by reason, ``lost``: clients that
        died."""
        guests = list(self._guests)
        return {
            "address": self.address,
            "tables": [name for name, _ in self._tables],
            "clients": {
                guest.token.hex(): guest.stats() | self._desk.client_stats(guest.session, VERB_NAMES)
                for guest in guests
            },
            "lost": self._guests.lost,
            "refused": self._refused | self._desk.refused(),
            "waiting": len(self._chores),
        }

    def save_place(self, path: Any, where: str = "save()") -> Path:
        """Where a client may save to. A client without a key could else write anywhere in this user's name, and on the
        loopback every user of the machine is a client."""
        place = Path(str(path))
        if self.folder is not None:
            inside = (self.folder / place).resolve()
            if not inside.is_relative_to(self.folder.resolve()):
                raise StorageError(f"{where}: path: expected a path in the server's folder, got {str(path)!r}")
            return inside
        if not self.has_keys and not self._endpoint.startswith("ipc://"):
            raise StorageError(
                f"{where}: the server reads and writes no files for clients without keys; give serve() folder= or keys="
            )
        if not place.is_absolute():
            raise StorageError(f"{where}: path: expected an absolute path on the server's machine, got {str(path)!r}")
        return place

    def close(self, drain_s: float = _DRAIN_S) -> None:
        """Ends the server: calls that work (a save, a flush) end and are answered; new calls, and those that wait for
        rows or for a pace, get no answer, and their clients wait for a new server at the address until their deadlines.
        A second call does nothing.

        Args:
            drain_s: Seconds that running calls have at most.
        """
        with self._closing:
            if self._is_closed:
                return
            self._drain_s = number("close()", "drain_s", drain_s, 0, 1e6)
            self._is_closing = True
            self._listener.ring()
            self._thread.join(self._drain_s + 10.0)
            self._is_closed = True
            _running.discard(self)

    @property
    def is_running(self) -> bool:
        """Whether it takes calls: not after ``close()``, and not if its thread has failed."""
        return self._thread.is_alive() and not self._is_closing

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._guests)} clients"
        return f"<Server {self.address}: {', '.join(name for name, _ in self._tables)}; {state}>"

    # ---- the server's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause, is_timed = max(50, int(1e3 * self._look_s)), False
        try:
            while not self._is_closing:
                self._guard(self._serve)
                for done in self._chores.finished():
                    self._guard(self._calls.finish, *done)
                if is_timed != bool(self._guests):  # without clients nothing is looked after
                    is_timed = bool(self._guests)
                    self._listener.wait_at_most(pause if is_timed else -1)
        finally:
            self._end()

    def _serve(self) -> None:
        try:
            event = self._desk.serve(self._look_s, self._timeout)
        except StorageError:  # the socket is gone: nothing can be served any more
            self._is_closing = True
            raise
        self._take(event)

    def _guard(self, call: Callable[..., None], *args: Any) -> None:
        """A failure that no reply tells of is reported, and the other clients are served on."""
        try:
            call(*args)
        except Exception as error:
            self._count("failure")
            threading.excepthook(
                threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
            )

    def _end(self) -> None:
        self._calls.is_closing = True
        self._chores.cancel_waiting()
        self._finish_chores(self._drain_s)
        self._chores.cancel_all()
        self._finish_chores(1.0)
        if self._guests:  # else nobody waits for a reply
            time.sleep(max(0.0, self._calls.replied_at + _READ_S - time.monotonic()))
        for guest in self._guests:
            self._guests.part(guest)
        self._chores.close()
        self._listener.close()

    def _finish_chores(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self._chores) and time.monotonic() < deadline:
            for done in self._chores.finished():
                self._guard(self._calls.finish, *done)
            time.sleep(0.001)

    def _count(self, reason: str) -> None:
        self._refused[reason] = self._refused.get(reason, 0) + 1

    def _take(self, event: _core.Event) -> None:
        """What the desk hands over."""
        kind = event.kind
        if kind == _Kind.BELL:  # a call that waited is over, or the server is closing: _run sees to both
            return
        if kind == _Kind.QUIET:
            return self._guests.bury(time.monotonic())
        if kind == _Kind.HELLO:
            return self._greet(event)
        if kind == _Kind.KEYS:
            return self._guests.read_keys()
        guest = self._guests.find(event.session)
        if guest is None:
            return
        if kind == _Kind.CALL:
            self._calls.take(guest, event)
        elif kind == _Kind.BARRED:
            if self._guests.is_barred(guest):
                return self._turn_away(event, self._guests.refusal_of(guest))
            self._guests.read_keys()  # it is known again; the message is lost, and the client asks what became of it
        elif kind == _Kind.GIVEN_UP:
            self._calls.give_up(guest, event.channel)
        else:
            self._guests.part(guest)
            if kind == _Kind.BYE:
                self._desk.reply_bare(event, Status.OK, "")

    def _greet(self, event: _core.Event) -> None:
        try:
            guest = self._guests.admit(event.body, event.user)
        except Refusal as refusal:
            return self._turn_away(event, refusal)
        limits = {"message_bytes": self._limits.message_bytes, "calls": self._limits.calls}
        answer = {"version": guest.version, "server": self._life, "client_timeout": self._timeout, "limits": limits}
        self._desk.greet(event, guest.session, guest.version, encode(answer, HEAD_BYTES))

    def _turn_away(self, event: _core.Event, refusal: Refusal) -> None:
        self._count(refusal.reason)
        self._desk.reply_bare(event, refusal.status, str(refusal))


_Kind = _core.Event.Kind
_running: weakref.WeakSet[Server] = weakref.WeakSet()


def _close_all() -> None:
    """When the interpreter ends: a server's thread works without it, and would go on into the teardown."""
    for server in list(_running):
        if server._process == os.getpid():
            server.close(0)


atexit.register(_close_all)
