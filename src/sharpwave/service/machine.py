"""Which machine this is, for a client that may attach to a table's own file instead of asking its server."""

from __future__ import annotations

from pathlib import Path

__all__ = ["boot_id"]


def boot_id() -> str | None:
    """Random, of this start of the system; None where the system has none. Containers of one machine share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
