"""Aside: threads of a client for its awaited calls, as many as wait at once. Each has a channel of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from ..process import fork_count
from ..sequences.worker import Task, Worker

__all__ = ["Aside"]

_Result = TypeVar("_Result")


class Aside:
    """Not the event loop's own threads: calls that wait for samples could take all of them, and the put that they wait
    for would find none. Threads are kept for the next calls until this object is collected."""

    def __init__(self) -> None:
        self._idle: list[Worker] = []
        self._forks = fork_count()

    def begin(self, work: Callable[[], Any]) -> None:
        """Does it in another thread; nobody waits for it."""
        if fork_count() != self._forks:  # the threads are the parent's
            self._idle, self._forks = [], fork_count()
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = Worker()
        idle = self._idle

        def run() -> None:
            try:
                work()
            finally:
                idle.append(worker)

        worker.hand_over(Task(run))

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """The result, awaited. Cancelled, the work goes on, and its result is dropped."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Result] = loop.create_future()

        def end(result: Any, error: BaseException | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def attempt() -> None:
            result: Any = None
            failed: BaseException | None = None
            try:
                result = work()
            except BaseException as error:
                failed = error
            try:
                loop.call_soon_threadsafe(end, result, failed)
            except RuntimeError:
                return  # the loop was closed: nobody waits there any more

        self.begin(attempt)
        return await done
