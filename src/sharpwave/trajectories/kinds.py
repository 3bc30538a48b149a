"""Kinds: what a row of the trajectories is, and the layouts that they have."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import _core
from .index import TrajectoryIndex
from .layout import Layout
from .records import Records
from .trajectory import DTYPES, Leaf

__all__ = ["Kinds"]


class Kinds:
    """The leaves of a row, and the numbered layouts of the slabs, with what is computed of them once."""

    def __init__(self, index: TrajectoryIndex) -> None:
        self._take(index)

    def _take(self, index: TrajectoryIndex) -> None:
        self.index = index
        self._numbers = {
            layout: number
            for number, layout in enumerate(index.layouts)
            if index.generations[number] == index.generation
        }
        self._cores: dict[int, _core.SlabLayout] = {}
        self._records: dict[int, Records] = {}
        self._row_kinds: _core.RowKinds | None = None

    def set_leaves(self, leaves: tuple[Leaf, ...] | None) -> None:
        """Sets the leaves of a row. None ends a generation: the next trajectory may have other leaves."""
        if leaves is None:
            if self.index.leaves is not None:
                self.index.former[self.index.generation] = self.index.leaves
            self.index.generation += 1
            self._numbers.clear()
        self.index.leaves = leaves
        self._cores.clear()
        self._records.clear()
        self._row_kinds = None

    def row_kinds(self) -> _core.RowKinds:
        """Dtypes and shapes of rows, for the engine."""
        if self._row_kinds is None:
            leaves = self.index.leaves or ()
            self._row_kinds = _core.RowKinds([(np.dtype(DTYPES[leaf.dtype][0]), leaf.shape) for leaf in leaves])
        return self._row_kinds

    def number_of(self, layout: Layout) -> tuple[int, bool]:
        """A layout's number, and whether it is new."""
        known = self._numbers.get(layout)
        if known is not None:
            return known, False
        self._numbers[layout] = number = self.index.add_layout(layout)
        return number, True

    def core_layout(self, number: int) -> _core.SlabLayout:
        made = self._cores.get(number)
        if made is None:
            assert self.index.leaves is not None
            made = self._cores[number] = self.index.layouts[number].to_core(self.index.leaves)
        return made

    def records(self, number: int) -> Records:
        """The form in which the cache keeps trajectories of a layout."""
        made = self._records.get(number)
        if made is None:
            assert self.index.leaves is not None
            made = self._records[number] = Records(self.index.leaves, self.index.layouts[number])
        return made

    def to_records(self, number: int, slab: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The records of a slab of that layout."""
        return self.records(number).make(slab, self.core_layout(number))
