"""TrajectoryTable: trajectories that clients add and draw, over kills of them and of their server."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from sweep_table import ACKNOWLEDGED, QUOTA, TRIED, Notes, SweepTable

import sharpwave as sw

__all__ = ["TrajectoryTable"]

NO_TIMEOUT_S = 1e6  # calls wait for the next server


def trajectory(stream: int, number: int) -> sw.Trajectory:
    steps = 2 + number % 3
    return sw.Trajectory(
        rewards=np.full((steps, 2), number, np.float32), curr_obs={"state": np.full((steps, 2, 3), stream, np.float32)}
    )


class TrajectoryTable(SweepTable):
    kind = "trajectories"

    @staticmethod
    def make(path: str) -> Any:
        return sw.TrajectoryReplayBuffer(path, seed=0)

    @staticmethod
    def work(buffer: Any, notes: Notes, rng: random.Random, is_odd: bool) -> None:
        number = 0
        while number < QUOTA - 8:
            with notes.call(0, NO_TIMEOUT_S):
                span = slice(number, number := number + rng.choice((1, 1, 3)))
                notes.rows[span] = TRIED
                buffer.add([trajectory(notes.stream, one) for one in range(span.start, span.stop)])
                notes.rows[span] = ACKNOWLEDGED
            if is_odd and rng.random() < 0.2:
                with notes.call(1, NO_TIMEOUT_S):
                    batch = buffer.sample(4)
                    assert (batch["rewards"] >= 0).all()
        while True:
            len(buffer)

    def check_items(self) -> None:
        found: dict[int, list[int]] = {notes.stream: [] for notes in self.streams}
        with sw.TrajectoryReplayBuffer(self.path) as buffer:
            for _, one in buffer.trajectories():
                stream, number = int(one.curr_obs["state"][0, 0, 0]), int(one.rewards[0, 0])
                expected = trajectory(stream, number)
                assert np.array_equal(one.rewards, expected.rewards), f"trajectory {number} of {stream} is torn"
                assert np.array_equal(one.curr_obs["state"], expected.curr_obs["state"])
                found[stream].append(number)
        for notes in self.streams:
            self.check_once(notes, np.array(found[notes.stream], np.int64))
