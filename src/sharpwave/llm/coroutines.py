"""Coroutines that run together, and such that run to their end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

__all__ = ["Unbroken", "is_cancelled", "to_its_end", "together"]

_Result = TypeVar("_Result")


def is_cancelled() -> bool:
    """Whether this task is, for an `except CancelledError`: agents may also let out that a task of theirs was."""
    task = asyncio.current_task()
    return task is None or not hasattr(task, "cancelling") or task.cancelling() > 0  # Python 3.10 cannot tell


async def together(work: Sequence[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """All results, in order. Where one raises or the caller is cancelled, the others end before this call does."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        left = [task for task in tasks if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.gather(*left, return_exceptions=True)


async def to_its_end(work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of work that is not left to itself: where the caller is cancelled, it ends before this call does."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait([task])
        raise


class Unbroken:
    """Runs work that must not be left half done: it goes on where its caller is cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()  # an event loop itself keeps no task alive

    async def __call__(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its caller has it, or is gone
