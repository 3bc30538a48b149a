"""Pace: how fast adding and sampling may go relative to each other."""

from __future__ import annotations

import math
import warnings
from typing import Any

from .checks import number, set_once, whole
from .errors import SchemaError

__all__ = ["Pace"]


class Pace:
    """Lets ``add`` and ``sample`` wait for each other, so that rows are read about as often as you want.

    With I rows added, S rows sampled and ``size`` rows in the buffer, ``sample(n)`` goes when ``size >= min_size`` and
    ``I * samples_per_insert - S - n >= min_diff``; an ``add`` of n rows goes when ``size + n <= min_size`` or
    ``(I + n) * samples_per_insert - S <= max_diff``. These are the inequalities of Reverb's rate limiter.

    Mostly one of the presets is what you want: ``Pace.min_size``, ``Pace.samples_per_insert``, ``Pace.queue``.

    Args:
        min_size: Rows before the first sample.
        samples_per_insert: How often a row is sampled, on average.
        min_diff: Sampling waits when it would get ahead of this.
        max_diff: Adding waits when it would get ahead of this.

    Example:
        >>> import sharpwave as sw
        >>> sw.Pace.samples_per_insert(8, min_size=1000, error=1000)
        Pace(min_size=1000, samples_per_insert=8.0, min_diff=7000.0, max_diff=9000.0)
    """

    __slots__ = ("_is_queue", "_numbers")
    __setattr__ = set_once

    def __init__(
        self,
        min_size: int = 1,
        samples_per_insert: float = 1.0,
        min_diff: float = -math.inf,
        max_diff: float = math.inf,
    ) -> None:
        where = "Pace()"
        size = whole(where, "min_size", min_size)
        ratio = number(where, "samples_per_insert", samples_per_insert, 0, 1e15)
        if ratio == 0:
            raise SchemaError(f"{where}: samples_per_insert: expected a number above 0, got {samples_per_insert!r}")
        low, high = _bound("min_diff", min_diff), _bound("max_diff", max_diff)
        if low > high:
            raise SchemaError(f"{where}: min_diff: expected at most max_diff {high:g}, got {low:g}")
        if low > ratio * size:
            raise SchemaError(
                f"{where}: min_diff: expected at most samples_per_insert x min_size = {ratio * size:g}, got {low:g}: "
                "sampling would wait for rows that adding may not bring, for ever"
            )
        if high < ratio * size:
            warnings.warn(
                f"{where}: max_diff {high:g} is below samples_per_insert x min_size = {ratio * size:g}: past min_size, "
                "adding waits until somebody else samples",
                stacklevel=2,
            )
        self._numbers = size, ratio, low, high
        self._is_queue = False

    @classmethod
    def min_size(cls, n: int) -> Pace:
        """Sampling waits for n rows; nothing else waits."""
        return cls(n)

    @classmethod
    def samples_per_insert(cls, ratio: float, min_size: int, error: float | tuple[float, float]) -> Pace:
        """Each row is sampled ``ratio`` times on average; either side may get ``error`` samples ahead.

        Args:
            ratio: Samples per insert.
            min_size: Rows before the first sample.
            error: How far the sides may be apart, in samples; or (min_diff, max_diff).
        """
        where = "Pace.samples_per_insert()"
        ratio = number(where, "ratio", ratio, 0, 1e15)
        middle = ratio * whole(where, "min_size", min_size)
        if isinstance(error, tuple):
            if len(error) != 2:
                raise SchemaError(f"{where}: error: expected a number or (min_diff, max_diff), got {error!r}")
            low, high = (_bound(name, value) for name, value in zip(("min_diff", "max_diff"), error, strict=True))
        else:
            width = number(where, "error", error, 0, 1e15)
            low, high = middle - width, middle + width
        if not high - low >= 2 * max(1.0, ratio):
            raise SchemaError(
                f"{where}: error: expected max_diff - min_diff of at least 2 x max(1, ratio) = {2 * max(1.0, ratio):g},"
                f" got {high - low:g}: the two sides would block each other"
            )
        return cls(min_size, ratio, low, high)

    @classmethod
    def queue(cls, n: int) -> Pace:
        """At most n rows wait to be read, and each is read once: with ``sampler=Fifo()`` or ``Lifo()``."""
        pace = cls(1, 1.0, 0, whole("Pace.queue()", "n", n))
        pace._is_queue = True
        return pace

    def numbers(self) -> tuple[int, float, float, float]:
        """min_size, samples_per_insert, min_diff, max_diff."""
        return self._numbers

    def check(self, where: str, capacity: int) -> None:
        """Refuses what a buffer of this capacity could never do."""
        size, _, _, most = self._numbers
        if size > capacity:
            raise SchemaError(f"{where}: pace: min_size {size} is more than the capacity {capacity}")
        if self._is_queue and most > capacity:
            raise SchemaError(
                f"{where}: pace: a queue of {most:g} rows would lose some: give a capacity of as many, got {capacity}"
            )

    def to_plain(self) -> list[float]:
        return list(self._numbers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pace) and self._numbers == other._numbers

    def __hash__(self) -> int:
        return hash(self._numbers)

    def __repr__(self) -> str:
        size, ratio, low, high = self._numbers
        return f"Pace(min_size={size}, samples_per_insert={ratio}, min_diff={low}, max_diff={high})"


def _bound(name: str, value: Any) -> float:
    if isinstance(value, float) and math.isinf(value):
        return float(value)
    return number("Pace()", name, value, -1e18, 1e18)
