"""A trainer that may be killed at any moment: 300 ids, batches of 63, its own checkpoint every second step.

The checkpoint is the list of what was trained, as a model's weights would be. Epochs follow each other without a gap:
a batch may have the last of one and the first of the next.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import sharpwave as sw

IDS, BATCH, EVERY = 300, 63, 2


def sample(name: str, key: str = "a") -> sw.SequenceSample:
    return sw.SequenceSample([name], {key: [4]}, {key: np.arange(4)})


class Loader:
    """The ids of one epoch after the other, each epoch in its own order."""

    def __init__(self, epoch: int) -> None:
        self.epoch, self.rest = epoch, self.order(epoch)

    @staticmethod
    def order(epoch: int) -> list[str]:
        return [f"{epoch}:id{at}" for at in np.random.default_rng(epoch).permutation(IDS)]

    def take(self, seq: sw.SequenceBuffer, count: int) -> list[str]:
        found: list[str] = []
        while len(found) < count:
            if not self.rest:
                self.epoch += 1
                self.rest = self.order(self.epoch)
            names, self.rest = self.rest[:count], self.rest[count:]
            found += seq.wanted(names)
        return found


def load(folder: Path) -> dict[str, Any]:
    path = folder / "checkpoint.json"
    return json.loads(path.read_text()) if path.exists() else {"step": 0, "trained": [], "used": []}


def save(folder: Path, state: dict[str, Any]) -> None:
    beside = folder / "checkpoint.tmp"
    beside.write_text(json.dumps(state))
    os.replace(beside, folder / "checkpoint.json")


def main(folder: Path, epochs: int, form: str) -> None:
    flow = sw.Dataflow([sw.Consumer("inf", {"a"}, {"b"}, BATCH), sw.Consumer("train", {"a", "b"}, batch_size=BATCH)])
    state = load(folder)
    options: dict[str, Any] = {"epoch_size": IDS}
    if form == "journal":
        options |= {"journal": folder / "journal", "resume": f"step-{state['step']}" if state["step"] else None}
    if form == "journal" and not state["step"]:
        (folder / "journal").unlink(missing_ok=True)  # nothing was ever checkpointed: begin anew
    seq = sw.SequenceBuffer(450, flow=flow, **options)
    if form != "journal":
        seq.mark_used(state["used"])
    trained: list[str] = state["trained"]
    loader = Loader(len(trained) // IDS)
    print("ready", flush=True)
    for step in range(state["step"] + 1, 10**9):
        while (ready := {name: one["ready"] for name, one in seq.stats()["consumers"].items()})["train"] < BATCH:
            if ready["inf"] < BATCH:
                seq.put([sample(name) for name in loader.take(seq, BATCH)])
                continue
            with seq.get("inf", timeout=60) as lease:
                seq.amend(lease.handles, [sample(name, "b") for name in lease.batch.ids])
        time.sleep(0.005)  # so that kills fall on every line here
        with seq.get("train", timeout=60) as lease:
            trained += [name.partition(":")[2] for name in lease.batch.ids]
        if step % EVERY == 0:
            if form == "journal":
                seq.checkpoint(f"step-{step}")
            save(folder, {"step": step, "trained": trained, "used": seq.used_ids})
            if len(trained) >= epochs * IDS:
                return


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
