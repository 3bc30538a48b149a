"""Waiters: a call that waits for room or samples, in a thread or in a coroutine."""

from __future__ import annotations

import math
import os
import select
from queue import SimpleQueue
from typing import Any

__all__ = ["CoroutineWaiter", "ThreadWaiter", "Waiter"]


class Waiter:
    """A waiting call. ``arm`` and ``wake`` are called with the buffer's lock held, so no wake-up is lost: a change that
    comes after the call has looked finds its waiter armed."""

    need = 0  # samples
    was_listed = False  # among the waiting calls, now or before

    def arm(self) -> None:
        raise NotImplementedError

    def wake(self) -> bool:
        """False where the waiting call is gone: its event loop was closed."""
        raise NotImplementedError

    def close(self) -> None:
        """It waits no more, and is in no list."""


class ThreadWaiter(Waiter):
    """A thread. Its time runs by the steady clock on every Python: before 3.11 the timed waits of ``threading`` run by
    the wall clock, and one that is set back would prolong them. A signal's handler runs at once.

    It waits at a queue and not at an Event: an interrupt in the Python code of an Event can leave its lock taken, and
    the thread that wakes this one, with the buffer's lock held, would wait for it for ever.
    """

    def __init__(self, need: int) -> None:
        self.need = need
        self._is_woken = False
        self._calls: SimpleQueue[None] = SimpleQueue()  # one for each time that it was woken, while there is no pipe
        self._pipe: tuple[int, int] | None = None  # made by the first timed wait: most calls never wait

    def arm(self) -> None:
        self._is_woken = False

    def wake(self) -> bool:
        if not self._is_woken:
            self._is_woken = True
            if self._pipe is None:
                self._calls.put(None)
            else:
                os.write(self._pipe[1], b"\0")
        return True

    def wait(self, seconds: float | None) -> None:
        """Until it is woken. It may return earlier: the caller looks again."""
        if seconds is None and self._pipe is None:
            self._calls.get()
            return
        if self._pipe is None:
            ends = os.pipe()
            os.set_blocking(ends[0], False)
            os.set_blocking(ends[1], False)
            self._pipe = ends
        if self._is_woken:  # before there was a pipe
            return
        waiting = select.poll()
        waiting.register(self._pipe[0], select.POLLIN)
        # Rounded up: a wait of less than a millisecond must not become a loop without waiting.
        if waiting.poll(None if seconds is None else min(math.ceil(seconds * 1e3), 2**31 - 1)):
            os.read(self._pipe[0], 4096)

    def close(self) -> None:
        pipe, self._pipe = self._pipe, None
        for end in pipe or ():
            os.close(end)


class CoroutineWaiter(Waiter):
    def __init__(self, need: int) -> None:
        import asyncio

        self.need = need
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()

    def arm(self) -> None:
        if self._future.done():
            self._future = self._loop.create_future()

    def wake(self) -> bool:
        try:
            self._loop.call_soon_threadsafe(_set, self._future)
        except RuntimeError:  # the loop was closed
            return False
        return True

    async def wait(self, seconds: float | None) -> None:
        import asyncio

        await asyncio.wait({self._future}, timeout=seconds)


def _set(future: Any) -> None:
    if not future.done():
        future.set_result(None)
