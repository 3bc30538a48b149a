"""`Device`: a simulated computer that its users share by time slicing."""

from __future__ import annotations

import asyncio

__all__ = ["Device"]

_ROUNDING_S = 1e-12


class Device:
    """While n users compute, each goes on at 1/n of the speed. For one event loop."""

    def __init__(self) -> None:
        self._jobs: list[list[float]] = []
        self._ends: list[asyncio.Future[None]] = []
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.busy_s = 0.0

    async def use(self, seconds: float) -> None:
        """Computes for so long, or longer where others compute, too."""
        loop = asyncio.get_running_loop()
        self._advance(loop)
        job, end = [seconds], loop.create_future()
        self._jobs.append(job)
        self._ends.append(end)
        self._plan(loop)
        try:
            await end
        finally:
            if job in self._jobs:  # cancelled
                self._advance(loop)
                at = self._jobs.index(job)
                del self._jobs[at], self._ends[at]
                self._plan(loop)

    def _advance(self, loop: asyncio.AbstractEventLoop) -> None:
        passed, self._at = loop.time() - self._at, loop.time()
        if self._jobs:
            self.busy_s += passed
            for job in self._jobs:
                job[0] -= passed / len(self._jobs)

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._jobs:
            wait = max(0.0, min(job[0] for job in self._jobs)) * len(self._jobs)
            self._timer = loop.call_later(wait, self._end, loop)

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        self._advance(loop)
        shortest = min(job[0] for job in self._jobs)
        for at in reversed(range(len(self._jobs))):
            if self._jobs[at][0] <= max(shortest, 0.0) + _ROUNDING_S:
                end = self._ends.pop(at)
                del self._jobs[at]
                if not end.done():
                    end.set_result(None)
        self._plan(loop)
