"""`Permit`: one item that an agent worker may work on; `Permits`: those that are out, and calls that wait for one."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .items import Item

__all__ = ["Permit", "Permits", "derive_seed"]


@dataclass(frozen=True)
class Permit:
    """What `Controller.start` gives. It is over when the controller has heard `finish` or `reject`, or lost the owner.

    Attributes:
        number: Its own among all permits of a controller.
        key: `epoch/id` of the item, which is the id of the sample to be made.
        owner: Who has it.
        item: The item.
        version: No token may be made by weights before this version.
        seed: For all random draws of this piece of work; another one each time that the item is started.
        began_s: When it was given, by the controller's clock.
    """

    number: int
    key: str
    owner: str
    item: Item
    version: int
    seed: int
    began_s: float


class Permits:
    """For one event loop."""

    def __init__(self) -> None:
        self.out: dict[int, Permit] = {}
        self._next = 0
        self.calls: deque[tuple[str, asyncio.Future[Permit | None]]] = deque()
        """Owners that wait for a permit, first come first served."""

    def __len__(self) -> int:
        return len(self.out)

    def open(self, key: str, owner: str, item: Item, version: int, seed: int, now: float) -> Permit:
        permit = Permit(self._next, key, owner, item, version, seed, now)
        self._next += 1
        self.out[permit.number] = permit
        return permit

    def adopt(self, permit: Permit) -> Permit:
        """A permit of another controller, under a number of this one."""
        return self.open(permit.key, permit.owner, permit.item, permit.version, permit.seed, permit.began_s)

    def has(self, permit: Permit) -> bool:
        return self.out.get(permit.number) == permit

    def end(self, permit: Permit) -> None:
        del self.out[permit.number]

    def of(self, owner: str) -> list[Permit]:
        return [permit for permit in self.out.values() if permit.owner == owner]

    def waiting(self) -> set[str]:
        return {owner for owner, _ in self.calls}

    def owners(self) -> set[str]:
        return {permit.owner for permit in self.out.values()} | self.waiting()

    def oldest(self) -> Permit | None:
        return min(self.out.values(), key=lambda permit: (permit.began_s, permit.number), default=None)

    async def wait(self, owner: str, serve: Callable[[], None], give_back: Callable[[Permit], None]) -> Permit | None:
        """What `serve` gives this call, at once or later. A permit for a call that is cancelled is given back."""
        call: asyncio.Future[Permit | None] = asyncio.get_running_loop().create_future()
        self.calls.append((owner, call))
        serve()
        try:
            return await call
        except asyncio.CancelledError:
            if call.done() and not call.cancelled() and call.exception() is None:
                permit = call.result()
                if permit is not None and self.has(permit):
                    self.end(permit)
                    give_back(permit)
            with suppress(ValueError):
                self.calls.remove((owner, call))
            serve()
            raise

    def dismiss(self, owner: str) -> None:
        """Ends the calls of an owner that is dead."""
        for call in [one for one in self.calls if one[0] == owner]:
            self.calls.remove(call)
            call[1].cancel()


def derive_seed(*parts: Any) -> int:
    """63 bits that depend on the parts alone, in every process and on every machine."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
