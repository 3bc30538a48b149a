"""The index of the samples held: what each consumer may get next, in time that depends on the batch only.

Not safe for threads: the buffer's one lock is around every call. Nothing here is as long as the capacity: memory is
taken for the samples that are held.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from heapq import heapify, heappop, heappush
from itertools import islice, repeat
from typing import Any

from .. import _core
from ..checks import whole
from ..errors import SchemaError
from .dataflow import Consumer, Dataflow
from .incoming import Incoming
from .sample import SequenceSample

__all__ = ["HeldSample", "Line", "SampleIndex"]

_Key = tuple[int, int, Any]  # birth, serial, and what has them


class HeldSample:
    """One sample and its state for each consumer (one bit each): queued, leased, done."""

    __slots__ = (
        "birth", "bytes", "done", "gone", "group", "have", "leased", "put_at", "queued", "sample", "serial", "tokens",
        "uses", "version",
    )  # fmt: skip

    sample: SequenceSample
    serial: int
    birth: int
    have: int  # the bits of its keys
    tokens: int
    bytes: int
    group: Any
    version: int | None
    put_at: float
    queued: int
    leased: int
    done: int
    uses: dict[int, int] | None  # by line, where something is used more than once
    gone: bool

    @classmethod
    def make_all(cls, incoming: Incoming) -> list[HeldSample]:
        """One a sample, without serials, births and times. In one step: an ``__init__`` for each took half of a put."""
        survey = incoming.survey
        have: list[int] = []
        for mask, end in zip(incoming.masks, survey.ends, strict=True):
            have += repeat(mask, end - len(have))
        return _core.make_all(
            cls, len(incoming), sample=incoming.samples, have=have, tokens=survey.tokens, bytes=survey.bytes,
            group=incoming.groups, version=incoming.versions, queued=0, leased=0, done=0, uses=None, gone=False,
        )  # fmt: skip


class _Unit:
    """Entries that are handed out together."""

    __slots__ = ("gone", "members")

    def __init__(self, members: list[HeldSample]) -> None:
        self.members = members
        self.gone = False


class BirthOrder:
    """Items by (birth, serial), smallest first. Births mostly rise: then both ends cost O(1); the rest is a heap."""

    def __init__(self) -> None:
        self.count = 0
        self._run: deque[_Key] = deque()
        self._late: list[_Key] = []

    def push(self, birth: int, serial: int, item: Any) -> None:
        key = (birth, serial, item)
        if not self._run or self._run[-1] < key:
            self._run.append(key)
        else:
            heappush(self._late, key)
        self.count += 1

    def push_all(self, keys: list[_Key], are_sorted: bool) -> None:
        run = self._run
        if are_sorted and (not run or run[-1] < keys[0]):
            run.extend(keys)
            self.count += len(keys)
        else:
            for key in keys:
                self.push(*key)

    def pop(self) -> Any:
        """The smallest that has not gone."""
        run, late = self._run, self._late
        while True:
            if late and (not run or late[0] < run[0]):
                item = heappop(late)[2]
            else:
                item = run.popleft()[2]
            if not item.gone:
                self.count -= 1
                return item

    def lost_one(self) -> None:
        """An item inside has gone. Its place is cleared when as many have gone as are left."""
        self.count -= 1
        if len(self._run) + len(self._late) > 2 * self.count + 64:
            self._run = deque(key for key in self._run if not key[2].gone)
            self._late = [key for key in self._late if not key[2].gone]
            heapify(self._late)


class Line:
    """The samples that one consumer may have, in the order in which it gets them."""

    def __init__(self, consumer: Consumer, number: int, need: int) -> None:
        self.consumer, self.number, self.need = consumer, number, need
        self.bit = 1 << number
        self.waiters: list[Any] = []
        self.taken = 0  # samples handed out
        self._order = BirthOrder()

    def count(self, where: str, batch_size: int | None, capacity: int) -> int:
        """The samples of a batch: those asked for, or the consumer's own number.

        Raises:
            SchemaError: No such batch can ever be ready.
        """
        consumer = self.consumer
        count = consumer.batch_size if batch_size is None else whole(where, "batch_size", batch_size)
        if count > min(consumer.window or capacity, capacity):
            bound = f"window={consumer.window}" if consumer.window and consumer.window < count else f"{capacity=}"
            raise SchemaError(f"{where}: batch_size: {count} samples are never ready: {bound}; ask for fewer")
        if consumer.group_size is not None and count % consumer.group_size:
            raise SchemaError(f"{where}: batch_size: expected a multiple of group_size={consumer.group_size}")
        return count

    def enter(self, entry: HeldSample) -> None:
        """A new entry, ready or not."""

    def make_ready(self, entry: HeldSample, now: float) -> None:
        entry.queued |= self.bit
        self._order.push(entry.birth, entry.serial, entry)

    def make_all_ready(self, keys: list[_Key], are_sorted: bool, now: float) -> None:
        """Entries, at least one, each behind its birth and serial. They have the line's bit in ``queued`` already."""
        self._order.push_all(keys, are_sorted)

    def has(self, count: int) -> bool:
        return self._order.count >= count

    @property
    def ready(self) -> int:
        """How many samples could be handed out now."""
        return self._order.count

    def take(self, count: int) -> list[HeldSample]:
        """The next ``count``; the caller has checked that there are so many."""
        pop, keep = self._order.pop, ~self.bit
        taken = [pop() for _ in range(count)]
        for entry in taken:
            entry.queued &= keep
        return taken

    def give_back(self, entries: list[HeldSample], now: float) -> None:
        for entry in entries:
            self.make_ready(entry, now)

    def drop(self, entry: HeldSample) -> None:
        """The entry is ``gone`` already."""
        if entry.queued & self.bit:
            entry.queued &= ~self.bit
            self._order.lost_one()

    def uses(self, entry: HeldSample) -> int:
        """How often the consumer has acknowledged it."""
        if entry.done & self.bit:
            return self.consumer.reuse
        return 0 if entry.uses is None else entry.uses.get(self.number, 0)

    def next_deadline(self) -> float | None:
        """When something becomes ready only because time passes."""
        return None

    def tick(self, now: float) -> bool:
        """Makes ready what time makes ready; whether there was any."""
        return False


