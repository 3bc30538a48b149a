"""tianshou `ReplayBuffer` and `VectorReplayBuffer`: NumPy arrays inside `Batch` objects."""

from __future__ import annotations

from itertools import cycle, islice

import numpy as np
from harness.worker import Contender, Operation
from harness.workloads import Columns, Row, Workload
from tianshou.data import Batch, ReplayBuffer, VectorReplayBuffer


def step_batch(row: Row) -> Batch:
    obs, action, reward, next_obs, done = row
    return Batch(
        obs=obs,
        act=action,
        rew=np.float32(reward),
        terminated=done,
        truncated=False,
        obs_next=next_obs,
        info={},
    )


def env_batch(columns: Columns) -> Batch:
    return Batch(
        obs=columns["obs"],
        act=columns["action"],
        rew=columns["reward"],
        terminated=columns["done"],
        truncated=np.zeros(len(columns["done"]), bool),
        obs_next=columns["next_obs"],
        info=Batch(),
    )


class Tianshou(Contender):
    packages = ("tianshou", "torch", "numpy")
    note = "Batch objects prebuilt; many rows in one add only as environments"

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload, self.capacity = workload, capacity
        self.buffer = ReplayBuffer(capacity)
        self.buffer.add(step_batch(workload.rows()[0]))
        # Through its arrays, which the first add has allocated: add() takes one step at a time.
        stored, start = self.buffer._meta, 0
        for chunk in workload.chunks(capacity):
            end = start + len(chunk["reward"])
            batch = env_batch(chunk)
            for name in ("obs", "act", "rew", "terminated", "truncated", "obs_next"):
                stored[name][start:end] = batch[name]
            stored.done[start:end] = chunk["done"]
            start = end
        self.buffer._size, self.buffer._insertion_idx = capacity, 0

    def add_one(self) -> dict[str, Operation]:
        buffer, steps = self.buffer, cycle([step_batch(row) for row in self.workload.rows()])

        def add(calls: int) -> None:
            for step in islice(steps, calls):
                buffer.add(step)

        return {"": Operation(add)}

    def add_many(self, count: int) -> dict[str, Operation]:
        buffer, ids = VectorReplayBuffer(self.capacity, count), np.arange(count)
        batch = env_batch(self.workload.columns(count))
        buffer.add(batch, buffer_ids=ids)
        for array in buffer._meta.values():
            if isinstance(array, np.ndarray):
                array[:] = 1

        def add(calls: int) -> None:
            for _ in range(calls):
                buffer.add(batch, buffer_ids=ids)

        return {"": Operation(add)}

    def sample(self, count: int) -> dict[str, Operation]:
        buffer = self.buffer

        def sample(calls: int) -> None:
            for _ in range(calls):
                _batch = buffer.sample(count)

        return {"": Operation(sample)}


CONTENDER = Tianshou
