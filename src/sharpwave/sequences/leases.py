"""Leases: samples that a consumer has, until it acknowledges them or gives them back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..errors import SchemaError, StaleHandle
from .intake import unpack
from .lines import HeldSample, Line
from .sample import SequenceSample
from .staleness import mark_fresh

if TYPE_CHECKING:
    from ..files.origin import Origin
    from .change import Change
    from .commits import Commits
    from .gate import Gate
    from .store import Store
    from .turns import Turns

__all__ = ["Book", "Claim", "Lease", "Lender", "Lending"]

_Samples = SequenceSample | Sequence[SequenceSample]


class Claim:
    """The buffer's record of a lease."""

    __slots__ = ("begun", "deadline", "entries", "line", "number", "owner", "samples")

    def __init__(
        self,
        number: int,
        line: Line,
        entries: list[HeldSample],
        owner: str | None,
        begun: float,
        deadline: float | None,
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

    def open(self, line: Line, entries: list[HeldSample], owner: str | None, now: float, length: float | None) -> Claim:
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
        """Takes the leases that are due off the book."""
        due = []
        while (deadline := self.next_expiry()) is not None and deadline <= now:
            due.append(self.out.pop(heappop(self._expiries)[1]))
        return due


class Lender:
    """Makes the leases of one buffer and ends them."""

    def __init__(self, gate: Gate, store: Store, turns: Turns, commits: Commits) -> None:
        self._gate, self._store, self._turns, self._commits = gate, store, turns, commits

    def lend(self, claim: Claim) -> Lease:
        """What ``get`` returns. The batch is put together without the lock: samples are never changed."""
        options = self._store.options
        try:
            batch = self._store.intake.gather(claim.samples, sorted(claim.line.consumer.inputs))
            versions = [entry.version for entry in claim.entries]
            if options.max_staleness is not None and options.stale != "evict":
                batch = self._mark_stale(batch, versions, options.max_staleness, options.stale == "mask")
            handles = np.array([entry.serial for entry in claim.entries], np.int64)
            return Lease(batch, versions, handles, claim.line.consumer.name, claim, self)
        except BaseException:
            self.give_back(claim)
            raise

    def _mark_stale(
        self, batch: SequenceSample, versions: list[int | None], max_staleness: int, mask: bool
    ) -> SequenceSample:
        oldest = self._store.version - max_staleness
        samples = sum(version is not None and version < oldest for version in versions)
        marked, tokens = mark_fresh(batch, versions, oldest)
        with self._gate.lock:
            self._store.counters["stale_samples"] += samples
            self._store.counters["stale_tokens"] += tokens
        return marked if mask else batch

    def ack(self, claim: Claim | None, samples: _Samples | None = None, origin: Origin | None = None) -> None:
        self._commits.commit("ack()", self._plan_ack(claim, samples, origin))

    async def ack_async(
        self, claim: Claim | None, samples: _Samples | None = None, origin: Origin | None = None
    ) -> None:
        await self._commits.commit_async("ack_async()", self._plan_ack(claim, samples, origin))

    def _plan_ack(
        self, claim: Claim | None, samples: _Samples | None, origin: Origin | None
    ) -> Callable[[], Change[None]]:
        finish = self._store.finish if samples is None else self._plan_complete(claim, samples)

        def plan() -> Change[None]:
            if claim is None:  # of a client; one that was acknowledged is known by its origin
                raise StaleHandle(
                    "ack(): the lease is over: the server was restarted, or took this client for dead, and others may "
                    "have the samples"
                )
            return finish(claim)

        def ticked() -> Change[None]:
            self._turns.tick()
            return self._store.origins.once(origin, plan)

        return ticked

    def _plan_complete(self, claim: Claim | None, samples: _Samples) -> Callable[[Claim], Change[None]]:
        parts = unpack("ack()", samples)
        if claim is not None and len(parts) != len(claim.entries):
            leased = len(claim.entries)
            raise SchemaError(f"ack(): samples: expected one for each of the {leased} leased, got {len(parts)}")
        body = self._store.intake.body(samples, parts) if self._store.journal is not None else None
        return lambda claim: self._store.complete(claim, parts, body)

    def give_back(self, claim: Claim) -> None:
        self._gate.check_process("release()")
        with self._gate.lock:
            if not self._gate.is_closed:  # close() gave the leases back
                self._turns.tick()
                now = time.monotonic()
                self._store.give_back(claim, now)
                self._turns.moved(now)

    async def give_back_async(self, claim: Claim) -> None:
        self.give_back(claim)  # changes memory only

    def give_back_all(self, owner: object) -> int:
        if not isinstance(owner, str):
            raise SchemaError(f"release(): owner: expected text, got {owner!r}")
        with self._gate.locked("release()"):
            self._gate.check_open("release()")
            now = time.monotonic()
            count = self._store.give_back_all(owner, now)
            self._turns.moved(now)
            return count

    def renew(self, claim: Claim) -> None:
        with self._gate.locked("renew()"):
            self._gate.check_open("renew()")
            self._turns.tick()
            self._store.renew(claim, time.monotonic())


class Lending(Protocol):
    """What ends the leases that it made. ``claim`` is its own record of one."""

    def ack(self, claim: Any, samples: _Samples | None) -> None: ...
    async def ack_async(self, claim: Any, samples: _Samples | None) -> None: ...
    def give_back(self, claim: Any) -> None: ...
    async def give_back_async(self, claim: Any) -> None: ...
    def renew(self, claim: Any) -> None: ...


class Lease:
    """A batch that has to be acknowledged or given back.

    Call ``ack()`` when the work is done: only then does a sample count as used, and it leaves when every consumer has
    acknowledged it. ``release()`` gives the samples back; so does the expiry of the lease. As a context manager it
    acknowledges, or gives back if the block raises; ``async with`` does so without disk work on the event loop.
    ``clear()`` of the buffer ends the lease: ``ack`` and ``amend`` are a StaleHandle then, ``release`` does nothing.

    Attributes:
        batch: The samples, with the consumer's input keys.
        handles: One a sample, for ``amend``; a handle names one sample for ever.
        consumer: The consumer's name.
        versions: The policy's version that made each sample; None where none was given.
    """

    def __init__(
        self,
        batch: SequenceSample,
        versions: list[int | None],
        handles: np.ndarray[Any, np.dtype[np.int64]],
        consumer: str,
        claim: Any,
        lender: Lending,
    ) -> None:
        self.batch, self.versions, self.handles, self.consumer = batch, versions, handles, consumer
        self._claim, self._lender = claim, lender
        self._is_over = False

    def ack(self, samples: SequenceSample | Sequence[SequenceSample] | None = None) -> None:
        """The work is done.

        Args:
            samples: What it made: the consumer's output keys, for the leased samples in their order. They are added as
                ``amend`` does, and the lease is acknowledged, both or neither, also where the process dies meanwhile.

        Raises:
            StaleHandle: The lease has expired, was given back or cleared; another call may have the samples now.
            SchemaError: The samples are not the leased ones, or lack a key. The lease goes on.
        """
        self._lender.ack(self._claim, samples)
        self._is_over = True

    async def ack_async(self, samples: SequenceSample | Sequence[SequenceSample] | None = None) -> None:
        """``ack`` that lets the event loop go on while the journal is written."""
        await self._lender.ack_async(self._claim, samples)
        self._is_over = True

    def release(self) -> None:
        """The work was not done: the samples wait again, at their old place. Nothing if the lease is over."""
        if not self._is_over:
            self._lender.give_back(self._claim)
            self._is_over = True

    def renew(self) -> None:
        """The time until expiry starts again."""
        self._lender.renew(self._claim)

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
            await self._lender.give_back_async(self._claim)
            self._is_over = True
