"""Waits that do not block: of an event loop, and of a learner whose batches a thread draws ahead."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from .. import _core
from ..errors import ClosedError, NotReady
from .protocol import Batch, BatchMap, Rows

if TYPE_CHECKING:
    import asyncio

__all__ = ["Bell", "batches", "sample_far", "without_blocking"]

_Result = TypeVar("_Result")
_SLICE = 0.1  # seconds after which a thread checks whether it is still needed
_LOOK = 0.5  # seconds after which a coroutine tries again: no call wakes it when a process dies
_PAUSES = 0.001, 0.05  # seconds between two tries to draw from an empty buffer without a pace: the first, the longest


async def without_blocking(rows: Rows, attempt: Callable[[float | None], _Result], timeout: float | None) -> _Result:
    """A call that rarely waits (for another process that holds the index): here without a wait, then in a thread.

    Args:
        rows: What the call is about.
        attempt: The call, with its timeout.
        timeout: Seconds, checked; None waits for ever.
    """
    if rows.is_remote:
        return await rows.in_thread(lambda: attempt(timeout))
    begun = time.monotonic()
    try:
        return attempt(0)
    except NotReady:
        left = None if timeout is None else timeout - (time.monotonic() - begun)
        if left is not None and left <= 0:
            raise
    return await rows.in_thread(lambda: attempt(left))


async def sample_far(rows: Rows, batch_size: int, out: Any, device: Any, timeout: float | None) -> Batch:
    """A batch of a server. A call that is cancelled takes no rows: they stay reserved until the batch is here."""
    is_over = threading.Event()

    def draw() -> Batch:
        drawn = rows.draw(batch_size, out=out, device=device, timeout=timeout)
        if drawn.handles is not None:
            rows.settle(drawn.handles, not is_over.is_set())
        return drawn.batch

    try:
        return await rows.in_thread(draw)
    finally:
        is_over.set()


class Bell:
    """Wakes coroutines when rows were added or sampled. One thread listens for all of them, while any waits."""

    def __init__(self, table: _core.Table) -> None:
        self._table = table
        self._lock = threading.Lock()
        self._listeners: set[asyncio.Future[None]] = set()
        self._is_listening = False

    async def in_turn(self, attempt: Callable[[], _Result], timeout: float | None) -> _Result:
        """The result of ``attempt``, which is tried again after every add and sample until the pace allows it."""
        import asyncio

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
            except ClosedError:  # the coroutines get the same error when they try again
                with self._lock:
                    self._is_listening = False
                return
            if now == mark:
                continue
            mark = now
            with self._lock:
                for rung in self._listeners:
                    with contextlib.suppress(RuntimeError):  # its loop was just closed
                        rung.get_loop().call_soon_threadsafe(_set, rung)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def batches(
    draw: Callable[[float], tuple[Batch, Any]],
    settle: Callable[[Any, bool], None],
    prefetch: int,
    timeout: float | None,
    change: BatchMap | None = None,
) -> Iterator[Any]:
    """Batches drawn ahead by a thread. An error of the thread is raised by the caller's next(), and ends the iterator.

    Args:
        draw: Draws one and waits for at most that many seconds. Returns it with its handles; its rows stay reserved.
        settle: Takes the handles of a batch, and whether the batch was returned to the caller.
        prefetch: Batches that are drawn ahead, at most.
        timeout: Seconds that the caller waits for one; None for ever.
        change: The thread calls it with each batch. If it raises, the batch was not returned to the caller.
    """
    process = os.getpid()
    ready: queue.Queue[Any] = queue.Queue()
    room = threading.Semaphore(prefetch)
    is_over = threading.Event()

    def is_needed() -> bool:
        return not is_over.is_set() and threading.main_thread().is_alive()

    def work() -> None:
        try:
            draw_ahead()
        except BaseException as error:  # without this the caller would wait for ever
            ready.put(error)

    def draw_ahead() -> None:
        while is_needed():
            if not room.acquire(timeout=_SLICE):
                continue
            began = time.monotonic()
            pause, longest = _PAUSES
            while is_needed():
                left = _SLICE if timeout is None else min(_SLICE, max(0.0, began + timeout - time.monotonic()))
                try:
                    batch, handles = draw(left)
                except NotReady as error:
                    over = math.inf if timeout is None else began + timeout - time.monotonic()
                    if over <= 0:
                        return ready.put(error)
                    # With a pace the draw has waited. Without one it fails at once while the buffer is empty, and
                    # nothing wakes this thread when rows are added.
                    is_over.wait(min(pause, over))
                    pause = min(2 * pause, longest)
                    continue
                if change is not None:
                    try:
                        batch = change(batch)
                    except BaseException:
                        settle(handles, False)
                        raise
                ready.put((batch, handles))
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
            batch, handles = item
            room.release()
            settle(handles, True)
            yield batch
    finally:
        is_over.set()
        thread.join()
        while os.getpid() == process and not ready.empty():
            item = ready.get()
            if not isinstance(item, BaseException):
                settle(item[1], False)
