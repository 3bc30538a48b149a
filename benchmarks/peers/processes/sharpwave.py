"""Sharpwave: one process makes `shm://name`, the others open it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from harness.crowd import Calls, Peer
from harness.worker import ALPHA, BETA, random_priorities
from harness.workloads import Workload

import sharpwave as sw


class Sharpwave(Peer):
    packages = ("sharpwave", "numpy")

    def fill(self, workload: Workload, capacity: int, token: str) -> None:
        self.workload, self.address = workload, f"shm://{token}"
        self.note = 'storage="shm://name"' + (", sampler=Prioritized()" if self.prioritized else "")
        self.buffer = sw.ReplayBuffer(
            capacity,
            obs_shape=workload.obs_shape,
            action_shape=workload.action_shape,
            sampler=sw.Prioritized(alpha=ALPHA, beta=BETA) if self.prioritized else sw.Uniform(),
            storage=self.address,
            seed=0,
        )
        # A writer that closes leaves its half-full block to the next one.
        with self.buffer.writer() as writer:
            for chunk in workload.chunks(capacity):
                given = {"priority": random_priorities(len(chunk["reward"]))} if self.prioritized else {}
                writer.add(**chunk, **given)
        self.buffer.sample(1)  # the index takes rows in when somebody draws
        stats = self.buffer.stats(huge_pages=True)
        self.facts = {name: stats[name] for name in ("storage_bytes", "huge_page_bytes")}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "buffer"}

    def open(self) -> None:
        self.buffer = sw.open(self.address)

    def adding(self, count: int) -> tuple[Calls, Sequence[tuple]]:
        rows = self.workload.rows() if count == 1 else [tuple(self.workload.columns(count).values())]
        self.buffer.add(*rows[0])  # from now on it is the writer's own method
        return self.buffer.add, rows

    def learning(self, count: int) -> tuple[Callable[[], Any], Callable[[Any, Any], object]]:
        buffer = self.buffer
        return partial(buffer.sample, count), lambda batch, values: buffer.update_priorities(batch["indices"], values)

    def close(self) -> None:
        self.buffer.close(unlink=True)


FORMS = {"uniform": partial(Sharpwave, False), "prioritized": partial(Sharpwave, True)}
