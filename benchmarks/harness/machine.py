"""Where and with what a result was measured."""

from __future__ import annotations

import datetime
import os
import platform
import time
from pathlib import Path

# Above it a run is not published: somebody else's work is then part of the figures.
MOST_LOAD = 0.5
LOOK_S = 5.0
WAIT_S = 300.0


def busy_cores(seconds: float = LOOK_S) -> float:
    """Cores that were busy on average while this process slept. Unlike the system's load average, which looks back for
    a minute and more, it does not count the benchmark that ended just before."""
    before = _busy_s()
    time.sleep(seconds)
    return (_busy_s() - before) / seconds


def settled_load(wait_s: float = WAIT_S) -> float:
    """The load once it is low enough to measure, or after `wait_s` seconds the load that there still is."""
    deadline = time.monotonic() + wait_s
    while (load := busy_cores()) > MOST_LOAD and time.monotonic() < deadline:
        left = round(deadline - time.monotonic())
        print(f"load {load:.2f}, more than {MOST_LOAD}: waiting for an idle machine, {left} s at most", flush=True)
    return load


def _busy_s() -> float:
    """Seconds that all cores together have worked since the machine started, its host's share included."""
    first = Path("/proc/stat").read_text().splitlines()[0]
    user, nice, system, _idle, _waiting, *others = map(int, first.split()[1:9])
    return (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")


def describe(load: float) -> dict[str, str | int | float]:
    """The facts that make two results comparable or not."""
    return {
        "cpu": _after_colon("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(_meminfo_bytes("MemTotal") / 2**30, 1),
        "huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "kernel": platform.release().partition("-")[0],  # a vendor's suffix says nothing
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "load_at_start": round(load, 2),
        # Of the last minute, for information: it counts what this machine measured just before.
        "load_average": round(os.getloadavg()[0], 2),
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
