"""`Packing`: sequences of any length in rows of one fixed length, several to a row."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..checks import whole
from ..errors import SchemaError

__all__ = ["Packing"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Packing:
    """The row and the first column of each sequence. A sequence is never cut, so attention stays within a row.

    Values of tokens are flat arrays, sequences one after the other: `place` puts them into rows, `take` gets them back.

    Example:
        >>> packing = Packing.of([3, 5, 2], row_tokens=8)
        >>> packing.segments.tolist()
        [[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 0, 0, 0, 0, 0, 0]]
    """

    lens: Array
    row: Array
    start: Array
    rows: int
    row_tokens: int

    @classmethod
    def of(cls, lens: Any, *, row_tokens: int, multiple: int = 1) -> Packing:
        """Packs by best fit, longest sequence first: each goes into the fullest row that has room for it.

        Args:
            lens: Tokens of each sequence.
            row_tokens: Tokens of a row.
            multiple: The number of rows is rounded up to a multiple of this one. The rows that this adds are empty.

        Raises:
            SchemaError: A sequence is longer than a row.
        """
        row_tokens = whole("Packing.of()", "row_tokens", row_tokens)
        lens = np.asarray(lens, np.int64).reshape(-1)
        if len(lens) and lens.max() > row_tokens:
            at = int(lens.argmax())
            raise SchemaError(f"sequence {at} has {lens[at]} tokens, row_tokens={row_tokens}; raise row_tokens=")
        row, start = np.zeros_like(lens), np.zeros_like(lens)
        open_rows: list[tuple[int, int]] = []  # free tokens and row, sorted: the first that fits is the fullest
        rows = 0
        for at in np.argsort(-lens, kind="stable").tolist():
            length = int(lens[at])
            place = bisect_left(open_rows, (length, -1))
            if place < len(open_rows):
                free, row[at] = open_rows.pop(place)
            else:
                free, row[at] = row_tokens, rows
                rows += 1
            start[at] = row_tokens - free
            if free > length:
                insort(open_rows, (free - length, int(row[at])))
        return cls(lens, row, start, -(-rows // multiple) * multiple, row_tokens)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.row_tokens

    @property
    def fill(self) -> float:
        """The share of all places that hold a token."""
        return float(self.lens.sum() / max(1, self.rows * self.row_tokens))

    @cached_property
    def positions_flat(self) -> Array:
        """Position of each token in its sequence, flat."""
        return np.asarray(np.arange(self.lens.sum()) - np.repeat(np.cumsum(self.lens) - self.lens, self.lens))

    @cached_property
    def _at(self) -> Array:
        return np.repeat(self.row * self.row_tokens + self.start, self.lens) + self.positions_flat

    @property
    def positions(self) -> Array:
        """Position of each token in its sequence, [rows, row_tokens]."""
        return self.place(self.positions_flat)

    @property
    def segments(self) -> Array:
        """The number of each token's sequence in its row, from 1, [rows, row_tokens]; 0 is padding."""
        order = np.lexsort((self.start, self.row))
        rows = self.row[order]
        first = np.searchsorted(rows, rows, side="left")
        numbers = np.empty(len(rows), np.int64)
        numbers[order] = np.arange(len(rows)) - first + 1
        return self.place(np.repeat(numbers, self.lens))

    def place(self, values: Any) -> Array:
        """Flat values in rows; 0 where there is no token."""
        values = np.asarray(values)
        packed = np.zeros(self.rows * self.row_tokens, values.dtype)
        packed[self._at] = values
        return packed.reshape(self.shape)

    def take(self, packed: Any) -> Array:
        """Undoes `place`."""
        return np.asarray(packed).reshape(-1)[self._at]
