"""`Clock`: where all parts of a run take time from, so that a run can also go by simulated time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

__all__ = ["Clock", "WallClock"]

_Result = TypeVar("_Result")


class Clock(Protocol):
    """Time and blocking work. Everything that waits for either goes through it."""

    def now(self) -> float:
        """Seconds since some moment; never falls."""
        ...

    def unix(self, moment_s: float) -> float:
        """A time of `now` as logs and files have it."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    async def outside(self, work: Callable[[], _Result]) -> _Result:
        """The result of a call that blocks: a disk, a computation. Other coroutines go on meanwhile."""
        ...


class WallClock:
    """Real time, for one event loop. Blocking work runs in threads."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def unix(self, moment_s: float) -> float:
        return time.time() + moment_s - self.now()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def outside(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.to_thread(work)
