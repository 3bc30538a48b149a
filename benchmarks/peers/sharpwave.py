"""Sharpwave itself, through its public API."""

from __future__ import annotations

from itertools import cycle, islice

from harness.worker import Contender, Operation
from harness.workloads import Workload

import sharpwave as sw


class Sharpwave(Contender):
    packages = ("sharpwave", "numpy")

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        schema = {
            "obs": sw.Field(workload.obs_shape, workload.obs_dtype),
            "action": sw.Field(workload.action_shape, workload.action_dtype),
        }
        self.buffer = sw.ReplayBuffer(capacity, schema=schema, seed=0)
        for chunk in workload.chunks(capacity):
            self.buffer.add(**chunk)

    def add_one(self) -> dict[str, Operation]:
        buffer, rows = self.buffer, cycle(self.workload.rows())

        def positional(calls: int) -> None:
            for obs, action, reward, next_obs, done in islice(rows, calls):
                buffer.add(obs, action, reward, next_obs, done)

        def keyword(calls: int) -> None:
            for obs, action, reward, next_obs, done in islice(rows, calls):
                buffer.add(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)

        return {"": Operation(positional), "keyword": Operation(keyword)}

    def add_many(self, count: int) -> dict[str, Operation]:
        buffer, batch = self.buffer, tuple(self.workload.columns(count).values())

        def add(calls: int) -> None:
            for _ in range(calls):
                buffer.add(*batch)

        return {"": Operation(add)}

    def sample(self, count: int) -> dict[str, Operation]:
        buffer = self.buffer
        kept = buffer.sample(count)

        def fresh(calls: int) -> None:
            for _ in range(calls):
                _batch = buffer.sample(count)

        def out(calls: int) -> None:
            for _ in range(calls):
                buffer.sample(count, out=kept)

        def torch(calls: int) -> None:
            for _ in range(calls):
                _batch = buffer.sample(count, device="cpu")

        return {"": Operation(fresh), "out": Operation(out), "torch": Operation(torch)}


CONTENDER = Sharpwave
