"""RowTable: rows that clients add, draw and give priorities, over kills of them and of their server."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from sweep_table import ACKNOWLEDGED, FAILED, QUOTA, TIMEOUTS_S, TRIED, Notes, SweepTable

import sharpwave as sw
from sharpwave.errors import NotReady

__all__ = ["RowTable"]

CAPACITY = 300_000
WIDTH = 16


def rows_of(stream: Any, numbers: np.ndarray) -> dict[str, np.ndarray]:
    """The known contents of rows: every value depends on the stream and on the number."""
    numbers = np.asarray(numbers)
    streams = np.broadcast_to(stream, numbers.shape)
    obs = ((streams[:, None] * 31 + numbers[:, None] * 17 + np.arange(WIDTH)) % 65_536).astype(np.float32)
    obs[:, 0], obs[:, 1] = streams, numbers
    return {
        "obs": obs,
        "action": obs[:, :2] + 1,
        "reward": numbers.astype(np.float32),
        "next_obs": obs + 0.5,
        "done": numbers % 50 == 49,
    }


def check_contents(rows: dict[str, np.ndarray], where: str) -> tuple[np.ndarray, np.ndarray]:
    """The streams and the numbers of rows, which must be as they were added."""
    streams, numbers = rows["obs"][:, 0].astype(np.int64), rows["obs"][:, 1].astype(np.int64)
    for name, expected in rows_of(streams, numbers).items():
        wrong = np.flatnonzero((rows[name] != expected).reshape(len(numbers), -1).any(axis=1))
        assert not len(wrong), f"{where}: {name} of row {numbers[wrong[0]]} of stream {streams[wrong[0]]} is torn"
    return streams, numbers


class RowTable(SweepTable):
    kind = "rows"
    open_options = {"direct": False}  # noqa: RUF012

    @staticmethod
    def make(path: str) -> Any:
        return sw.ReplayBuffer(
            CAPACITY, obs_shape=(WIDTH,), action_shape=(2,), sampler=sw.Prioritized(), storage=f"file://{path}",
            exist="attach", writers=512, seed=0,
        )  # fmt: skip

    @staticmethod
    def work(buffer: Any, notes: Notes, rng: random.Random, is_odd: bool) -> None:
        """Odd ones add with a window."""
        writer = buffer.writer(window=rng.choice((8, 64, 256))) if is_odd else buffer
        number, indices = 0, np.zeros(0, np.int64)
        while True:
            timeout_s = rng.choice(TIMEOUTS_S)
            verb = rng.choices((0, 1, 2, 3), (8, 2, 1, 1))[0]
            with notes.call(verb, timeout_s):
                if verb == 0 and number < QUOTA - 8:
                    count = rng.choice((1, 1, 1, 5))
                    _add(writer, notes, slice(number, number := number + count), timeout_s, is_odd)
                elif verb == 1:
                    batch = buffer.sample(32, timeout=timeout_s)
                    check_contents(batch, f"sample() of stream {notes.stream}")
                    indices = batch["indices"]
                elif verb == 2 and len(indices):
                    buffer.update_priorities(indices, rng.random() * np.ones(len(indices)), timeout=timeout_s)
                elif verb == 3 and is_odd:
                    writer.flush(timeout=timeout_s)
                    notes.rows[:number][notes.rows[:number] == TRIED] = ACKNOWLEDGED

    def check_items(self) -> None:
        found: dict[int, list[np.ndarray]] = {notes.stream: [] for notes in self.streams}
        with sw.open(f"file://{self.path}") as buffer:
            self.counts["rows"] += len(buffer)
            for rows in buffer.rows(batch_size=10_000):
                streams, numbers = check_contents(rows, "the table")
                for stream in np.unique(streams):
                    assert stream in found, f"the table has a row of stream {stream}, which there never was"
                    found[stream].append(numbers[streams == stream])
        for notes in self.streams:
            self.check_once(notes, np.concatenate([np.zeros(0, np.int64), *found[notes.stream]]))


def _add(writer: Any, notes: Notes, span: slice, timeout_s: float, is_windowed: bool) -> None:
    notes.rows[span] = TRIED
    rows = rows_of(notes.stream, np.arange(span.start, span.stop))
    try:
        writer.add(**(rows if span.stop - span.start > 1 else {n: v[0] for n, v in rows.items()}), timeout=timeout_s)
    except NotReady:
        notes.rows[span] = FAILED
        raise
    if not is_windowed:
        notes.rows[span] = ACKNOWLEDGED
