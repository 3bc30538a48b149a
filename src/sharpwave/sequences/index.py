"""The index of the samples held: what each consumer may get next, in time that depends on the batch only.

Not safe for threads: the buffer's one lock is around every call. Nothing here is as long as the capacity: memory is
taken for the samples that are held.
"""

from __future__ import annotations

from typing import Any

from .. import _core
from ..errors import SchemaError
from .dataflow import Dataflow
from .incoming import Incoming
from .lines import HeldSample, Line, line_of
from .sample import SequenceSample

__all__ = ["SampleIndex"]


class SampleIndex:
    """All entries, and one line a consumer."""

    def __init__(self, flow: Dataflow) -> None:
        self.entries: dict[int, HeldSample] = {}
        self.by_id: dict[str, HeldSample] = {}
        self.tokens = self.bytes = 0
        self._key_bit = {key: 1 << at for at, key in enumerate(sorted(flow.keys))}
        self._masks: dict[frozenset[str], int] = {}
        self._readies: dict[int, tuple[Line, ...]] = {}
        self.lines: dict[str, Line] = {}
        for number, consumer in enumerate(flow):
            self.lines[consumer.name] = line_of(consumer, number, self.mask(consumer.inputs))
        self._all = (1 << len(flow)) - 1
        self._ordered = tuple(self.lines.values())
        self._windowed = tuple(line for line in self._ordered if line.consumer.window)
        self._versions: dict[int, dict[int, HeldSample]] = {}  # by version, then serial

    def line(self, where: str, consumer: Any) -> Line:
        line = self.lines.get(consumer) if isinstance(consumer, str) else None
        if line is None:
            names = ", ".join(self.lines)
            raise SchemaError(f"{where}: consumer: expected one of {names}, got {consumer!r}")
        return line

    def mask(self, keys: frozenset[str]) -> int:
        """One bit for each key that a consumer reads."""
        mask = self._masks.get(keys)
        if mask is None:
            mask = sum(self._key_bit.get(key, 0) for key in keys)
            if len(self._masks) < 4096:
                self._masks[keys] = mask
        return mask

    def _ready_for(self, have: int) -> tuple[Line, ...]:
        lines = self._readies.get(have)
        if lines is None:
            lines = tuple(line for line in self._ordered if have & line.need == line.need)
            if len(self._readies) < 4096:
                self._readies[have] = lines
        return lines

    def add(self, incoming: Incoming, serials: list[int], now: float) -> list[HeldSample]:
        """New samples, at least one. In bulk: neighbours mostly have the same keys."""
        are_sorted = incoming.births is None
        births = incoming.births or list(range(serials[0] + 1, serials[-1] + 2))
        entries = self._hold(incoming, serials, births, now)
        for line in self._windowed:
            for entry in entries:
                line.enter(entry)
        start = 0
        for mask, end in zip(incoming.masks, incoming.survey.ends, strict=True):
            lines = self._ready_for(mask)
            same = entries[start:end]
            _core.set_all(HeldSample, same, queued=sum(line.bit for line in lines))
            for line in lines:
                line.make_all_ready(same, are_sorted, now)
            start = end
        return entries

    def restore(
        self, incoming: Incoming, serials: list[int], uses: list[dict[str, int]], now: float
    ) -> list[HeldSample]:
        """Samples that consumers may have used, by the consumer's name."""
        births = incoming.births or []
        entries = self._hold(incoming, serials, births, now)
        for entry, used in zip(entries, uses, strict=True):
            for line in self._ordered:
                count = used.get(line.consumer.name, 0)
                if count >= line.consumer.reuse:
                    entry.done |= line.bit
                elif count:
                    entry.uses = {**(entry.uses or {}), line.number: count}
            for line in self._windowed:
                if not entry.done & line.bit:
                    line.enter(entry)
            for line in self._ready_for(entry.have):
                if not entry.done & line.bit:
                    line.make_ready(entry, now)
        return entries

    def _hold(self, incoming: Incoming, serials: list[int], births: list[int], now: float) -> list[HeldSample]:
        entries: list[HeldSample] = incoming.entries or HeldSample.make_all(incoming)
        _core.set_all(HeldSample, entries, serial=serials, birth=births, put_at=now)
        self.entries.update(zip(serials, entries, strict=True))
        self.by_id.update(zip(incoming.survey.ids, entries, strict=True))
        self.tokens += incoming.tokens
        self.bytes += incoming.bytes
        if incoming.versions.count(None) < len(entries):
            for entry in entries:
                if entry.version is not None:
                    self._versions.setdefault(entry.version, {})[entry.serial] = entry
        return entries

    def amend(self, entry: HeldSample, merged: SequenceSample, tokens: int, nbytes: int, have: int, now: float) -> None:
        """The sample with further keys, whose bits are ``have``."""
        entry.sample = merged
        self.tokens += tokens - entry.tokens
        self.bytes += nbytes - entry.bytes
        entry.tokens, entry.bytes = tokens, nbytes
        entry.have = have = entry.have | have
        if not entry.gone:
            busy = entry.queued | entry.leased | entry.done
            for line in self._ready_for(have):
                if not busy & line.bit:
                    line.make_ready(entry, now)

    def take(self, line: Line, count: int) -> list[HeldSample]:
        taken = line.take(count)
        for entry in taken:
            entry.leased |= line.bit
        line.taken += len(taken)
        return taken

    def give_back(self, line: Line, entries: list[HeldSample], now: float) -> list[HeldSample]:
        """The entries wait again; those condemned meanwhile leave. Returns those that left."""
        back, left = [], []
        for entry in entries:
            entry.leased &= ~line.bit
            if not entry.gone:
                back.append(entry)
            elif not entry.leased:
                left.append(entry)
        line.give_back(back, now)
        for entry in left:
            self._forget(entry)
        return left

    def finish(self, line: Line, entries: list[HeldSample], now: float) -> tuple[list[HeldSample], list[HeldSample]]:
        """Counts one use by the line. Returns the entries that left used up, and those that left condemned."""
        freed, left, again = [], [], []
        for entry in entries:
            entry.leased &= ~line.bit
            if self._use(line, entry):
                entry.done |= line.bit
            elif not entry.gone:
                again.append(entry)
            if entry.done == self._all and not entry.leased:
                freed.append(entry)
            elif entry.gone and not entry.leased:
                left.append(entry)
        if again:
            line.give_back(again, now)
        for entry in freed:
            self._forget(entry)
        for entry in left:
            self._forget(entry)
        return freed, left

    def _use(self, line: Line, entry: HeldSample) -> bool:
        """Counts one use; whether it was the last."""
        if line.consumer.reuse == 1:
            return True
        if entry.uses is None:
            entry.uses = {}
        entry.uses[line.number] = entry.uses.get(line.number, 0) + 1
        return entry.uses[line.number] >= line.consumer.reuse

    def condemn(self, entry: HeldSample) -> bool:
        """It is not handed out any more; it leaves now (True), or when its leases end."""
        entry.gone = True
        for line in self._ordered:
            line.drop(entry)
        if entry.leased:
            return False
        self._forget(entry)
        return True

    def clear(self) -> None:
        """Everything leaves, leased or not. Newest first: then a windowed line moves nothing in its list."""
        for entry in reversed(list(self.entries.values())):
            entry.leased = 0
            self.condemn(entry)

    def older_than(self, version: int) -> list[HeldSample]:
        """Those of a smaller version that are not condemned yet. O(versions held + found)."""
        old = [held for held in self._versions if held < version]
        return [entry for held in old for entry in self._versions[held].values() if not entry.gone]

    def versions(self) -> dict[int, int]:
        """How many entries each version has."""
        return {version: len(held) for version, held in sorted(self._versions.items())}

    def _forget(self, entry: HeldSample) -> None:
        entry.gone = True
        del self.entries[entry.serial]
        name = entry.sample._ids[0]
        if self.by_id.get(name) is entry:
            del self.by_id[name]
        self.tokens -= entry.tokens
        self.bytes -= entry.bytes
        if entry.version is not None:
            held = self._versions[entry.version]
            del held[entry.serial]
            if not held:
                del self._versions[entry.version]
