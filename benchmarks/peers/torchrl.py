"""torchrl `ReplayBuffer` over `LazyTensorStorage`: TensorDicts in and out."""

from __future__ import annotations

from itertools import cycle, islice

import torch
from harness.worker import Contender, Operation
from harness.workloads import Columns, Workload
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler


def tensordict(columns: Columns) -> TensorDict:
    # Flat names: torchrl's own nested "next" costs it a second TensorDict a call.
    return TensorDict({name: torch.from_numpy(x) for name, x in columns.items()}, batch_size=len(columns["reward"]))


class Torchrl(Contender):
    packages = ("torchrl", "tensordict", "torch")
    note = "TensorDicts prebuilt"

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        self.buffer = ReplayBuffer(storage=LazyTensorStorage(capacity), sampler=RandomSampler())
        for chunk in workload.chunks(capacity):
            self.buffer.extend(tensordict(chunk))

    def add_one(self) -> dict[str, Operation]:
        buffer = self.buffer
        rows = cycle([row.clone() for row in tensordict(self.workload.columns(self.workload.pool_rows))])

        def add(calls: int) -> None:
            for row in islice(rows, calls):
                buffer.add(row)

        return {"": Operation(add)}

    def add_many(self, count: int) -> dict[str, Operation]:
        buffer, batch = self.buffer, tensordict(self.workload.columns(count))

        def extend(calls: int) -> None:
            for _ in range(calls):
                buffer.extend(batch)

        return {"": Operation(extend)}

    def sample(self, count: int) -> dict[str, Operation]:
        buffer = self.buffer

        def sample(calls: int) -> None:
            for _ in range(calls):
                _batch = buffer.sample(count)

        return {"": Operation(sample)}


CONTENDER = Torchrl
