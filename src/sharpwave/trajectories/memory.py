"""Memory: the trajectories in the cache, those that have no file yet, and the mapped files."""

from __future__ import annotations

import resource
from collections import OrderedDict
from typing import Any

import numpy as np

from .. import _core
from .mapped import Mapped

__all__ = ["Memory"]

Slab = tuple[np.ndarray[Any, Any], _core.SlabLayout]
_MOST_MAPPED = 1_024  # files; a process may map 65,530 regions, and each has a cost in the kernel


def _most_mapped() -> int:
    """Every mapped file keeps a descriptor open, to check its size: at most a quarter of those that are allowed."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_MAPPED if allowed == resource.RLIM_INFINITY else max(8, min(_MOST_MAPPED, allowed // 4))


class Memory:
    """The slabs in memory, by trajectory number; the engine's list of trajectories refers to them. The cache drops the
    oldest first: drawing from a trajectory does not keep it longer, and reading its file does not bring it into the
    cache. Calls are made under the store's lock.

    Args:
        most: Trajectories in the cache; None has no bound.
        most_bytes: Bytes in the cache; None has no bound.
    """

    def __init__(self, rows: _core.Trajectories, most: int | None, most_bytes: int | None) -> None:
        self._rows, self._most, self._most_bytes = rows, most, most_bytes
        self._cached: OrderedDict[int, int] = OrderedDict()  # bytes by number
        self._unsaved: dict[int, Slab] = {}
        self._mapped: OrderedDict[int, Mapped] = OrderedDict()
        self._checked: dict[int, Any] = {}  # identities of files whose checksum was right, mapped or not
        self._most_mapped = _most_mapped()
        self.cached_bytes = 0

    def __len__(self) -> int:
        return len(self._cached)

    def wait(self, number: int, slab: Slab) -> None:
        """Keeps a slab until its file is written."""
        self._unsaved[number] = slab
        self._rows.hold(number, *slab)

    def cache(self, number: int, slab: Slab) -> None:
        """Puts a slab into the cache and drops the oldest ones above the bounds."""
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
        """Replaces a slab in the cache by another form of the same trajectory."""
        if number in self._cached:
            self.cached_bytes += slab[0].nbytes - self._cached[number]
            self._cached[number] = slab[0].nbytes
            self._rows.hold(number, *slab)
            self._make_room()

    def saved(self, number: int) -> None:
        """Tells that a trajectory has its file now."""
        if self._unsaved.pop(number, None) is not None:
            self._let_go(number)

    def unsaved(self, number: int) -> np.ndarray[Any, Any] | None:
        """The slab of a trajectory that has no file yet, in the form of the file; None: it has one."""
        return self._unsaved[number][0] if number in self._unsaved else None

    def forget(self, number: int) -> None:
        """Forgets a trajectory that was deleted."""
        self.cached_bytes -= self._cached.pop(number, 0)
        self._unsaved.pop(number, None)
        self._mapped.pop(number, None)
        self._checked.pop(number, None)

    def empty_cache(self) -> None:
        numbers, self.cached_bytes = list(self._cached), 0
        self._cached.clear()
        self._mapped.clear()
        for number in numbers:
            self._let_go(number)

    def mapped(self, number: int) -> np.ndarray[Any, Any] | None:
        """The mapped slab of a file that has not changed since it was checked; None: there is none."""
        file = self._mapped.get(number)
        if file is None:
            return None
        if not file.file.is_unchanged:
            del self._mapped[number]
            self._checked.pop(number, None)
            return None
        self._mapped.move_to_end(number)
        return file.slab  # type: ignore[no-any-return]

    def checked(self, number: int) -> Any:
        """The identity that a file had when its checksum was compared; None: not yet."""
        return self._checked.get(number)

    def keep_mapped(self, number: int, file: Mapped) -> None:
        self._checked[number] = file.file.identity
        self._mapped[number] = file
        if len(self._mapped) > self._most_mapped:
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
