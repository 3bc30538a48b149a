"""Which trajectories are in memory: those in the cache, and those that have no file yet. And which files are mapped."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from .. import _core

__all__ = ["Memory"]

Slab = tuple[np.ndarray[Any, Any], _core.SlabLayout]
_MOST_MAPPED = 1_024  # files; a process may map 65,530 places, and every one costs the kernel something


class Memory:
    """Slabs by trajectory number, over the engine's own list. The cache lets the oldest go first; reading does not make
    young again, and what is read from files does not enter. Under the buffer's lock.

    Args:
        most: Trajectories in the cache; None has no bound.
        most_bytes: Bytes in the cache; None has no bound.
    """

    def __init__(self, rows: _core.Trajectories, most: int | None, most_bytes: int | None) -> None:
        self._rows, self._most, self._most_bytes = rows, most, most_bytes
        self._cached: OrderedDict[int, int] = OrderedDict()  # bytes by number
        self._unsaved: dict[int, Slab] = {}
        self._mapped: OrderedDict[int, np.ndarray[Any, Any]] = OrderedDict()
        self.cached_bytes = 0

    def __len__(self) -> int:
        return len(self._cached)

    def wait(self, number: int, slab: Slab) -> None:
        """Holds a slab until it is saved."""
        self._unsaved[number] = slab
        self._rows.hold(number, *slab)

    def cache(self, number: int, slab: Slab) -> None:
        """Takes a slab into the cache; the oldest make room."""
        self._rows.hold(number, *slab)
        self._cached[number] = slab[0].nbytes
        self.cached_bytes += slab[0].nbytes
        self._make_room()

    def _make_room(self) -> None:
        while self._cached and self._is_over():
            oldest, size = self._cached.popitem(last=False)
            self.cached_bytes -= size
            self._let_go(oldest)

    def is_cached(self, number: int) -> bool:
        return number in self._cached

    def change(self, number: int, slab: Slab) -> None:
        """Another form of one that is in the cache."""
        if number in self._cached:
            self.cached_bytes += slab[0].nbytes - self._cached[number]
            self._cached[number] = slab[0].nbytes
            self._rows.hold(number, *slab)
            self._make_room()

    def saved(self, number: int) -> None:
        """It has a file now."""
        if self._unsaved.pop(number, None) is not None:
            self._let_go(number)

    def unsaved(self, number: int) -> np.ndarray[Any, Any] | None:
        """The slab, as its file is going to be, of one that has none."""
        return self._unsaved[number][0] if number in self._unsaved else None

    def forget(self, number: int) -> None:
        """It is no trajectory of the buffer's any more."""
        self.cached_bytes -= self._cached.pop(number, 0)
        self._unsaved.pop(number, None)
        self._mapped.pop(number, None)

    def empty_cache(self) -> None:
        numbers, self.cached_bytes = list(self._cached), 0
        self._cached.clear()
        self._mapped.clear()
        for number in numbers:
            self._let_go(number)

    def mapped(self, number: int) -> np.ndarray[Any, Any] | None:
        slab = self._mapped.get(number)
        if slab is not None:
            self._mapped.move_to_end(number)
        return slab

    def keep_mapped(self, number: int, slab: np.ndarray[Any, Any]) -> None:
        self._mapped[number] = slab
        if len(self._mapped) > _MOST_MAPPED:
            self._mapped.popitem(last=False)

    def _is_over(self) -> bool:
        return (self._most is not None and len(self._cached) > self._most) or (
            self._most_bytes is not None and self.cached_bytes > self._most_bytes
        )

    def _let_go(self, number: int) -> None:
        if number in self._cached:
            return
        if number in self._unsaved:
            self._rows.hold(number, *self._unsaved[number])
        else:
            self._rows.let_go(number)
