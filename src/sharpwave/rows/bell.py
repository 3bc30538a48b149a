"""Waiting that lets others work: an event loop that goes on, a thread that draws ahead."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from .. import _core
from ..errors import ClosedError, NotReady

__all__ = ["Bell", "batches"]

_Result = TypeVar("_Result")
_SLICE = 0.1  # seconds after which a thread looks whether it is still wanted
_LOOK = 0.5  # seconds after which a coroutine looks again: nothing rings when a process dies
_PAUSES = 0.001, 0.05  # seconds between two looks for rows of a buffer without a pace: the first, and the longest


class Bell:
    """Wakes coroutines when rows were added or sampled. One thread listens for all of them, while any waits."""

    def __init__(self, table: _core.Table) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._listeners: set[asyncio.Future[None]] = set()
        self._is_listening = False

    async def in_turn(self, attempt: Callable[[], _Result], timeout: float | None) -> _Result:
        """The result of ``attempt``, which is tried again whenever something happened until it is its turn."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        while True:
            rung: asyncio.Future[None] = loop.create_future()
            self._listen(rung)
            try:
                try:
                    return attempt()
                except NotReady:
                    left = _LOOK if deadline is None else min(_LOOK, deadline - loop.time())
                    if left <= 0:
                        raise
                await asyncio.wait({rung}, timeout=left)
            finally:
                with self._lock:
                    self._listeners.discard(rung)

    def _listen(self, rung: asyncio.Future[None]) -> None:
        with self._lock:
            self._listeners.add(rung)
            if not self._is_listening:
                self._is_listening = True
                threading.Thread(target=self._run, name="sharpwave-bell").start()

    def _run(self) -> None:
        mark = self._table.pace_mark()
        while True:
            with self._lock:
                self._listeners = {rung for rung in self._listeners if not rung.get_loop().is_closed()}
                if not self._listeners or not threading.main_thread().is_alive():
                    self._is_listening = False
                    return
            try:
                now = self._table.pace_wait(mark, _SLICE)
            except ClosedError:  # those that wait will be told so when they look again
                with self._lock:
                    self._is_listening = False
                return
            if now == mark:
                continue
            mark = now
            with self._lock:
                for rung in self._listeners:
                    with contextlib.suppress(RuntimeError):  # its loop was closed this instant
                        rung.get_loop().call_soon_threadsafe(_set, rung)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def batches(
    draw: Callable[[float], Any], settle: Callable[[Any, bool], None], prefetch: int, timeout: float | None
) -> Iterator[Any]:
    """Batches drawn ahead by a thread.

    Args:
        draw: Draws one, waiting at most so many seconds; its rows stay reserved.
        settle: Whether the rows of a batch reached anybody.
        prefetch: Most batches that wait.
        timeout: Seconds that the caller waits for one; None for ever.
    """
    process = os.getpid()
    ready: queue.Queue[Any] = queue.Queue()
    room = threading.Semaphore(prefetch)
    unwanted = threading.Event()

    def is_wanted() -> bool:
        return not unwanted.is_set() and threading.main_thread().is_alive()

    def work() -> None:
        try:
            draw_ahead()
        except BaseException as error:  # without it the caller would wait for ever
            ready.put(error)

    def draw_ahead() -> None:
        while is_wanted():
            if not room.acquire(timeout=_SLICE):
                continue
            began = time.monotonic()
            pause, longest = _PAUSES
            while is_wanted():
                left = _SLICE if timeout is None else min(_SLICE, max(0.0, began + timeout - time.monotonic()))
                try:
                    batch = draw(left)
                except NotReady as error:
                    over = math.inf if timeout is None else began + timeout - time.monotonic()
                    if over <= 0:
                        return ready.put(error)
                    # With a pace the draw has waited. Without one it says at once that there is nothing to draw, and
                    # nothing rings when rows come.
                    unwanted.wait(min(pause, over))
                    pause = min(2 * pause, longest)
                    continue
                serials = batch["indices"]
                ready.put((batch, serials.cpu().numpy() if hasattr(serials, "cpu") else serials.copy()))
                break

    thread = threading.Thread(target=work, name="sharpwave-batches")
    thread.start()
    try:
        while True:
            if os.getpid() != process:
                raise ClosedError("batches(): begun by the parent process of this one; call batches() again here")
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            batch, serials = item
            room.release()
            settle(serials, True)
            yield batch
    finally:
        unwanted.set()
        thread.join()
        while os.getpid() == process and not ready.empty():
            item = ready.get()
            if not isinstance(item, BaseException):
                settle(item[1], False)
