"""Sharpwave's engine called from C++: what the Python face is measured against."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
from harness.worker import (
    ALPHA,
    BETA,
    GAMMA,
    PRIORITY_BATCHES,
    STEPS,
    UPDATES_A_GROUP,
    Contender,
    Operation,
    random_priorities,
)
from harness.workloads import Columns, Workload

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "peer_engine"


def compiled() -> ctypes.CDLL:
    """The engine as the project builds it (without Blosc2, which no case here needs), as a shared library."""
    cmake = shutil.which("cmake") or str(Path(sys.executable).with_name("cmake"))
    for step in (
        ["-S", ROOT, "-B", BUILD, "-DSHARPWAVE_BLOSC2=none"],
        ["--build", BUILD, "--target", "sharpwave_core"],
    ):
        subprocess.run([cmake, *step], check=True, stdout=subprocess.DEVNULL)
    library, own = BUILD / "engine.so", Path(__file__).with_name("engine.cpp")
    flags = ["-std=c++20", "-O3", "-DNDEBUG", "-fPIC", "-shared", f"-I{ROOT / 'core'}"]
    inputs = [str(own), str(BUILD / "libsharpwave_core.a"), "-lpthread", "-o", str(library)]
    subprocess.run([os.environ.get("CXX", "c++"), *flags, *inputs], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.engine_create.restype = ctypes.c_void_p
    return loaded


def pointers(columns: Columns) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(columns))(*[column.ctypes.data for column in columns.values()])


def address(array: np.ndarray | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


class Engine(Contender):
    note = "the loop over calls is in C++; outputs exist"

    def __init__(self, *, prioritized: bool = False, n_step: int = 1) -> None:
        self.prioritized, self.n_step = prioritized, n_step

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload, self.native = workload, compiled()
        self.handle = ctypes.c_void_p(
            self.native.engine_create(
                ctypes.c_uint64(capacity),
                ctypes.c_bool(self.prioritized),
                ctypes.c_double(ALPHA),
                ctypes.c_double(BETA),
                ctypes.c_uint32(self.n_step),
                ctypes.c_double(GAMMA),
            )
        )
        for chunk in workload.chunks(capacity):
            rows = len(chunk["reward"])
            self.adding(chunk, random_priorities(rows) if self.prioritized else None).run(1)

    def adding(self, columns: Columns, priorities: np.ndarray | None = None) -> Operation:
        rows, flags = len(columns["reward"]), columns["done"].astype(np.uint8)  # terminated is bit 0

        def add(calls: int) -> None:
            counts = (ctypes.c_uint64(rows), ctypes.c_uint64(calls))
            self.native.engine_add(self.handle, *counts, pointers(columns), address(flags), address(priorities))

        return Operation(add)

    def add_one(self) -> dict[str, Operation]:
        return self.add_many(1)

    def add_many(self, count: int) -> dict[str, Operation]:
        return {"": self.adding(self.workload.columns(count))}

    def sample(self, count: int) -> dict[str, Operation]:
        return {"": self.drawing(count, np.ones(count, np.uint64))}

    def drawing(self, count: int, serials: np.ndarray) -> Operation:
        specs = self.workload.field_specs
        outputs = {name: np.ones((count, *shape), dtype) for name, (shape, dtype) in specs.items()}
        discounts = np.ones(count, np.float32) if self.n_step > 1 else None
        weights = np.ones(count, np.float32) if self.prioritized else None
        probabilities = np.ones(count, np.float64) if self.prioritized else None
        beside = [address(array) for array in (discounts, serials, weights, probabilities)]

        def draw(calls: int) -> None:
            counts = (ctypes.c_uint64(count), ctypes.c_uint64(calls))
            self.native.engine_sample(self.handle, *counts, pointers(outputs), *beside)

        # The arrays live as long as the operation.
        draw.arrays = (discounts, serials, weights, probabilities)  # type: ignore[attr-defined]
        return Operation(draw)

    def update(self, count: int) -> dict[str, Operation]:
        if not self.prioritized:
            return {}
        serials = np.ones((UPDATES_A_GROUP, count), np.uint64)
        draws = [self.drawing(count, batch) for batch in serials]
        priorities = random_priorities((UPDATES_A_GROUP + PRIORITY_BATCHES) * count).reshape(-1, count)
        first = 0  # of the priorities that the next group takes

        def before(calls: int) -> None:
            nonlocal first
            first = (first + 1) % PRIORITY_BATCHES
            for draw in draws[:calls]:
                draw.run(1)

        def update(calls: int) -> None:
            counts = (ctypes.c_uint64(count), ctypes.c_uint64(calls))
            self.native.engine_update(self.handle, *counts, address(serials), address(priorities[first:]))

        return {"": Operation(update, before=before, group=UPDATES_A_GROUP)}


FORMS = {
    "plain": Engine,
    "prioritized": partial(Engine, prioritized=True),
    "nstep": partial(Engine, n_step=STEPS),
}
