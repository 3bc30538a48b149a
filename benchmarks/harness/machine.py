"""Where and with what a result was measured."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path


def describe() -> dict[str, str | int | float]:
    """The facts that make two results comparable or not."""
    return {
        "cpu": _after_colon("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(_meminfo_bytes("MemTotal") / 2**30, 1),
        "huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "kernel": platform.release().partition("-")[0],  # a vendor's suffix says nothing
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def available_bytes() -> int:
    return _meminfo_bytes("MemAvailable")


def file_system(folder: Path) -> str:
    """The kind of file system that holds a folder."""
    kinds = {place: kind for _, place, kind, *_ in map(str.split, Path("/proc/mounts").read_text().splitlines())}
    return next((kinds[str(place)] for place in (folder, *folder.parents) if str(place) in kinds), "unknown")


def _meminfo_bytes(name: str) -> int:
    return int(_after_colon("/proc/meminfo", name).split()[0]) * 1024


def _after_colon(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.split(":", 1)[1].strip()
    return ""


def _chosen(path: str) -> str:
    """The bracketed word of a kernel setting such as `always [madvise] never`."""
    file = Path(path)
    return file.read_text().partition("[")[2].partition("]")[0] if file.exists() else "unknown"
