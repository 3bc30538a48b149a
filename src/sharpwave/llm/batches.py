"""`Batches`: samples on their way from the buffer to the learner."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from ..buffers.sequence import SequenceBuffer
from ..errors import NotReady, StaleHandle
from ..sequences.leases import Lease
from .clock import Clock

__all__ = ["Batches"]


class Batches:
    """The calls that wait for a batch, and the batches that are out. For one event loop."""

    def __init__(self, buffer: SequenceBuffer, clock: Clock) -> None:
        self._buffer, self._clock = buffer, clock
        self.leases: dict[str, tuple[Lease, float]] = {}
        """By owner, each with the moment at which it was taken."""
        self._takers: list[tuple[str, int, asyncio.Future[None]]] = []

    @property
    def leased(self) -> int:
        """Samples that are out."""
        return sum(len(lease) for lease, _ in self.leases.values())

    def waiting(self) -> set[str]:
        """Owners that wait for a batch."""
        return {owner for owner, _, _ in self._takers}

    def owner_of(self, lease: Lease) -> str | None:
        return next((owner for owner, (mine, _) in self.leases.items() if mine is lease), None)

    async def take(self, owner: str, count: int) -> Lease | None:
        """`count` samples, as soon as they are ready. None where another number is right meanwhile."""
        change = asyncio.ensure_future(self._wait_for_change(owner, count))
        if not count:
            await change
            return None
        getting = asyncio.ensure_future(self._buffer.get_async("train", batch_size=count, owner=owner))
        try:
            await asyncio.wait([getting, change], return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                return None
            self.leases[owner] = (getting.result(), self._clock.now())
            return getting.result()
        except asyncio.CancelledError:
            if getting.done() and getting.exception() is None:
                getting.result().release()
            raise
        finally:
            getting.cancel()
            change.cancel()
            with suppress(asyncio.CancelledError):
                await getting

    async def _wait_for_change(self, owner: str, count: int) -> None:
        taker = (owner, count, asyncio.get_running_loop().create_future())
        self._takers.append(taker)
        try:
            await taker[2]
        finally:
            self._takers.remove(taker)

    def recount(self, count: int | None) -> None:
        """The number of samples that the next batch has now; None where there will be none."""
        for _, waits_for, change in self._takers:
            if waits_for != count and not change.done():
                change.set_result(None)

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
