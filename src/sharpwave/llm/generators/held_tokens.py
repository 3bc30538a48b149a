"""`HeldTokens`: which tokens the cache of each slot holds, and by which version, so that prompts are computed once."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["HeldTokens"]

Ids = np.ndarray[Any, np.dtype[np.int64]]

_FIRST = 8


class HeldTokens:
    """For each place of the cache its token and the version of the weights that made its keys and values; -1 for none.

    A place counts only together with all places before it: keys depend on the whole sequence up to them.
    """

    def __init__(self, slots: int, context: int) -> None:
        self._tokens = np.full((slots, context), -1, np.int64)
        self._versions = np.full((slots, context), -1, np.int64)

    def put(self, slot: int, start: int, tokens: Ids, version: int) -> None:
        self._tokens[slot, start : start + len(tokens)] = tokens
        self._versions[slot, start : start + len(tokens)] = version

    def put_each(self, slots: Ids, places: Ids, tokens: Ids, version: int) -> None:
        """One token of each of these slots, at its place."""
        self._tokens[slots, places] = tokens
        self._versions[slots, places] = version

    def drop(self, slot: int, start: int) -> None:
        """Forgets the places from `start` on. Needed before another sequence goes on there."""
        self._versions[slot, start:] = -1

    def shared(self, ids: Ids, version: int) -> Ids:
        """How many first tokens of `ids` each slot holds, made by `version`."""
        found = np.zeros(len(self._tokens), np.int64)
        if not len(ids):
            return found
        # Most slots differ in the first token, and most others soon after it: few are looked at whole.
        rows = np.flatnonzero((self._tokens[:, 0] == ids[0]) & (self._versions[:, 0] == version))
        for size in (_FIRST, len(ids)):
            size = min(size, len(ids))
            same = (self._tokens[rows, :size] == ids[:size]) & (self._versions[rows, :size] == version)
            is_whole = same.all(axis=1)
            found[rows] = np.where(is_whole, size, same.argmin(axis=1))
            rows = rows[is_whole]
            if size == len(ids) or not len(rows):
                break
        return found
