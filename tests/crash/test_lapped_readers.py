"""A reader that stands still in the middle of a draw while the writer goes round the ring."""

from __future__ import annotations

import os
import random
import signal
import time
from multiprocessing.connection import Connection

from crash.processes import process, processes
from crash.steps import EPISODE, add_steps, make
from patience import HANG_S, pause

import sharpwave as sw

ROUNDS = 600
LAP = 200  # steps: most of the ring


def read_for_ever(address: str, pipe: Connection) -> None:
    buffer = sw.open(address)
    pipe.send("ready")
    drawn = 0
    while not pipe.poll():
        buffer.sample(32)
        drawn += 1
    pipe.send(drawn)


def test_a_reader_that_is_lapped_again_and_again_finds_windows(shm_address: str) -> None:
    """The rows that a draw has just found are gone when it goes on; the ring is full of others."""
    ours, theirs = processes.Pipe()
    chance = random.Random(0)
    with make(shm_address, view=sw.Windows(4, burn_in=2, stride=2, end="stop"), sampler=sw.Prioritized()) as buffer:
        add_steps(buffer, 0, 0, 2 * EPISODE)
        with process(read_for_ever, shm_address, theirs) as reader:
            assert ours.poll(HANG_S)
            assert ours.recv() == "ready"
            for lap in range(0, 3 * ROUNDS, 3):
                pause(reader.pid)
                assert reader.is_alive()
                for part in range(3):
                    add_steps(buffer, 1, (lap + part) * LAP, LAP)
                os.kill(reader.pid, signal.SIGCONT)
                end = time.perf_counter() + 3e-4 * chance.random()  # any instant of a draw
                while time.perf_counter() < end:
                    pass
            ours.send("end")
            assert ours.poll(HANG_S), "the reader failed: see above"
            assert ours.recv() > 0
        buffer.close(unlink=True)
