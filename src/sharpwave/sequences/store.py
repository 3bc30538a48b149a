"""The state of a SequenceBuffer, and every change of it in memory and journal. The buffer's lock is around each call.

A change is checked first, then written to the journal, then made: a call that fails has changed nothing. Writing takes
time, so the lock is not held meanwhile. A verb here returns a ``Change``; ``Commits`` writes its records and calls
``make``, or ``undo`` if the write failed. Between the two only Changes are made that were planned together with it and
do not touch what it was planned on. Changes without a record may happen: leases are taken, given back and expire, and
samples leave with their last lease.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np

from ..errors import BufferFull, SchemaError, StaleHandle, StorageError
from ..files import Entry, Journal, Loss, read_journal, warn_caller
from . import insight
from .change import Change
from .history import ACK, AMEND, CLEAR, EVICT, KIND, MARK, MEND, OPTIONS, PUT, VERSION, Instant, Kept, needed, put_head
from .incoming import Incoming, Survey
from .index import SampleIndex
from .intake import Intake
from .leases import Book, Claim
from .lines import HeldSample, Line
from .options import Options
from .origins import Origins
from .recovery import Ledger, Replay
from .sample import SequenceSample
from .staleness import are_all_older

__all__ = ["Store"]

_SLACK = 16 << 20  # bytes of waste that are not worth a rewrite
_Result = TypeVar("_Result")
_Handles = np.ndarray[Any, np.dtype[np.int64]]

_COUNTED = (
    "added", "amends", "acks", "trained", "evicted", "cleared", "given_back", "expired", "stale_tokens",
    "stale_samples",
)  # fmt: skip


class Store:
    """Samples, leases, used ids, the version, and the journal of them all. Not safe for threads."""

    def __init__(self, options: Options, version: int = 0) -> None:
        self.options = options
        self.flow, self.capacity, self.max_tokens, self.max_bytes = (
            options.flow, options.capacity, options.max_tokens, options.max_bytes,
        )  # fmt: skip
        self._oldest, self._lease_s = options.oldest, options.lease_timeout
        self.index = SampleIndex(self.flow)
        self.intake = Intake(self.flow, self.index, options.duplicate_ids, options.max_staleness is not None)
        self.book = Book()
        self.ledger = Ledger(options.epoch_size)
        self.origins = Origins()
        self.journal: Journal | None = None
        self.counters = dict.fromkeys(_COUNTED, 0)
        self.version = self.first_version = version
        self.accepted = 0  # put, and not evicted since
        self._lost: dict[str, int] = {}  # of the file that was loaded, where there is no journal
        self.waste_bytes = 0  # of records that no restart needs, about
        self._next_serial = self._first_serial = 0  # the first one given since the restart
        self._unsaid: list[int] = []  # serials that left, and whose record is not written yet

    # ---- put and amend -----------------------------------------------------------------------------------------------

    def fits(self, incoming: Incoming) -> bool:
        index, all_new = self.index, [*self.intake.coming, incoming]
        return (
            len(index.entries) + sum(map(len, all_new)) <= self.capacity
            and (self.max_tokens is None or index.tokens + sum(one.tokens for one in all_new) <= self.max_tokens)
            and (self.max_bytes is None or index.bytes + sum(one.bytes for one in all_new) <= self.max_bytes)
        )

    def refuse_unfit(self, incoming: Incoming) -> None:
        """Refuses samples that would not fit into an empty buffer either."""
        for what, got, most in (
            ("capacity", len(incoming), self.capacity),
            ("max_tokens", incoming.tokens, self.max_tokens),
            ("max_bytes", incoming.bytes, self.max_bytes),
        ):
            if most is not None and got > most:
                raise SchemaError(f"put(): {got} at once never fit {what}={most}; put fewer, or raise {what}")

    def full(self, incoming: Incoming, ahead: int) -> BufferFull:
        said = [f"{len(self.index.entries)} of {self.capacity} samples"]
        if self.max_tokens is not None:
            said.append(f"{self.index.tokens} of {self.max_tokens} tokens")
        if self.max_bytes is not None:
            said.append(f"{self.index.bytes} of {self.max_bytes} bytes")
        others = f", {ahead} puts wait before it" if ahead > 0 else ""
        return BufferFull(
            f"put(): no room for {len(incoming)} samples ({incoming.tokens} tokens, {incoming.bytes} bytes): "
            f"{', '.join(said)} are held{others}; acknowledge leases, or give a larger timeout"
        )

    def admit(self, incoming: Incoming) -> Change[_Handles]:
        """Takes samples that fit; their handles."""
        self.intake.check(incoming)
        coming = self.intake.coming
        first = self._next_serial + sum(map(len, coming))
        serials = list(range(first, first + len(incoming)))
        coming.append(incoming)

        def make(now: float) -> _Handles:
            coming.remove(incoming)
            self._next_serial += len(serials)
            self.intake.keep(incoming)
            entries = self.index.add(incoming, serials, now)
            self.accepted += len(serials)
            self.counters["added"] += len(serials)
            self._evict_old(entries)
            return np.arange(first, first + len(serials))

        records = []
        if self.journal is not None:
            head = put_head(serials, incoming.births, incoming.versions, incoming.origin)
            records = [Entry(PUT, head, incoming.body or ())]
        return Change(records, make, lambda: coming.remove(incoming), alone=self.intake.is_first(incoming))

    def amend(self, serials: list[int], parts: list[SequenceSample], body: list[Any] | None) -> Change[None]:
        entries = [self._entry(serial) for serial in serials]
        merged, forms = self.intake.merge(entries, parts)

        def make(now: float) -> None:
            self.intake.keep_forms(forms)
            for entry, (sample, tokens, nbytes, have) in zip(entries, merged, strict=True):
                if entry.serial in self.index.entries:  # else it was too old, and its last lease ended meanwhile
                    self.index.amend(entry, sample, tokens, nbytes, have, now)
            self.counters["amends"] += len(serials)

        records = [Entry(AMEND, {"serials": serials}, body or ())] if serials else []
        return Change(records, make, reads=serials, writes=serials, alone=bool(forms))

    def _entry(self, serial: int) -> HeldSample:
        entry = self.index.entries.get(serial)
        if entry is None:
            raise StaleHandle(
                f"amend(): the sample of handle {serial} has left: every consumer was done with it, it was too old, "
                "or it was cleared; amend before you acknowledge"
            )
        return entry

    # ---- leases ------------------------------------------------------------------------------------------------------

    def lease(self, line: Line, count: int, owner: str | None, now: float) -> Claim:
        return self.book.open(line, self.index.take(line, count), owner, now, self._lease_s)

    def renew(self, claim: Claim, now: float) -> None:
        if claim.number not in self.book.out:
            raise StaleHandle("renew(): the lease is over: it expired, was acknowledged, given back or cleared")
        self.book.renew(claim, now, self._lease_s)

    def finish(self, claim: Claim) -> Change[None]:
        """The work on these samples is done."""
        self._check_out(claim)
        self.book.end(claim.number)  # off the book: it cannot expire while its record is written

        def make(now: float) -> None:
            freed, left = self.index.finish(claim.line, claim.entries, now)
            for entry in freed:
                self.ledger.train(entry.sample._ids[0], entry.serial)
            self.counters["acks"] += len(claim.entries)
            self.counters["trained"] += len(freed)
            self.waste_bytes += sum(entry.bytes for entry in freed)
            self._count_evicted(left)

        head = _ack_head(claim)
        return Change([Entry(ACK, head)], make, lambda: self.book.put_back(claim), writes=head["serials"])

    def complete(self, claim: Claim, parts: list[SequenceSample], body: list[Any] | None) -> Change[None]:
        """``amend`` and ``finish`` as one change with one record: a restart finds both or neither."""
        self._check_out(claim)
        consumer, head = claim.line.consumer, _ack_head(claim)
        if not consumer.outputs:
            raise SchemaError(
                f"ack(): samples: {consumer.name!r} makes no keys; give Consumer(outputs=), or use amend()"
            )
        for part in parts:
            if lacking := sorted(consumer.outputs - part.keys):
                raise SchemaError(
                    f"ack(): samples: {part._ids[0]!r} lacks {', '.join(lacking)}, which {consumer.name!r} makes"
                )
        serials = head["serials"]
        amended = self.amend(serials, parts, body)
        finished = self.finish(claim)

        def make(now: float) -> None:
            amended.make(now)
            finished.make(now)

        return Change(
            [Entry(AMEND, head, body or ())], make, finished.undo, reads=serials, writes=serials, alone=amended.alone
        )

    def _check_out(self, claim: Claim) -> None:
        if claim.number not in self.book.out:
            raise StaleHandle(
                f"ack(): the lease of {len(claim.entries)} samples for {claim.line.consumer.name!r} is over: it "
                "expired, was given back or cleared, and others may have the samples; raise lease_timeout or renew() "
                "in between"
            )

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

    def clear(self) -> Change[None]:
        """All samples leave, and all leases end."""

        def make(_: float) -> None:
            entries = list(self.index.entries.values())
            self.book.out.clear()
            self.index.clear()
            self.intake.forget()
            self.accepted -= len(entries)  # they will not be trained on: others may start in their place
            self.counters["cleared"] += len(entries)
            self.waste_bytes += sum(entry.bytes for entry in entries)
            for entry in entries:
                if entry.serial < self._first_serial:
                    self.ledger.unskip(entry.sample._ids[0])

        return Change([Entry(CLEAR, {})], make, alone=True)

    def wanted(self, ids: list[str]) -> list[str]:
        return [one for one in ids if not self.ledger.skips_now(one) and one not in self.index.by_id]

    # ---- versions ----------------------------------------------------------------------------------------------------

    def set_version(self, version: int) -> Change[None]:
        if version < self.version:
            raise SchemaError(f"set_version(): expected {self.version} or more, got {version}")

        def make(_: float) -> None:
            self.version = version
            if self._oldest is not None:
                self._evict_old(self.index.older_than(version - self._oldest))

        return Change([Entry(VERSION, {"version": version})] if version > self.version else [], make, alone=True)

    def _evict_old(self, entries: Iterable[HeldSample]) -> None:
        if self._oldest is None:
            return
        oldest = self.version - self._oldest
        old = [entry for entry in entries if entry.version is not None and entry.version < oldest]
        if self.options.stale == "mask":  # nothing is learnt from a sample without a fresh token
            old = [entry for entry in old if are_all_older(entry.sample, oldest)]
        self._count_evicted([entry for entry in old if self.index.condemn(entry)])

    def _count_evicted(self, entries: list[HeldSample]) -> None:
        if not entries:
            return
        self.accepted -= len(entries)  # they will not be trained on: others may start in their place
        self.counters["evicted"] += len(entries)
        if self.journal is not None:
            self._unsaid += [entry.serial for entry in entries]
            self.waste_bytes += sum(entry.bytes for entry in entries)

    # ---- the journal -------------------------------------------------------------------------------------------------

    def unsaid(self) -> list[Entry]:
        """The record of samples that left since the last one: it goes in front of any later record.

        They leave with a lease or a version, on whatever thread, where no time is for a disk. A restart that does not
        find the record finds them too old again.
        """
        return [Entry(EVICT, {"serials": list(self._unsaid)})] if self._unsaid else []

    def say(self, records: list[Entry]) -> None:
        """What ``unsaid`` gave has been written."""
        for record in records:
            del self._unsaid[: len(record.head["serials"])]

    def open_journal(
        self, where: str, path: str | os.PathLike[str], resume: str | None, recover: bool, now: float
    ) -> None:
        """Becomes what the journal says; from now on everything is written there."""
        journal = self.journal = Journal(path, KIND, where=where, sync=self.options.sync, recover=recover)
        try:
            said = Replay(where, journal.path, self.flow, self.ledger, self.origins, resume)
            said.read(journal.records())
            is_damaged = bool(journal.lost_records or journal.lost_bytes)
            if is_damaged:
                mend = said.mend(self.options.duplicate_ids)
                journal.append([Entry(MEND, mend)])  # the next restart finds the same
                said.apply(MEND, mend, bytearray())
            self._become(where, journal.path, said, now)
            options = self.options.to_json()
            if not said.count and not is_damaged:
                journal.append([Entry(OPTIONS, options)])  # a new file: else they would not be the first record
            elif resume is not None or said.options != options:
                trainers = frozenset(consumer.name for consumer in self.flow if not consumer.outputs)
                journal.replace(needed(journal, *self.needed(), resume, trainers))
        except BaseException:
            journal.close()
            raise

    def load(self, where: str, path: str | os.PathLike[str], recover: bool, now: float) -> None:
        """Becomes what a journal says, which is left alone."""
        loss = Loss()
        said = Replay(where, path, self.flow, self.ledger, self.origins, None)
        said.read(read_journal(path, KIND, where=where, recover=recover, loss=loss))
        if loss:
            warn_caller(
                f"{where}: {path}: was damaged: {loss.records} records ({loss.bytes} bytes) are lost, {loss.found} are "
                "whole"
            )
            said.apply(MEND, said.mend(self.options.duplicate_ids), bytearray())
            self._lost = {"lost_records": loss.records, "lost_bytes": loss.bytes}
        self._become(where, path, said, now)

    def _become(self, where: str, path: Any, said: Replay, now: float) -> None:
        said.finish()
        self.version = self.first_version = said.version
        self._next_serial = self._first_serial = said.next_serial
        held = said.held.values()
        try:
            samples = [one.sample for one in held]
            survey = Survey.of(samples)
            assert survey is not None
            versions, births = [one.version for one in held], [one.birth for one in held]
            incoming = self.intake.incoming(samples, survey, versions, births)
            self.intake.learn(incoming, any(one.has_birth for one in held))
        except SchemaError as error:
            raise StorageError(f"{where}: {path}: does not fit this buffer: {error}") from None
        entries = self.index.restore(incoming, list(said.held), [one.uses for one in held], now)
        self.accepted = len(entries)
        self._evict_old(entries)

    def instant(self) -> Instant:
        """What ``save`` writes. Samples are never changed, so it stays as it is. O(samples held)."""
        lines = self.index.lines.values()
        kept = [
            Kept(
                entry.serial,
                entry.sample,
                entry.birth,
                entry.version,
                entry.bytes,
                [line.uses(entry) for line in lines],
            )
            for entry in self.index.entries.values()
            if not entry.gone  # too old, and here only until its leases end
        ]
        base = {
            "used": list(self.ledger.used),
            "trained": self.ledger.trained,
            "version": self.version,
            "next": self._next_serial,
            "origins": self.origins.to_json(),
        }
        journal = None if self.journal is None else self.journal.path
        return Instant(self.options, base, self.intake.has_births, kept, journal)

    def checkpoint(self, name: str) -> Change[bool]:
        """Whether half of the journal is waste now."""
        journal = self.journal
        if journal is None:
            raise SchemaError("checkpoint(): needs SequenceBuffer(journal=)")

        def make(_: float) -> bool:
            self.ledger.mark(name, self.version)
            return self.is_wasteful(journal)

        return Change([Entry(MARK, {"name": name})], make, alone=True)

    def is_wasteful(self, journal: Journal) -> bool:
        return self.waste_bytes > _SLACK and self.waste_bytes > journal.size // 2

    def needed(self) -> tuple[Options, dict[str, Any], set[int], str | None]:
        """What a rewritten journal begins with, the samples whose records it keeps, and its first mark."""
        base, freed, first = self.ledger.base(self.version, self._next_serial)
        base["origins"] = self.origins.to_json()
        return self.options, base, freed | set(self.index.entries), first

    # ---- insight -----------------------------------------------------------------------------------------------------

    def explain(self, line: Line, now: float) -> str:
        return insight.explain(self.flow, self.index, self.book, line.consumer.name, now)

    def stats(self, waiting_puts: int, now: float) -> dict[str, Any]:
        counters = {**self.counters, "accepted": self.accepted, "waiting_puts": waiting_puts}
        for name in ("cut_bytes", "lost_records", "lost_bytes"):
            counters[name] = self._lost.get(name, 0) if self.journal is None else getattr(self.journal, name)
        counters["journal_bytes"] = 0 if self.journal is None else self.journal.size
        return insight.stats(self.index, self.book, self.capacity, counters, self.version, now)


def _ack_head(claim: Claim) -> dict[str, Any]:
    return {"serials": [entry.serial for entry in claim.entries], "consumer": claim.line.consumer.name}
