"""Writers killed at random instants: rows, episodes and counts stay right, and their places are free again."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash.episodes import (
    ENVS,
    RUN,
    Process,
    add_step,
    by_priority,
    check_batch,
    check_ends,
    check_index,
    check_rows,
    make,
    running,
    write_forever,
)
from crash.processes import child

import sharpwave as sw
from sharpwave.errors import BufferFull


@pytest.mark.parametrize("sampler", [None, by_priority()], ids=["uniform", "prioritized"])
def test_killed_writer_in_shared_memory(sampler: Any, shm_address: str) -> None:
    buffer = make(sampler=sampler, storage=shm_address)
    stream = np.random.default_rng(9)
    for turn in range(8):
        writer = Process(write_forever, shm_address, turn)
        with running(writer):
            time.sleep(float(stream.uniform(0, 0.05)))
            check_batch(buffer.sample(32))
        before = check_rows(buffer)
        check_batch(buffer.sample(256))
        with buffer.writer() as mine:
            after = check_rows(buffer)
            check_ends(after, turn)
            # A step that was half written is gone; nothing else is.
            assert set(after) <= set(before)
            assert len(set(before) - set(after)) <= ENVS
            for step in range(30):
                add_step(mine, 20 + turn, step)
        truncated = check_rows(buffer)
        assert sum(number // RUN == 20 + turn for number in truncated) == 30 * ENVS
        check_ends(truncated, turn)
        check_ends(truncated, 20 + turn)
        check_batch(buffer.sample(256))
    buffer.close()


def write_many_forever(address: str, ready: Any) -> None:
    buffer = sw.open(address)
    writer = buffer.writer()
    wide, flat, ends = np.zeros((2000, 200), np.float32), np.zeros(2000), np.zeros(2000, bool)
    while True:
        writer.add(wide, flat, flat, wide, ends)
        ready.set()


def test_killed_writers_leave_the_right_number_of_rows(shm_address: str) -> None:
    buffer = sw.ReplayBuffer(5000, obs_shape=(200,), storage=shm_address, writers=4, seed=0)
    stream = np.random.default_rng(10)
    for turn in range(8):
        with running(Process(write_many_forever, shm_address)):
            time.sleep(float(stream.uniform(0, 0.02)))
        buffer.writer().close()
        held = sum(len(batch["indices"]) for batch in buffer.rows())
        assert (turn, len(buffer)) == (turn, held)
    buffer.close()


@pytest.mark.parametrize("sampler", [None, by_priority()], ids=["uniform", "prioritized"])
def test_killed_writers_of_a_file_that_all_processes_left(sampler: Any, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/live.sw"
    make(sampler=sampler, storage=address).close()
    stream = np.random.default_rng(11)
    for turn in range(0, 8, 2):
        writers = [Process(write_forever, address, turn + k) for k in range(1 + turn % 4 // 2)]
        with running(*writers):
            time.sleep(float(stream.uniform(0, 0.05)))
        buffer = sw.open(address)
        truncated = check_rows(buffer, alone=False)
        for k in range(len(writers)):
            check_ends(truncated, turn + k)
        assert len(buffer) == len(truncated)
        check_batch(buffer.sample(256))
        for step in range(10):
            add_step(buffer, 20 + turn, step)
        truncated = check_rows(buffer, alone=False)
        assert sum(number // RUN == 20 + turn for number in truncated) == 10 * ENVS
        if sampler is not None:
            check_index(buffer)
        buffer.close()


def test_full_writer_table_names_the_processes_that_hold_it(shm_address: str) -> None:
    buffer = sw.ReplayBuffer(100, obs_shape=(1,), next_obs=None, storage=shm_address, writers=2, seed=0)
    writer = "w = sw.open(sys.argv[1]).writer()\nprint('ready', flush=True)\nimport time\ntime.sleep(600)\n"
    mine = buffer.writer()
    with child(writer, shm_address) as other:
        wanted = rf"all 2 writers are taken; .*1 by process {os.getpid()} \(this one\)"
        with pytest.raises(BufferFull, match=wanted) as caught:
            buffer.writer()
        assert f"1 by process {other.pid}" in str(caught.value)
    buffer.writer().close()  # the dead one's
    assert buffer.stats()["writers_reclaimed"] == 1
    mine.close()
    buffer.close(unlink=True)
