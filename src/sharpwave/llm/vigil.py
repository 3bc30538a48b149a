"""`Vigil`: when each owner was last heard, and when the run last moved."""

from __future__ import annotations

from collections.abc import Collection

from .clock import Clock
from .rules import Rules

__all__ = ["Vigil"]


class Vigil:
    def __init__(self, clock: Clock, rules: Rules) -> None:
        self._clock, self._rules = clock, rules
        self._heard: dict[str, float] = {}
        self._moved_at: float | None = None

    @property
    def period_s(self) -> float | None:
        """How often to look; None where there is nothing to look for."""
        times = [one for one in (self._rules.owner_timeout_s, self._rules.watchdog_s) if one is not None]
        return min(times) / 4 if times else None

    def hear(self, owner: str) -> None:
        self._heard[owner] = self._clock.now()

    def forget(self, owner: str) -> None:
        self._heard.pop(owner, None)

    def move(self) -> None:
        self._moved_at = self._clock.now()

    def excuse(self, late_s: float) -> None:
        """This process stood still for so long (Ctrl-Z, a call that blocks), and read nothing meanwhile."""
        now = self._clock.now()
        self._heard = {owner: min(now, heard + late_s) for owner, heard in self._heard.items()}
        if self._moved_at is not None:
            self._moved_at = min(now, self._moved_at + late_s)

    def silent(self, waiting: Collection[str]) -> list[str]:
        """Owners that were not heard for too long. A call that waits is a sign of life."""
        limit, now = self._rules.owner_timeout_s, self._clock.now()
        if limit is None:
            return []
        return [owner for owner, heard in self._heard.items() if now - heard > limit and owner not in waiting]

    def is_still(self) -> bool:
        """Whether nothing has moved for `watchdog_s`, which begins with the first look."""
        if self._moved_at is None:
            self.move()
        limit, moved_at = self._rules.watchdog_s, self._moved_at
        return limit is not None and moved_at is not None and self._clock.now() - moved_at > limit
