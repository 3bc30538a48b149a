"""torchrl's shared buffers: `ReplayBuffer(shared=True)`, and `TensorDictPrioritizedReplayBuffer(sync=False)`.

The latter keeps the priorities in the process that made the buffer, which alone may draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from harness.crowd import Calls, Peer
from harness.worker import ALPHA, BETA, batch_priorities, random_priorities
from harness.workloads import Workload
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictPrioritizedReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler

from peers.torchrl import tensordict


class Torchrl(Peer):
    packages = ("torchrl", "tensordict", "torch")
    note = "shared=True, one thread a process; TensorDicts prebuilt"

    def __init__(self, prioritized: bool) -> None:
        super().__init__(prioritized)
        self.learns_here = prioritized
        if prioritized:
            self.note = f"sync=False, {self.note}"

    def fill(self, workload: Workload, capacity: int, token: str) -> None:
        self.open()
        self.workload = workload
        storage = LazyTensorStorage(capacity)
        if self.prioritized:
            settings = {"alpha": ALPHA, "beta": BETA, "shared": True, "sync": False}
            self.buffer = TensorDictPrioritizedReplayBuffer(storage=storage, **settings)
        else:
            self.buffer = ReplayBuffer(storage=storage, sampler=RandomSampler(), shared=True)
        for chunk in workload.chunks(capacity):
            self.buffer.extend(tensordict(chunk))
        if self.prioritized:
            self.buffer.sample(1)  # its priorities follow the rows when somebody draws
            self.buffer.update_priority(torch.arange(capacity), torch.from_numpy(random_priorities(capacity)))

    def open(self) -> None:
        # Two of them on two cores already.
        torch.set_num_threads(1)

    def adding(self, count: int) -> tuple[Calls, Sequence[tuple]]:
        if count > 1:
            return self.buffer.extend, [(tensordict(self.workload.columns(count)),)]
        rows = tensordict(self.workload.columns(self.workload.pool_rows))
        return self.buffer.add, [(row.clone(),) for row in rows]

    def learning(self, count: int) -> tuple[Callable[[], Any], Callable[[Any, Any], object]]:
        buffer = self.buffer
        return partial(buffer.sample, count), lambda batch, values: buffer.update_priority(batch["index"], values)

    def priorities(self, count: int) -> Sequence[torch.Tensor]:
        return [torch.from_numpy(values) for values in batch_priorities(count)]


FORMS = {"uniform": partial(Torchrl, False), "prioritized": partial(Torchrl, True)}
