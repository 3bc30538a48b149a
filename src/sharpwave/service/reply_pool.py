"""ReplyPool: memory of replies that is used again. New memory of a large batch costs a page fault for every 4 KiB."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..rows.protocol import Batch
from .batch_layout import BatchLayout
from .message import HEAD_BYTES

__all__ = ["ReplyPool"]

_POOLED = 8  # replies of one batch size
_POOLED_SIZES = 16
_ODDS_BYTES = 16  # two numbers behind the batch, for clients that ask for them


class ReplyPool:
    """Several threads may take and free at once."""

    def __init__(self, layout: BatchLayout) -> None:
        self._layout = layout
        self._free: dict[int, list[tuple[Any, Batch]]] = {}  # by batch size

    def take(self, count: int) -> tuple[Any, Batch]:
        """Memory of a reply with room for two float64 behind the batch, and the batch, whose arrays are views of it."""
        try:
            return self._free[count].pop()
        except (KeyError, IndexError):
            memory = np.empty(HEAD_BYTES + self._layout.places(count).end + _ODDS_BYTES, np.uint8)
            return memory, self._layout.over(memory, HEAD_BYTES, count)

    def free(self, count: int, memory: Any, views: Batch) -> None:
        free = self._free.setdefault(count, [])
        if len(free) < _POOLED:
            free.append((memory, views))
        if len(self._free) > _POOLED_SIZES:  # the size that came first leaves
            self._free.pop(next(iter(self._free)), None)
