"""Shares: how many rows of a batch come from each of several buffers."""

from __future__ import annotations

import math
import threading

__all__ = ["Shares"]


class Shares:
    """Splits batch sizes by fixed shares. What rounding leaves over is carried to the next batch, so the rows taken
    from a buffer never differ from its share of all rows by more than half the number of buffers. No random numbers.

    The first buffer is split off, then the second from the rest, and so on: a split in two with a carried remainder
    needs no more than half a row, and never a negative count. Threads may call at once.
    """

    def __init__(self, shares: tuple[float, ...]) -> None:
        # Of what the buffers before it have left over. The last one takes the rest.
        self._of_rest = [share / sum(shares[i:]) for i, share in enumerate(shares[:-1])]
        self._owed = [0.0] * len(self._of_rest)
        self._lock = threading.Lock()

    def take(self, size: int) -> tuple[list[int], list[float]]:
        """The counts of a batch, and what to give back if the batch is not delivered."""
        counts, changes, left = [], [], size
        with self._lock:
            for i, share in enumerate(self._of_rest):
                exact = left * share
                count = min(max(math.floor(exact + self._owed[i] + 0.5), 0), left)
                self._owed[i] += exact - count
                counts.append(count)
                changes.append(exact - count)
                left -= count
        return [*counts, left], changes

    def give_back(self, changes: list[float]) -> None:
        with self._lock:
            for i, change in enumerate(changes):
                self._owed[i] -= change
