"""What a SequenceBuffer keeps, and every change of it in memory and journal. The buffer's lock is around each call.

Checked first, then written to the journal, then changed: a call that fails has changed nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import BufferFull, SchemaError, StaleHandle
from .dataflow import Dataflow
from .incoming import Incoming, Intake
from .index import Entry, Index, Line
from .journal import ACK, AMEND, EVICT, MARK, PUT, VERSION, Journal
from .leases import Book, Claim
from .recovery import Ledger, replay
from .sample import SequenceSample

__all__ = ["Store"]

_COUNTED = (
    "puts", "amends", "acks", "trained", "evicted", "given_back", "expired", "stale_tokens", "stale_samples",
)  # fmt: skip


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
        self._next_serial = 0

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

    def admit(self, incoming: Incoming, now: float) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Takes samples that fit; their handles."""
        self.intake.check(incoming)
        first = self._next_serial
        serials = list(range(first, first + len(incoming.entries)))
        for at, entry in enumerate(incoming.entries):
            entry.serial = first + at
            entry.birth = first + at + 1 if incoming.births is None else incoming.births[at]
        if self.journal is not None:
            head = {
                "serials": serials,
                "births": incoming.births,
                "versions": [entry.version for entry in incoming.entries],
            }
            self.journal.write(PUT, head, incoming.body)
        self._next_serial += len(serials)
        self.intake.keep(incoming)
        self.index.add(incoming.entries, now)
        self.accepted += len(serials)
        self.counters["puts"] += len(serials)
        self._evict_old(incoming.entries)
        return np.array(serials, np.int64)

    def amend(self, serials: list[int], parts: list[SequenceSample], body: list[Any] | None, now: float) -> None:
        entries = [self._entry(serial) for serial in serials]
        merged = self.intake.merge(entries, parts)
        if self.journal is not None and serials:
            self.journal.write(AMEND, {"serials": serials}, body)
        for entry, (sample, tokens, nbytes) in zip(entries, merged, strict=True):
            self.index.amend(entry, sample, tokens, nbytes, now)
        self.counters["amends"] += len(serials)

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

    def finish(self, claim: Claim, now: float) -> None:
        """The work on these samples is done."""
        name = claim.line.consumer.name
        if claim.number not in self.book.out:
            raise StaleHandle(
                f"ack(): the lease of {len(claim.entries)} samples for {name!r} is over: it expired or was given back, "
                "and others may have them; raise lease_timeout or renew() in between"
            )
        if self.journal is not None:
            self.journal.write(ACK, {"serials": [entry.serial for entry in claim.entries], "consumer": name})
        self.book.end(claim.number)
        freed, left = self.index.finish(claim.line, claim.entries, now)
        for entry in freed:
            self.ledger.train(entry.sample._ids[0], entry.serial)
        self.counters["acks"] += len(claim.entries)
        self.counters["trained"] += len(freed)
        self._note_waste(freed)
        self._count_evicted(left)

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

    def set_version(self, version: int) -> None:
        if version < self.version:
            raise SchemaError(f"set_version(): expected {self.version} or more, got {version}")
        if self.journal is not None and version > self.version:
            self.journal.write(VERSION, {"version": version})
        self.version = version
        if self._oldest is not None:
            self._evict_old(self.index.older_than(version - self._oldest))

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
            self.journal.write(EVICT, {"serials": [entry.serial for entry in entries]})
            self._note_waste(entries)

    # ---- the journal -------------------------------------------------------------------------------------------------

    def open_journal(self, path: str | os.PathLike[str], sync: bool, resume: str | None, now: float) -> None:
        """Becomes what the journal says; from now on everything is written there."""
        self.journal = Journal(path, sync)
        try:
            self._recover(self.journal, resume, now)
        except BaseException:
            self.journal.close()
            raise

    def _recover(self, journal: Journal, resume: str | None, now: float) -> None:
        held, self.version, self._next_serial = replay(journal, self.flow, self.ledger, resume)
        self.first_version = self.version
        entries = []
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
        self.index.add(entries, now)
        self.accepted = len(entries)
        self._evict_old(entries)
        if resume is not None:
            trainers = frozenset(consumer.name for consumer in self.flow if not consumer.outputs)
            self._rewrite(journal, resume, trainers)

    def checkpoint(self, name: str) -> None:
        if self.journal is None:
            raise SchemaError("checkpoint(): needs SequenceBuffer(journal=)")
        self.journal.write(MARK, {"name": name})
        self.ledger.mark(name, self.version)
        if self.journal.is_wasteful():
            self._rewrite(self.journal, None, frozenset())

    def _rewrite(self, journal: Journal, until: str | None, undone: frozenset[str]) -> None:
        base, freed, first = self.ledger.base(self.version, self._next_serial)
        journal.rewrite(base, freed | set(self.index.entries), first, until, undone)

    def _note_waste(self, entries: list[Entry]) -> None:
        if self.journal is not None:
            self.journal.waste_bytes += sum(entry.bytes for entry in entries)
