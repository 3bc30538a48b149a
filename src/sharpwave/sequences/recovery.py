"""What was trained, and where a restart takes up: the part of a SequenceBuffer's memory that outlives its samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..errors import StorageError
from .dataflow import Dataflow
from .journal import ACK, AMEND, BASE, EVICT, MARK, PUT, VERSION, Journal
from .sample import SequenceSample

__all__ = ["Ledger", "Restored", "replay"]


@dataclass
class Mark:
    name: str
    version: int
    used: list[str]
    trained: int
    freed: set[int] = field(default_factory=set)  # since then: a restart from here wants them again


class Ledger:
    """Ids in the order in which everybody was done with them, and the marks of the last two checkpoints."""

    def __init__(self, epoch_size: int | None) -> None:
        self.epoch_size = epoch_size
        self.used: list[str] = []
        self.trained = 0
        self.marks: list[Mark] = []
        self.skips: Counter[str] = Counter()

    def train(self, name: str, serial: int) -> None:
        self.used.append(name)
        self.trained += 1
        if self.epoch_size is not None and len(self.used) == self.epoch_size:
            self.used = []  # the epoch is over; what follows belongs to the next
        for mark in self.marks:
            mark.freed.add(serial)

    def mark(self, name: str, version: int) -> None:
        self.marks = [*self.marks[-1:], Mark(name, version, list(self.used), self.trained)]

    def take_up(self, ids: Iterable[Any]) -> None:
        """These were used before the restart: they count, and are skipped once each."""
        self.used = [str(one) for one in ids]
        self.skips = Counter(self.used)

    def skips_now(self, name: str) -> bool:
        """Whether this one was trained before the restart; it is skipped once for each time."""
        if self.skips[name] > 0:
            self.skips[name] -= 1
            return True
        return False

    def base(self, version: int, next_serial: int) -> tuple[dict[str, Any], set[int], str | None]:
        """What a rewritten journal starts from, whose samples it needs besides those held, and its first mark."""
        if not self.marks:
            about = {"used": self.used, "trained": self.trained, "version": version, "next": next_serial}
            return about, set(), None
        first = self.marks[0]
        about = {"used": first.used, "trained": first.trained, "version": first.version, "next": next_serial}
        return about, first.freed, first.name


@dataclass
class Restored:
    """One sample out of the journal."""

    sample: SequenceSample
    birth: int
    has_birth: bool  # given, not the order of puts
    version: int | None
    uses: dict[str, int] = field(default_factory=dict)


def replay(
    journal: Journal, flow: Dataflow, ledger: Ledger, resume: str | None
) -> tuple[dict[int, Restored], int, int]:
    """What the journal says: samples by serial, the version, the next serial. Fills the ledger.

    Raises:
        StorageError: No mark of the name to resume from, or a consumer that this dataflow lacks.
    """
    if resume is not None and not any(r.kind == MARK and r.head["name"] == resume for r in journal.records()):
        names = [r.head["name"] for r in journal.records() if r.kind == MARK]
        raise StorageError(f"journal: {journal.path}: resume: expected one of the marks {names}, got {resume!r}")
    strangers = {r.head["consumer"] for r in journal.records() if r.kind == ACK} - {one.name for one in flow}
    if strangers:
        raise StorageError(f"journal: {journal.path}: acknowledged by {sorted(strangers)}, consumers that are not here")
    held: dict[int, Restored] = {}
    version, next_serial, undone = 0, 0, False
    for record in journal.records():
        kind, head = record.kind, record.head
        if kind == BASE:
            ledger.used, ledger.trained = list(head["used"]), head["trained"]
            version, next_serial = head["version"], head["next"]
        elif kind == PUT:
            births = head["births"] or [serial + 1 for serial in head["serials"]]
            rows = zip(head["serials"], record.samples(), births, head["versions"], strict=True)
            for serial, sample, birth, made in rows:
                held[serial] = Restored(sample, birth, head["births"] is not None, made)
            next_serial = max(next_serial, *(serial + 1 for serial in head["serials"]))
        elif kind == AMEND:
            for serial, part in zip(head["serials"], record.samples(), strict=True):
                if serial in held:
                    held[serial].sample = held[serial].sample.update(part)
        elif kind == EVICT:
            for serial in head["serials"]:
                held.pop(serial, None)
        elif kind == ACK:
            # What a producer acknowledged is in the sample; what a trainer acknowledged is in the model that was lost.
            if not undone or flow[head["consumer"]].outputs:
                _ack(held, flow, ledger, head)
        elif kind == VERSION:
            version = version if undone else head["version"]
        elif kind == MARK:
            if not undone:
                ledger.mark(head["name"], version)
                undone = head["name"] == resume
        else:
            raise StorageError(f"journal: {journal.path}: a record of kind {kind}: written by a newer Sharpwave")
    ledger.take_up(ledger.used)
    ledger.skips.update(entry.sample._ids[0] for entry in held.values())  # a loader that starts over comes by them too
    return held, version, next_serial


def _ack(held: dict[int, Restored], flow: Dataflow, ledger: Ledger, head: dict[str, Any]) -> None:
    for serial in head["serials"]:
        entry = held.get(serial)
        if entry is None:
            continue  # its put was left out when the file was rewritten
        entry.uses[head["consumer"]] = entry.uses.get(head["consumer"], 0) + 1
        if all(entry.uses.get(one.name, 0) >= one.reuse for one in flow):
            ledger.train(entry.sample._ids[0], serial)
            del held[serial]
