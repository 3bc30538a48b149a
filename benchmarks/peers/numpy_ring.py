"""The ring that everyone writes once: a yardstick, not a library."""

from __future__ import annotations

from itertools import cycle, islice

import numpy as np
from harness.worker import Contender, Operation
from harness.workloads import Workload


class Ring:
    def __init__(self, capacity: int, specs: dict[str, tuple[tuple[int, ...], np.dtype]]) -> None:
        self.capacity, self.position, self.size = capacity, 0, 0
        self.columns = {name: np.zeros((capacity, *shape), dtype) for name, (shape, dtype) in specs.items()}
        self.rng = np.random.default_rng(0)

    def add(self, **row: object) -> None:
        for name, value in row.items():
            self.columns[name][self.position] = value
        self.position = (self.position + 1) % self.capacity
        self.size = min(self.size + 1, self.capacity)

    def extend(self, **batch: np.ndarray) -> None:
        count = len(batch["reward"])
        end = self.position + count
        where: slice | np.ndarray = slice(self.position, end)
        if end > self.capacity:
            where = np.arange(self.position, end) % self.capacity
        for name, values in batch.items():
            self.columns[name][where] = values
        self.position = end % self.capacity
        self.size = min(self.size + count, self.capacity)

    def sample(self, count: int) -> dict[str, np.ndarray]:
        rows = self.rng.integers(0, self.size, count)
        return {name: column[rows] for name, column in self.columns.items()}

    def sample_take(self, count: int) -> dict[str, np.ndarray]:
        rows = self.rng.integers(0, self.size, count)
        return {name: column.take(rows, axis=0) for name, column in self.columns.items()}


class NumpyRing(Contender):
    packages = ("numpy",)

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        self.ring = Ring(capacity, workload.field_specs)
        for chunk in workload.chunks(capacity):
            self.ring.extend(**chunk)

    def add_one(self) -> dict[str, Operation]:
        ring, rows = self.ring, cycle(self.workload.rows())

        def add(calls: int) -> None:
            for obs, action, reward, next_obs, done in islice(rows, calls):
                ring.add(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)

        return {"": Operation(add)}

    def add_many(self, count: int) -> dict[str, Operation]:
        ring, batch = self.ring, self.workload.columns(count)

        def add(calls: int) -> None:
            for _ in range(calls):
                ring.extend(**batch)

        return {"": Operation(add)}

    def sample(self, count: int) -> dict[str, Operation]:
        ring = self.ring

        def index(calls: int) -> None:
            for _ in range(calls):
                _batch = ring.sample(count)

        def take(calls: int) -> None:
            for _ in range(calls):
                _batch = ring.sample_take(count)

        return {"": Operation(index), "take": Operation(take)}


FORMS = {"plain": NumpyRing}
