"""A Ray actor around a NumPy ring, as people write it. Both sides keep requests in flight, as Ray advises."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

# Before the import, which reads it: everything listens on the loopback address alone.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

import numpy as np
import ray
from harness.crowd import Calls, Peer
from harness.worker import ALPHA, BETA, random_priorities
from harness.workloads import Columns, Workload

from peers.numpy_ring import Ring

ACTOR = NAMESPACE = "replay"
ADDS_IN_FLIGHT, BATCHES_AHEAD = 32, 2
STORE_BYTES = 200_000_000


class SumTree:
    """Sums over masses in one array: node i has the children 2i and 2i + 1, the leaves come last."""

    def __init__(self, capacity: int) -> None:
        self.levels = (capacity - 1).bit_length()
        self.leaves = 1 << self.levels
        self.sums = np.zeros(2 * self.leaves)
        self.rng = np.random.default_rng(0)

    def set(self, rows: np.ndarray, masses: np.ndarray | float) -> None:
        nodes = rows + self.leaves
        self.sums[nodes] = masses
        for _ in range(self.levels):
            nodes = np.unique(nodes >> 1)
            self.sums[nodes] = self.sums[2 * nodes] + self.sums[2 * nodes + 1]

    def draw(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and their probabilities, one of each of `count` equal parts of the mass."""
        total = self.sums[1]
        targets, nodes = (np.arange(count) + self.rng.random(count)) * (total / count), np.ones(count, np.int64)
        for _ in range(self.levels):
            nodes *= 2
            left = self.sums[nodes]
            right = targets >= left
            targets -= left * right
            nodes += right
        return nodes - self.leaves, self.sums[nodes] / total


class Store:
    """What the actor is."""

    def __init__(self, workload: Workload, capacity: int, prioritized: bool) -> None:
        self.ring = Ring(capacity, workload.field_specs)
        self.tree = SumTree(capacity) if prioritized else None
        self.largest = 1.0
        for chunk in workload.chunks(capacity):
            self.extend(chunk)
        if prioritized:
            self.update(np.arange(capacity), random_priorities(capacity))

    def add(self, row: tuple) -> None:
        obs, action, reward, next_obs, done = row
        self.arrive(1)
        self.ring.add(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)

    def extend(self, batch: Columns) -> None:
        self.arrive(len(batch["reward"]))
        self.ring.extend(**batch)

    def arrive(self, count: int) -> None:
        if self.tree:
            self.tree.set((self.ring.position + np.arange(count)) % self.ring.capacity, self.largest)

    def sample(self, count: int) -> Columns:
        if self.tree is None:
            return self.ring.sample_take(count)
        rows, probabilities = self.tree.draw(count)
        weights = (self.ring.size * probabilities) ** -BETA
        batch = {name: column.take(rows, axis=0) for name, column in self.ring.columns.items()}
        return batch | {"indices": rows, "weights": weights / weights.max()}

    def update(self, rows: np.ndarray, priorities: np.ndarray) -> None:
        masses = priorities**ALPHA
        self.largest = max(self.largest, float(masses.max()))
        self.tree.set(rows, masses)


class Ray(Peer):
    packages = ("ray", "numpy")
    note = f"an actor around a NumPy ring; {ADDS_IN_FLIGHT} adds in flight, {BATCHES_AHEAD} batches ahead"

    def fill(self, workload: Workload, capacity: int, token: str) -> None:
        if self.prioritized:
            self.note += "; a sum tree in NumPy"
        self.workload = workload
        context = ray.init(
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            namespace=NAMESPACE,
            object_store_memory=STORE_BYTES,
            _temp_dir=os.environ.get("TMPDIR"),
        )
        self.address = context.address_info["gcs_address"]
        make = ray.remote(Store).options(name=ACTOR, num_cpus=0)
        self.store = make.remote(workload, capacity, self.prioritized)
        ray.get(self.store.sample.remote(1))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "store"}

    def open(self) -> None:
        ray.init(address=self.address, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
        self.store = ray.get_actor(ACTOR)

    def adding(self, count: int) -> tuple[Calls, Sequence[tuple]]:
        asked: deque[Any] = deque()
        method = self.store.add if count == 1 else self.store.extend

        def add(rows: Any) -> None:
            asked.append(method.remote(rows))
            if len(asked) > ADDS_IN_FLIGHT:
                ray.get(asked.popleft())

        inputs = self.workload.rows() if count == 1 else [self.workload.columns(count)]
        return add, [(value,) for value in inputs]

    def learning(self, count: int) -> tuple[Callable[[], Any], Callable[[Any, Any], object]]:
        store = self.store
        asked = deque(store.sample.remote(count) for _ in range(BATCHES_AHEAD))

        def sample() -> Columns:
            asked.append(store.sample.remote(count))
            return ray.get(asked.popleft())

        def update(batch: Columns, values: np.ndarray) -> None:
            store.update.remote(batch["indices"], values)

        return sample, update

    def close(self) -> None:
        ray.shutdown()


FORMS = {"uniform": partial(Ray, False), "prioritized": partial(Ray, True)}
