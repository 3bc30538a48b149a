"""Leases: samples in somebody's hands, until the work on them is done or they go back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from heapq import heappop, heappush
from types import TracebackType
from typing import Any

import numpy as np

from .index import Entry, Line
from .sample import SequenceSample

__all__ = ["Book", "Claim", "Lease"]


class Claim:
    """What the buffer keeps of a lease."""

    __slots__ = ("begun", "deadline", "entries", "line", "number", "owner", "samples")

    def __init__(
        self, number: int, line: Line, entries: list[Entry], owner: str | None, begun: float, deadline: float | None
    ) -> None:
        self.number, self.line, self.entries, self.owner = number, line, entries, owner
        self.begun, self.deadline = begun, deadline
        self.samples = [entry.sample for entry in entries]  # of one instant: a later amend is not for this batch


class Book:
    """The leases that are out, by number; the one that expires next is found in O(log leases)."""

    def __init__(self) -> None:
        self.out: dict[int, Claim] = {}
        self._next = 0
        self._expiries: list[tuple[float, int]] = []

    def open(self, line: Line, entries: list[Entry], owner: str | None, now: float, length: float | None) -> Claim:
        claim = Claim(self._next, line, entries, owner, now, None)
        self._next += 1
        self.out[claim.number] = claim
        self.renew(claim, now, length)
        return claim

    def renew(self, claim: Claim, now: float, length: float | None) -> None:
        claim.deadline = None if length is None else now + length
        if claim.deadline is not None:
            heappush(self._expiries, (claim.deadline, claim.number))

    def end(self, number: int) -> Claim | None:
        """Takes a lease off the book; None where it is no longer on it."""
        return self.out.pop(number, None)

    def put_back(self, claim: Claim) -> None:
        """On the book again, as before ``end``."""
        self.out[claim.number] = claim
        if claim.deadline is not None:
            heappush(self._expiries, (claim.deadline, claim.number))

    def next_expiry(self) -> float | None:
        while self._expiries:
            deadline, number = self._expiries[0]
            claim = self.out.get(number)
            if claim is not None and claim.deadline == deadline:
                return deadline
            heappop(self._expiries)  # ended, or renewed
        return None

    def expired(self, now: float) -> list[Claim]:
        """Takes off the book whatever is due."""
        due = []
        while (deadline := self.next_expiry()) is not None and deadline <= now:
            due.append(self.out.pop(heappop(self._expiries)[1]))
        return due


class Lease:
    """A batch and the duty to say what became of it.

    ``ack()`` when the work is done: only then does the sample count as used, and leave when everybody is done with it.
    ``release()`` gives the samples back, as does the lease's expiry. As a context manager it acknowledges, or gives
    back if the block raises; ``async with`` does so without disk work on the event loop.

    Attributes:
        batch: The samples, with the consumer's input keys.
        handles: One a sample, for ``amend``; a handle names one sample for ever.
        consumer: Whose batch it is.
        versions: The policy's version that made each sample; None where none was told.
    """

    def __init__(
        self,
        batch: SequenceSample,
        handles: np.ndarray[Any, np.dtype[np.int64]],
        consumer: str,
        versions: list[int | None],
        end: Callable[[bool], None],
        renew: Callable[[], None],
        ack_async: Callable[[], Awaitable[None]],
    ) -> None:
        self.batch, self.handles, self.consumer, self.versions = batch, handles, consumer, versions
        self._end, self._renew, self._ack_async = end, renew, ack_async
        self._is_over = False

    def ack(self) -> None:
        """The work is done.

        Raises:
            StaleHandle: The lease has expired or was given back; the samples are somebody else's now.
        """
        self._end(True)
        self._is_over = True

    async def ack_async(self) -> None:
        """``ack`` that lets the event loop go on while the journal is written."""
        await self._ack_async()
        self._is_over = True

    def release(self) -> None:
        """The work was not done: the samples wait again, at their old place. Nothing if the lease is over."""
        if not self._is_over:
            self._end(False)
            self._is_over = True

    def renew(self) -> None:
        """The time until expiry starts again."""
        self._renew()

    def __len__(self) -> int:
        return len(self.handles)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_over:
            return
        if kind is None:
            self.ack()
        else:
            self.release()

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_over:
            return
        if kind is None:
            await self.ack_async()
        else:
            self.release()  # changes memory only
