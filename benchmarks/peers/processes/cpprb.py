"""cpprb `MPReplayBuffer` and `MPPrioritizedReplayBuffer`, given to the other processes."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cpprb import MPPrioritizedReplayBuffer, MPReplayBuffer
from harness.crowd import Calls, Peer
from harness.worker import ALPHA, BETA, random_priorities
from harness.workloads import Workload


class Cpprb(Peer):
    packages = ("cpprb", "numpy")
    note = 'backend="SharedMemory"'

    def fill(self, workload: Workload, capacity: int, token: str) -> None:
        self.workload = workload
        specs = workload.field_specs
        fields = {name: {"shape": shape or 1, "dtype": dtype} for name, (shape, dtype) in specs.items()}
        settings = {"ctx": multiprocessing.get_context("spawn"), "backend": "SharedMemory"}
        if self.prioritized:
            self.buffer = MPPrioritizedReplayBuffer(capacity, fields, alpha=ALPHA, **settings)
        else:
            self.buffer = MPReplayBuffer(capacity, fields, **settings)
        for chunk in workload.chunks(capacity):
            given = {"priorities": random_priorities(len(chunk["reward"]))} if self.prioritized else {}
            self.buffer.add(**chunk, **given)

    def adding(self, count: int) -> tuple[Calls, Sequence[tuple]]:
        buffer = self.buffer

        def add(obs: Any, action: Any, reward: Any, next_obs: Any, done: Any) -> None:
            buffer.add(obs=obs, action=action, reward=reward, next_obs=next_obs, done=done)

        return add, self.workload.rows() if count == 1 else [tuple(self.workload.columns(count).values())]

    def learning(self, count: int) -> tuple[Callable[[], Any], Callable[[Any, Any], object]]:
        buffer = self.buffer
        sample = partial(buffer.sample, count, BETA) if self.prioritized else partial(buffer.sample, count)
        return sample, lambda batch, values: buffer.update_priorities(batch["indexes"], values)

    def close(self) -> None:
        # Its segments go with the object, and with nothing else.
        del self.buffer
        gc.collect()


FORMS = {"uniform": partial(Cpprb, False), "prioritized": partial(Cpprb, True)}
