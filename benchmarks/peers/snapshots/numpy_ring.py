"""The ring's columns by `tofile` and `fromfile`: the bytes and nothing else."""

from __future__ import annotations

import os

import numpy as np
from harness.keeper import FIRST_BATCH, Keeper
from harness.workloads import Workload

from peers.numpy_ring import NumpyRing, Ring


class RingKeeper(Keeper):
    packages = ("numpy",)
    note = "tofile of the columns into one file, then os.fsync; fromfile"

    def fill(self, workload: Workload, capacity: int) -> None:
        contender = NumpyRing()
        contender.fill(workload, capacity)
        self.workload, self.ring = workload, contender.ring

    def save(self, path: str) -> None:
        with open(path, "wb") as file:
            for column in self.ring.columns.values():
                column.tofile(file)
            os.fsync(file.fileno())

    def load(self, path: str) -> Ring:
        loaded = Ring(0, self.workload.field_specs)
        loaded.capacity = loaded.size = self.ring.capacity
        with open(path, "rb") as file:
            for name, (shape, dtype) in self.workload.field_specs.items():
                values = np.fromfile(file, dtype, loaded.capacity * int(np.prod(shape)))
                loaded.columns[name] = values.reshape(-1, *shape)
        loaded.sample_take(FIRST_BATCH)
        return loaded


KEEPER = RingKeeper
