"""Buffers to disk and back: the contender's side.

`python -m harness.keeper NAME` loads `peers/snapshots/NAME.py` and obeys one JSON line at a time: `fill`, `save`,
`load`, `attach`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.worker import about, obey, settled_bytes, wait_until_quiet
from harness.workloads import WORKLOADS, Workload

FIRST_BATCH = 256


class Keeper:
    """One library's way to save a buffer and to have it back. `save` makes a file or folder that is not there yet."""

    packages: tuple[str, ...] = ()
    note = ""
    facts: Mapping[str, Any] = {}

    def fill(self, workload: Workload, capacity: int) -> None:
        raise NotImplementedError

    def save(self, path: str) -> None:
        raise NotImplementedError

    def load(self, path: str) -> Any:
        """The buffer, from what `save` wrote, after a batch was drawn: what is put off until then counts as well."""
        raise NotImplementedError

    def attach(self, path: str) -> Any:
        """Open in place a buffer that lives at `path`; the first call makes it."""
        raise NotImplementedError


def peak_bytes() -> int:
    """Most resident bytes since `/proc/self/clear_refs` got a 5."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not tell how much memory was resident at most")


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def bytes_at(path: Path) -> int:
    return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())


class Worker:
    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        try:
            self.waited_ns = ctypes.CDLL(None).sync_clock_ns
            self.waited_ns.restype = ctypes.c_longlong
        except AttributeError:
            self.waited_ns = None

    def fill(self, workload: str, capacity: int) -> dict[str, object]:
        self.keeper.fill(WORKLOADS[workload], capacity)
        return about(self.keeper)

    def save(self, path: str) -> dict[str, int | None]:
        """Time until the bytes are handed to the system, time waited for the disk, bytes; and the peak of memory."""
        remove(Path(path))
        before = settled_bytes()
        Path("/proc/self/clear_refs").write_text("5")
        waited = self.waited_ns() if self.waited_ns else 0
        started = time.perf_counter_ns()
        self.keeper.save(path)
        took = time.perf_counter_ns() - started
        waited = self.waited_ns() - waited if self.waited_ns else None
        extra = peak_bytes() - before
        wait_until_quiet()
        return {
            "save_ns": took - (waited or 0),
            "fsync_ns": waited,
            "bytes": bytes_at(Path(path)),
            "extra_bytes": extra,
        }

    def load(self, path: str) -> int:
        return self.time(self.keeper.load, path)

    def attach(self, path: str) -> int:
        return self.time(self.keeper.attach, path)

    @staticmethod
    def time(call: Any, path: str) -> int:
        gc.collect()
        started = time.perf_counter_ns()
        opened = call(path)
        took = time.perf_counter_ns() - started
        del opened
        gc.collect()
        wait_until_quiet()
        return took


def main() -> None:
    (name,) = sys.argv[1:]
    obey(lambda: Worker(importlib.import_module(f"peers.snapshots.{name}").KEEPER()))


if __name__ == "__main__":
    main()
