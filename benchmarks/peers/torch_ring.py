"""A ring of torch tensors by hand: `index_select`, on as many cores as torch takes."""

from __future__ import annotations

import torch
from harness.worker import Contender, Operation
from harness.workloads import Workload


class TorchRing(Contender):
    packages = ("torch",)
    note = "index_select on all cores"

    def fill(self, workload: Workload, capacity: int) -> None:
        self.capacity = capacity
        specs = workload.field_specs
        kinds = {name: getattr(torch, dtype.name) for name, (_, dtype) in specs.items()}
        self.columns = {name: torch.empty((capacity, *shape), dtype=kinds[name]) for name, (shape, _) in specs.items()}
        start = 0
        for chunk in workload.chunks(capacity):
            end = start + len(chunk["reward"])
            for name, values in chunk.items():
                self.columns[name][start:end] = torch.from_numpy(values)
            start = end

    def sample(self, count: int) -> dict[str, Operation]:
        columns, capacity = self.columns, self.capacity
        kept = {name: column[:count].clone() for name, column in columns.items()}

        def fresh(calls: int) -> None:
            for _ in range(calls):
                rows = torch.randint(0, capacity, (count,))
                _batch = {name: torch.index_select(column, 0, rows) for name, column in columns.items()}

        def out(calls: int) -> None:
            for _ in range(calls):
                rows = torch.randint(0, capacity, (count,))
                for name, column in columns.items():
                    torch.index_select(column, 0, rows, out=kept[name])

        return {"": Operation(fresh), "out": Operation(out)}


FORMS = {"plain": TorchRing}
