"""The samples that a buffer holds, and one line of them for each consumer: those that it may have, in order.

Not safe for threads: the buffer's one lock is around every call.
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
from .dataflow import Consumer
from .incoming import Incoming
from .sample import SequenceSample

__all__ = ["HeldSample", "Line", "line_of"]


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
    """Entries that are handed out together, in the order of births; the first one's place is theirs."""

    __slots__ = ("birth", "gone", "members", "serial")

    def __init__(self, members: list[HeldSample]) -> None:
        self.members = members
        self.birth, self.serial = members[0].birth, members[0].serial
        self.gone = False


_Item = HeldSample | _Unit


class BirthOrder:
    """Items by (birth, serial), smallest first. Births mostly rise: then both ends cost O(1); the rest is a heap."""

    def __init__(self) -> None:
        self.count = 0
        self._run: deque[Any] = deque()
        self._late: list[tuple[int, int, Any]] = []

    def push(self, item: _Item) -> None:
        run = self._run
        if not run or (run[-1].birth, run[-1].serial) < (item.birth, item.serial):
            run.append(item)
        else:
            heappush(self._late, (item.birth, item.serial, item))
        self.count += 1

    def push_all(self, items: list[HeldSample], are_sorted: bool) -> None:
        """At least one; in bulk where they are in order and behind all others."""
        run = self._run
        if are_sorted and (not run or (run[-1].birth, run[-1].serial) < (items[0].birth, items[0].serial)):
            run.extend(items)
            self.count += len(items)
        else:
            for item in items:
                self.push(item)

    def pop(self) -> Any:
        """The smallest that has not gone."""
        run, late = self._run, self._late
        while True:
            if late and (not run or late[0][:2] < (run[0].birth, run[0].serial)):
                item = heappop(late)[2]
            else:
                item = run.popleft()
            if not item.gone:
                self.count -= 1
                return item

    def lost_one(self) -> None:
        """An item inside has gone. Its place is cleared when as many have gone as are left."""
        self.count -= 1
        if len(self._run) + len(self._late) > 2 * self.count + 64:
            self._run = deque(item for item in self._run if not item.gone)
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
        self._order.push(entry)

    def make_all_ready(self, entries: list[HeldSample], are_sorted: bool, now: float) -> None:
        """At least one entry. They have the line's bit in ``queued`` already."""
        self._order.push_all(entries, are_sorted)

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

    def make_all_ready(self, entries: list[HeldSample], are_sorted: bool, now: float) -> None:
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

    def make_all_ready(self, entries: list[HeldSample], are_sorted: bool, now: float) -> None:
        for entry in entries:
            self.make_ready(entry, now)

    def _release(self, members: list[HeldSample]) -> None:
        members.sort(key=lambda entry: (entry.birth, entry.serial))
        unit = _Unit(members)
        for entry in members:
            self._units[entry.serial] = unit
        self._order.push(unit)

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


def line_of(consumer: Consumer, number: int, need: int) -> Line:
    kind = _Windowed if consumer.window else _Grouped if consumer.group_size else Line
    return kind(consumer, number, need)
