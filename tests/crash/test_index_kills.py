"""Processes killed while they draw or update by priority: the index of the survivors is complete."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from crash.episodes import (
    Process,
    by_priority,
    check_batch,
    check_ends,
    check_index,
    check_rows,
    learn_forever,
    make,
    running,
    tune_forever,
    write_forever,
)
from crash.processes import child
from patience import HANG_S, until

import sharpwave as sw
from sharpwave.errors import NotReady


def test_learner_killed_inside_the_index_does_not_hold_up_others(shm_address: str) -> None:
    buffer = sw.ReplayBuffer(3000, obs_shape=(4,), sampler=by_priority(), storage=shm_address, seed=1)
    numbers = np.arange(4000, dtype=np.float32)
    wide = np.repeat(numbers[:, None], 4, axis=1)
    for at in range(0, 4000, 500):
        part = slice(at, at + 500)
        buffer.add(wide[part], numbers[part], numbers[part], wide[part] + 1, np.zeros(500, bool))
        buffer.sample(8)
    stream = np.random.default_rng(7)
    for turn in range(5):
        victim, other = (Process(learn_forever, shm_address, 10 * turn + k) for k in range(2))
        with running(victim, other):
            time.sleep(float(stream.uniform(0, 0.06)))
            victim.kill()
            batch = buffer.sample(512, timeout=HANG_S)
            buffer.update_priorities(batch["indices"], stream.uniform(0.5, 1.5, 512))
            calls = buffer.stats()["sample_calls"]
            until(lambda calls=calls: buffer.stats()["sample_calls"] != calls, "a batch of the other learner")
        for name in ("obs", "next_obs"):
            expected = batch["reward"][:, None] + (name == "next_obs")
            np.testing.assert_array_equal(batch[name], np.broadcast_to(expected, (512, 4)))
        np.testing.assert_array_equal(batch["reward"], batch["indices"].astype(np.float32))
        check_index(buffer)
    buffer.close()


def test_process_killed_while_it_makes_every_mass_anew(shm_address: str) -> None:
    """Nearly all of its time is spent inside the lock: the next caller finds it abandoned and the tree half made."""
    buffer = sw.ReplayBuffer(100_000, obs_shape=(1,), sampler=by_priority(), storage=shm_address, seed=2)
    flat = np.zeros(100_000, np.float32)
    buffer.add(flat[:, None], flat, flat, flat[:, None], flat.astype(bool))
    stream = np.random.default_rng(13)
    for _ in range(4):
        buffer.update_priorities(np.arange(100_000), stream.uniform(0.5, 1.5, 100_000))
        with running(Process(tune_forever, shm_address)):
            time.sleep(float(stream.uniform(0, 0.02)))
        buffer.sample(32, timeout=HANG_S)
        check_index(buffer)
    buffer.close()


def test_learners_and_writers_killed_together_leave_a_whole_index(shm_address: str) -> None:
    buffer = make(sampler=by_priority(), storage=shm_address)
    stream = np.random.default_rng(8)
    for turn in range(4):
        writer = Process(write_forever, shm_address, turn)
        learner = Process(learn_forever, shm_address, turn)
        with running(writer, learner):
            time.sleep(float(stream.uniform(0, 0.08)))
            check_batch(buffer.sample(64))
            for process in (writer, learner) if turn % 2 else (learner, writer):
                process.kill()
        check_batch(buffer.sample(64))
        buffer.writer().close()  # a new writer releases what the dead one held
        check_ends(check_rows(buffer), turn)
        check_index(buffer)
    buffer.close()


@pytest.mark.timing
def test_learner_goes_on_within_100_ms_of_work_at_a_million_rows(shm_address: str) -> None:
    buffer = sw.ReplayBuffer(
        1_000_000, obs_shape=(1,), next_obs=None, storage=shm_address, sampler=sw.Prioritized(), seed=0
    )
    flat = np.zeros(10_000, np.float32)
    for _ in range(100):
        buffer.add(obs=flat[:, None], action=flat, reward=flat, done=flat.astype(bool))
    buffer.sample(8)
    learner = """
buf = sw.open(sys.argv[1])
batch = buf.sample(4096)
print("ready", flush=True)
while True:
    buf.update_priorities(batch["indices"], np.ones(4096))
"""
    for deaths in (1, 2):
        with child(learner, shm_address) as other:
            deadline = time.monotonic() + HANG_S
            while True:  # until it was stopped inside the lock
                other.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
                try:
                    buffer.sample(8, timeout=0)
                except NotReady:
                    break
                assert time.monotonic() < deadline, "it was never stopped inside the lock"
                other.send_signal(signal.SIGCONT)
                time.sleep(0.001)
        began = time.thread_time()  # work, not the wait for a processor that others have
        buffer.sample(8)
        took = time.thread_time() - began
        assert buffer.stats()["index_takeovers"] == deaths
        assert took < 0.1
    buffer.close(unlink=True)