class _Windowed(Line):
    """Hands out from the oldest ``window`` samples only: a late sample is overtaken by a bounded number.

    A call costs O(window), and a memory move of what is outstanding.
    """

    def __init__(self, consumer: Consumer, number: int, need: int) -> None:
        super().__init__(consumer, number, need)
        self._outstanding: list[tuple[int, int, HeldSample]] = []
        self._window: int = consumer.window or 1

    def enter(self, entry: HeldSample) -> None:
        insort(self._outstanding, (entry.birth, entry.serial, entry))

    def make_ready(self, entry: HeldSample, now: float) -> None:
        entry.queued |= self.bit

    def make_all_ready(self, keys: list[_Key], are_sorted: bool, now: float) -> None:
        """Their bits are all that there is."""

    def _seen(self) -> list[HeldSample]:
        return [key[2] for key in islice(self._outstanding, self._window) if key[2].queued & self.bit]

    def has(self, count: int) -> bool:
        return len(self._seen()) >= count

    @property
    def ready(self) -> int:
        return len(self._seen())

    def take(self, count: int) -> list[HeldSample]:
        taken = self._seen()[:count]
        for entry in taken:
            entry.queued &= ~self.bit
            self._leave(entry)
        return taken

    def give_back(self, entries: list[HeldSample], now: float) -> None:
        for entry in entries:
            self.enter(entry)
            entry.queued |= self.bit

    def drop(self, entry: HeldSample) -> None:
        entry.queued &= ~self.bit
        self._leave(entry)

    def _leave(self, entry: HeldSample) -> None:
        at = bisect_left(self._outstanding, (entry.birth, entry.serial, entry))
        if at < len(self._outstanding) and self._outstanding[at][2] is entry:
            del self._outstanding[at]


class _Grouped(Line):
    """Hands out complete groups, and incomplete ones after the timeout."""

    def __init__(self, consumer: Consumer, number: int, need: int) -> None:
        super().__init__(consumer, number, need)
        self._size: int = consumer.group_size or 1
        self._open: OrderedDict[Any, tuple[float, list[HeldSample]]] = OrderedDict()  # oldest first
        self._units: dict[int, _Unit] = {}

    def make_ready(self, entry: HeldSample, now: float) -> None:
        entry.queued |= self.bit
        _, members = self._open.setdefault(entry.group, (now, []))
        members.append(entry)
        if len(members) == self._size:
            del self._open[entry.group]
            self._release(members)

    def make_all_ready(self, keys: list[_Key], are_sorted: bool, now: float) -> None:
        for _, _, entry in keys:
            self.make_ready(entry, now)

    def _release(self, members: list[HeldSample]) -> None:
        members.sort(key=lambda entry: (entry.birth, entry.serial))
        unit = _Unit(members)
        for entry in members:
            self._units[entry.serial] = unit
        self._order.push(members[0].birth, members[0].serial, unit)

    def has(self, count: int) -> bool:
        return self._order.count >= count // self._size

    @property
    def ready(self) -> int:
        return self._order.count * self._size

    def take(self, count: int) -> list[HeldSample]:
        taken = [entry for _ in range(count // self._size) for entry in self._order.pop().members]
        for entry in taken:
            entry.queued &= ~self.bit
            del self._units[entry.serial]
        return taken

    def give_back(self, entries: list[HeldSample], now: float) -> None:
        together: dict[Any, list[HeldSample]] = {}
        for entry in entries:
            entry.queued |= self.bit
            together.setdefault(entry.group, []).append(entry)
        for members in together.values():
            self._release(members)

    def drop(self, entry: HeldSample) -> None:
        if not entry.queued & self.bit:
            return
        entry.queued &= ~self.bit
        unit = self._units.pop(entry.serial, None)
        if unit is None:
            _, members = self._open[entry.group]
            members.remove(entry)
            if not members:
                del self._open[entry.group]
            return
        unit.members.remove(entry)
        if not unit.members:
            unit.gone = True
            self._order.lost_one()

    def next_deadline(self) -> float | None:
        if self.consumer.group_timeout is None or not self._open:
            return None
        return next(iter(self._open.values()))[0] + self.consumer.group_timeout

    def tick(self, now: float) -> bool:
        moved = False
        while (due := self.next_deadline()) is not None and due <= now:
            self._release(self._open.popitem(last=False)[1][1])
            moved = True
        return moved


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
            kind = _Windowed if consumer.window else _Grouped if consumer.group_size else Line
            self.lines[consumer.name] = kind(consumer, number, self.mask(consumer.inputs))
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
        keys = list(zip(births, serials, entries, strict=True))
        for line in self._windowed:
            for entry in entries:
                line.enter(entry)
        start = 0
        for mask, end in zip(incoming.masks, incoming.survey.ends, strict=True):
            lines = self._ready_for(mask)
            _core.set_all(HeldSample, entries[start:end], queued=sum(line.bit for line in lines))
            for line in lines:
                line.make_all_ready(keys[start:end], are_sorted, now)
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
