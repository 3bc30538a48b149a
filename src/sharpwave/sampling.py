"""Samplers pick row numbers, views shape them into batches. Both are settings: plain data that a file can carry."""

from __future__ import annotations

from typing import Any

__all__ = ["Transitions", "Uniform"]


class Uniform:
    """Every row is equally likely; draws are with replacement.

    Example:
        >>> import sharpwave as sw
        >>> buf = sw.ReplayBuffer(100, obs_shape=(4,), sampler=sw.Uniform())
    """

    def to_plain(self) -> dict[str, Any]:
        return {"kind": "Uniform"}

    def __repr__(self) -> str:
        return "Uniform()"


class Transitions:
    """One row is one example: what was seen, done and got, and what came next.

    Example:
        >>> import sharpwave as sw
        >>> buf = sw.ReplayBuffer(100, obs_shape=(4,), view=sw.Transitions())
    """

    def to_plain(self) -> dict[str, Any]:
        return {"kind": "Transitions"}

    def __repr__(self) -> str:
        return "Transitions()"
