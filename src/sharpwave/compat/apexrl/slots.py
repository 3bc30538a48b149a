"""Slots: the place of each row of the engine in ApexRL's ring."""

from __future__ import annotations

from typing import Any

import numpy as np

import sharpwave as sw

__all__ = ["Slots"]


class Slots:
    """Counts rows as they are added by one writer."""

    def __init__(self, capacity: int, first_slot: int = 0) -> None:
        self.capacity, self.first_slot = capacity, first_slot
        self.added = 0
        self.first_serial = self.lap = 0

    def count(self, inner: sw.ReplayBuffer, rows: int) -> None:
        if not self.added:
            stats = inner.stats()
            self.lap = stats["blocks"] * stats["block_rows"]
            self.first_serial = int(next(iter(inner.rows(1)))["indices"][0])
        self.added += rows

    @property
    def pos(self) -> int:
        return (self.first_slot + self.added) % self.capacity

    def serials(self, slots: np.ndarray[Any, Any], added: int) -> np.ndarray[Any, Any]:
        """Of the rows in these slots, after so many had been added."""
        pos = (self.first_slot + added) % self.capacity
        row = slots + (added - pos) - np.where(slots < pos, 0, self.capacity)
        # One writer gives its rows consecutive serials. The engine's ring consists of whole blocks: a lap may have a
        # few serials more than the capacity, and those at its end are not used.
        return np.asarray(self.first_serial + row // self.capacity * self.lap + row % self.capacity)
