"""Whose turn it is: the calls that wait for room or for samples, and who is woken when something changed.

The gate's lock is around every call but ``leave``, which takes it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from .gate import Gate
from .index import Line
from .waiting import Waiter

__all__ = ["Turns"]


class Turns:
    """Putters wait in one list, getters in the list of their consumer's line, both in the order in which they came."""

    def __init__(self, gate: Gate, lines: Iterable[Line]) -> None:
        self._gate, self._lines = gate, tuple(lines)
        self.putters: list[Waiter] = []
        self.moved_at = time.monotonic()

    def is_next(self, waiter: Waiter) -> bool:
        """Whether a putter may go on."""
        return not self.putters or self.putters[0] is waiter

    def moved(self, now: float) -> None:
        """Something changed: wakes those who can go on now."""
        self.moved_at = now
        for line in self._lines:
            if line.waiters:
                self._wake(line)
        if self.putters:
            self._wake_putter()

    def leave(self, waiters: list[Waiter], waiter: Waiter) -> None:
        """Served, refused or cancelled: the next one gets the chance for which this one may have been woken."""
        if waiter not in waiters:  # only its own thread puts it there
            waiter.close()
            return
        with self._gate.lock:
            waiters.remove(waiter)
            waiter.close()
            if waiters is self.putters:
                self._wake_putter()
            else:
                self._wake(next(line for line in self._lines if line.waiters is waiters))

    def wake_all(self) -> None:
        for waiters in (self.putters, *(line.waiters for line in self._lines)):
            for waiter in waiters:
                waiter.wake()

    def _wake(self, line: Line) -> None:
        """As many waiting getters as can be served."""
        room = line.ready
        for waiter in list(line.waiters):
            if waiter.need <= room:
                if waiter.wake():
                    room -= waiter.need
                else:
                    line.waiters.remove(waiter)

    def _wake_putter(self) -> None:
        while self.putters and not self.putters[0].wake():
            self.putters.pop(0)
