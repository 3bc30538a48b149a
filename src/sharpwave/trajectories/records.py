"""Records: the form of a trajectory in the cache, one record for each row with all its leaves side by side."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _core
from .layout import Layout, views
from .trajectory import DTYPES, Leaf

__all__ = ["Records"]

_ALIGN = 16


class Records:
    """The layout of a slab of records. Arrays that have more rows than steps follow whole behind the records: their
    additional rows belong to no record."""

    def __init__(self, leaves: tuple[Leaf, ...], layout: Layout) -> None:
        self._leaves, self._layout = leaves, layout
        offsets = np.cumsum([0, *(leaf.row_bytes for leaf in leaves)]).tolist()
        self._offsets: list[int] = offsets[:-1]
        self._record_bytes = max(_ALIGN, offsets[-1] + -offsets[-1] % _ALIGN)
        at = self._record_bytes * layout.steps * layout.envs
        self._behind: dict[int, int] = {}  # offsets of the arrays with more rows, by leaf number
        for number, (leaf, extra) in enumerate(zip(leaves, layout.epochs, strict=True)):
            if extra:
                self._behind[number] = at
                at += layout.leaf_bytes(leaf, number)
        self.bytes = at
        places = [(offset, leaf.row_bytes, 0, 0, 0, 0) for leaf, offset in zip(leaves, self._offsets, strict=True)]
        self.core = _core.SlabLayout(layout.steps, layout.envs, self.bytes, self._record_bytes, places)

    def make(self, slab: np.ndarray[Any, Any], layout: _core.SlabLayout) -> np.ndarray[Any, Any]:
        """Copies a slab of arrays into a new slab of records."""
        records: Any = _core.new_slab(self.bytes)
        _core.make_records(slab, layout, records, self.core)
        if self._behind:
            arrays = views(slab, self._leaves, self._layout)
            whole = [np.ascontiguousarray(arrays[number]) for number in self._behind]
            _core.copy_into_slab(records, list(self._behind.values()), whole)
        return records  # type: ignore[no-any-return]

    def views(self, records: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """Copies of all leaves as they were added."""
        steps, envs = self._layout.steps, self._layout.envs
        rows = records[: self._record_bytes * steps * envs].reshape(steps, envs, self._record_bytes)
        made = []
        for number, (leaf, offset) in enumerate(zip(self._leaves, self._offsets, strict=True)):
            shape, dtype = (steps, envs, *leaf.shape), DTYPES[leaf.dtype][0]
            if number in self._behind:
                begin = self._behind[number]
                part = records[begin : begin + self._layout.leaf_bytes(leaf, number)].copy()
                shape = (steps + self._layout.epochs[number], envs, *leaf.shape)
            else:
                part = np.ascontiguousarray(rows[:, :, offset : offset + leaf.row_bytes])
            made.append(part.view(dtype).reshape(shape) if part.size else np.empty(shape, dtype))
        return made
