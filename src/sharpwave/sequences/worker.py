"""A worker: a thread that does work in order for callers that must not do it themselves.

It is built of locks and a queue whose operations are one step for the interpreter. An interrupt in a caller (Ctrl-C)
cannot leave them half taken, as it can with the pure Python locks of ``concurrent.futures``.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

__all__ = ["Task", "Worker", "outcome"]

_Result = TypeVar("_Result")


class Task(Generic[_Result]):
    """Work that was handed over."""

    def __init__(self, work: Callable[[], _Result], tell: Callable[[], None] | None = None) -> None:
        self._work: Callable[[], _Result] | None = work
        self._tell = tell
        self._result: Any = None
        self._error: BaseException | None = None
        self._fate: dict[str, str] = {}  # one entry, which the first of begin() and cancel() sets in one step
        self._is_done = False
        self._running = threading.Lock()
        self._running.acquire()  # released when the work is done

    def run(self) -> None:
        if not self.begin():
            return
        work, self._work = self._work, None
        assert work is not None
        try:
            result = work()
        except BaseException as error:
            self.fail(error)
        else:
            self.finish(result)

    def begin(self) -> bool:
        """Whether the caller is to do the work now: not if it was cancelled. Called once."""
        return self._fate.setdefault("is", "begun") == "begun"

    def cancel(self) -> bool:
        """Whether it will never run; False where it runs or is done. The same each time: an interrupt loses answers."""
        return self._fate.setdefault("is", "cancelled") == "cancelled"

    def finish(self, result: _Result) -> None:
        self._result = result
        self._end()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        self._is_done = True  # first: an interrupt in wait() may leave the lock taken, and the next wait() sees this
        self._running.release()
        if self._tell is not None:
            self._tell()

    def wait(self, seconds: float = -1) -> bool:
        """Whether it is done; -1 waits until it is."""
        if self._is_done:
            return True
        if not self._running.acquire(timeout=seconds):
            return False
        self._running.release()
        return True

    def result(self) -> _Result:
        """Of work that is done, or its exception."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # else it and its traceback would hold each other
        return self._result  # type: ignore[no-any-return]


class Worker:
    """One thread, for as long as this object lives."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task[Any] | None] = SimpleQueue()
        # The thread holds the queue and not the worker: without references to the worker the thread ends. It is no
        # threading.Thread: an interrupt in start() can leave a lock taken that the new thread waits for.
        _thread.start_new_thread(_run, (self._tasks,))

    def hand_over(self, task: Task[Any]) -> None:
        self._tasks.put(task)

    def stop(self) -> None:
        """Behind everything that was handed over."""
        self._tasks.put(None)

    def __del__(self) -> None:
        if hasattr(self, "_tasks"):  # else an interrupt came before
            self._tasks.put(None)


async def outcome(
    make: Callable[[Callable[[], None]], Task[_Result]],
    start: Callable[[Task[_Result]], None],
    wait: float | None,
    stays: bool = False,
) -> _Result:
    """The result of a task, awaited. Cancelled before the task has begun, it never begins; later it is done.

    Args:
        make: Makes the task; its argument is to be called when the task is done.
        start: Hands it over.
        wait: Seconds after which a task that has not begun never begins; None for no bound.
        stays: Whether a call that is cancelled later ends when the task is done: the task uses what is the caller's.

    Raises:
        TimeoutError: It did not begin in time.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish() -> None:
        if not done.done():
            done.set_result(None)

    def tell() -> None:
        try:
            loop.call_soon_threadsafe(finish)
        except RuntimeError:
            return  # the loop was closed: no call waits there any more

    task = make(tell)
    start(task)
    try:
        await asyncio.wait({done}, timeout=wait)
        if not done.done():
            if task.cancel():
                raise TimeoutError
            await done
    except asyncio.CancelledError:
        is_begun = not task.cancel()
        while stays and is_begun and not done.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({done})
        raise
    return task.result()


def _run(tasks: SimpleQueue[Task[Any] | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # while it waits for the next one it keeps nothing of the last one alive
