"""Sharpwave's engine called from C++: what the Python face is measured against."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from harness.worker import Contender, Operation
from harness.workloads import Workload

CORE = Path(__file__).resolve().parents[2] / "core"


def compiled() -> ctypes.CDLL:
    """The engine as a shared library, with the flags of a release build."""
    compiler, flags = os.environ.get("CXX", "c++"), ["-std=c++20", "-O3", "-DNDEBUG", "-fPIC", f"-I{CORE}"]
    sources = [str(p) for p in CORE.rglob("*.cpp") if p.name != "copy_avx2.cpp"]
    with tempfile.TemporaryDirectory() as folder:
        library, kernels = Path(folder) / "engine.so", Path(folder) / "avx2.o"
        if os.uname().machine == "x86_64":
            avx2 = [compiler, *flags, "-mavx2", "-c", str(CORE / "table/copy_avx2.cpp"), "-o", str(kernels)]
            subprocess.run(avx2, check=True)
            flags.append("-DSHARPWAVE_HAS_AVX2")
            sources.append(str(kernels))
        own = str(Path(__file__).with_name("engine.cpp"))
        subprocess.run([compiler, *flags, "-shared", own, *sources, "-lpthread", "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
    loaded.engine_create.restype = ctypes.c_void_p
    return loaded


def pointers(columns: dict[str, np.ndarray]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(columns))(*[column.ctypes.data for column in columns.values()])


class Engine(Contender):
    note = "the loop over calls is in C++; outputs exist"

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload, self.native = workload, compiled()
        self.handle = ctypes.c_void_p(self.native.engine_create(ctypes.c_uint64(capacity)))
        for chunk in workload.chunks(capacity):
            self._add(chunk, len(chunk["reward"]), 1)

    def _add(self, columns: dict[str, np.ndarray], rows: int, calls: int) -> None:
        self.native.engine_add(self.handle, ctypes.c_uint64(rows), ctypes.c_uint64(calls), pointers(columns))

    def add_one(self) -> dict[str, Operation]:
        return self.add_many(1)

    def add_many(self, count: int) -> dict[str, Operation]:
        columns = self.workload.columns(count)
        return {"": Operation(lambda calls: self._add(columns, count, calls))}

    def sample(self, count: int) -> dict[str, Operation]:
        specs = self.workload.field_specs
        outputs = {name: np.ones((count, *shape), dtype) for name, (shape, dtype) in specs.items()}
        serials = np.ones(count, np.uint64)

        def draw(calls: int) -> None:
            self.native.engine_sample(
                self.handle,
                ctypes.c_uint64(count),
                ctypes.c_uint64(calls),
                pointers(outputs),
                ctypes.c_void_p(serials.ctypes.data),
            )

        return {"": Operation(draw)}


CONTENDER = Engine
