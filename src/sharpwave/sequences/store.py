"""What a SequenceBuffer keeps, and every change of it in memory and journal. The buffer's lock is around each call.

A change is checked first, then written to the journal, then made: a call that fails has changed nothing. Writing takes
time, so the lock is not held meanwhile. A verb here returns a ``Change``; the buffer writes its records and calls
``make``, or ``undo`` if the write failed. Between the two no other Change is made; only what needs no record may
happen: leases taken, given back and expired, and samples that leave with their last lease.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import numpy as np

from ..errors import BufferFull, SchemaError, StaleHandle, StorageError
from ..files import Entry as JournalEntry
from ..files import Journal
from .dataflow import Dataflow
from .incoming import Incoming, Intake
from .index import Entry, Index, Line
from .journal import ACK, AMEND, EVICT, KIND, MARK, PUT, VERSION, needed
from .leases import Book, Claim
from .recovery import Ledger, replay
from .sample import SequenceSample

__all__ = ["Change", "Store"]

_SLACK = 16 << 20  # bytes of waste that are not worth a rewrite
_Result = TypeVar("_Result")
_Handles = np.ndarray[Any, np.dtype[np.int64]]

_COUNTED = (
    "puts", "amends", "acks", "trained", "evicted", "given_back", "expired", "stale_tokens", "stale_samples",
)  # fmt: skip


class Change(Generic[_Result]):
    """What a call is about to do: its records, and how to make it or to go back."""

    __slots__ = ("make", "records", "undo")

    def __init__(
        self,
        records: list[JournalEntry],
        make: Callable[[float], _Result],
        undo: Callable[[], None] = lambda: None,
    ) -> None:
        self.records, self.make, self.undo = records, make, undo


class Store:
    """Samples, leases, what was trained, the version, and the journal of them all. Not safe for threads."""

    def __init__(
        self,
        flow: Dataflow,
        capacity: int,
        max_tokens: int | None,
        max_bytes: int | None,
        oldest: int | None,
        lease_s: float | None,
        duplicate_ids: bool,
        needs_version: bool,
        epoch_size: int | None,
        version: int,
    ) -> None:
        """``oldest``: how many versions behind is too old to keep; None keeps everything."""
        self.flow, self.capacity, self.max_tokens, self.max_bytes = flow, capacity, max_tokens, max_bytes
        self._oldest, self._lease_s = oldest, lease_s
        self.index = Index(flow)
        self.intake = Intake(flow, self.index, duplicate_ids, needs_version)
        self.book = Book()
        self.ledger = Ledger(epoch_size)
        self.journal: Journal | None = None
        self.counters = dict.fromkeys(_COUNTED, 0)
        self.version = self.first_version = version
        self.accepted = 0  # put, and not evicted since
        self.waste_bytes = 0  # of records that no restart needs, about
        self._next_serial = 0
        self._unsaid: list[int] = []  # serials that left, and whose record is not written yet

    # ---- put and amend -----------------------------------------------------------------------------------------------

    def fits(self, incoming: Incoming) -> bool:
        index = self.index
        return (
            len(index.entries) + len(incoming.entries) <= self.capacity
            and (self.max_tokens is None or index.tokens + incoming.tokens <= self.max_tokens)
            and (self.max_bytes is None or index.bytes + incoming.bytes <= self.max_bytes)
        )

    def refuse_unfit(self, incoming: Incoming) -> None:
        """What would not fit into an empty buffer never will."""
        for what, got, most in (
            ("capacity", len(incoming.entries), self.capacity),
            ("max_tokens", incoming.tokens, self.max_tokens),
            ("max_bytes", incoming.bytes, self.max_bytes),
        ):
            if most is not None and got > most:
                raise BufferFull(f"put(): {got} at once never fit {what}={most}; put fewer, or raise {what}")

    def full(self, incoming: Incoming, ahead: int) -> BufferFull:
        said = [f"{len(self.index.entries)} of {self.capacity} samples"]
        if self.max_tokens is not None:
            said.append(f"{self.index.tokens} of {self.max_tokens} tokens")
        if self.max_bytes is not None:
            said.append(f"{self.index.bytes} of {self.max_bytes} bytes")
        others = f", {ahead} puts wait before it" if ahead > 0 else ""
        return BufferFull(
            f"put(): no room for {len(incoming.entries)} samples ({incoming.tokens} tokens, {incoming.bytes} bytes): "
            f"{', '.join(said)} are held{others}; wait with timeout=, or acknowledge leases"
        )

    def admit(self, incoming: Incoming) -> Change[_Handles]:
        """Takes samples that fit; their handles."""
        self.intake.check(incoming)
        first = self._next_serial
        serials = list(range(first, first + len(incoming.entries)))
        for at, entry in enumerate(incoming.entries):
            entry.serial = first + at
            entry.birth = first + at + 1 if incoming.births is None else incoming.births[at]

        def make(now: float) -> _Handles:
            self._next_serial += len(serials)
            self.intake.keep(incoming)
            self.index.add(incoming.entries, now)
            self.accepted += len(serials)
            self.counters["puts"] += len(serials)
            self._evict_old(incoming.entries)
            return np.array(serials, np.int64)

        versions = [entry.version for entry in incoming.entries]
        head = {"serials": serials, "births": incoming.births, "versions": versions}
        return Change([JournalEntry(PUT, head, incoming.body or ())], make)

    def amend(self, serials: list[int], parts: list[SequenceSample], body: list[Any] | None) -> Change[None]:
        entries = [self._entry(serial) for serial in serials]
        merged, forms = self.intake.merge(entries, parts)

        def make(now: float) -> None:
            self.intake.keep_forms(forms)
            for entry, (sample, tokens, nbytes) in zip(entries, merged, strict=True):
                if entry.serial in self.index.entries:  # else it was too old, and its last lease ended meanwhile
                    self.index.amend(entry, sample, tokens, nbytes, now)
            self.counters["amends"] += len(serials)

        return Change([JournalEntry(AMEND, {"serials": serials}, body or ())] if serials else [], make)

    def _entry(self, serial: int) -> Entry:
        entry = self.index.entries.get(serial)
        if entry is None:
            raise StaleHandle(
                f"amend(): the sample of handle {serial} has left: everybody was done with it, or it was too old; "
                "amend before you acknowledge"
            )
        return entry

    # ---- leases ------------------------------------------------------------------------------------------------------

    def lease(self, line: Line, count: int, owner: str | None, now: float) -> Claim:
        return self.book.open(line, self.index.take(line, count), owner, now, self._lease_s)

    def renew(self, claim: Claim, now: float) -> None:
        if claim.number not in self.book.out:
            raise StaleHandle("renew(): the lease is over: it expired, was acknowledged or given back")
        self.book.renew(claim, now, self._lease_s)

    def finish(self, claim: Claim) -> Change[None]:
        """The work on these samples is done."""
        name = claim.line.consumer.name
        if self.book.end(claim.number) is None:  # off the book: it cannot expire while its record is written
            raise StaleHandle(
                f"ack(): the lease of {len(claim.entries)} samples for {name!r} is over: it expired or was given back, "
                "and others may have them; raise lease_timeout or renew() in between"
            )

        def make(now: float) -> None:
            freed, left = self.index.finish(claim.line, claim.entries, now)
            for entry in freed:
                self.ledger.train(entry.sample._ids[0], entry.serial)
            self.counters["acks"] += len(claim.entries)
            self.counters["trained"] += len(freed)
            self.waste_bytes += sum(entry.bytes for entry in freed)
            self._count_evicted(left)

        head = {"serials": [entry.serial for entry in claim.entries], "consumer": name}
        return Change([JournalEntry(ACK, head)], make, lambda: self.book.put_back(claim))

    def give_back(self, claim: Claim, now: float) -> None:
        """The work was not done. Nothing happens to a lease that is over."""
        if self.book.end(claim.number) is not None:
            self._return(claim, now)

    def give_back_all(self, owner: str, now: float) -> int:
        mine = [claim for claim in self.book.out.values() if claim.owner == owner]
        for claim in mine:
            self.give_back(claim, now)
        return sum(len(claim.entries) for claim in mine)

    def _return(self, claim: Claim, now: float) -> None:
        self.counters["given_back"] += len(claim.entries)
        self._count_evicted(self.index.give_back(claim.line, claim.entries, now))

    def has_clock(self) -> bool:
        """Whether time alone may change anything."""
        return self.book.next_expiry() is not None or any(
            line.next_deadline() is not None for line in self.index.lines.values()
        )

    def tick(self, now: float) -> bool:
        """Leases that expire, groups whose time is up; whether there were any."""
        expired = self.book.expired(now)
        for claim in expired:
            self.counters["expired"] += len(claim.entries)
            self._return(claim, now)
        grouped = [line.tick(now) for line in self.index.lines.values()]
        return bool(expired) or any(grouped)

    # ---- versions ----------------------------------------------------------------------------------------------------

    def set_version(self, version: int) -> Change[None]:
        if version < self.version:
            raise SchemaError(f"set_version(): expected {self.version} or more, got {version}")

        def make(_: float) -> None:
            self.version = version
            if self._oldest is not None:
                self._evict_old(self.index.older_than(version - self._oldest))

        return Change([JournalEntry(VERSION, {"version": version})] if version > self.version else [], make)

    def _evict_old(self, entries: Iterable[Entry]) -> None:
        if self._oldest is None:
            return
        oldest = self.version - self._oldest
        old = [entry for entry in entries if entry.version is not None and entry.version < oldest]
        self._count_evicted([entry for entry in old if self.index.condemn(entry)])

    def _count_evicted(self, entries: list[Entry]) -> None:
        if not entries:
            return
        self.accepted -= len(entries)  # they will not be trained on: others may start in their place
        self.counters["evicted"] += len(entries)
        if self.journal is not None:
            self._unsaid += [entry.serial for entry in entries]
            self.waste_bytes += sum(entry.bytes for entry in entries)

    # ---- the journal -------------------------------------------------------------------------------------------------

    def unsaid(self) -> list[JournalEntry]:
        """The record of samples that left since the last one: it goes in front of any later record.

        They leave with a lease or a version, on whatever thread, where no time is for a disk. A restart that does not
        find the record finds them too old again.
        """
        return [JournalEntry(EVICT, {"serials": list(self._unsaid)})] if self._unsaid else []

    def say(self, records: list[JournalEntry]) -> None:
        """What ``unsaid`` gave has been written."""
        for record in records:
            del self._unsaid[: len(record.head["serials"])]

    def open_journal(
        self, path: str | os.PathLike[str], sync: bool, resume: str | None, recover: bool, now: float
    ) -> None:
        """Becomes what the journal says; from now on everything is written there."""
        self.journal = Journal(path, KIND, where="SequenceBuffer(): journal", sync=sync, recover=recover)
        try:
            self._recover(self.journal, resume, now)
        except BaseException:
            self.journal.close()
            raise

    def _recover(self, journal: Journal, resume: str | None, now: float) -> None:
        held, self.version, self._next_serial = replay(journal, self.flow, self.ledger, resume, self.intake.duplicates)
        self.first_version = self.version
        entries = []
        try:
            for serial, restored in held.items():
                entry = self.intake.entry(restored.sample, restored.version)
                entry.serial, entry.birth = serial, restored.birth
                for line in self.index.lines.values():
                    uses = restored.uses.get(line.consumer.name, 0)
                    if uses >= line.consumer.reuse:
                        entry.done |= line.bit
                    elif uses:
                        entry.uses = {**(entry.uses or {}), line.number: uses}
                entries.append(entry)
            self.intake.learn(entries, any(restored.has_birth for restored in held.values()))
        except SchemaError as error:
            raise StorageError(f"{journal.where}: {journal.path}: does not fit this buffer: {error}") from None
        self.index.add(entries, now)
        self.accepted = len(entries)
        self._evict_old(entries)
        if resume is not None:
            trainers = frozenset(consumer.name for consumer in self.flow if not consumer.outputs)
            base, serials, first = self.needed()
            journal.replace(needed(journal, base, serials, first, resume, trainers))

    def checkpoint(self, name: str) -> Change[bool]:
        """Whether half of the journal is waste now."""
        journal = self.journal
        if journal is None:
            raise SchemaError("checkpoint(): needs SequenceBuffer(journal=)")

        def make(_: float) -> bool:
            self.ledger.mark(name, self.version)
            return self.is_wasteful(journal)

        return Change([JournalEntry(MARK, {"name": name})], make)

    def is_wasteful(self, journal: Journal) -> bool:
        return self.waste_bytes > _SLACK and self.waste_bytes > journal.size // 2

    def needed(self) -> tuple[dict[str, Any], set[int], str | None]:
        """What a rewritten journal begins with, the samples whose records it keeps, and its first mark."""
        base, freed, first = self.ledger.base(self.version, self._next_serial)
        return base, freed | set(self.index.entries), first
