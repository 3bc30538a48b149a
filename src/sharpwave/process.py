"""Which process this is, by counting forks: process ids repeat, and are equal in different containers."""

from __future__ import annotations

import os

__all__ = ["fork_count"]

_count = 0


def fork_count() -> int:
    """How many forks lie between the first process and this one. An object that remembers it knows its own process."""
    return _count


def _after_fork() -> None:
    global _count
    _count += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
