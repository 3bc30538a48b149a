"""torchrl `ReplayBuffer` over `LazyTensorStorage`: TensorDicts in and out."""

from __future__ import annotations

from itertools import cycle, islice

import torch
from harness.worker import (
    ALPHA,
    BETA,
    GAMMA,
    STEPS,
    WINDOW_STEPS,
    Contender,
    Operation,
    batch_priorities,
    random_priorities,
    updating,
)
from harness.workloads import Columns, Workload
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import PrioritizedSampler, RandomSampler, SliceSampler
from torchrl.envs.transforms import MultiStepTransform


def tensordict(columns: Columns) -> TensorDict:
    # Flat names: torchrl's own nested "next" costs it a second TensorDict a call.
    return TensorDict({name: torch.from_numpy(x) for name, x in columns.items()}, batch_size=len(columns["reward"]))


class Torchrl(Contender):
    packages = ("torchrl", "tensordict", "torch")
    note = "TensorDicts prebuilt"

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        self.buffer = self.make(LazyTensorStorage(capacity))
        for chunk in workload.chunks(capacity):
            self.buffer.extend(self.tensordict(chunk))

    def make(self, storage: LazyTensorStorage) -> ReplayBuffer:
        return ReplayBuffer(storage=storage, sampler=RandomSampler())

    def tensordict(self, columns: Columns) -> TensorDict:
        return tensordict(columns)

    def rows(self) -> list[TensorDict]:
        return [row.clone() for row in self.tensordict(self.workload.columns(self.workload.pool_rows))]

    def add_one(self) -> dict[str, Operation]:
        buffer, rows = self.buffer, cycle(self.rows())

        def add(calls: int) -> None:
            for row in islice(rows, calls):
                buffer.add(row)

        return {"": Operation(add)}

    def add_many(self, count: int) -> dict[str, Operation]:
        buffer, batch = self.buffer, self.tensordict(self.workload.columns(count))

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


class Prioritized(Torchrl):
    note = "TensorDicts prebuilt; its extension built from its own sources where the wheel's does not load"

    def fill(self, workload: Workload, capacity: int) -> None:
        super().fill(workload, capacity)
        self.buffer.update_priority(torch.arange(capacity), torch.from_numpy(random_priorities(capacity)))

    def make(self, storage: LazyTensorStorage) -> ReplayBuffer:
        return ReplayBuffer(storage=storage, sampler=PrioritizedSampler(storage.max_size, alpha=ALPHA, beta=BETA))

    def sample(self, count: int) -> dict[str, Operation]:
        buffer = self.buffer

        def sample(calls: int) -> None:
            for _ in range(calls):
                _batch, _info = buffer.sample(count, return_info=True)

        return {"": Operation(sample)}

    @staticmethod
    def priorities(count: int) -> list[torch.Tensor]:
        return [torch.from_numpy(values) for values in batch_priorities(count)]

    def update(self, count: int) -> dict[str, Operation]:
        buffer = self.buffer

        def draw() -> torch.Tensor:
            return buffer.sample(count, return_info=True)[1]["index"]

        return {"": updating(draw, buffer.update_priority, self.priorities(count))}

    def learn(self, count: int) -> dict[str, Operation]:
        buffer, steps = self.buffer, zip(cycle(self.rows()), cycle(self.priorities(count)), strict=False)

        def learn(calls: int) -> None:
            for row, priorities in islice(steps, calls):
                buffer.add(row)
                _batch, info = buffer.sample(count, return_info=True)
                buffer.update_priority(info["index"], priorities)

        return {"": Operation(learn)}


class NStep(Torchrl):
    note = "MultiStepTransform: folds the steps when it adds, so that a sample is a plain one; TensorDicts prebuilt"

    def make(self, storage: LazyTensorStorage) -> ReplayBuffer:
        fold = MultiStepTransform(n_steps=STEPS, gamma=GAMMA)
        return ReplayBuffer(storage=storage, sampler=RandomSampler(), transform=fold)

    def tensordict(self, columns: Columns) -> TensorDict:
        flat = tensordict(columns)
        done = flat["done"].unsqueeze(-1)
        after = {
            "obs": flat["next_obs"],
            "reward": flat["reward"].unsqueeze(-1),
            "done": done,
            "terminated": done.clone(),
        }
        return TensorDict({"obs": flat["obs"], "action": flat["action"], "next": after}, batch_size=flat.batch_size)

    def add_one(self) -> dict[str, Operation]:
        # It wants a time axis: one row is an extend by one.
        buffer, pool = self.buffer, self.tensordict(self.workload.columns(self.workload.pool_rows))
        rows = cycle([pool[i : i + 1].clone() for i in range(len(pool))])

        def extend(calls: int) -> None:
            for row in islice(rows, calls):
                buffer.extend(row)

        return {"": Operation(extend)}


class Windows(Torchrl):
    note = "SliceSampler: episodes are equally likely, then their slices; TensorDicts prebuilt"
    cache_values = False

    def make(self, storage: LazyTensorStorage) -> ReplayBuffer:
        sampler = SliceSampler(slice_len=WINDOW_STEPS, end_key="done", cache_values=self.cache_values)
        return ReplayBuffer(storage=storage, sampler=sampler)

    def sample(self, count: int) -> dict[str, Operation]:
        return super().sample(count * WINDOW_STEPS)


class CachedWindows(Windows):
    note = "cache_values=True: it keeps where episodes end, until the next add"
    cache_values = True


FORMS = {
    "plain": Torchrl,
    "prioritized": Prioritized,
    "nstep": NStep,
    "stop": Windows,
    "stop_cached": CachedWindows,
}
