"""Channel: one socket of a client. Calls go out in order, several at once if wanted, and each has one answer."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from .. import _core
from ..errors import ClosedError, NotReady
from .message import Status, Verb, error_of, to_microseconds
from .zeromq import load_zmq, zmq_functions

if TYPE_CHECKING:
    from .session import Session

__all__ = ["Channel", "NoAnswer", "OpenCall"]

_SILENCE_MS = 1000  # without a word for so long, the client asks what became of its call
GRACE_S = 0.25  # longer than its timeout waits a call for the server's own answer


class NoAnswer(NotReady):
    """The server was silent until the deadline."""


class OpenCall:
    """A call without an answer. ``message`` begins with the space of a head, or is None for a head alone. It is kept
    until the answer is there: it may have to be sent again."""

    __slots__ = ("argument", "call", "deadline", "flags", "message", "stream", "table", "timeout", "verb")

    def __init__(
        self, verb: int, message: Any, table: Any, stream: Any, argument: int, flags: int, timeout: float | None
    ) -> None:
        self.verb, self.message, self.table, self.stream = verb, message, table, stream
        self.argument, self.flags, self.timeout = argument, flags, timeout
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self.call = 0


class Channel:
    """Used by one thread at a time."""

    def __init__(self, session: Session, number: int) -> None:
        self._session, self.number = session, number
        self._zmq = load_zmq()
        self._socket = session.connect()
        self._next = 1
        self._open: deque[OpenCall] = deque()
        self._wire = _core.Wire(zmq_functions(), self._socket.underlying)
        self._early: dict[int, _core.Frame] = {}  # answers to later calls than the first open one
        # Of the session that the numbers of this channel's calls belong to; another thread may have made a newer one.
        self._generation, self._session_number = session.generation, session.number
        self._wait_ms = _SILENCE_MS
        self._is_unsent = False  # open calls wait for a connection
        self.resent = 0
        self.is_busy = False  # in the middle of an exchange
        self.is_over: threading.Event | None = None  # set by another thread: the caller wants no answer

    def __del__(self) -> None:
        socket, wire = getattr(self, "_socket", None), getattr(self, "_wire", None)
        if wire is not None:
            wire.close()
        if socket is not None:
            socket.close(0)

    def close(self) -> None:
        if self._wire.close():  # else a thread waits at the socket, which is freed after it
            self._socket.close(0)

    def renew(self) -> Channel:
        """Another channel with the open calls of this one, whose socket is gone. Only for calls that may come twice."""
        other = self._session.new_channel()
        for call in self._open:
            other.begin("add()", call)
        return other

    @property
    def oldest(self) -> int:
        """The least call whose answer is still wanted."""
        return self._open[0].call if self._open else self._next

    @property
    def open_calls(self) -> int:
        return len(self._open)

    # ---- calls ------------------------------------------------------------------------------------------------------

    def exchange(
        self,
        where: str,
        verb: int,
        message: Any,
        *,
        table: Any = None,
        stream: Any = None,
        argument: int = 0,
        flags: int = 0,
        timeout: float | None = None,
    ) -> _core.Frame:
        """One call, with a wait for its answer. A call that is given up is forgotten by both sides."""
        call = OpenCall(verb, message, table, stream, argument, flags, timeout)
        self.is_busy = True
        try:
            self.begin(where, call)
            return self.finish(where)
        except BaseException as error:
            self.abandon()
            if isinstance(error, (ClosedError, self._zmq.ZMQError)):
                self._session.check_open(where)  # closed meanwhile, by the handler of a signal
            raise
        finally:
            self.is_busy = False

    def begin(self, where: str, call: OpenCall) -> None:
        """Never waits: what cannot be sent now is sent by ``finish``."""
        self._session.check_open(where)
        if not self._is_stale():
            call.call = self._next
            self._next += 1
        self._open.append(call)
        if call.call and not self._is_unsent:  # else in order, when there is a session and a connection
            self._send(call)

    def _is_stale(self) -> bool:
        """Whether the session that this channel knows is over."""
        return self._session.generation != self._generation or self._session_number == 0

    def finish_until(self, where: str, deadline: float | None) -> _core.Frame:
        """The answer to the first open call, which had no timeout of its own. NoAnswer: the call stays open."""
        call = self._open[0]
        call.deadline = deadline
        return self.finish(where)

    def finish(self, where: str) -> _core.Frame:
        """The answer to the first open call. NoAnswer: it did not come until the deadline; the call stays open."""
        call = self._open[0]
        if not (self._early or self._is_unsent or self._is_stale()):  # the usual way
            self._set_wait(call)
            frame = self._wire.take(self._session_number, call.call)
            if frame is not None:
                self._open.popleft()
                return frame
            if not self._wire.has_early:
                self._hear_nothing(where, call)
        while True:
            if self._is_stale():
                self._join(where, call.deadline)
            if self._is_unsent:
                self._wait_for_connection(where, call)
            frame = self._early.pop(call.call, None)
            if frame is None:
                frame = self._receive(where, call)
                if frame is None:
                    continue
            status = frame.status
            if status == Status.OK:
                self._open.popleft()
                return frame
            if status == Status.WORKING:
                continue
            if status == Status.UNKNOWN_CALL:
                self._send_all()
            elif status == Status.UNKNOWN_SESSION:
                self._join(where, call.deadline)
            else:
                self._open.popleft()
                raise error_of(status, str(frame.body, "utf-8", "replace"))

    def abandon(self) -> None:
        """No answer is wanted any more: the server drops those that it keeps, and does not begin calls that are
        lost."""
        self._open.clear()
        self._early.clear()
        self._is_unsent = False

    # ---- below ------------------------------------------------------------------------------------------------------

    def _join(self, where: str, deadline: float | None) -> None:
        """Makes the session anew, if no other thread did, and sends all open calls under new numbers."""
        session = self._session
        session.join(where, self, self._generation, deadline)
        self.follow()
        calls = list(self._open)
        self._open.clear()
        self._early.clear()
        for call in calls:
            if call.table is not None:
                call.table.check(where)
            call.call = self._next
            self._next += 1
            self._open.append(call)
        if calls:
            self._send_all()

    def follow(self) -> None:
        """Goes on in the present session, which counts calls anew."""
        session = self._session
        self._generation, self._session_number, self._next = session.generation, session.number, 1

    def prepare(self, session_number: int) -> None:
        """Works in a session that other channels do not know yet: its tables are still being opened."""
        self._session_number = session_number

    def _send_all(self) -> None:
        for call in list(self._open):
            self.resent += 1
            if not self._send(call):
                return

    def _send(self, call: OpenCall) -> bool:
        """Never waits; without a connection, all open calls go out when there is one."""
        session, table, stream = self._session, call.table, call.stream
        is_sent = self._wire.send(
            call.message, session.version, call.verb, call.flags, 0 if table is None else table.number,
            self._session_number, self.number, 0 if stream is None else stream.number, call.call, self._open[0].call,
            to_microseconds(call.timeout), call.argument,
        )  # fmt: skip
        if is_sent:
            session.sent_at = time.monotonic()
        self._is_unsent = not is_sent
        return is_sent

    def _wait_for_connection(self, where: str, call: OpenCall) -> None:
        while self._is_unsent:
            self._check_time(where, call)
            if self._socket.poll(self._slice(call, 200), self._zmq.POLLOUT):
                self._is_unsent = False
                self._send_all()

    @staticmethod
    def _slice(call: OpenCall, most: int) -> int:
        """Milliseconds of a wait: until the call's deadline, at most so many."""
        if call.deadline is None:
            return most
        return max(1, min(most, int(1e3 * (call.deadline + GRACE_S - time.monotonic())) + 1))

    def _set_wait(self, call: OpenCall) -> None:
        wait = _SILENCE_MS if call.deadline is None else self._slice(call, _SILENCE_MS)
        if wait != self._wait_ms:
            self._socket.setsockopt(self._zmq.RCVTIMEO, wait)
            self._wait_ms = wait

    def _receive(self, where: str, call: OpenCall) -> _core.Frame | None:
        """The next word about the first open call; None: it was about another one, or there was silence."""
        self._set_wait(call)
        frame = self._wire.receive()
        if frame is None:
            self._hear_nothing(where, call)
            return None
        if not frame.is_valid or frame.verb == Verb.HELLO:
            return None
        if frame.session != self._session_number:  # of calls that were given up, in a session before this one
            return None
        if frame.call == call.call or frame.status == Status.UNKNOWN_SESSION:
            return frame
        if frame.call > call.call and frame.status not in (Status.WORKING, Status.UNKNOWN_CALL):
            self._early[frame.call] = frame
        return None

    def _hear_nothing(self, where: str, call: OpenCall) -> None:
        self._check_time(where, call)
        self._probe(call)

    def _probe(self, call: OpenCall) -> None:
        """Without a connection it is lost, and the next silence asks again."""
        self._wire.send(None, self._session.version, Verb.PROBE, 0, 0, self._session_number, self.number, 0, call.call,
                        call.call, 0, 0)  # fmt: skip

    def _check_time(self, where: str, call: OpenCall) -> None:
        self._session.check_open(where)
        if self.is_over is not None and self.is_over.is_set():
            raise NoAnswer(f"{where}: the call was cancelled")
        if call.deadline is not None and time.monotonic() >= call.deadline + GRACE_S:
            raise NoAnswer(
                f"{where}: {self._session.server} did not answer within the timeout; is the server running? a call "
                "without timeout= waits for it"
            )

    def greet(self, where: str, message: Any, deadline: float | None) -> _core.Frame:
        """Says HELLO and waits for the answer."""
        zmq = self._zmq
        while True:
            left = None if deadline is None else deadline + GRACE_S - time.monotonic()
            if self._session.is_hopeless() or (left is not None and left <= 0):
                raise NoAnswer(f"{where}: {self._session.server} does not answer{self._session.why()}")
            wait = 200 if left is None else max(1, min(200, int(1e3 * left)))
            for option in (zmq.SNDTIMEO, zmq.RCVTIMEO):
                self._socket.setsockopt(option, wait)
            self._wait_ms = wait
            try:
                self._session.check_open(where)
                self._socket.send(message)
            except zmq.Again:
                continue
            while (frame := self._wire.receive()) is not None:
                if frame.is_valid and frame.verb == Verb.HELLO:
                    self._socket.setsockopt(zmq.SNDTIMEO, _SILENCE_MS)
                    return frame

    def say_goodbye(self, message: Any) -> None:
        """Without a wait for the answer beyond a moment."""
        zmq = self._zmq
        try:
            for option in (zmq.SNDTIMEO, zmq.RCVTIMEO):  # a new socket has to connect first
                self._socket.setsockopt(option, 200)
            self._wait_ms = 200
            self._socket.send(message)
            while (frame := self._wire.receive()) is not None:
                if frame.is_valid and frame.verb == Verb.BYE:
                    return
        except (ClosedError, zmq.ZMQError):
            return
