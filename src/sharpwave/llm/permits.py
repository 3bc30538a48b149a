"""`Permit`: one item that an agent worker may work on; `Permits`: those that are out, by number and by owner."""

from __future__ import annotations

import hashlib
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
    def __init__(self) -> None:
        self.out: dict[int, Permit] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self.out)

    def open(self, key: str, owner: str, item: Item, version: int, seed: int, now: float) -> Permit:
        permit = Permit(self._next, key, owner, item, version, seed, now)
        self._next += 1
        self.out[permit.number] = permit
        return permit

    def has(self, permit: Permit) -> bool:
        return self.out.get(permit.number) == permit

    def end(self, permit: Permit) -> None:
        del self.out[permit.number]

    def of(self, owner: str) -> list[Permit]:
        return [permit for permit in self.out.values() if permit.owner == owner]


def derive_seed(*parts: Any) -> int:
    """63 bits that depend on the parts alone, in every process and on every machine."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
