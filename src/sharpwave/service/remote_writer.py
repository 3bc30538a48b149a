"""RemoteWriter: a stream of rows to a table of a server, each row taken once."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import deque
from typing import Any, NamedTuple

from .. import _core
from ..checks import seconds
from ..errors import ClosedError, NotReady, SharpwaveError, StorageError
from ..rows.host import reading_of
from ..rows.spec import RowSpec
from .channel import Channel, NoAnswer, OpenCall
from .document import decode, encode
from .keeper import keep_writer
from .message import ADD_TELLS_INDICES, HEAD_BYTES, Verb
from .session import OpenTable, Session

__all__ = ["RemoteWriter"]

_PACK_BYTES = 128 << 10  # of one message of a writer with a window
_CLOSE_S = 10.0
_LINGER_S = 0.02  # that rows wait for others in the same message, while rows are added


class _Sent(NamedTuple):
    first: int
    rows: int


class RemoteWriter:
    """Made by ``buf.writer(window=...)``; without a window it is also what ``buf.add`` calls.

    Rows are numbered. The server tells how many it has, also after it was killed and started again on the same file, so
    rows that are sent again are taken once.

    Args:
        window: Rows that may be without an answer of the server; None waits for the answer in every ``add``.
        opens: Whether the server is told of the stream now, with a wait for it; else the first ``add`` does that,
            within its own timeout. Only without a window.
    """

    _is_closed = True  # until it is open
    _is_dropped = False

    def __init__(
        self, session: Session, table: OpenTable, spec: RowSpec, window: int | None, *, opens: bool = True
    ) -> None:
        self._session, self._table, self._window = session, table, window
        self._token = secrets.token_bytes(16)
        self.number = 0  # the server's, for this stream
        self._next = 0  # number of the next row to be sent
        self._acknowledged = 0
        # Whether it is not known which rows the server has: after a call without an answer, and before the first one.
        self._is_unsure = not opens
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._unsent = 0  # rows that the packer gave and the channel may not have: an interrupt came between
        self._sent: deque[_Sent] = deque()
        # A channel of its own where several calls are under way; else that of the thread that adds.
        self._own: Channel | None = None if window is None else session.new_channel()
        most_bytes = min(_PACK_BYTES, max(4096, session.message_bytes // 2))
        self._packer = _core.Packer(
            spec.batch_tree(weights=spec.is_prioritized, relabelled=spec.hindsight is not None),
            spec.schema.engine_fields(), spec.capacity, spec.num_envs or 1, *reading_of(spec), self._send,
            1 if window is None else max(1, window // 4), 1 if window is None else most_bytes,
            0.0 if window is None else _LINGER_S,
        )  # fmt: skip
        if opens:
            self.reopen(session.channel(), None)
        self._is_closed = False
        session.also_reopen(self)
        if window is None:
            self.add = self._add_alone
        else:
            self.add = self._packer.add
            keep_writer(self)

    def reopen(self, channel: Channel, timeout: float | None) -> None:
        """In a new session: the server says how many rows of this stream it has."""
        if self._table.is_lost:
            return
        message = encode({"verb": "open_stream", "args": {"token": self._token.hex()}}, HEAD_BYTES)
        reply = channel.exchange("add()", Verb.CALL, message, table=self._table, timeout=timeout)
        told = decode(reply.body)
        self.number, accepted = told["stream"], told["accepted"]
        if accepted < self._acknowledged:
            self._table.lose(
                f"the server no longer knows this writer: of the {self._acknowledged} rows that it had acknowledged "
                f"it names {accepted}; open the buffer again"
            )
        if not self._sent:
            self._next = max(self._next, accepted) if self._is_unsure else accepted

    def _add_alone(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return self._packer.add(*args, **kwargs)

    # ---- sending ----------------------------------------------------------------------------------------------------

    def _send(self, timeout: Any, wants_indices: bool) -> Any:
        """Called by the packer when rows are to be sent; the newest are those of the running ``add``."""
        limit = seconds("add()", timeout)
        if self._process != os.getpid():  # a thread of the parent may have held the lock
            self._lock = threading.RLock()
        with self._lock:
            try:
                self._check_open()
                if self._window is None:
                    return self._send_alone(limit, wants_indices)
                deadline = None if limit is None else time.monotonic() + limit
                self._wait_for_room(deadline)
            except BaseException:
                self._packer.drop_last()
                raise
            self._send_pending(wants_indices)
            return self._finish_all(deadline) if wants_indices else None

    def _check_open(self) -> None:
        if self._process != os.getpid():
            raise ClosedError("add(): this writer is of the parent process; open one in this process")
        if self._is_closed:
            raise ClosedError("add(): this writer is closed")
        self._session.check_open("add()")
        self._table.check("add()")

    def _send_alone(self, timeout: float | None, wants_indices: bool) -> Any:
        begun = time.monotonic()
        if self._is_unsure:
            self._ask(timeout)
        message, rows = self._packer.take(HEAD_BYTES), self._packer.last_rows
        if timeout is not None:
            timeout = max(0.0, timeout - (time.monotonic() - begun))
        self._session.check_size("add()", message)
        self._is_unsure = True
        try:
            reply = self._session.channel().exchange(
                "add()", Verb.ADD, message, table=self._table, stream=self, argument=self._next,
                flags=ADD_TELLS_INDICES if wants_indices else 0, timeout=timeout,
            )  # fmt: skip
        except NoAnswer as error:
            raise NotReady(f"{error}; whether the server has the rows is not known until the next add()") from None
        except SharpwaveError:
            self._is_unsure = False  # an answer: nothing was added, or the next row finds out
            raise
        self._acknowledge(reply.argument)
        self._next = reply.argument
        self._is_unsure = False  # last: an interrupt before it lets the next add ask
        assert rows
        return _serials(reply) if wants_indices else None

    def _ask(self, timeout: float | None = None) -> None:
        """How many rows the server has, after a call without an answer."""
        told = self._session.call(self._table, "open_stream", {"token": self._token.hex()}, timeout=timeout)
        self.number = told["stream"]
        self._acknowledge(told["accepted"])
        self._next, self._is_unsure = told["accepted"], False

    def _acknowledge(self, accepted: int) -> None:
        self._table.rows_acknowledged += accepted - self._acknowledged
        self._acknowledged = accepted

    # ---- with a window ----------------------------------------------------------------------------------------------

    def _wait_for_room(self, deadline: float | None) -> None:
        assert self._window is not None
        self._mend(deadline)
        if self._is_unsure:
            self._ask(_left(deadline))
        room = max(self._window, self._packer.rows)
        while self._sent and self._next - self._acknowledged + self._packer.rows > room:
            if deadline is not None and time.monotonic() >= deadline:
                waiting = self._next - self._acknowledged
                raise NotReady(
                    f"add(): {waiting} rows wait for the answer of {self._session.server}, window={self._window}; "
                    "give a larger timeout= or window="
                )
            self._finish_one(deadline)

    def _send_pending(self, wants_indices: bool = False) -> None:
        rows = self._packer.rows
        if rows == 0:
            return
        assert self._own is not None
        self._unsent = rows
        message = self._packer.take(HEAD_BYTES)
        flags = ADD_TELLS_INDICES if wants_indices else 0
        call = OpenCall(Verb.ADD, message, self._table, self, self._next, flags, None)
        self._own.begin("add()", call)
        self._sent.append(_Sent(self._next, rows))
        self._next += rows
        self._unsent = 0

    def _mend(self, deadline: float | None) -> None:
        """After an interrupt in the middle of a call: the server tells what it has.

        Raises:
            StorageError: Rows whose ``add`` had returned are lost.
        """
        assert self._own is not None
        if self._unsent == 0 and len(self._sent) == self._own.open_calls:
            return
        lost = self._give_up(deadline)
        if lost:
            raise StorageError(f"add(): a call was interrupted; {lost} rows that were on their way were not added")

    def _finish_one(self, deadline: float | None) -> Any:
        """The answer to the oldest message. NotReady: none until the deadline; the message stays under way."""
        assert self._own is not None
        try:
            reply = self._own.finish_until("add()", deadline)
        except NoAnswer:
            raise
        except SharpwaveError as error:
            lost = self._give_up(deadline)
            raise type(error)(f"{error}; {lost} rows that were on their way were not added") from None
        self._sent.popleft()
        self._acknowledge(reply.argument)
        return reply

    def _finish_all(self, deadline: float | None) -> Any:
        reply = None
        while self._sent:
            reply = self._finish_one(deadline)
        return None if reply is None else _serials(reply)

    def _give_up(self, deadline: float | None) -> int:
        """The server refused rows: those behind them have no place any more. Returns how many are lost.

        Raises:
            NoAnswer: The server does not tell what it has; the next call asks again.
        """
        assert self._own is not None
        self._own.abandon()
        sent = (self._sent[-1].first + self._sent[-1].rows if self._sent else self._next) + self._unsent
        self._unsent = max(self._unsent, sent - self._next)
        self._ask(_left(deadline))
        self._sent.clear()
        self._unsent = 0
        return max(0, sent - self._acknowledged)

    def send_old(self) -> None:
        """Sends rows that wait for others to come; called by the keeper."""
        if self._packer.rows and not self._is_closed and self._lock.acquire(blocking=False):
            try:
                if len(self._sent) < 2 and self._unsent == 0 and not self._is_unsure:
                    self._send_pending()
            finally:
                self._lock.release()

    # ---- life -------------------------------------------------------------------------------------------------------

    def leave_to_parent(self) -> None:
        """In a forked process: the next add is refused at once, and no row waits for others to come."""
        self._packer.max_rows = 1

    def flush(self, timeout: float | None = None) -> None:
        """Returns when the server has every row that was added through this writer.

        Raises:
            NotReady: It has not answered until the timeout. The rows stay on their way.
        """
        limit = seconds("flush()", timeout)
        if self._process != os.getpid():
            self._check_open()
        with self._lock:
            self._check_open()
            deadline = None if limit is None else time.monotonic() + limit
            if self._window is not None:
                self._wait_for_room(deadline)
                self._send_pending()
                self._finish_all(deadline)
            elif self._is_unsure:
                self._ask(limit)

    def close(self, timeout: float | None = _CLOSE_S) -> None:
        """Sends what is left, waits for the server, and ends open episodes as truncated. A second call does nothing.

        Raises:
            NotReady: The server has not answered until the timeout; the message says how many rows may be missing.
        """
        limit = seconds("close()", timeout)
        if self._process != os.getpid():
            return
        with self._lock:
            if self._is_closed:
                return
            if self._is_dropped and self._own is not None:
                self._own = self._own.renew()  # its socket was collected as well
            try:
                if not self._session.closed and not self._table.is_lost:
                    self._end(limit)
            finally:
                self._is_closed = True
                self._packer.max_rows = 1  # the next add is told at once
                self._session.forget(self)
                if self._own is not None:
                    self._own.close()

    def _end(self, timeout: float | None) -> None:
        try:
            self.flush(timeout)
            self._session.call(self._table, "close_stream", {"stream": self.number}, timeout=timeout)
        except NotReady as error:
            left = self._next - self._acknowledged + self._packer.rows
            raise NotReady(f"{error}; {left} rows have no answer") from None

    def __del__(self) -> None:
        # As a local writer ends when it is collected. Nothing may wait here: the keeper has it closed.
        if not self._is_closed and self.number and self._process == os.getpid():
            self._is_dropped = True
            self._session.dropped.put(self)

    def __enter__(self) -> RemoteWriter:
        return self

    def __exit__(self, kind: Any, *exc: object) -> None:
        if kind is None:
            return self.close()
        with contextlib.suppress(NotReady):  # the block was left by an error, which is not kept waiting
            self.close(0)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _serials(reply: Any) -> Any:
    import numpy as np

    return np.frombuffer(reply.body, np.int64).copy()
