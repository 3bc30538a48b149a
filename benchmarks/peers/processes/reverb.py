"""Reverb: a server process, and a client in each of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import reverb
from harness.crowd import Calls, Peer
from harness.worker import batch_priorities
from harness.workloads import Workload

import peers.reverb as in_process


class Reverb(Peer):
    packages = ("dm-reverb", "tensorflow", "numpy")

    def fill(self, workload: Workload, capacity: int, token: str) -> None:
        served = in_process.FORMS["prioritized" if self.prioritized else "plain"]()
        served.fill(workload, capacity)
        self.workload, self.note, self.port = workload, served.note, served.server.port
        self.pool, self.served = served.pool, served

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "served"}

    def open(self) -> None:
        self.client = reverb.Client(f"localhost:{self.port}")

    def adding(self, count: int) -> tuple[Calls, Sequence[tuple]]:
        writer, table = in_process.open_writer(self.client), in_process.TABLE

        def add(*steps: dict[str, Any]) -> None:
            for step in steps:
                writer.append(step)
                writer.create_item(table, num_timesteps=1, priority=1.0)

        return add, list(zip(*repeat(iter(self.pool), count), strict=False))

    def learning(self, count: int) -> tuple[Callable[[], Any], Callable[[Any, Any], object]]:
        client, batches = self.client, in_process.batches(self.port, count)

        def update(batch: Any, values: list[float]) -> None:
            keys = batch.info.key.numpy().tolist()
            client.mutate_priorities(in_process.TABLE, dict(zip(keys, values, strict=True)))

        return partial(next, batches), update

    def priorities(self, count: int) -> Sequence[list[float]]:
        return [values.tolist() for values in batch_priorities(count)]

    def close(self) -> None:
        self.served.server.stop()


FORMS = {"uniform": partial(Reverb, False), "prioritized": partial(Reverb, True)}
