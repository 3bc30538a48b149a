"""ReplyPool: memory of replies that is used again. New memory of a large batch costs a page fault for every 4 KiB."""

from __future__ import annotations

from typing import Any

import numpy as np

from .batch_layout import BatchLayout
from .message import HEAD_BYTES

__all__ = ["ReplyPool", "Sheet"]

_POOLED = 8  # replies of one batch size
_POOLED_SIZES = 16


class Sheet:
    """The memory of a reply to SAMPLE, with the arrays of its batch: made once, used again and again."""

    __slots__ = ("_pool", "batch", "memory", "odds", "with_odds")

    def __init__(self, layout: BatchLayout, count: int, pool: list[Sheet]) -> None:
        # Two numbers behind the batch, for clients that ask for them.
        whole = np.empty(HEAD_BYTES + layout.places(count).end + 16, np.uint8)
        self.batch = layout.over(whole, HEAD_BYTES, count)
        self.odds = whole[-16:].view(np.float64)
        self.memory, self.with_odds = whole[:-16].data, whole.data
        self._pool = pool

    def free(self, _: Any = None) -> None:
        if len(self._pool) < _POOLED:
            self._pool.append(self)


class ReplyPool:
    """Several threads may take and free at once."""

    def __init__(self, layout: BatchLayout) -> None:
        self._layout = layout
        self._free: dict[int, list[Sheet]] = {}  # by batch size

    def take(self, count: int) -> Sheet:
        free = self._free.get(count)
        if free is None:
            free = self._free[count] = []
            if len(self._free) > _POOLED_SIZES:  # the size that came first leaves
                self._free.pop(next(iter(self._free)), None)
        try:
            return free.pop()
        except IndexError:
            return Sheet(self._layout, count, free)
