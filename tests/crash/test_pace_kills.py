"""Processes killed while they read a queue, wait for their turn or hold a reservation: the others go on."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from crash.processes import kill_after, process, processes
from crash.steps import add_steps, make
from patience import HANG_S, until, until_asleep

import sharpwave as sw
from sharpwave.errors import NotReady


def empty_queue(address: str, path: str) -> None:
    buffer = sw.open(address)
    with open(path, "ab", buffering=0) as log:
        while True:
            try:
                log.write(buffer.sample(2, timeout=HANG_S)["indices"].tobytes())
            except NotReady:
                continue


def test_row_of_a_queue_is_given_once_when_readers_are_killed(shm_address: str, tmp_path: Any) -> None:
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
        ready = processes.Event()
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


def test_killed_waiter_does_not_hold_up_others(shm_address: str) -> None:
    with make(shm_address, pace=sw.Pace.queue(16)) as buffer:
        for _ in range(3):
            ready = processes.Event()
            with process(wait_for_rows, shm_address, ready) as child:
                assert ready.wait(2 * HANG_S)
                until_asleep(child.pid)
                kill_after(child, 0)
        add_steps(buffer, 0, 0, 8, timeout=HANG_S)
        assert len(buffer.sample(16, timeout=HANG_S)["indices"]) == 16
        with pytest.raises(NotReady):
            buffer.sample(1, timeout=0.1)
        buffer.close(unlink=True)
