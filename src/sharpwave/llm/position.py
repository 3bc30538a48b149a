"""`Position`: which item comes next, and which are still open; saved in a checkpoint."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from typing import Any

import numpy as np

from ..errors import SchemaError
from .items import Items

__all__ = ["OUTCOMES", "Position"]

OUTCOMES = ("trained", "no_signal", "rejected")


class Position:
    """Items in epochs. A key is `epoch/id`: each is handed out until it is settled, and settled once.

    The state is a cursor in the order of the present epoch, the keys that are open, and the keys beyond the cursor that
    need not be handed out (a restart finds these in the buffer).

    Args:
        items: The data.
        epochs: How often each item is trained; None for ever.
        seed: Of the order; each epoch has its own.
        shuffle: Whether epochs have random orders.
    """

    def __init__(self, items: Items, *, epochs: int | None = None, seed: int = 0, shuffle: bool = True) -> None:
        self._items, self._epochs, self._seed, self._shuffle = items, epochs, seed, shuffle
        self.epoch, self._cursor = 0, 0
        self._order = self._order_of(0)
        self._places: dict[int, dict[str, int]] = {}
        self.open: dict[str, int] = {}
        """Keys that were handed out and are not settled, each with how often it was lost."""
        self._again: deque[str] = deque()
        self._ahead: set[str] = set()
        self.outcomes: Counter[str] = Counter()
        self._left: dict[int, int] = {}  # per epoch: keys that are not settled
        self._trained: Counter[int] = Counter()  # per epoch that is not over
        self._rejected: Counter[int] = Counter()  # as well
        self.empty_epoch: int | None = None
        """An epoch that is over, and in which nothing was trained."""
        self.has_rejected = False
        """Whether items of that epoch were rejected."""
        self.is_closed = False
        """Whether `close` was called."""

    def _order_of(self, epoch: int) -> list[str]:
        ids = self._items.ids
        if not self._shuffle:
            return ids
        return [ids[place] for place in np.random.default_rng([self._seed, epoch]).permutation(len(ids))]

    # ---- handing out -------------------------------------------------------------------------------------------------

    @property
    def has_next(self) -> bool:
        """Whether an item can be handed out now."""
        self._skip()
        return bool(self._again) or not self._is_exhausted

    @property
    def is_over(self) -> bool:
        """Whether every item of every epoch is settled, or of those that were handed out before `close`."""
        return not self.has_next and not self.open

    def close(self) -> None:
        """No other key is handed out: those that are open are the last. A checkpoint does not keep this."""
        self.is_closed = True

    def peek(self) -> str:
        """The key that `next` gives."""
        self._skip()
        return self._again[0] if self._again else self._key()

    def next(self) -> str:
        """The next key; it is open from now on. Keys that come again go first."""
        key = self.peek()
        if self._again:
            return self._again.popleft()
        self._cursor += 1
        self.open[key] = 0
        self._count_left(self.epoch)
        return key

    def birth(self, key: str) -> int:
        """The place of a key in the order of all epochs, from 1."""
        epoch, name = self.split(key)
        if epoch not in self._places:
            order = self._order if epoch == self.epoch else self._order_of(epoch)
            self._places[epoch] = {one: place for place, one in enumerate(order)}
            for old in sorted(self._places)[:-2]:  # an older epoch is made again where it is needed
                if old != epoch:
                    del self._places[old]
        return epoch * len(self._items) + self._places[epoch][name] + 1

    @staticmethod
    def split(key: str) -> tuple[int, str]:
        epoch, _, name = key.partition("/")
        return int(epoch), name

    @property
    def _is_exhausted(self) -> bool:
        return self.is_closed or (self._epochs is not None and self.epoch >= self._epochs)

    def _key(self) -> str:
        return f"{self.epoch}/{self._order[self._cursor]}"

    def _skip(self) -> None:
        """Moves the cursor behind the keys that are done or open already."""
        while not self._is_exhausted:
            if self._cursor == len(self._order):
                self._count_left(self.epoch)
                self.epoch, self._cursor = self.epoch + 1, 0
                self._order = self._order_of(self.epoch)
            elif self._ahead and self._key() in self._ahead:
                self._ahead.remove(self._key())
                self._cursor += 1
            else:
                return

    # ---- what became of them -----------------------------------------------------------------------------------------

    def lose(self, key: str, limit: int, *, is_next: bool = False) -> bool:
        """The work on an open item is lost: it comes again, unless that happened `limit` times. Whether it does.

        Args:
            is_next: It comes before all others that come again; otherwise after them.
        """
        self.open[key] += 1
        if self.open[key] > limit:
            self.settle(key, "rejected")
            return False
        if is_next:
            self._again.appendleft(key)
        else:
            self._again.append(key)
        return True

    def give_back(self, key: str) -> None:
        """It was handed out and not begun."""
        self._again.appendleft(key)

    def missing(self, there: Collection[str]) -> list[str]:
        """Open keys that are neither there nor to be handed out again."""
        known = {*there, *self._again}
        return [key for key in self.open if key not in known]

    def claim(self, key: str) -> bool:
        """Takes a key out of turn, for work that was begun before a restart. Whether it still is to be done."""
        if key in self._again:
            self._again.remove(key)
            return True
        epoch, name = self.split(key)
        is_past = self._epochs is not None and epoch >= self._epochs
        if key in self.open or key in self._ahead or is_past or name not in self._items or self._is_behind(key):
            return False
        self._ahead.add(key)
        self.open[key] = 0
        self._count_left(epoch)
        return True

    def settle(self, key: str, outcome: str) -> None:
        """Raises:
        SchemaError: The key is not open. It would be counted twice.
        """
        if self.open.pop(key, None) is None:
            raise SchemaError(f"settle(): {key!r} is not open; it was settled before, or never handed out")
        self.outcomes[outcome] += 1
        epoch, _ = self.split(key)
        self._count_left(epoch)
        self._left[epoch] -= 1
        self._trained[epoch] += outcome == "trained"
        self._rejected[epoch] += outcome == "rejected"
        if not self._left[epoch]:
            if not self._trained[epoch]:
                self.empty_epoch, self.has_rejected = epoch, self._rejected[epoch] > 0
            del self._left[epoch], self._trained[epoch], self._rejected[epoch]

    def _count_left(self, epoch: int) -> None:
        if epoch not in self._left:
            self._left[epoch] = len(self._items)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        self._skip()
        return {
            "data": self._items.fingerprint,
            "seed": self._seed if self._shuffle else None,
            "epoch": self.epoch,
            "cursor": self._cursor,
            "open": dict(self.open),
            "ahead": sorted(self._ahead),
            "outcomes": dict(self.outcomes),
            "left": {str(epoch): count for epoch, count in self._left.items()},
            "trained": {str(epoch): count for epoch, count in self._trained.items()},
            "rejected": {str(epoch): count for epoch, count in self._rejected.items()},
        }

    def restore(self, said: dict[str, Any] | None, held: Collection[str], used: Collection[str]) -> None:
        """Goes on from a saved position.

        Args:
            said: What `to_json` gave; None where nothing was saved.
            held: Keys of the samples in the buffer, whatever the position says of them. They are open.
            used: Keys that the buffer says are trained, among them all since the position was saved.

        Raises:
            SchemaError: The position is one in other data.
        """
        if said is not None:
            seed = self._seed if self._shuffle else None
            if (said["data"], said["seed"]) != (self._items.fingerprint, seed):
                raise SchemaError(
                    f"the checkpoint is a position in {said['data']}, seed {said['seed']}; this run has "
                    f"{self._items.fingerprint}, seed {seed}; give the same data, seed= and shuffle="
                )
            self.epoch, self._cursor = said["epoch"], said["cursor"]
            self._order = self._order_of(self.epoch)
            self.open = dict(said["open"])
            self._ahead = set(said["ahead"])
            self.outcomes = Counter(said["outcomes"])
            self._left = {int(epoch): count for epoch, count in said["left"].items()}
            self._trained = Counter({int(epoch): count for epoch, count in said["trained"].items()})
            self._rejected = Counter({int(epoch): count for epoch, count in said["rejected"].items()})
        known, there = set(self._items.ids), set(held)
        strangers = [key for key in held if self.split(key)[1] not in known]
        if strangers:
            raise SchemaError(f"the buffer holds {strangers[0]!r}, which is no item of this run; give the same data")
        for key in held:
            if key not in self.open:
                if self._is_behind(key):
                    self._unsettle(key)
                else:
                    self._ahead.add(key)
                self.open[key] = 0
                self._count_left(self.split(key)[0])
        for key in used:
            if key in self.open and key not in there:
                self.settle(key, "trained")
            elif not self._is_behind(key) and key not in self._ahead:
                self._ahead.add(key)
                self.open[key] = 0
                self.settle(key, "trained")
        waiting = [key for key in self.open if key not in there]
        self._again = deque(sorted(waiting, key=self.birth))

    def _is_behind(self, key: str) -> bool:
        """Whether the cursor is past a key."""
        epoch, _ = self.split(key)
        return epoch < self.epoch or (epoch == self.epoch and (self.birth(key) - 1) % len(self._items) < self._cursor)

    def _unsettle(self, key: str) -> None:
        """The position says that a held sample was trained: the acknowledgement was undone."""
        epoch, _ = self.split(key)
        self.outcomes["trained"] -= 1
        if epoch in self._left:
            self._left[epoch] += 1
            self._trained[epoch] -= 1
        else:  # an epoch that was over; others of it were trained, for all that is known
            self._left[epoch], self._trained[epoch] = 1, 1
