"""The ring that everyone writes once: a yardstick, not a library."""

from __future__ import annotations

from functools import partial
from itertools import cycle, islice

import numpy as np
from harness.worker import (
    GOAL_RATIO,
    WINDOW_STEPS,
    Contender,
    Operation,
    batch_states,
    goal_reward,
    kept_rows,
    updating,
)
from harness.workloads import FIELDS, STATE_ITEMS, Columns, Workload
from numpy.lib.stride_tricks import as_strided


class Ring:
    def __init__(self, capacity: int, specs: dict[str, tuple[tuple[int, ...], np.dtype]]) -> None:
        self.capacity, self.position, self.size = capacity, 0, 0
        self.columns = {name: np.zeros((capacity, *shape), dtype) for name, (shape, dtype) in specs.items()}
        self.obs, self.action, self.reward, self.next_obs, self.done = (self.columns[name] for name in FIELDS)
        self.rng = np.random.default_rng(0)

    def add(self, **row: object) -> None:
        for name, value in row.items():
            self.columns[name][self.position] = value
        self.position = (self.position + 1) % self.capacity
        self.size = min(self.size + 1, self.capacity)

    def add_plainly(self, obs: object, action: object, reward: object, next_obs: object, done: object) -> None:
        """The same as five assignments."""
        row = self.position
        self.obs[row] = obs
        self.action[row] = action
        self.reward[row] = reward
        self.next_obs[row] = next_obs
        self.done[row] = done
        self.position = (row + 1) % self.capacity
        if self.size < self.capacity:
            self.size += 1

    def extend(self, **batch: np.ndarray) -> None:
        count = len(batch["reward"])
        end = self.position + count
        where: slice | np.ndarray = slice(self.position, end)
        if end > self.capacity:
            where = np.arange(self.position, end) % self.capacity
        for name, values in batch.items():
            self.columns[name][where] = values
        self.position = end % self.capacity
        self.size = min(self.size + count, self.capacity)

    def sample(self, count: int) -> dict[str, np.ndarray]:
        rows = self.rng.integers(0, self.size, count)
        return {name: column[rows] for name, column in self.columns.items()}

    def sample_take(self, count: int) -> dict[str, np.ndarray]:
        rows = self.rng.integers(0, self.size, count)
        return {name: column.take(rows, axis=0) for name, column in self.columns.items()}


class NumpyRing(Contender):
    packages = ("numpy",)

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        self.ring = Ring(capacity, workload.field_specs)
        for chunk in workload.chunks(capacity):
            self.ring.extend(**chunk)

    def add_one(self) -> dict[str, Operation]:
        ring, rows = self.ring, cycle(self.workload.rows())

        def add(calls: int) -> None:
            for obs, action, reward, next_obs, done in islice(rows, calls):
                ring.add(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)

        def add_plainly(calls: int) -> None:
            for obs, action, reward, next_obs, done in islice(rows, calls):
                ring.add_plainly(obs, action, reward, next_obs, done)

        return {"": Operation(add), "assignments": Operation(add_plainly)}

    def add_many(self, count: int) -> dict[str, Operation]:
        ring, batch = self.ring, self.workload.columns(count)

        def add(calls: int) -> None:
            for _ in range(calls):
                ring.extend(**batch)

        return {"": Operation(add)}

    def sample(self, count: int) -> dict[str, Operation]:
        ring = self.ring

        def index(calls: int) -> None:
            for _ in range(calls):
                _batch = ring.sample(count)

        def take(calls: int) -> None:
            for _ in range(calls):
                _batch = ring.sample_take(count)

        return {"": Operation(index), "take": Operation(take)}


class Windows(NumpyRing):
    """The columns seen as overlapping windows, each one piece of memory: one index a field copies whole windows."""

    note = "overlapping views and one index a field; where windows may start is known beforehand, until the next add"

    def fill(self, workload: Workload, capacity: int) -> None:
        super().fill(workload, capacity)
        # A window may end with an episode and not go on after it.
        ends = np.cumsum(self.ring.done)
        last = np.arange(capacity - WINDOW_STEPS + 1) + WINDOW_STEPS - 2
        before = np.append(0, ends)[: len(last)]
        self.starts = np.flatnonzero(ends[last] == before)
        self.views = {name: self.windows(column) for name, column in self.ring.columns.items()}
        self.shapes = {name: (WINDOW_STEPS, *column.shape[1:]) for name, column in self.ring.columns.items()}

    @staticmethod
    def windows(column: np.ndarray) -> np.ndarray:
        size = int(np.prod(column.shape[1:]))
        shape = (len(column) - WINDOW_STEPS + 1, WINDOW_STEPS * size)
        return as_strided(column, shape, (column.strides[0], column.itemsize), writeable=False)

    def add_one(self) -> dict[str, Operation]:
        return {}

    def sample(self, count: int) -> dict[str, Operation]:
        rng, views, shapes, possible = self.ring.rng, self.views, self.shapes, self.starts

        def sample(calls: int) -> None:
            for _ in range(calls):
                starts = possible[rng.integers(0, len(possible), count)]
                _batch = {name: view[starts].reshape(count, *shapes[name]) for name, view in views.items()}

        return {"": Operation(sample)}


