"""Writers and learners killed while windows are drawn: every window stays within one episode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from crash.processes import kill_after, process
from crash.steps import EPISODE, add_steps, make
from patience import HANG_S

import sharpwave as sw
from sharpwave.errors import NotReady


def check_windows(batch: dict[str, Any], length: int) -> None:
    """One run, one environment, one episode, step by step; the masks agree."""
    for obs, valid, mask in zip(batch["obs"], batch["valid"], batch["mask"], strict=True):
        rows = obs[valid]
        assert (rows[:, :3] == rows[0, :3]).all()
        np.testing.assert_array_equal(rows[:, 3], rows[0, 3] + np.arange(len(rows)))
        assert not (mask & ~valid).any()
        assert 1 <= mask.sum() <= length
        assert valid[: len(rows)].all()


def write_for_ever(address: str, run: int) -> None:
    buffer = sw.open(address)
    for first in range(0, 10**9, 3):
        add_steps(buffer, run, first, 3)


def learn_for_ever(address: str) -> None:
    buffer = sw.open(address)
    while True:
        try:
            batch = buffer.sample(16)
        except NotReady:
            continue
        buffer.update_priorities(batch["indices"], np.random.rand(*batch["mask"].shape), mask=batch["mask"])


@pytest.mark.parametrize("end", ["stop", "pad"])
def test_writer_and_learner_killed_at_random_instants(end: str, shm_address: str) -> None:
    view = sw.Windows(4, burn_in=2, stride=2, end=end)
    with make(shm_address, view=view, sampler=sw.Prioritized()) as buffer:
        add_steps(buffer, 0, 0, 2 * EPISODE)
        stream = np.random.default_rng(0)
        for run in range(1, 9):
            with process(write_for_ever, shm_address, run) as writer, process(learn_for_ever, shm_address) as learner:
                kill_after(writer if run % 2 else learner, 0.05 + 0.1 * stream.random())
                for _ in range(50):  # a call that waits for the dead one would have no end
                    check_windows(buffer.sample(32, timeout=HANG_S), 4)
            for _ in range(50):
                check_windows(buffer.sample(32), 4)
        with buffer.writer() as last:  # the next writer continues where the dead one stopped
            add_steps(last, 99, 0, 20 * EPISODE)
        batch = buffer.sample(2000)
        check_windows(batch, 4)
        assert (batch["obs"][..., 0] == 99).any()
        buffer.close(unlink=True)
