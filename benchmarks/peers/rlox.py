"""rlox: buffers in Rust; flat float32 arrays in, NumPy arrays out."""

from __future__ import annotations

from itertools import count as numbers
from itertools import cycle, islice

import numpy as np
import rlox
from harness.worker import (
    ALPHA,
    BETA,
    GOAL_RATIO,
    WINDOW_STEPS,
    Contender,
    Operation,
    batch_priorities,
    random_priorities,
    updating,
)
from harness.workloads import Columns, Workload


def flat(columns: Columns) -> tuple[np.ndarray, ...]:
    """What `push_batch` takes: one axis for every field, flags as bytes."""
    flags = columns["done"].astype(np.uint8)
    obs, after, action = (columns[name].ravel().astype(np.float32) for name in ("obs", "next_obs", "action"))
    return obs, after, action, columns["reward"], flags, np.zeros_like(flags)


class Rlox(Contender):
    packages = ("rlox", "numpy")
    note = "a seed for every sample; flags are prebuilt as bytes; rows of float32 alone"

    def fill(self, workload: Workload, capacity: int) -> None:
        if np.dtype(workload.obs_dtype) != np.float32:
            raise TypeError("rlox keeps observations as float32 alone")
        self.workload = workload
        # It needs a new seed every time: with the same one it draws the same rows.
        self.seeds = numbers()
        action = int(np.prod(workload.action_shape))
        self.buffer = self.make(capacity, workload.obs_shape[0], action)
        for chunk in workload.chunks(capacity):
            self.extend(chunk)

    def make(self, capacity: int, obs: int, action: int) -> rlox.ReplayBuffer:
        return rlox.ReplayBuffer(capacity, obs, action)

    def extend(self, columns: Columns) -> None:
        self.buffer.push_batch(*flat(columns))

    def add_one(self) -> dict[str, Operation]:
        push, rows = self.buffer.push, cycle(self.workload.rows())

        def add(calls: int) -> None:
            for obs, action, reward, next_obs, done in islice(rows, calls):
                push(obs, action, reward, done, False, next_obs)

        return {"": Operation(add)}

    def add_many(self, count: int) -> dict[str, Operation]:
        buffer, batch = self.buffer, flat(self.workload.columns(count))

        def add(calls: int) -> None:
            for _ in range(calls):
                buffer.push_batch(*batch)

        return {"": Operation(add)}

    def sample(self, count: int) -> dict[str, Operation]:
        buffer, seeds = self.buffer, self.seeds

        def sample(calls: int) -> None:
            for seed in islice(seeds, calls):
                _batch = buffer.sample(count, seed)

        return {"": Operation(sample)}


class Prioritized(Rlox):
    note = "a seed for every sample; rows are added one by one; priorities are prebuilt as float64"

    def make(self, capacity: int, obs: int, action: int) -> rlox.PrioritizedReplayBuffer:
        return rlox.PrioritizedReplayBuffer(capacity, obs, action, ALPHA, BETA)

    def extend(self, columns: Columns) -> None:
        columns = {**columns, "action": columns["action"].reshape(len(columns["reward"]), -1).astype(np.float32)}
        rows = zip(*columns.values(), random_priorities(len(columns["reward"])).tolist(), strict=True)
        for obs, action, reward, next_obs, done, priority in rows:
            self.buffer.push(obs, action, float(reward), bool(done), False, next_obs, priority)

    def update(self, count: int) -> dict[str, Operation]:
        buffer, seeds = self.buffer, self.seeds
        priorities = [values.astype(np.float64) for values in batch_priorities(count)]
        return {
            "": updating(lambda: buffer.sample(count, next(seeds))["indices"], buffer.update_priorities, priorities)
        }

    def learn(self, count: int) -> dict[str, Operation]:
        buffer, priorities = self.buffer, [values.astype(np.float64) for values in batch_priorities(count)]
        steps = zip(cycle(self.workload.rows()), cycle(priorities), self.seeds, strict=False)

        def learn(calls: int) -> None:
            for (obs, action, reward, next_obs, done), values, seed in islice(steps, calls):
                buffer.push(obs, action, reward, done, False, next_obs)
                batch = buffer.sample(count, seed)
                buffer.update_priorities(batch["indices"], values)

        return {"": Operation(learn)}


class OneByOne(Rlox):
    """The buffers that know episodes: rows in the order obs, next_obs, and no batches of them."""

    def extend(self, columns: Columns) -> None:
        for obs, action, reward, next_obs, done in zip(*columns.values(), strict=True):
            self.buffer.push(obs, next_obs, action, float(reward), bool(done), False)

    def add_one(self) -> dict[str, Operation]:
        push, rows = self.buffer.push, cycle(self.workload.rows())

        def add(calls: int) -> None:
            for obs, action, reward, next_obs, done in islice(rows, calls):
                push(obs, next_obs, action, reward, done, False)

        return {"": Operation(add)}


class Windows(OneByOne):
    note = "SequenceReplayBuffer: windows that fit whole; a seed for every sample"

    def make(self, capacity: int, obs: int, action: int) -> rlox.SequenceReplayBuffer:
        return rlox.SequenceReplayBuffer(capacity, obs, action)

    def sample(self, count: int) -> dict[str, Operation]:
        buffer, seeds = self.buffer, self.seeds

        def sample(calls: int) -> None:
            for seed in islice(seeds, calls):
                _batch = buffer.sample_sequences(count, WINDOW_STEPS, seed)

        return {"": Operation(sample)}


class Hindsight(OneByOne):
    note = "HERBuffer: its own reward, 0 or -1 by a distance, in Rust: it takes no function; a seed for every sample"

    def make(self, capacity: int, obs: int, action: int) -> rlox.HERBuffer:
        goals = self.workload.goal_size
        achieved, desired = obs - 2 * goals, obs - goals
        return rlox.HERBuffer(capacity, obs, action, goals, achieved, desired, "future", goal_tolerance=0.05)

    def sample(self, count: int) -> dict[str, Operation]:
        buffer, seeds = self.buffer, self.seeds

        def sample(calls: int) -> None:
            for seed in islice(seeds, calls):
                _batch = buffer.sample(count, GOAL_RATIO, seed)

        return {"": Operation(sample)}


FORMS = {"plain": Rlox, "prioritized": Prioritized, "stop": Windows, "hindsight": Hindsight}
