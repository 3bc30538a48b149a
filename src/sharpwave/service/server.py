"""Server: buffers of this process for clients in other processes and on other machines."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..checks import number, told
from ..errors import ClosedError, SchemaError, StorageError
from .document import decode, encode
from .endpoint import is_reachable_by_others, read_endpoint, read_name
from .guest import Guest, Kept, Line, Request
from .guests import Guests, Refusal
from .hosted import Answer, Hosted, Later, Parked
from .hosting import host
from .limits import Limits
from .listener import Listener
from .message import HEAD, HEAD_BYTES, MAGIC, VERB_NAMES, Status, Verb, status_of, to_seconds

__all__ = ["Server", "serve"]

_NUMBERED = frozenset({Verb.OPEN, Verb.CALL, Verb.ADD, Verb.SAMPLE, Verb.UPDATE, Verb.SETTLE, Verb.TABLES})
_EXCHANGE_ROLES = {Verb.ADD: "write", Verb.UPDATE: "write", Verb.SAMPLE: "read", Verb.SETTLE: "read"}
_DRAIN_S = 10.0


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
        self._guests = Guests(self._keys, self._limits, self._timeout, self._tables)
        self._waiting_bytes = 0
        self._drain_s = _DRAIN_S
        self._is_closing = False
        self._is_closed = False
        self._closing = threading.Lock()
        self._listener = Listener(where, self._endpoint, self._keys, self._limits)
        self.address = self._listener.address
        from .chores import Chores

        self._chores = Chores(self._listener.ring)
        self._thread = threading.Thread(target=self._run, name="sharpwave-server", daemon=True)
        self._thread.start()

    # ---- for other threads ------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """``clients`` with their verbs (count, bytes, times), ``refused`` messages by reason, ``lost``: clients that
        died."""
        guests = list(self._guests)
        return {
            "address": self.address,
            "tables": [name for name, _ in self._tables],
            "clients": {guest.token.hex(): guest.stats() for guest in guests},
            "lost": self._guests.lost,
            "refused": dict(self._refused),
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
        listener, looked = self._listener, time.monotonic()
        pause = max(50, int(1e3 * self._timeout / 10))
        is_timed = False
        try:
            while not self._is_closing:
                came = listener.receive()
                if came is not None:
                    self._guard(self._take, *came)
                for done in self._chores.finished():
                    self._guard(self._finish, *done)
                now = time.monotonic()
                if now - looked > self._timeout / 10:
                    looked = now
                    self._guard(self._guests.bury, now)
                if is_timed != bool(self._guests):  # without clients nothing is looked after
                    is_timed = bool(self._guests)
                    listener.wait_at_most(pause if is_timed else -1)
        finally:
            self._end()

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
        self._chores.cancel_waiting()
        self._finish_chores(self._drain_s)
        self._chores.cancel_all()
        self._finish_chores(1.0)
        for guest in self._guests:
            self._guests.part(guest)
        self._chores.close()
        self._listener.close()

    def _finish_chores(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while len(self._chores) and time.monotonic() < deadline:
            for done in self._chores.finished():
                self._guard(self._finish, *done)
            time.sleep(0.001)

    def _count(self, reason: str) -> None:
        self._refused[reason] = self._refused.get(reason, 0) + 1

    def _take(self, who: bytes, frame: Any) -> None:
        if frame.more:  # more frames than the protocol has
            return self._count("frames")
        view = frame.buffer
        if len(view) < HEAD_BYTES:
            if len(view):  # an empty frame is our own bell
                self._count("short")
            return
        head = HEAD.unpack_from(view)
        magic, version, verb, _, flags, table, session, channel, stream, call, oldest, timeout, argument = head
        if magic != MAGIC:
            return self._count("magic")
        if verb == Verb.HELLO:
            return self._greet(who, frame, version, channel, view)
        try:
            guest = self._guests.find(session, frame)
        except Refusal as refusal:
            return self._turn_away(who, head, refusal)
        if guest is None:
            return self._reply_bare(who, head, Status.UNKNOWN_SESSION)
        guest.seen = now = time.monotonic()
        if verb == Verb.BEAT:
            return self._hear_beat(guest, view)
        if verb == Verb.BYE:
            self._guests.part(guest)
            return self._reply_bare(who, head, Status.OK)
        line = guest.lines.get(channel)
        if line is None:
            if len(guest.lines) >= self._limits.channels:
                return self._reply_bare(who, head, Status.BUSY, f"at most {self._limits.channels} channels a client")
            line = guest.lines[channel] = Line()
        line.who = who
        if oldest > line.oldest:
            self._forget(guest, line, oldest)
        if verb == Verb.PROBE:
            return self._answer_probe(guest, line, head)
        if verb not in _NUMBERED or version != guest.version:
            return self._refuse(who, head, guest, f"verb {verb} of version {version} is not known")
        if call != line.expected:
            return self._meet_again(guest, line, head)
        if guest.open_calls >= self._limits.calls:
            line.expected += 1
            return self._keep(
                guest, line, call, self._error(head, Status.BUSY, f"at most {self._limits.calls} open calls")
            )
        if guest.kept_bytes >= self._limits.kept_bytes:
            line.expected += 1
            text = (
                f"the client has not taken replies of {guest.kept_bytes} bytes, limits['kept_bytes']="
                f"{self._limits.kept_bytes}"
            )
            return self._keep(guest, line, call, self._error(head, Status.BUSY, text))
        if 0 < self._waiting_bytes > self._limits.waiting_bytes - len(view):
            line.expected += 1
            text = f"calls of {self._waiting_bytes} bytes wait, limits['waiting_bytes']={self._limits.waiting_bytes}"
            return self._keep(guest, line, call, self._error(head, Status.BUSY, text))
        line.expected += 1
        guest.open_calls += 1
        body = view[HEAD_BYTES:]
        request = Request(verb, flags, table, stream, call, to_seconds(timeout), argument, body, now)
        if line.running is not None:
            self._waiting_bytes += len(body)
            line.waiting.append(request)
        else:
            self._execute(guest, line, channel, request)

    # ---- sessions ---------------------------------------------------------------------------------------------------

    def _greet(self, who: bytes, frame: Any, version: int, channel: int, view: Any) -> None:
        head = (MAGIC, version, Verb.HELLO, 0, 0, 0, 0, channel, 0, 0, 0, 0, 0)
        try:
            guest = self._guests.admit(view[HEAD_BYTES:], frame)
        except Refusal as refusal:
            return self._turn_away(who, head, refusal)
        limits = {"message_bytes": self._limits.message_bytes, "calls": self._limits.calls}
        answer = {"version": guest.version, "server": self._life, "client_timeout": self._timeout, "limits": limits}
        memory = encode(answer, HEAD_BYTES)
        HEAD.pack_into(memory, 0, MAGIC, guest.version, Verb.HELLO, 0, 0, 0, guest.session, channel, 0, 0, 0, 0, 0)
        self._send(who, memory)

    def _turn_away(self, who: Any, head: tuple[Any, ...], refusal: Refusal) -> None:
        self._count(refusal.reason)
        self._reply_bare(who, head, refusal.status, str(refusal))

    def _hear_beat(self, guest: Guest, view: Any) -> None:
        body = view[HEAD_BYTES:]
        if len(body) % 16:
            return self._count("beat")
        numbers = memoryview(bytes(body)).cast("Q")
        for at in range(0, len(numbers), 2):
            line = guest.lines.get(numbers[at])
            if line is not None and numbers[at + 1] > line.oldest:
                self._forget(guest, line, numbers[at + 1])

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _meet_again(self, guest: Guest, line: Line, head: tuple[Any, ...]) -> None:
        """A call that is not the next one: it came before, or one before it was lost."""
        call = head[9]
        if call < line.expected:
            return self._answer_probe(guest, line, head)
        self._count("out of order")  # the client sends again from the lost one on

    def _answer_probe(self, guest: Guest, line: Line, head: tuple[Any, ...]) -> None:
        call = head[9]
        reply = line.replies.get(call)
        if reply is not None:
            reply.send_again()
            self._send(line.who, reply.memory)
        elif call >= line.expected:
            self._reply_bare(line.who, head, Status.UNKNOWN_CALL)
        elif call >= line.oldest:
            self._reply_bare(line.who, head, Status.WORKING)

    def _forget(self, guest: Guest, line: Line, oldest: int) -> None:
        line.oldest = oldest
        if oldest > line.expected:  # the client gave up calls that never came
            line.expected = oldest
        if line.running is not None and line.running < oldest:  # else the calls behind it would wait for ever
            line.chore.give_up()
        for call in [call for call in line.replies if call < oldest]:
            kept = line.replies.pop(call)
            guest.kept_bytes -= len(kept.memory)
            kept.drop()

    def _execute(self, guest: Guest, line: Line, channel: int, request: Request) -> None:
        if request.call < line.oldest:  # given up while it waited for its turn
            guest.open_calls -= 1
            return
        try:
            result = self._dispatch(guest, channel, request)
        except Exception as error:
            result = error
        if isinstance(result, (Later, Parked)):
            line.running = request.call
            self._waiting_bytes += len(request.body)
            place = guest, line, channel, request
            if isinstance(result, Later):
                line.chore = self._chores.add(guest, place, result)
            else:
                line.chore = self._chores.park(guest, place, result)
        else:
            self._complete(guest, line, channel, request, result)

    def _dispatch(self, guest: Guest, channel: int, request: Request) -> Any:
        verb = request.verb
        if self._is_closing:
            raise ClosedError("the server is closing")
        if verb == Verb.OPEN:
            return self._open(guest, decode(request.body))
        if verb == Verb.TABLES:
            self._check_role(guest, "read", "TABLES")
            return {name: {"face": hosted.face, **hosted.summary()} for name, hosted in self._tables}
        if not 0 < request.table <= len(self._tables):
            raise StorageError(f"table {request.table} is not known; open it first")
        hosted = self._tables[request.table - 1][1]
        role = _EXCHANGE_ROLES.get(verb)
        if role is not None:
            self._check_role(guest, role, VERB_NAMES[verb])
            return hosted.exchange(guest, request)
        return self._call(guest, hosted, request)

    def _check_role(self, guest: Guest, role: str, verb: str) -> None:
        if role not in guest.roles:
            raise _Forbidden(
                f"{verb} needs the role {role!r}; the key of {guest.user_name!r} has {', '.join(sorted(guest.roles))}"
            )

    def _open(self, guest: Guest, said: Any) -> dict[str, Any]:
        name = said.get("name") if isinstance(said, dict) else None
        for number_, (known, hosted) in enumerate(self._tables, 1):
            if known == name:
                return {"table": number_, "face": hosted.face, "kind": hosted.kind, **hosted.describe()}
        names = ", ".join(known for known, _ in self._tables)
        raise StorageError(f"the server has no table {name!r}; it has {names or 'none'}")

    def _call(self, guest: Guest, hosted: Hosted, request: Request) -> Any:
        said = decode(request.body)
        if not isinstance(said, dict) or not isinstance(said.get("args"), dict):
            raise SchemaError("CALL: expected a verb and its args")
        name, args = said.get("verb"), said["args"]
        verb = hosted.verbs.get(name) if isinstance(name, str) else None
        if verb is None:
            raise SchemaError(f"CALL: a {hosted.face} has no verb {name!r}")
        self._check_role(guest, verb.role, str(name))
        args["timeout"] = request.timeout
        if verb.mode == "inline":
            return verb.call(guest, args)
        if verb.mode == "parked":
            return Parked(lambda done: verb.call(guest, args, done))
        if verb.mode == "async":
            return Later(lambda: verb.call(guest, args))
        import asyncio

        return Later(lambda: asyncio.to_thread(verb.call, guest, args), is_work=True)

    # ---- replies ----------------------------------------------------------------------------------------------------

    def _finish(self, place: Any, result: Any) -> None:
        guest, line, channel, request = place
        line.running = line.chore = None
        self._waiting_bytes -= len(request.body)
        self._complete(guest, line, channel, request, result)
        while line.waiting and line.running is None:
            following = line.waiting.popleft()
            self._waiting_bytes -= len(following.body)
            if not guest.is_gone:  # what a dead client asked for is not begun
                self._execute(guest, line, channel, following)

    def _complete(self, guest: Guest, line: Line, channel: int, request: Request, result: Any) -> None:
        if guest.is_gone or (self._is_closing and isinstance(result, ClosedError)):  # the next server is asked again
            return
        verb = request.verb
        argument = result.argument if isinstance(result, Answer) else 0
        head = (
            MAGIC, guest.version, verb, 0, 0, request.table, guest.session, channel, request.stream, request.call, 0, 0,
            argument,
        )  # fmt: skip
        free = None
        if isinstance(result, BaseException):
            status = Status.FORBIDDEN if isinstance(result, _Forbidden) else status_of(result)
            reply: Any = self._error(head, status, str(result))
        elif isinstance(result, Answer):
            reply, free = result.memory, result.free
            HEAD.pack_into(reply, 0, *head)
        else:
            try:
                reply = encode(result, HEAD_BYTES)
                HEAD.pack_into(reply, 0, *head)
            except Exception as error:
                reply = self._error(head, Status.FAILURE, f"the result cannot be sent: {error}")
        if len(reply) > self._limits.message_bytes:
            text = (
                f"the reply has {len(reply)} bytes, above limits['message_bytes']={self._limits.message_bytes}; ask "
                "for less"
            )
            reply, free = self._error(head, Status.SCHEMA, text), None
        guest.open_calls -= 1
        guest.times(VERB_NAMES[verb]).note(time.monotonic() - request.came, len(request.body), len(reply))
        self._keep(guest, line, request.call, reply, free)

    def _keep(self, guest: Guest, line: Line, call: int, reply: Any, free: Any = None) -> None:
        if call >= line.oldest:
            kept = line.replies[call] = Kept(reply, free)
            guest.kept_bytes += len(reply)
            kept.sending = self._send(line.who, reply)

    def _error(self, head: tuple[Any, ...], status: int, text: str) -> bytearray:
        memory = bytearray(HEAD_BYTES) + text.encode(errors="backslashreplace")
        HEAD.pack_into(memory, 0, *head[:3], status, 0, *head[5:10], 0, 0, 0)
        return memory

    def _reply_bare(self, who: Any, head: tuple[Any, ...], status: int, text: str = "") -> None:
        """A reply without a number, or about a call that is not there: it is not kept."""
        self._send(who, self._error(head, status, text))

    def _refuse(self, who: Any, head: tuple[Any, ...], guest: Guest, text: str) -> None:
        self._count("bad message")
        self._reply_bare(who, head, Status.BAD_MESSAGE, text)
        self._guests.part(guest)

    def _send(self, who: Any, memory: Any) -> Any:
        is_sent, sending = self._listener.send(who, memory)
        if not is_sent:  # it is kept, and the client asks for it
            self._count("unsent")
        return sending


class _Forbidden(StorageError):
    """The key of a client lacks a role."""
