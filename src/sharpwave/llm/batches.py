"""`Batches`: samples on their way from the buffer to the learner."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..buffers.sequence import SequenceBuffer
from ..errors import NotReady, StaleHandle
from ..sequences.leases import Lease
from .clock import Clock

__all__ = ["Batches"]


@dataclass(frozen=True)
class _Taker:
    """A call that waits for samples. `count` is the learner's number; None where any number will do."""

    owner: str
    count: int | None
    change: asyncio.Future[None]


class Batches:
    """The calls that wait for samples, and the samples that are out. For one event loop."""

    def __init__(self, buffer: SequenceBuffer, clock: Clock) -> None:
        self._buffer, self._clock = buffer, clock
        self.leases: dict[str, tuple[Lease, float]] = {}
        """The learner's, by owner, each with the moment at which it was taken."""
        self.lent: dict[str, Lease] = {}
        """Those of stages before it, by owner."""
        self._takers: list[_Taker] = []

    @property
    def leased(self) -> int:
        """Samples that the learner has."""
        return sum(len(lease) for lease, _ in self.leases.values())

    def waiting(self) -> set[str]:
        """Owners that wait for samples: the learner, and stages before it."""
        return {taker.owner for taker in self._takers}

    @property
    def takers(self) -> int:
        """Calls of the learner that wait."""
        return sum(taker.count is not None for taker in self._takers)

    def owner_of(self, lease: Lease) -> str | None:
        return next((owner for owner, (mine, _) in self.leases.items() if mine is lease), None)

    def stage_of(self, lease: Lease) -> str | None:
        return next((owner for owner, mine in self.lent.items() if mine is lease), None)

    def lose(self, owner: str) -> int:
        """What a dead owner had returns. Says how many samples that were."""
        self.leases.pop(owner, None)
        self.lent.pop(owner, None)
        return self._buffer.release(owner)

    async def take(self, owner: str, count: int) -> Lease | None:
        """`count` samples for the learner, as soon as they are ready. None where another number is right meanwhile."""
        wanted = self._buffer.get_async("train", batch_size=count, owner=owner) if count else None
        lease = await self._first(_Taker(owner, count, _future()), wanted)
        if lease is not None:
            self.leases[owner] = (lease, self._clock.now())
        return lease

    async def take_some(self, consumer: str, owner: str, most: int) -> Lease | None:
        """One to `most` samples for a stage before the learner, as soon as there is one. None where the run is over."""
        lease = await self._first(_Taker(owner, None, _future()), self._some(consumer, owner, most))
        if lease is not None:
            self.lent[owner] = lease
        return lease

    async def _some(self, consumer: str, owner: str, most: int) -> Lease:
        with suppress(NotReady):
            return await self._buffer.get_async(consumer, batch_size=most, timeout=0, partial=True, owner=owner)
        return await self._buffer.get_async(consumer, batch_size=1, owner=owner)

    async def _first(self, taker: _Taker, wanted: Coroutine[Any, Any, Lease] | None) -> Lease | None:
        """The lease, or None where the taker's change comes first."""
        self._takers.append(taker)
        getting = None if wanted is None else asyncio.ensure_future(wanted)
        try:
            calls: list[asyncio.Future[Any]] = [taker.change] if getting is None else [getting, taker.change]
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            return getting.result() if getting is not None and getting.done() else None
        except asyncio.CancelledError:
            if getting is not None and getting.done() and getting.exception() is None:
                getting.result().release()
            raise
        finally:
            self._takers.remove(taker)
            taker.change.cancel()
            if getting is not None and not getting.done():
                getting.cancel()
                # suppress(CancelledError) would also swallow a cancellation of this call that comes now: the call would
                # wait for samples again, and the task that cancelled it would wait for its end.
                await asyncio.gather(getting, return_exceptions=True)

    def recount(self, count: int | None) -> None:
        """The number of samples that the learner's next batch has now; None where nothing will be handed out."""
        for taker in self._takers:
            if not taker.change.done() and (count is None or taker.count not in (None, count)):
                taker.change.set_result(None)

    def find(self, keys: set[str], owner: str) -> list[Lease]:
        """These samples, as a lease each. Every sample that is ready is looked at: for recovery only.

        Raises:
            StaleHandle: One of them is not ready, or leased by another owner. Nothing was changed.
        """
        found: list[Lease] = []
        others: list[Lease] = []
        with suppress(NotReady):
            while len(found) < len(keys):
                lease = self._buffer.get("train", batch_size=1, timeout=0, owner=owner)
                (found if lease.batch.ids[0] in keys else others).append(lease)
        is_whole = len(found) == len(keys)
        for lease in others if is_whole else [*others, *found]:
            lease.release()
        if not is_whole:
            raise StaleHandle(f"confirm(): {len(keys) - len(found)} of the {len(keys)} items are not free any more")
        return found


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()
