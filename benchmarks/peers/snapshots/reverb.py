"""Reverb: a server writes a checkpoint, and a new server starts from it."""

from __future__ import annotations

import shutil
from pathlib import Path

import reverb
from harness.keeper import FIRST_BATCH, Keeper
from harness.workloads import Workload

from peers.reverb import MOST_ROWS, Reverb, batches


class ReverbKeeper(Keeper):
    packages = ("dm-reverb", "tensorflow", "numpy")

    def fill(self, workload: Workload, capacity: int) -> None:
        self.contender, self.rows = Reverb(), min(capacity, MOST_ROWS)
        self.contender.fill(workload, capacity)
        self.note = self.contender.note

    def save(self, path: str) -> None:
        # A server has its folder from the start, by default a temporary one.
        shutil.move(Path(self.contender.client.checkpoint()).parent, path)

    def load(self, path: str) -> reverb.Server:
        checkpointer = reverb.checkpointers.DefaultCheckpointer(path)
        loaded = reverb.Server([self.contender.table(self.rows)], checkpointer=checkpointer)
        next(batches(loaded.port, FIRST_BATCH))
        return loaded


KEEPER = ReverbKeeper