class Masked(NumpyRing):
    note = "take, by a list of the rows that may be drawn, which is made beforehand"

    def __init__(self, share: int) -> None:
        self.share = share

    def fill(self, workload: Workload, capacity: int) -> None:
        super().fill(workload, capacity)
        self.kept = np.flatnonzero(kept_rows(capacity, self.share))

    def sample(self, count: int) -> dict[str, Operation]:
        ring, kept = self.ring, self.kept

        def take(calls: int) -> None:
            for _ in range(calls):
                rows = kept.take(ring.rng.integers(0, len(kept), count))
                _batch = {name: column.take(rows, axis=0) for name, column in ring.columns.items()}

        return {"": Operation(take)}


class Recurrent(NumpyRing):
    note = "one more column; states are assigned by the numbers of their rows"

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        self.ring = Ring(capacity, workload.field_specs | {"state": ((STATE_ITEMS,), np.dtype(np.float32))})
        for chunk in workload.chunks(capacity):
            self.ring.extend(**chunk, state=np.zeros((len(chunk["reward"]), STATE_ITEMS), np.float32))

    def add_one(self) -> dict[str, Operation]:
        ring, rows, state = self.ring, cycle(self.workload.rows()), np.zeros(STATE_ITEMS, np.float32)

        def add(calls: int) -> None:
            for obs, action, reward, next_obs, done in islice(rows, calls):
                ring.add(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done, state=state)

        return {"": Operation(add)}

    def write(self, count: int) -> dict[str, Operation]:
        ring, column = self.ring, self.ring.columns["state"]

        def write(rows: np.ndarray, states: np.ndarray) -> None:
            column[rows] = states

        return {"": updating(lambda: ring.rng.integers(0, ring.size, count), write, batch_states(count))}


class Hindsight(Contender):
    """Goals that the same episode reached later, by hand: a column tells how many steps of the episode are left."""

    packages = ("numpy",)
    note = "by hand: draw rows and later rows of the same episode, take, put the goals in, compute the reward"

    def fill(self, workload: Workload, capacity: int) -> None:
        chunks = list(workload.chunks(capacity))
        columns: Columns = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in FIELDS}
        self.obs, self.after = (workload.split_goals(columns[name]) for name in ("obs", "next_obs"))
        self.rest = {name: columns[name] for name in ("action", "reward", "done")}
        ends = np.flatnonzero(columns["done"])
        rows = np.arange(capacity)
        self.steps_left = ends[np.searchsorted(ends, rows)] - rows + 1
        self.rng = np.random.default_rng(0)

    def draw(self, count: int) -> Columns:
        changed = round(GOAL_RATIO * count)
        rows = self.rng.integers(0, len(self.steps_left), count)
        obs = {name: column.take(rows, axis=0) for name, column in self.obs.items()}
        after = {name: column.take(rows, axis=0) for name, column in self.after.items()}
        batch = {name: column.take(rows, axis=0) for name, column in self.rest.items()}
        first = rows[:changed]
        later = first + (self.rng.random(changed) * self.steps_left.take(first)).astype(np.int64)
        goals = self.after["achieved_goal"].take(later, axis=0)
        obs["desired_goal"][:changed] = goals
        after["desired_goal"][:changed] = goals
        batch["reward"][:changed] = goal_reward(after["achieved_goal"][:changed], goals)
        return {**batch, "obs": obs, "next_obs": after}

    def sample(self, count: int) -> dict[str, Operation]:
        def sample(calls: int) -> None:
            for _ in range(calls):
                _batch = self.draw(count)

        return {"": Operation(sample)}


FORMS = {
    "plain": NumpyRing,
    "stop": Windows,
    "hindsight": Hindsight,
    "mutable": Recurrent,
    **{f"masked_{share}": partial(Masked, share) for share in (0, 50, 90, 99)},
}
