"""What was trained, and where a restart takes up: the part of a SequenceBuffer's memory that outlives its samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..errors import StorageError
from ..files import Entry as JournalEntry
from ..files import Journal
from .dataflow import Dataflow
from .journal import ACK, AMEND, BASE, EVICT, MARK, MEND, PUT, VERSION, read_head, read_samples
from .sample import SequenceSample

__all__ = ["Ledger", "Restored", "replay"]

_LOST_SERIALS = 1 << 32  # more than a lost record can have given: no handle is given twice


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
    journal: Journal, flow: Dataflow, ledger: Ledger, resume: str | None, duplicates: bool
) -> tuple[dict[int, Restored], int, int]:
    """What the journal says: samples by serial, the version, the next serial. Fills the ledger.

    Where records were lost, what follows from that is written behind them: the next restart finds the same.

    Args:
        duplicates: Whether an id may be held more than once.

    Raises:
        StorageError: Damage, no mark of the name to resume from, or a consumer that this dataflow lacks.
    """
    said = _Said(flow, ledger, resume)
    for record in journal.records():
        with journal.reading(record):
            said.apply(record.kind, read_head(record), record.body)
    if resume is not None and not said.undone:
        raise StorageError(
            f"{journal.where}: {journal.path}: resume: expected one of the marks {said.marks}, got {resume!r}"
        )
    if said.strangers:
        names = sorted(said.strangers)
        raise StorageError(f"{journal.where}: {journal.path}: acknowledged by {names}, consumers that are not here")
    if journal.lost_records or journal.lost_bytes:
        mend = said.mend(duplicates)
        journal.append([JournalEntry(MEND, mend)])
        said.apply(MEND, mend, bytearray())
    held = said.held
    ledger.take_up(ledger.used)
    ledger.skips.update(entry.sample._ids[0] for entry in held.values())  # a loader that starts over comes by them too
    return held, said.version, said.next_serial


class _Said:
    """What the records so far have led to."""

    def __init__(self, flow: Dataflow, ledger: Ledger, resume: str | None) -> None:
        self._flow, self._ledger, self._resume = flow, ledger, resume
        self._names = {consumer.name for consumer in flow}
        self.held: dict[int, Restored] = {}
        self.version = self.next_serial = 0
        self.undone = False  # behind the mark to resume from
        self.marks: list[str] = []
        self.strangers: set[str] = set()

    def apply(self, kind: int, head: dict[str, Any], body: bytearray) -> None:
        held = self.held
        if kind == BASE:
            self._ledger.used, self._ledger.trained = list(head["used"]), head["trained"]
            self.version, self.next_serial = head["version"], head["next"]
        elif kind == PUT:
            self._put(head, read_samples(body))
        elif kind == AMEND:
            for serial, part in zip(head["serials"], read_samples(body), strict=True):
                if serial in held:
                    held[serial].sample = held[serial].sample.update(part)
        elif kind == EVICT:
            for serial in head["serials"]:
                held.pop(serial, None)
        elif kind == ACK:
            if head["consumer"] not in self._names:
                self.strangers.add(head["consumer"])
            # What a producer acknowledged is in the sample; what a trainer acknowledged is in the model that was lost.
            elif not self.undone or self._flow[head["consumer"]].outputs:
                self._ack(head)
        elif kind == VERSION:
            self.version = self.version if self.undone else head["version"]
        elif kind == MARK:
            self.marks.append(head["name"])
            if not self.undone:
                self._ledger.mark(head["name"], self.version)
                self.undone = head["name"] == self._resume
        elif kind == MEND:
            for name, serials in head["redo"].items():
                for serial in serials:
                    if serial in held:
                        held[serial].uses.pop(name, None)
            for serial in head["gone"]:
                held.pop(serial, None)
            self.next_serial = max(self.next_serial, head["next"])

    def _put(self, head: dict[str, Any], samples: list[SequenceSample]) -> None:
        serials = head["serials"]
        births = head["births"] or [serial + 1 for serial in serials]
        for serial, sample, birth, made in zip(serials, samples, births, head["versions"], strict=True):
            if serial in self.held:
                raise ValueError(f"serial {serial} is put a second time")
            self.held[serial] = Restored(sample, birth, head["births"] is not None, made)
        self.next_serial = max(self.next_serial, *(serial + 1 for serial in serials))

    def _ack(self, head: dict[str, Any]) -> None:
        for serial in head["serials"]:
            entry = self.held.get(serial)
            if entry is None:
                continue  # its put was left out when the file was rewritten
            entry.uses[head["consumer"]] = entry.uses.get(head["consumer"], 0) + 1
            if all(entry.uses.get(one.name, 0) >= one.reuse for one in self._flow):
                self._ledger.train(entry.sample._ids[0], serial)
                del self.held[serial]

    def mend(self, duplicates: bool) -> dict[str, Any]:
        """What a loss of records changes besides: what is left has to be able to go on."""
        redo = {}
        for consumer in self._flow:  # what it made is lost: it has to make it again
            entries = self.held.items()
            lacking = [serial for serial, one in entries if not consumer.outputs <= one.sample.keys]
            redo[consumer.name] = [serial for serial in lacking if consumer.name in self.held[serial].uses]
        gone = []
        if not duplicates:  # an id is put again only when its sample has left: the record of that is among the lost
            newest = {one.sample._ids[0]: serial for serial, one in self.held.items()}
            gone = [serial for serial, one in self.held.items() if newest[one.sample._ids[0]] != serial]
        return {"redo": redo, "gone": gone, "next": self.next_serial + _LOST_SERIALS}
