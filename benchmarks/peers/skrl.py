"""skrl `RandomMemory`: torch tensors of (memory_size, num_envs, size)."""

from __future__ import annotations

from itertools import cycle, islice

import numpy as np
import torch
from harness.worker import Contender, Operation
from harness.workloads import FIELDS, Columns, Workload
from skrl.memories.torch import RandomMemory


def tensors(columns: Columns) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(x.reshape(len(x), -1)) for name, x in columns.items()}


class Skrl(Contender):
    packages = ("skrl", "torch")
    note = "replacement=True (its default draws a permutation of the whole memory per sample); tensors prebuilt"

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload, self.capacity = workload, capacity
        self.memory = self.filled(1)

    def filled(self, num_envs: int) -> RandomMemory:
        memory = RandomMemory(memory_size=self.capacity // num_envs, num_envs=num_envs, device="cpu", replacement=True)
        for name, (shape, dtype) in self.workload.field_specs.items():
            kind = torch.from_numpy(np.zeros(1, dtype)).dtype
            memory.create_tensor(name=name, size=int(np.prod(shape)), dtype=kind)
        # Through its tensors: add_samples with many rows and one environment misplaces them in skrl 2.1.
        flat = {name: memory.tensors[name].flatten(0, 1) for name in FIELDS}
        start = 0
        for chunk in self.workload.chunks(len(flat["reward"])):
            end = start + len(chunk["reward"])
            for name, values in tensors(chunk).items():
                flat[name][start:end] = values
            start = end
        memory.filled = True
        return memory

    @staticmethod
    def adding(memory: RandomMemory, steps: list[dict[str, torch.Tensor]]) -> Operation:
        endless = cycle(steps)

        def add(calls: int) -> None:
            for step in islice(endless, calls):
                memory.add_samples(**step)

        return Operation(add)

    def add_one(self) -> dict[str, Operation]:
        pool = tensors(self.workload.columns(self.workload.pool_rows))
        steps = [{name: x[i : i + 1].clone() for name, x in pool.items()} for i in range(self.workload.pool_rows)]
        return {"": self.adding(self.memory, steps)}

    def add_many(self, count: int) -> dict[str, Operation]:
        return {"": self.adding(self.filled(count), [tensors(self.workload.columns(count))])}

    def sample(self, count: int) -> dict[str, Operation]:
        memory, names = self.memory, list(FIELDS)

        def sample(calls: int) -> None:
            for _ in range(calls):
                _batch = memory.sample(names, batch_size=count)

        return {"": Operation(sample)}


FORMS = {"plain": Skrl}
