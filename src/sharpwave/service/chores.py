"""Chores: calls of clients that wait, in an event loop of their own, beside the thread that serves everybody."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..errors import ClosedError
from .guest import Guest
from .hosted import Later, Parked

__all__ = ["Chore", "Chores", "ParkedChore"]

_MOST_THREADS = 32  # calls that wait for a disk at once


class Chores:
    """Runs coroutines and tells the server's thread what became of them.

    Args:
        tell: Wakes the server's thread; called from the thread of the event loop.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._done: deque[tuple[Any, Any]] = deque()
        self._running: set[Any] = set()
        self._loop = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(_MOST_THREADS, "sharpwave-chores")
        self._loop.set_default_executor(self._threads)
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._running) + len(self._done)

    def add(self, guest: Guest, place: Any, later: Later) -> Chore:
        """Begins a call of a client. Only the server's thread calls it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop.run_forever, name="sharpwave-chores", daemon=True)
            self._thread.start()
        chore = Chore(self, guest, place, later)
        self._running.add(chore)
        guest.tasks.add(chore)
        self._loop.call_soon_threadsafe(chore.begin)
        return chore

    def park(self, guest: Guest, place: Any, parked: Parked) -> ParkedChore:
        """Begins a call that another thread ends. Only the server's thread calls it."""
        chore = ParkedChore(self, guest, place)
        self._running.add(chore)
        guest.tasks.add(chore)
        try:
            chore.leave = parked.begin(chore.end)
        except Exception as error:
            chore.end(error)
        return chore

    def finished(self) -> list[tuple[Any, Any]]:
        """What has ended since the last look: places and results, or errors."""
        found = []
        while self._done:
            chore, result = self._done.popleft()
            self._running.discard(chore)
            chore.guest.tasks.discard(chore)
            found.append((chore.place, result))
        return found

    def end(self, chore: Any, result: Any) -> None:
        self._done.append((chore, result))
        self._tell()

    def cancel_waiting(self) -> None:
        for chore in list(self._running):
            chore.give_up()

    def cancel_all(self) -> None:
        for chore in list(self._running):
            chore.cancel()

    def close(self) -> None:
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5.0)
        self._threads.shutdown(wait=False, cancel_futures=True)  # the caller has waited for what is running
        if self._thread is None or not self._thread.is_alive():
            self._loop.close()


class Chore:
    """One call that waits."""

    def __init__(self, chores: Chores, guest: Guest, place: Any, later: Later) -> None:
        self.guest, self.place = guest, place
        self._chores, self._later = chores, later
        self._task: asyncio.Task[Any] | None = None
        self._is_cancelled = False

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._end)
        if self._is_cancelled:
            self._task.cancel()

    async def _run(self) -> Any:
        try:
            return await self._later.wait()
        except Exception as error:
            return error

    def _end(self, task: asyncio.Task[Any]) -> None:
        # Not in the coroutine: one that is cancelled before its first step never runs.
        if task.cancelled():
            self._chores.end(self, ClosedError("the client is gone, or the server is closing"))
        else:
            self._chores.end(self, task.result())

    def give_up(self) -> None:
        """The client wants no answer. What is being done is done; a wait ends."""
        if not self._later.is_work:
            self.cancel()

    def cancel(self) -> None:
        """From any thread."""
        self._is_cancelled = True

        def stop() -> None:
            if self._task is not None:
                self._task.cancel()

        self._chores._loop.call_soon_threadsafe(stop)


class ParkedChore:
    """One call that another thread ends."""

    def __init__(self, chores: Chores, guest: Guest, place: Any) -> None:
        self.guest, self.place = guest, place
        self._chores = chores
        self._ends: dict[str, object] = {}  # one entry, which the first end sets in one step
        self.leave: Callable[[], None] = lambda: None

    def end(self, result: Any) -> None:
        """From any thread; the first one counts."""
        mark = object()
        if self._ends.setdefault("is", mark) is mark:
            self._chores.end(self, result)

    def give_up(self) -> None:
        self.cancel()

    def cancel(self) -> None:
        self.leave()
        self.end(ClosedError("the client is gone, or the server is closing"))
