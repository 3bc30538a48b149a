"""Times the opening and closing of a `file://` buffer: verified and not, small rows and images.

    python benchmarks/bench_open.py                  # about two minutes, 11 GB of disk
    python benchmarks/bench_open.py --quick

The limit beside it is a read of the same file by as many threads, which looks at every byte once and checks nothing.
Files are read while the system still has them in memory; from a disk, its own speed is the bound. Writes
`results/open.json`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from harness import machine, results
from harness.program import Run, parse, parser

import sharpwave as sw

CHUNK = 1 << 20
TABLES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "small": ("1,000,000 x (obs f32(17), action f32(6), reward, next_obs f32(17), done)",
              {"obs_shape": (17,), "action_shape": (6,)}, 1_000_000, 50_000),
    "images": ("10 GB of images: 177,000 x (obs u8(84, 84, 4), action, reward, next_obs u8(84, 84, 4), done)",
               {"obs_shape": (84, 84, 4), "obs_dtype": "uint8"}, 177_000, 2_000),
}  # fmt: skip


def fill(path: Path, options: dict[str, Any], rows: int) -> None:
    buffer = sw.ReplayBuffer(rows, storage=f"file://{path}", seed=0, **options)
    stream = np.random.default_rng(0)
    shape, dtype = options["obs_shape"], options.get("obs_dtype", "float32")
    count = min(rows, 1_000)
    obs = stream.integers(0, 255, (count, *shape)).astype(dtype)
    action = np.zeros((count, *options.get("action_shape", ())), np.float32)
    for start in range(0, rows, count):
        n = min(count, rows - start)
        buffer.add(obs[:n], action[:n], np.ones(n, np.float32), obs[:n], np.zeros(n, bool))
    buffer.close()


def read_through(path: Path) -> None:
    """Every byte into a core's cache, by as many threads as the machine has cores."""
    size = path.stat().st_size

    def read(first: int) -> None:
        into = bytearray(CHUNK)
        with path.open("rb", buffering=0) as file:
            file.seek(first)
            left = -(-size // (os.cpu_count() or 1))
            while left > 0 and (got := file.readinto(memoryview(into)[: min(left, CHUNK)])):
                left -= got

    parts = os.cpu_count() or 1
    with ThreadPoolExecutor(parts) as pool:
        list(pool.map(read, [part * -(-size // parts) for part in range(parts)]))


def timed(call: Callable[[], Any]) -> tuple[int, Any]:
    begun = time.perf_counter_ns()
    made = call()
    return time.perf_counter_ns() - begun, made


def measure(path: Path, rounds: int) -> dict[str, dict[str, float]]:
    times: dict[str, list[int]] = {"verified": [], "unverified": [], "close": [], "read": []}
    for turn in range(rounds + 1):  # the first round warms up
        for case in ("verified", "unverified", "read"):
            if case == "read":
                took, _ = timed(lambda: read_through(path))
            else:
                took, buffer = timed(lambda case=case: sw.open(f"file://{path}", verify=case == "verified"))
                closing, _ = timed(buffer.close)
                if turn:
                    times["close"].append(closing)
            if turn:
                times[case].append(took)
    return {
        case: {"min_ns": min(of), "median_ns": statistics.median(of), "bursts": len(of)} for case, of in times.items()
    }


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--folder", type=Path, help="where files are written")
    options = parse(made)
    if options.quick:
        options.rounds = 3
    run, workloads = Run(options), {}
    with tempfile.TemporaryDirectory(prefix="sw-", dir=options.folder) as name:
        folder = Path(name)
        system = machine.file_system(folder)
        for label, (title, fields, rows, quick_rows) in TABLES.items():
            path = folder / f"{label}.sw"
            print(f"open: filling {label}", flush=True)
            fill(path, fields, quick_rows if options.quick else rows)
            cases = measure(path, options.rounds)
            workloads[label] = {"title": title, "file_bytes": path.stat().st_size, "cases": cases}
            for case, times in cases.items():
                print(f"    {case:12}{results.duration(times['min_ns']):>10}  "
                      f"median {results.duration(times['median_ns'])}")  # fmt: skip
            path.unlink()
    run.save("open", workloads=workloads, file_system=system)


if __name__ == "__main__":
    main()
