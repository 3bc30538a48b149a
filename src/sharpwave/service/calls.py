"""Calls: executes what clients ask for, in the server's thread or beside it, and gives the answers to the desk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import _core
from ..errors import ClosedError, SchemaError, StorageError
from .document import decode, encode
from .guest import Guest, Line, Request
from .hosted import Answer, Hosted, Later, Parked
from .limits import Limits
from .message import HEAD_BYTES, VERB_NAMES, Status, Verb, status_of

if TYPE_CHECKING:
    from .chores import Chores

__all__ = ["Calls"]

_EXCHANGE_ROLES = {Verb.ADD: "write", Verb.UPDATE: "write", Verb.SAMPLE: "read", Verb.SETTLE: "read"}


class Calls:
    """Only the server's thread uses it. Calls of one channel are executed in their order, one after the other.

    Args:
        chores: Runs the calls that wait, or that take long.
        tables: The hosted buffers by name; their numbers begin with 1.
    """

    def __init__(self, desk: _core.Desk, chores: Chores, tables: Sequence[tuple[str, Hosted]], limits: Limits) -> None:
        self._desk, self._chores, self._tables, self._limits = desk, chores, tables, limits
        self.is_closing = False
        self.replied_at = 0.0  # when the last reply went out

    def take(self, guest: Guest, request: Request) -> None:
        line = guest.lines.get(request.channel)
        if line is None:
            line = guest.lines[request.channel] = Line()
        if line.running is None:
            self._execute(guest, line, request)
        else:
            self._desk.waiting_bytes += len(request.body)
            line.waiting.append(request)

    def give_up(self, guest: Guest, channel: int) -> None:
        """The client wants no answer of the call that is running: else the calls behind it would wait for ever."""
        line = guest.lines.get(channel)
        if line is not None and line.chore is not None:
            line.chore.give_up()

    def finish(self, place: Any, result: Any) -> None:
        """A call that has waited is over."""
        guest, line, request = place
        line.running = line.chore = None
        self._desk.hold(guest.session, request.channel, 0)
        self._desk.waiting_bytes -= len(request.body)
        self._complete(guest, request, result)
        while line.waiting and line.running is None:
            following = line.waiting.popleft()
            self._desk.waiting_bytes -= len(following.body)
            if not guest.is_gone:  # what a dead client asked for is not begun
                self._execute(guest, line, following)

    # ---- execution --------------------------------------------------------------------------------------------------

    def _execute(self, guest: Guest, line: Line, request: Request) -> None:
        if request.call < self._desk.oldest(guest.session, request.channel):  # given up while it waited for its turn
            return self._desk.drop_call(guest.session)
        try:
            result = self._dispatch(guest, request)
        except Exception as error:
            result = error
        if not isinstance(result, (Later, Parked)):
            return self._complete(guest, request, result)
        line.running = request
        self._desk.hold(guest.session, request.channel, request.call)
        self._desk.waiting_bytes += len(request.body)
        place = guest, line, request
        if isinstance(result, Later):
            line.chore = self._chores.add(guest, place, result)
        else:
            line.chore = self._chores.park(guest, place, result)

    def _dispatch(self, guest: Guest, request: Request) -> Any:
        verb = request.verb
        if self.is_closing:
            raise ClosedError("the server is closing")
        if verb == Verb.OPEN:
            return self._open(decode(request.body))
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

    def _open(self, said: Any) -> dict[str, Any]:
        name = said.get("name") if isinstance(said, dict) else None
        for number, (known, hosted) in enumerate(self._tables, 1):
            if known == name:
                return {"table": number, "face": hosted.face, "kind": hosted.kind, **hosted.describe()}
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

    def _complete(self, guest: Guest, request: Request, result: Any) -> None:
        if guest.is_gone or (self.is_closing and isinstance(result, ClosedError)):  # the next server is asked again
            return
        status, argument = Status.OK, 0
        if isinstance(result, BaseException):
            status = Status.FORBIDDEN if isinstance(result, _Forbidden) else status_of(result)
            memory: Any = _text(str(result))
        elif isinstance(result, Answer):
            memory, argument = result
        else:
            try:
                memory = encode(result, HEAD_BYTES)
            except Exception as error:
                status, memory = Status.FAILURE, _text(f"the result cannot be sent: {error}")
        if len(memory) > self._limits.message_bytes:
            text = (
                f"the reply has {len(memory)} bytes, above limits['message_bytes']={self._limits.message_bytes}; ask "
                "for less"
            )
            status, argument, memory = Status.SCHEMA, 0, _text(text)
        self._desk.reply(request, memory, status, argument)
        self.replied_at = time.monotonic()


class _Forbidden(StorageError):
    """The key of a client lacks a role."""


def _text(text: str) -> bytearray:
    return bytearray(HEAD_BYTES) + text.encode(errors="backslashreplace")
