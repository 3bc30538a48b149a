"""Whether a process lives, by its id and the moment of its start: ids are used again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

__all__ = ["describe_process", "is_alive"]


def _stat(pid: int) -> tuple[str, int] | None:
    """The state of a process, and when it started, in ticks since the machine did."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[19])


def describe_process(pid: int) -> dict[str, int]:
    """What `is_alive` takes."""
    found = _stat(pid)
    return {"pid": pid, "ticks": -1 if found is None else found[1]}


def is_alive(said: dict[str, Any] | None) -> bool:
    if said is None or "ticks" not in said:
        return False
    found = _stat(said["pid"])
    if found is None or found[1] != said["ticks"]:
        return False
    return found[0] not in "ZX" or _has_other_threads(said["pid"])


def _has_other_threads(pid: int) -> bool:
    """A killed process keeps its files and locks until the last of its threads is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    except (FileNotFoundError, ProcessLookupError):
        return False
