"""Pace: limits on how far adding and sampling may get ahead of each other."""

from __future__ import annotations

import math
import warnings
from typing import Any

from .checks import number, set_once, whole
from .errors import SchemaError

__all__ = ["Pace"]


class Pace:
    """Makes ``add`` and ``sample`` wait for each other, so that each row is sampled about as often as you want.

    I rows were added, S rows were sampled, and ``size`` rows can be drawn. ``sample(n)`` proceeds when
    ``size >= min_size`` and ``I * samples_per_insert - S - n >= min_diff``. An ``add`` of n rows proceeds when
    ``size + n <= min_size`` or ``(I + n) * samples_per_insert - S <= max_diff``. These are the inequalities of Reverb's
    rate limiter.

    Three presets cover most uses: ``Pace.min_size``, ``Pace.samples_per_insert`` and ``Pace.queue``. Two of them have
    the name of an argument; the values of a pace are in ``pace.numbers``.

    Args:
        min_size: Rows that must be in the buffer before the first sample.
        samples_per_insert: How often a row is sampled, on average.
        min_diff: Lower bound of ``I * samples_per_insert - S``: sampling waits rather than go below it.
        max_diff: Upper bound of ``I * samples_per_insert - S``: adding waits rather than go above it.

    Example:
        >>> import sharpwave as sw
        >>> pace = sw.Pace.samples_per_insert(8, min_size=1000, error=1000)
        >>> pace
        Pace(min_size=1000, samples_per_insert=8.0, min_diff=7000.0, max_diff=9000.0)
        >>> pace.numbers["min_size"]
        1000
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
                "sampling and adding would wait for each other for ever"
            )
        if high < ratio * size:
            warnings.warn(
                f"{where}: max_diff {high:g} is below samples_per_insert x min_size = {ratio * size:g}: after "
                "min_size rows, adding waits until another thread or process samples",
                stacklevel=2,
            )
        self._numbers = {"min_size": size, "samples_per_insert": ratio, "min_diff": low, "max_diff": high}
        self._is_queue = False

    @classmethod
    def min_size(cls, n: int) -> Pace:
        """Sampling waits until the buffer has n rows. Adding never waits."""
        return cls(n)

    @classmethod
    def samples_per_insert(cls, ratio: float, min_size: int, error: float | tuple[float, float]) -> Pace:
        """Each row is sampled ``ratio`` times on average. Adding or sampling may get ``error`` samples ahead.

        Args:
            ratio: Samples per insert.
            min_size: Rows that must be in the buffer before the first sample.
            error: How far adding and sampling may get ahead, in samples; or the bounds (min_diff, max_diff).
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
        """A queue of at most n unread rows, each read once. Use it with ``sampler=Fifo()`` or ``Lifo()``."""
        pace = cls(1, 1.0, 0, whole("Pace.queue()", "n", n))
        pace._is_queue = True
        return pace

    @property
    def numbers(self) -> dict[str, float]:
        """The four arguments by name: ``Pace(**pace.numbers) == pace``."""
        return dict(self._numbers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pace) and self._numbers == other._numbers

    def __hash__(self) -> int:
        return hash(tuple(self._numbers.values()))

    def __repr__(self) -> str:
        return f"Pace({', '.join(f'{name}={value}' for name, value in self._numbers.items())})"


def check_pace(where: str, pace: Pace, capacity: int) -> None:
    """Refuses a pace that a buffer of this capacity cannot keep."""
    size, most = pace._numbers["min_size"], pace._numbers["max_diff"]
    if size > capacity:
        raise SchemaError(f"{where}: pace: min_size {size} is more than the capacity {capacity}")
    if pace._is_queue and most > capacity:
        raise SchemaError(
            f"{where}: pace: a queue of {most:g} rows needs a capacity of at least {most:g}, got {capacity}: "
            "unread rows would be overwritten"
        )


def _bound(name: str, value: Any) -> float:
    if isinstance(value, float) and math.isinf(value):
        return float(value)
    return number("Pace()", name, value, -1e18, 1e18)
