"""Waiters: a call that waits for room or samples, in a thread or in a coroutine."""

from __future__ import annotations

import math
import os
import select
import threading
from typing import Any

__all__ = ["CoroutineWaiter", "ThreadWaiter", "Waiter"]


class Waiter:
    """A waiting call. ``arm`` and ``wake`` are called with the buffer's lock held, so no wake-up is lost: a change that
    comes after the call has looked finds its waiter armed."""

    need = 0  # samples

    def arm(self) -> None:
        raise NotImplementedError

    def wake(self) -> bool:
        """False where the waiting call is gone: its event loop was closed."""
        raise NotImplementedError

    def close(self) -> None:
        """It waits no more, and is in no list."""


class ThreadWaiter(Waiter):
    """A thread. Its time runs by the steady clock on every Python: before 3.11 the timed waits of ``threading`` run by
    the wall clock, and one that is set back would prolong them. A signal's handler runs at once."""

    def __init__(self, need: int) -> None:
        self.need = need
        self._event = threading.Event()
        self._pipe: tuple[int, int] | None = None  # made by the first timed wait: most calls never wait

    def arm(self) -> None:
        self._event.clear()

    def wake(self) -> bool:
        if not self._event.is_set():
            self._event.set()
            if self._pipe is not None:
                os.write(self._pipe[1], b"\0")
        return True

    def wait(self, seconds: float | None) -> None:
        if seconds is None:
            self._event.wait()
            return
        if self._pipe is None:
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[0], False)
            os.set_blocking(self._pipe[1], False)
        if self._event.is_set():  # woken before there was a pipe
            return
        waiting = select.poll()
        waiting.register(self._pipe[0], select.POLLIN)
        # Rounded up: a wait of less than a millisecond must not become a loop without waiting.
        if waiting.poll(min(math.ceil(seconds * 1e3), 2**31 - 1)):
            os.read(self._pipe[0], 4096)

    def close(self) -> None:
        if self._pipe is not None:
            for end in self._pipe:
                os.close(end)
            self._pipe = None


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
