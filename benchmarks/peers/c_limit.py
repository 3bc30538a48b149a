"""The limit of one thread, and of all for image rows: `gather.c`, compiled here and called through ctypes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from harness.worker import Contender, Operation
from harness.workloads import W1, Workload

RECORD_BYTES = 168


def compiled(source: Path, *flags: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / f"{source.stem}.so"
        command = [os.environ.get("CC", "cc"), "-O3", *flags, "-shared", "-fPIC", "-pthread", source, "-o", library]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(library))


def address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class CLimit(Contender):
    note = "plain copies; on all cores: stores past the cache; the loop over calls is in C, too"
    keeps_stacks = True

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload, self.capacity = workload, ctypes.c_int64(capacity)
        self.image_bytes = int(np.prod(workload.obs_shape)) * np.dtype(workload.obs_dtype).itemsize
        # From NumPy, whose large arrays ask for huge pages; ones, so that every page is there.
        self.rows = np.ones((capacity, self.record_bytes()), np.uint8)
        self.native = compiled(Path(__file__).with_name("gather.c"), "-march=native")

    def record_bytes(self) -> int:
        return RECORD_BYTES if self.workload == W1 else 2 * self.image_bytes

    def add_many(self, count: int) -> dict[str, Operation]:
        source, head = np.ones((count, self.rows.shape[1]), np.uint8), np.zeros(1, np.int64)

        def append(calls: int) -> None:
            self.native.append_records(
                address(self.rows),
                self.capacity,
                ctypes.c_int64(count),
                ctypes.c_int64(calls),
                address(source),
                address(head),
            )

        return {"": Operation(append)}

    def sample(self, count: int) -> dict[str, Operation]:
        specs = self.workload.field_specs
        outputs = {name: np.ones((count, *shape), dtype) for name, (shape, dtype) in specs.items()}
        drawn = np.ones(count, np.int64)
        source = (address(self.rows), self.capacity, ctypes.c_int64(count))

        def records(calls: int) -> None:
            targets = [address(drawn), *map(address, outputs.values())]
            self.native.gather_records(*source, ctypes.c_int64(calls), *targets)

        def images(calls: int) -> None:
            targets = [address(outputs["obs"]), address(outputs["next_obs"])]
            gather = self.native.gather_images if self.keeps_stacks else self.native.gather_stacks
            gather(*source, ctypes.c_int64(calls), ctypes.c_int64(self.image_bytes), *targets)

        def images_on_all_cores(calls: int) -> None:
            targets = [address(outputs["obs"]), address(outputs["next_obs"])]
            sizes = (ctypes.c_int64(calls), ctypes.c_int64(self.image_bytes))
            self.native.gather_images_threads(*source, *sizes, *targets, ctypes.c_int64(os.cpu_count() or 1))

        if self.workload == W1:
            return {"": Operation(records)}
        ways = {"": Operation(images)}
        return ways | {"threads": Operation(images_on_all_cores)} if self.keeps_stacks else ways


class Stacked(CLimit):
    """Every frame once; a row is five neighbours, written as two stacks of four."""

    keeps_stacks = False

    def record_bytes(self) -> int:
        return self.image_bytes // self.workload.obs_shape[0]


FORMS = {"plain": CLimit, "stacked": Stacked}
