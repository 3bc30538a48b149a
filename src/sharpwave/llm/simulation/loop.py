"""An event loop in simulated time: one process, equal runs.

Nothing here waits. Where no coroutine can go on, time jumps to the next timer. So a run of hours takes as long as its
Python code, and coroutines run in the same order each time.
"""

from __future__ import annotations

import asyncio
from asyncio.base_events import BaseEventLoop
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ...errors import NotReady

__all__ = ["VirtualClock", "simulate"]

_Result = TypeVar("_Result")


class VirtualClock:
    """Simulated time. Blocking work is called in place, in the middle of the time that it takes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, outside_s: float) -> None:
        self._loop, self._outside_s = loop, outside_s

    def now(self) -> float:
        return self._loop.time()

    def unix(self, moment_s: float) -> float:
        return moment_s  # from 0 s on, so that equal runs have equal logs

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def outside(self, work: Callable[[], _Result]) -> _Result:
        # As with a thread, other coroutines run before the work is done, and before its caller has the result.
        await asyncio.sleep(self._outside_s / 2)
        result = work()
        await asyncio.sleep(self._outside_s / 2)
        return result


class _VirtualLoop(BaseEventLoop):
    """asyncio's loop without sockets. `select` is the one place where a loop waits, so time goes on there."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._clock_resolution = 1e-9
        self._selector = self

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise NotReady("simulate(): every coroutine waits for another one, and no timer is set")
        self._now += timeout
        return []

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        """Wakes a loop that sleeps in `select`; this one never does."""


def simulate(main: Callable[[VirtualClock], Coroutine[Any, Any, _Result]], *, outside_s: float = 0.0) -> _Result:
    """Runs a coroutine in simulated time, from 0 s.

    Args:
        main: The coroutine function; it gets the clock.
        outside_s: Simulated seconds that each piece of blocking work takes.

    Raises:
        NotReady: No coroutine can ever go on.

    Example:
        >>> async def day(clock):
        ...     await clock.sleep(24 * 3600)
        ...     return clock.now()
        >>> simulate(day)
        86400.0
    """
    loop: Any = _VirtualLoop()
    try:
        asyncio.set_event_loop(loop)
        try:
            return loop.run_until_complete(main(VirtualClock(loop, outside_s)))  # type: ignore[no-any-return]
        finally:
            _cancel_all(loop)
            loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    left = sorted(asyncio.all_tasks(loop), key=lambda task: (len(task.get_name()), task.get_name()))
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
