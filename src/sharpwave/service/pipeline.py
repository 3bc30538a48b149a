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


class Pipeline:
    """Used by one thread at a time, but for ``settle``, which only notes what the next request tells the server.

    Args:
        count: Examples in a batch.
        depth: Requests that are under way at once.
    """

    def __init__(self, rows: RemoteRows, count: int, depth: int) -> None:
        self._rows, self._count, self._depth = rows, count, depth
        self._channel: Any = None  # made by the thread that takes the first batch
        self._asked: deque[_Reserved] = deque()
        self._settled: deque[int] = deque()
        self._process = os.getpid()

    def take(self, timeout: float | None) -> tuple[Batch, int]:
        """The next batch and its reservation; NotReady: there was none until the timeout."""
        rows = self._rows
        if os.getpid() != self._process:
            raise ClosedError("batches(): begun by the parent process of this one; call batches() again here")
        if self._channel is None:
            self._channel = rows.session.new_channel()
        while len(self._asked) < self._depth:
            self._ask()
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            reply = self._channel.finish_until("batches()", deadline)
        except NoAnswer as error:
            raise NotReady(str(error)) from None
        except BaseException:
            self._asked.popleft()
            raise
        number = self._asked.popleft().number
        self._ask()
        return rows.read_batch(reply, self._count, number, False)[0], number

    def _ask(self) -> None:
        rows = self._rows
        rows.table.check("batches()")
        number = next(rows.reservations) if rows.spec.settles else 0
        body = b"".join(self._settled.popleft().to_bytes(8, "little") for _ in range(len(self._settled)))
        reserved = _Reserved(number)
        message = bytearray(HEAD_BYTES) + body
        flags = SAMPLE_HOLDS if number else 0
        self._asked.append(reserved)
        self._channel.begin("batches()", OpenCall(Verb.SAMPLE, message, rows.table, reserved, self._count, flags, None))

    def settle(self, number: int, delivered: bool) -> None:
        if number:
            self._settled.append(2 * number + delivered)

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
        channel, self._channel = self._channel, None
        for reserved in self._asked:
            self.settle(reserved.number, False)
        self._asked.clear()
        channel.abandon()
        if self._settled and not self._rows.closed:
            body = b"".join(number.to_bytes(8, "little") for number in self._settled)
            # Without it they return when the session ends.
            with contextlib.suppress(SharpwaveError):
                channel.exchange(
                    "batches()", Verb.SETTLE, bytearray(HEAD_BYTES) + body, table=self._rows.table, timeout=1.0
                )
        channel.close()
