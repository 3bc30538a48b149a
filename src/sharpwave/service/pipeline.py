"""Pipeline: batches of a server that are asked for ahead, so that the way there and back is not waited for."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import ClosedError, NotReady, SharpwaveError
from ..rows.protocol import Batch
from .channel import NoAnswer, OpenCall
from .message import HEAD_BYTES, SAMPLE_HOLDS, Verb

if TYPE_CHECKING:
    from .remote_rows import RemoteRows

__all__ = ["Pipeline"]


class _Reserved:
    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


_UNRESERVED = _Reserved(0)


class Pipeline:
    """Used by one thread at a time, but for ``settle``, which only notes what the next request tells the server.

    Args:
        count: Examples in a batch.
        depth: Requests that are under way at once.
    """

    def __init__(self, rows: RemoteRows, count: int, depth: int) -> None:
        self._rows, self._count, self._depth = rows, count, depth
        self._settles = rows.spec.settles
        self._channel: Any = None  # made by the thread that takes the first batch
        self._asked: deque[_Reserved] = deque()
        self._held: set[int] = set()  # reservations that the server was not told the end of
        self._process = os.getpid()

    def take(self, timeout: float | None) -> tuple[Batch, int]:
        """The next batch and its reservation; NotReady: there was none until the timeout."""
        rows = self._rows
        if os.getpid() != self._process:
            raise ClosedError("batches(): begun by the parent process of this one; call batches() again here")
        if self._channel is None:
            self._channel = rows.session.new_channel()
        self._refill()
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            reply = self._channel.finish_until("batches()", deadline)
        except NoAnswer as error:
            raise NotReady(self._why() or str(error)) from None
        except SharpwaveError:
            if self._channel.open_calls < len(self._asked):  # it was refused, and reserves nothing
                self._held.discard(self._asked.popleft().number)
            raise
        number = self._asked.popleft().number
        self._refill()
        return rows.read_batch(reply, self._count, number, False)[0], number

    def _why(self) -> str | None:
        """Why there is no batch, in the server's words; None: it is silent."""
        try:
            drawn = self._rows.draw(self._count, timeout=0)
        except NoAnswer:
            return None
        except NotReady as error:
            return str(error)
        self._rows.settle(drawn.handles, False)
        return None

    def _refill(self) -> None:
        """Several requests at once, when half of them were answered: each wakes four threads on its way."""
        if len(self._asked) <= self._depth // 2:
            while len(self._asked) < self._depth:
                self._ask()

    def _ask(self) -> None:
        rows = self._rows
        rows.table.check("batches()")
        if not self._settles and not rows.settled:
            self._asked.append(_UNRESERVED)
            call = OpenCall(Verb.SAMPLE, None, rows.table, _UNRESERVED, self._count, 0, None)
            self._channel.begin("batches()", call)
            return
        number = next(rows.reservations) if self._settles else 0
        settled = list(rows.settled)
        message = None
        if settled:
            message = bytearray(HEAD_BYTES) + b"".join(one.to_bytes(8, "little") for one in settled)
        reserved = _Reserved(number)
        flags = SAMPLE_HOLDS if number else 0
        if number:
            self._held.add(number)
        self._asked.append(reserved)
        self._channel.begin("batches()", OpenCall(Verb.SAMPLE, message, rows.table, reserved, self._count, flags, None))
        for one in settled:  # after an interrupt they are told twice, which changes nothing
            rows.settled.pop(one, None)

    def settle(self, number: int, delivered: bool) -> None:
        if number:
            self._rows.settled[2 * number + delivered] = None
            self._held.discard(number)

    def batches(self, timeout: float | None) -> Iterator[Batch]:
        with contextlib.closing(self):
            while True:
                batch, number = self.take(timeout)
                self.settle(number, True)
                yield batch

    def closing(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        with contextlib.closing(self):
            yield from batches

    def close(self) -> None:
        """Gives back what was asked for and not taken."""
        if self._channel is None or os.getpid() != self._process:
            return
        rows, channel = self._rows, self._channel
        rows.settled.update(dict.fromkeys(2 * number for number in self._held))
        self._channel = None
        self._asked.clear()
        channel.abandon()
        settled = list(rows.settled)
        if settled and not rows.closed:
            body = b"".join(one.to_bytes(8, "little") for one in settled)
            # Without it they return with the next request, or when the session ends.
            with contextlib.suppress(SharpwaveError):
                channel.exchange("batches()", Verb.SETTLE, bytearray(HEAD_BYTES) + body, table=rows.table, timeout=1.0)
                for one in settled:
                    rows.settled.pop(one, None)
        channel.close()
