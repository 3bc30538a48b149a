"""Waiting for a buffer's turn: one kind for threads, one for coroutines, woken alike."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

__all__ = ["CoroutineWaiter", "ThreadWaiter", "Waiter"]


class Waiter:
    """Somebody who waits. ``arm`` and ``wake`` are called with the buffer's lock held, so no wake-up is lost: whatever
    happens after the waiter looked finds it armed."""

    need = 0  # samples

    def arm(self) -> None:
        raise NotImplementedError

    def wake(self) -> bool:
        """False where nobody is left to be woken."""
        raise NotImplementedError


class ThreadWaiter(Waiter):
    def __init__(self, need: int) -> None:
        self.need = need
        self._event = threading.Event()

    def arm(self) -> None:
        self._event.clear()

    def wake(self) -> bool:
        self._event.set()
        return True

    def wait(self, seconds: float | None) -> None:
        self._event.wait(seconds)


class CoroutineWaiter(Waiter):
    def __init__(self, need: int) -> None:
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
        await asyncio.wait({self._future}, timeout=seconds)


def _set(future: Any) -> None:
    if not future.done():
        future.set_result(None)
