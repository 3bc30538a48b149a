"""The ring that everyone writes once, in shared memory under one lock."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
from harness.crowd import Calls, Peer
from harness.workloads import Workload

from peers.numpy_ring import Ring


class SharedRing(Ring):
    """Its columns and counters are wherever `columns` and `counters` are."""

    def __init__(self, capacity: int, columns: dict[str, np.ndarray], counters: np.ndarray) -> None:
        self.capacity, self.columns, self.counters = capacity, columns, counters
        self.rng = np.random.default_rng()

    @property
    def position(self) -> int:
        return int(self.counters[0])

    @position.setter
    def position(self, row: int) -> None:
        self.counters[0] = row

    @property
    def size(self) -> int:
        return int(self.counters[1])

    @size.setter
    def size(self, rows: int) -> None:
        self.counters[1] = rows


class NumpyRing(Peer):
    packages = ("numpy",)
    note = "SharedMemory and one multiprocessing.Lock around each call; draws by take"

    def fill(self, workload: Workload, capacity: int, token: str) -> None:
        self.workload, self.capacity, self.token = workload, capacity, token
        self.lock = multiprocessing.get_context("spawn").Lock()
        self.attach(create=True)
        self.ring.counters[:] = 0
        for chunk in workload.chunks(capacity):
            self.ring.extend(**chunk)

    def attach(self, create: bool) -> None:
        specs = {**self.workload.field_specs, "counters": ((), np.dtype("int64"))}
        arrays, self.segments = {}, []
        for name, (shape, dtype) in specs.items():
            rows = 2 if name == "counters" else self.capacity
            size = rows * int(np.prod(shape)) * dtype.itemsize
            self.segments.append(SharedMemory(f"{self.token}-{name}", create=create, size=size))
            arrays[name] = np.ndarray((rows, *shape), dtype, buffer=self.segments[-1].buf)
        counters = arrays.pop("counters")
        self.ring = SharedRing(self.capacity, arrays, counters)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("ring", "segments")}

    def open(self) -> None:
        self.attach(create=False)

    def adding(self, count: int) -> tuple[Calls, Sequence[tuple]]:
        ring, lock = self.ring, self.lock

        def add(obs: Any, action: Any, reward: Any, next_obs: Any, done: Any) -> None:
            with lock:
                ring.add(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)

        def extend(batch: dict[str, np.ndarray]) -> None:
            with lock:
                ring.extend(**batch)

        return (add, self.workload.rows()) if count == 1 else (extend, [(self.workload.columns(count),)])

    def learning(self, count: int) -> tuple[Callable[[], Any], Callable[[Any, Any], object]]:
        ring, lock = self.ring, self.lock

        def sample() -> dict[str, np.ndarray]:
            with lock:
                return ring.sample_take(count)

        return sample, lambda _batch, _values: None

    def close(self) -> None:
        for segment in self.segments:
            segment.unlink()


FORMS = {"uniform": partial(NumpyRing, False)}
