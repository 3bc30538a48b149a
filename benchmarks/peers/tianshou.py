"""tianshou's replay buffers: NumPy arrays inside `Batch` objects."""

from __future__ import annotations

from itertools import cycle, islice

import numpy as np
import torch
from harness.footage import STACK
from harness.worker import (
    ALPHA,
    BETA,
    GAMMA,
    STEPS,
    Contender,
    Operation,
    batch_priorities,
    random_priorities,
    updating,
)
from harness.workloads import Columns, Row, Workload
from tianshou.algorithm.algorithm_base import Algorithm
from tianshou.data import Batch, PrioritizedReplayBuffer, ReplayBuffer, VectorReplayBuffer


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
        self.buffer = self.make(capacity)
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

    def make(self, capacity: int) -> ReplayBuffer:
        return ReplayBuffer(capacity)

    def steps(self, count: int = 0) -> list[Batch]:
        return [step_batch(row) for row in self.workload.rows(count)]

    def add_one(self) -> dict[str, Operation]:
        buffer, steps = self.buffer, cycle(self.steps())

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


class Prioritized(Tianshou):
    note = "Batch objects prebuilt"

    def fill(self, workload: Workload, capacity: int) -> None:
        super().fill(workload, capacity)
        self.buffer.update_weight(np.arange(capacity), random_priorities(capacity))

    def make(self, capacity: int) -> ReplayBuffer:
        return PrioritizedReplayBuffer(capacity, alpha=ALPHA, beta=BETA)

    def update(self, count: int) -> dict[str, Operation]:
        buffer = self.buffer
        return {"": updating(lambda: buffer.sample(count)[1], buffer.update_weight, batch_priorities(count))}

    def learn(self, count: int) -> dict[str, Operation]:
        buffer, steps = self.buffer, zip(cycle(self.steps()), cycle(batch_priorities(count)), strict=False)

        def learn(calls: int) -> None:
            for step, priorities in islice(steps, calls):
                buffer.add(step)
                _batch, indices = buffer.sample(count)
                buffer.update_weight(indices, priorities)

        return {"": Operation(learn)}


class NStep(Tianshou):
    note = "sample and compute_nstep_return, which also adds the target network's values: here zeros at no cost"

    def sample(self, count: int) -> dict[str, Operation]:
        buffer, zeros = self.buffer, torch.zeros(count, 1)

        def target(_buffer: ReplayBuffer, _indices: np.ndarray) -> torch.Tensor:
            return zeros

        def sample(calls: int) -> None:
            for _ in range(calls):
                batch, indices = buffer.sample(count)
                _batch = Algorithm.compute_nstep_return(batch, buffer, indices, target, GAMMA, STEPS)

        return {"": Operation(sample)}


class Stacked(Tianshou):
    note = "stack_num=4, ignore_obs_next, save_only_last_obs; Batch objects prebuilt"

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        self.buffer = ReplayBuffer(capacity, stack_num=STACK, ignore_obs_next=True, save_only_last_obs=True)
        for step in islice(cycle(self.steps(workload.chunk_rows)), capacity):
            self.buffer.add(step)


FORMS = {"plain": Tianshou, "prioritized": Prioritized, "nstep": NStep, "stacked": Stacked}
