"""The ledger of used ids and checkpoints, and the state that the records of a journal lead to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..errors import StorageError
from ..files import Record, reading
from ..files.origin import Origin
from .dataflow import Dataflow
from .history import ACK, AMEND, BASE, CLEAR, EVICT, MARK, MEND, OPTIONS, PUT, VERSION, read_head, read_samples
from .origins import Origins
from .sample import SequenceSample

__all__ = ["Ledger", "Replay", "Restored"]

_LOST_SERIALS = 1 << 32  # more than a lost record can have given: no handle is given twice


@dataclass
class Mark:
    name: str
    version: int
    used: list[str]
    trained: int
    freed: set[int] = field(default_factory=set)  # serials used up since then: a restart from here needs them again


class Ledger:
    """Ids in the order in which they were used up, and the marks of the last two checkpoints."""

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
        # One that is asked for again takes the place of itself: its caller may still need the one before.
        before = [mark for mark in self.marks if mark.name != name]
        self.marks = [*before[-1:], Mark(name, version, list(self.used), self.trained)]

    def mark_used(self, ids: Iterable[Any]) -> None:
        """These were used before the restart: they count as used, and ``wanted`` skips each once."""
        self.used = [str(one) for one in ids]
        self.skips = Counter(self.used)

    def skips_now(self, name: str) -> bool:
        """Whether this id was used or held at the restart; it is skipped once for each time."""
        if self.skips[name] > 0:
            self.skips[name] -= 1
            return True
        return False

    def unskip(self, name: str) -> None:
        """A sample that was held at the restart is dropped: a loader has to make it again."""
        self.skips_now(name)

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


class Replay:
    """The state that the records so far have led to.

    Args:
        where: The call and argument that name the file, for messages.
        path: The file.
        flow: The consumers of the buffer that reads it.
        ledger: Is filled.
        origins: Likewise.
        resume: The mark behind which acknowledgements of trainers are undone.
    """

    def __init__(
        self, where: str, path: Any, flow: Dataflow, ledger: Ledger, origins: Origins, resume: str | None
    ) -> None:
        self._where, self._path = where, path
        self._flow, self._ledger, self._origins, self._resume = flow, ledger, origins, resume
        self._names = {consumer.name for consumer in flow}
        self.held: dict[int, Restored] = {}
        self.version = self.next_serial = self.count = 0
        self.options: dict[str, Any] | None = None
        self._undone = False  # behind the mark to resume from
        self._marks: list[str] = []
        self._strangers: set[str] = set()

    def read(self, records: Iterable[Record]) -> None:
        """Applies all records of a file.

        Raises:
            StorageError: Damage, no mark of the name to resume from, or a consumer that this dataflow lacks.
        """
        for record in records:
            with reading(self._where, self._path, record):
                self.apply(record.kind, read_head(record), record.body)
            self.count += 1
        if self._resume is not None and not self._undone:
            raise StorageError(
                f"{self._where}: {self._path}: resume: expected one of the marks {self._marks}, got {self._resume!r}"
            )
        if self._strangers:
            names = sorted(self._strangers)
            raise StorageError(f"{self._where}: {self._path}: acknowledged by {names}, consumers that are not here")

    def finish(self) -> None:
        """After the last record: a loader that starts over comes across the ids that were used or are held."""
        self._ledger.mark_used(self._ledger.used)
        self._ledger.skips.update(one.sample._ids[0] for one in self.held.values())

    def apply(self, kind: int, head: dict[str, Any], body: bytearray) -> None:
        held = self.held
        if "origin" in head and not (self._undone and kind in (ACK, VERSION, MARK)):
            run = (head["serials"][0], len(head["serials"])) if kind == PUT else None
            self._origins.keep(Origin.read(head["origin"]), run)
        if kind == OPTIONS:
            if self.count:
                raise ValueError("options: expected in the first record only")
            self.options = head
        elif kind == BASE:
            self._ledger.used, self._ledger.trained = list(head["used"]), head["trained"]
            self.version, self.next_serial = head["version"], head["next"]
            self._origins.read(head.get("origins", []))
        elif kind == PUT:
            self._put(head, read_samples(body))
        elif kind == AMEND:
            for serial, part in zip(head["serials"], read_samples(body), strict=True):
                if serial in held:
                    held[serial].sample = held[serial].sample.update(part)
            if "consumer" in head:
                self._acknowledge(head)
        elif kind == CLEAR:
            held.clear()
        elif kind == EVICT:
            for serial in head["serials"]:
                held.pop(serial, None)
        elif kind == ACK:
            self._acknowledge(head)
        elif kind == VERSION:
            self.version = self.version if self._undone else head["version"]
        elif kind == MARK:
            self._marks.append(head["name"])
            if not self._undone:
                self._ledger.mark(head["name"], self.version)
                self._undone = head["name"] == self._resume
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
        for name, uses in head.get("uses", {}).items():  # of a saved instant
            if any(uses) and name not in self._names:
                self._strangers.add(name)
            for serial, count in zip(serials, uses, strict=True):
                if count:
                    self.held[serial].uses[name] = count
        for serial in serials if "uses" in head else ():
            self._leave_if_used(serial)

    def _acknowledge(self, head: dict[str, Any]) -> None:
        if head["consumer"] not in self._names:
            self._strangers.add(head["consumer"])
            return
        # What a producer acknowledged is in the sample; what a trainer acknowledged is in the model that was lost.
        if self._undone and not self._flow[head["consumer"]].outputs:
            return
        for serial in head["serials"]:
            entry = self.held.get(serial)
            if entry is None:
                continue  # its put was left out when the file was rewritten
            entry.uses[head["consumer"]] = entry.uses.get(head["consumer"], 0) + 1
            self._leave_if_used(serial)

    def _leave_if_used(self, serial: int) -> None:
        entry = self.held[serial]
        if all(entry.uses.get(one.name, 0) >= one.reuse for one in self._flow):
            self._ledger.train(entry.sample._ids[0], serial)
            del self.held[serial]

    def mend(self, duplicates: bool) -> dict[str, Any]:
        """The head of the record that a loss of records makes necessary, so that the buffer can go on.

        Args:
            duplicates: Whether an id may be held more than once.
        """
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
