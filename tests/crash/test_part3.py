"""Processes killed while they draw windows, empty a queue, wait for their turn or hold a reservation.

Rows tell their stream, episode and step, so a window can be checked whole.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from patience import HANG_S, until, until_asleep

import sharpwave as sw
from sharpwave.errors import NotReady

_processes = mp.get_context("forkserver")
_processes.set_forkserver_preload(["numpy", "sharpwave"])

EPISODE = 11
ENVS = 2


@contextmanager
def process(work: Any, *arguments: Any) -> Iterator[Any]:
    child = _processes.Process(target=work, args=arguments, daemon=True)
    child.start()
    try:
        yield child
    finally:
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
        child.join(HANG_S)


def kill_after(child: Any, seconds: float) -> None:
    time.sleep(seconds)
    os.kill(child.pid, signal.SIGKILL)
    child.join(HANG_S)


def add_steps(target: Any, run: int, first: int, count: int, **options: Any) -> None:
    """Steps of both environments: obs is (run, env, episode, step)."""
    steps = np.arange(first, first + count)[:, None] + np.zeros(ENVS, int)
    envs = np.zeros((count, 1), int) + np.arange(ENVS)
    obs = np.stack([np.full_like(steps, run), envs, steps // EPISODE, steps % EPISODE], axis=-1).astype(np.float32)
    after = obs + np.array([0, 0, 0, 1], np.float32)
    done = steps % EPISODE == EPISODE - 1
    target.add(obs=obs, action=steps, reward=steps.astype(np.float32), next_obs=after, done=done, **options)


def make(address: str, **options: Any) -> sw.ReplayBuffer:
    return sw.ReplayBuffer(
        480, obs_shape=(4,), action_dtype="int64", num_envs=ENVS, storage=address, seed=1, writers=8, **options
    )


def check_windows(batch: dict[str, Any], length: int) -> None:
    """One run, one environment, one episode, step by step; the masks agree."""
    for obs, valid, mask in zip(batch["obs"], batch["valid"], batch["mask"], strict=True):
        rows = obs[valid]
        assert (rows[:, :3] == rows[0, :3]).all()
        np.testing.assert_array_equal(rows[:, 3], rows[0, 3] + np.arange(len(rows)))
        assert not (mask & ~valid).any()
        assert 1 <= mask.sum() <= length
        assert valid[: len(rows)].all()


# ---- windows ---------------------------------------------------------------------------------------------------------


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
        with buffer.writer() as last:  # whoever comes next goes on where the dead stopped
            add_steps(last, 99, 0, 20 * EPISODE)
        batch = buffer.sample(2000)
        check_windows(batch, 4)
        assert (batch["obs"][..., 0] == 99).any()
        buffer.close(unlink=True)


# ---- a queue ---------------------------------------------------------------------------------------------------------


def empty_queue(address: str, path: str) -> None:
    buffer = sw.open(address)
    with open(path, "ab", buffering=0) as log:
        while True:
            try:
                log.write(buffer.sample(2, timeout=HANG_S)["indices"].tobytes())
            except NotReady:
                continue


def test_row_of_a_queue_is_given_once_whoever_dies(shm_address: str, tmp_path: Any) -> None:
    with make(shm_address, sampler=sw.Fifo(), pace=sw.Pace.queue(400)) as buffer:
        logs = []
        for run in range(6):
            logs.append(tmp_path / str(run))
            with process(empty_queue, shm_address, str(logs[-1])) as reader:
                until(logs[-1].exists)
                for step in range(40):
                    add_steps(buffer, run, step, 1, timeout=HANG_S)
                kill_after(reader, 0.02)
        given = [np.frombuffer(log.read_bytes(), np.int64) for log in logs]
        while True:
            try:
                given.append(buffer.sample(1, timeout=0)["indices"])
            except NotReady:  # what the dead had drawn and not delivered is not given again
                break
        serials = np.concatenate(given)
        assert len(np.unique(serials)) == len(serials), "a row was given twice"
        assert 480 - 6 * 2 <= len(serials) <= 480
        buffer.close(unlink=True)


# ---- reservations ----------------------------------------------------------------------------------------------------


def hold_a_batch(address: str, ready: Any) -> None:
    buffer = sw.open(address)
    batches = buffer.batches(8, prefetch=4)
    next(batches)
    until(lambda: buffer.stats()["sample_calls"] >= 2, "a batch that is drawn ahead")
    ready.set()
    time.sleep(600)


def test_reservation_ends_with_its_process(shm_address: str) -> None:
    with make(shm_address, pace=sw.Pace(min_size=1, samples_per_insert=1.0, min_diff=0, max_diff=10_000)) as buffer:
        add_steps(buffer, 0, 0, 20)  # forty rows: forty samples
        ready = _processes.Event()
        with process(hold_a_batch, shm_address, ready) as child:
            assert ready.wait(2 * HANG_S)
            assert buffer.stats()["pace_samples"] == 8
            with pytest.raises(NotReady):
                buffer.sample(32, timeout=0.1)
            kill_after(child, 0)
        assert len(buffer.sample(32, timeout=HANG_S)["indices"]) == 32
        assert buffer.stats()["pace_samples"] == 40
        buffer.close(unlink=True)


def wait_for_rows(address: str, ready: Any) -> None:
    buffer = sw.open(address)
    ready.set()
    buffer.sample(8, timeout=600)


def test_dead_waiter_harms_nobody(shm_address: str) -> None:
    with make(shm_address, pace=sw.Pace.queue(16)) as buffer:
        for _ in range(3):
            ready = _processes.Event()
            with process(wait_for_rows, shm_address, ready) as child:
                assert ready.wait(2 * HANG_S)
                until_asleep(child.pid)
                kill_after(child, 0)
        add_steps(buffer, 0, 0, 8, timeout=HANG_S)
        assert len(buffer.sample(16, timeout=HANG_S)["indices"]) == 16
        with pytest.raises(NotReady):
            buffer.sample(1, timeout=0.1)
        buffer.close(unlink=True)
