"""cpprb `ReplayBuffer`: Cython over C++, NumPy in and out."""

from __future__ import annotations

from itertools import cycle, islice

from cpprb import ReplayBuffer
from harness.worker import Contender, Operation
from harness.workloads import Workload


class Cpprb(Contender):
    packages = ("cpprb", "numpy")

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        fields = {name: {"shape": shape or 1, "dtype": dtype} for name, (shape, dtype) in workload.field_specs.items()}
        self.buffer = ReplayBuffer(capacity, fields)
        for chunk in workload.chunks(capacity):
            self.buffer.add(**chunk)

    def add_one(self) -> dict[str, Operation]:
        buffer, rows = self.buffer, cycle(self.workload.rows())

        def add(calls: int) -> None:
            for obs, action, reward, next_obs, done in islice(rows, calls):
                buffer.add(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)

        return {"": Operation(add)}

    def add_many(self, count: int) -> dict[str, Operation]:
        buffer, batch = self.buffer, self.workload.columns(count)

        def add(calls: int) -> None:
            for _ in range(calls):
                buffer.add(**batch)

        return {"": Operation(add)}

    def sample(self, count: int) -> dict[str, Operation]:
        buffer = self.buffer

        def sample(calls: int) -> None:
            for _ in range(calls):
                _batch = buffer.sample(count)

        return {"": Operation(sample)}


CONTENDER = Cpprb
