"""The turns of waiting calls: which calls wait for room or for samples, for how long, and which one is woken next.

``try_put``, ``try_get``, ``leave`` and ``pause`` take the gate's lock; it is held around all other calls.
"""

from __future__ import annotations

import time
from typing import Any, TypeVar

import numpy as np

from ..errors import NotReady
from .change import Change
from .gate import Gate
from .incoming import Incoming
from .leases import Claim
from .lines import Line
from .store import Store
from .waiter import Waiter

__all__ = ["WRITE", "Turns"]

_Result = TypeVar("_Result")
_Handles = np.ndarray[Any, np.dtype[np.int64]]
WRITE: _Handles = np.empty(0, np.int64)


class Turns:
    """Putters wait in one list, getters in the list of their consumer's line, both in the order in which they came."""

    def __init__(self, gate: Gate, store: Store) -> None:
        self._gate, self._store, self._lines = gate, store, tuple(store.index.lines.values())
        self._watchdog_s = store.options.watchdog_timeout
        self.putters: list[Waiter] = []
        self.moved_at = time.monotonic()

    def try_put(self, where: str, waiter: Waiter, incoming: Incoming, deadline: float | None) -> _Handles | None:
        """Puts, where it is the waiter's turn and there is room.

        Returns:
            The handles, or ``WRITE`` where there is a journal: then ``plan_put`` is to be committed. None where the
            call has to wait: the waiter is in the list of waiting puts.
        """
        with self._gate.locked(where, deadline):
            self._gate.check_open(where)
            waiter.arm()
            self.tick()
            if not len(incoming):
                return np.empty(0, np.int64)
            origin = incoming.origin
            if origin is not None and self._store.origins.knows(origin):
                return self._store.origins.result(origin)  # type: ignore[no-any-return]
            if self._may_put(waiter, incoming):
                if self._store.journal is not None:
                    return WRITE
                return self.make(self._store.origins.once(origin, lambda: self._store.admit(incoming)))
            self._store.refuse_unfit(incoming)
            _enlist(self.putters, waiter)
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise self._store.full(incoming, len(self.putters) - 1)
            self.check_moving(where, now)
            return None

    def plan_put(self, waiter: Waiter, incoming: Incoming) -> Change[_Handles] | None:
        origin = incoming.origin
        if self._may_put(waiter, incoming) or (origin is not None and self._store.origins.knows(origin)):
            return self._store.origins.once(origin, lambda: self._store.admit(incoming))
        return None

    def _may_put(self, waiter: Waiter, incoming: Incoming) -> bool:
        return (not self.putters or self.putters[0] is waiter) and self._store.fits(incoming)

    def try_get(
        self, waiter: Waiter, line: Line, partial: bool, owner: str | None, deadline: float | None
    ) -> Claim | None:
        """Takes a batch. None where the call has to wait: the waiter is in the list of its line."""
        with self._gate.locked("get()", deadline):
            self._gate.check_open("get()")
            waiter.arm()
            self.tick()
            count = waiter.need
            now = time.monotonic()
            if not line.has(count):
                _enlist(line.waiters, waiter)
                if deadline is None or now < deadline:
                    self.check_moving("get()", now, line)
                    return None
                count = line.ready
                if not partial or not count:
                    raise NotReady(f"get(): {self._store.explain(line, now)}")
            self.moved_at = now
            return self._store.lease(line, count, owner, now)

    def make(self, change: Change[_Result]) -> _Result:
        """The last step of a change: in memory. Waiting calls that can go on are woken."""
        now = time.monotonic()
        result = change.make(now)
        self.moved(now)
        return result

    def moved(self, now: float) -> None:
        """Something changed: wakes the calls that can go on now."""
        self.moved_at = now
        for line in self._lines:
            if line.waiters:
                self._wake(line)
        if self.putters:
            self.wake_putter()

    def leave(self, line: Line | None, waiter: Waiter) -> None:
        """Served, refused or cancelled: the next one gets the chance for which this one may have been woken.

        May be called again: an interrupt (Ctrl-C) can end it anywhere, also before its first instruction.

        Args:
            line: Where it waited for samples; None where it waited for room.
        """
        if waiter.was_listed:
            with self._gate.lock:
                waiters = self.putters if line is None else line.waiters
                if waiter in waiters:
                    waiters.remove(waiter)
                if line is None:
                    self.wake_putter()
                else:
                    self._wake(line)
        waiter.close()

    def tick(self) -> None:
        """Makes the changes that time alone brings: leases expire, the time of groups is up."""
        if self._store.has_clock():
            now = time.monotonic()
            if self._store.tick(now):
                self.moved(now)

    def pause(self, line: Line | None, deadline: float | None) -> float | None:
        """Seconds until a waiting call has to look again although nothing woke it; None for ever."""
        with self._gate.lock:
            times = [deadline, self._store.book.next_expiry(), None if line is None else line.next_deadline()]
            if self._watchdog_s is not None:
                times.append(self.moved_at + self._watchdog_s)
        due = [moment for moment in times if moment is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def check_moving(self, where: str, now: float, line: Line | None = None) -> None:
        """Raises:
        NotReady: The watchdog's time is up.
        """
        if self._watchdog_s is None or now - self.moved_at < self._watchdog_s:
            return
        lines = [line] if line is not None else self._lines
        why = "\n".join(self._store.explain(one, now) for one in lines)
        raise NotReady(f"{where}: nothing has moved for watchdog_timeout={self._watchdog_s:g} s\n{why}")

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

    def wake_putter(self) -> None:
        while self.putters and not self.putters[0].wake():
            self.putters.pop(0)


def _enlist(waiters: list[Waiter], waiter: Waiter) -> None:
    if waiter not in waiters:
        waiter.was_listed = True  # first: an interrupt may come between the two
        waiters.append(waiter)
