"""RLinf's store of the rollouts with the newest weights."""

from __future__ import annotations

import bisect
from typing import Any

from sharpwave.checks import whole
from sharpwave.errors import SchemaError

__all__ = ["PriorityStore"]

Priority = tuple[float, float]


class PriorityStore:
    """Keeps the ``maxsize`` trajectories of the highest priority; among equal ones the newest.

    A priority is a pair, compared in order: upstream gives the lowest and the mean version of the weights that acted.

    Example:
        >>> from sharpwave.compat.rlinf import PriorityStore, Trajectory
        >>> store = PriorityStore(maxsize=2)
        >>> [store.add((version, version), Trajectory(max_episode_length=version)) for version in (3, 1, 2, 0)]
        [True, True, True, False]
        >>> [one.max_episode_length for one in store.topn(2)]
        [3, 2]
        >>> store.get_metric()
        {'discarded_unused': 2}
    """

    def __init__(self, maxsize: int) -> None:
        self.maxsize = whole("PriorityStore", "maxsize", maxsize)
        self._items: list[tuple[Priority, int, Any]] = []  # ascending: by priority, then by age
        self._added = 0
        self._used: set[int] = set()
        self._discarded_unused = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, priority: Priority, data: Any) -> bool:
        """Takes a trajectory; one of the lowest priority makes room. False: all that are here have higher ones."""
        given = tuple(priority)
        if len(given) != 2 or any(part != part for part in given):
            raise SchemaError(f"PriorityStore.add(): priority: expected two numbers, got {priority!r}")
        if len(self._items) == self.maxsize:
            if given < self._items[0][0]:
                self._discarded_unused += 1
                return False
            self._forget(self._items.pop(0)[1])
        bisect.insort(self._items, (given, self._added, data), key=lambda item: item[:2])
        self._added += 1
        return True

    def topn(self, n: int) -> list[Any]:
        """The ``n`` of the highest priority, or as many as there are, highest first. They count as used from then
        on."""
        newest = self._items[-whole("PriorityStore.topn()", "n", n) :]
        self._used.update(number for _, number, _ in newest)
        return [data for _, _, data in reversed(newest)]

    def remove_below(self, threshold: float) -> None:
        """Removes those whose first number is below ``threshold``."""
        kept = []
        for item in self._items:
            if item[0][0] < threshold:
                self._forget(item[1])
            else:
                kept.append(item)
        self._items = kept

    def get_metric(self) -> dict[Any, Any]:
        """``{version: {"ratio": share of all entries of versions}}``, and ``discarded_unused``: how many trajectories
        went, or were not taken, and were never in a ``topn``."""
        counts: dict[int, int] = {}
        for _, _, data in self._items:
            if data.versions is None:
                continue
            for version in data.versions.reshape(-1).tolist():
                counts[round(version)] = counts.get(round(version), 0) + 1
        total = sum(counts.values())
        ratios: dict[Any, Any] = {version: {"ratio": count / total} for version, count in counts.items()}
        return ratios | {"discarded_unused": self._discarded_unused}

    def _forget(self, number: int) -> None:
        if number in self._used:
            self._used.discard(number)
        else:
            self._discarded_unused += 1
