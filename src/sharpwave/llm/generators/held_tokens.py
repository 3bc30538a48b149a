"""`HeldTokens`: which tokens the cache of each slot holds, and by which version, so that prompts are computed once."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import numpy as np

__all__ = ["HeldTokens"]

Ids = np.ndarray[Any, np.dtype[np.int64]]

_FIRST = 8
_BLOCK = 32


class HeldTokens:
    """The tokens that are in each slot's cache, and how many of the first of them one version of the weights made.

    A place counts only together with all places before it: keys depend on the whole sequence up to them. Slots are
    found by their first tokens, because most of them differ there from what is looked for.
    """

    def __init__(self, slots: int, context: int) -> None:
        self._tokens = np.full((slots, context), -1, np.int32)
        self._made = np.zeros(slots, np.int64)  # places from the first on that `_version` made
        self._version = np.full(slots, -1, np.int64)
        self._keys: list[bytes | None] = [None] * slots  # of the first tokens
        self._slots: dict[bytes, set[int]] = {}  # by key

    def put(self, slot: int, start: int, tokens: Ids, version: int) -> None:
        end = start + len(tokens)
        self._tokens[slot, start:end] = tokens
        if version == self._version[slot] or start == 0:
            if version != self._version[slot]:
                self._version[slot], self._made[slot] = version, 0
            if start <= self._made[slot]:
                self._made[slot] = max(self._made[slot], end)
        else:
            self._made[slot] = min(self._made[slot], start)
        if start < _FIRST:
            self._index(slot)

    def put_each(self, slots: Ids, places: Ids, tokens: Ids, version: int) -> None:
        """One token of each of these slots, at its place."""
        if places.min(initial=_FIRST) < _FIRST:
            is_first = places < _FIRST
            for slot, place, token in zip(slots[is_first], places[is_first], tokens[is_first], strict=True):
                self.put(int(slot), int(place), np.array([token]), version)
            slots, places, tokens = slots[~is_first], places[~is_first], tokens[~is_first]
        self._tokens[slots, places] = tokens
        made, is_same = self._made[slots], self._version[slots] == version
        self._made[slots] = np.where(is_same, made + (made == places), np.minimum(made, places))

    def drop(self, slot: int, start: int) -> None:
        """Forgets the places from `start` on. Needed before another sequence goes on there."""
        self._made[slot] = min(self._made[slot], start)
        if start < _FIRST:
            self._index(slot)

    def longest(self, ids: Ids, version: int, among: Container[int]) -> tuple[int, int]:
        """The slot of `among` that holds most of the first tokens of `ids`, made by `version`, and how many it holds.

        Of equals the first; (-1, 0) where none holds any. Of longer `ids`, slots that hold less than 8 do not count:
        computing so few takes no longer than copying them.
        """
        size = len(ids)
        places: Iterable[int] = range(len(self._keys)) if size else ()
        if size >= _FIRST:
            places = sorted(self._slots.get(_key(ids[:_FIRST], version), ()))
        found = [slot for slot in places if slot in among]
        if not found:
            return -1, 0
        slots, ids = np.array(found), ids.astype(np.int32)
        # Another answer to the same prompt holds all of it, and few others hold its last token.
        for slot in slots[(self._tokens[slots, size - 1] == ids[-1]) & (self._made[slots] >= size)].tolist():
            if self.count(slot, ids, version) == size:
                return slot, size
        slots = slots[self._version[slots] == version]
        best = (-1, 0)
        for start in range(0, size, _BLOCK):  # where prompts begin alike, most slots hold the first blocks
            end = min(start + _BLOCK, size)
            same = self._tokens[slots, start:end] == ids[start:end]
            least = same.argmin(1)
            counts = np.where(same[np.arange(len(slots)), least], end - start, least)
            counts = np.minimum(counts, np.maximum(self._made[slots] - start, 0))
            if not (most := counts.max(initial=0)):
                break
            best = int(slots[counts.argmax()]), start + int(most)
            slots = slots[counts == end - start]
        return best

    def count(self, slot: int, ids: Ids, version: int) -> int:
        """How many first tokens of `ids` a slot holds, made by `version`."""
        size = min(len(ids), int(self._made[slot]))
        if size == 0 or self._version[slot] != version:
            return 0
        same = self._tokens[slot, :size] == ids[:size]
        least = int(same.argmin())
        return size if same[least] else least

    def _index(self, slot: int) -> None:
        """Finds the slot by what its first places hold now."""
        key = None
        if self._made[slot] >= _FIRST:
            key = _key(self._tokens[slot, :_FIRST], int(self._version[slot]))
        before, self._keys[slot] = self._keys[slot], key
        if before == key:
            return
        if before is not None:
            self._slots[before].discard(slot)
            if not self._slots[before]:
                del self._slots[before]
        if key is not None:
            self._slots.setdefault(key, set()).add(slot)


def _key(first: np.ndarray[Any, Any], version: int) -> bytes:
    tokens: bytes = first.astype(np.int32).tobytes()
    return tokens + version.to_bytes(8, "little", signed=True)
