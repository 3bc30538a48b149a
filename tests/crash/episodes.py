"""Numbered episodes with everything switched on: derived next observations, stacks, compression, priorities.

Every frame is computed from a number that its row stores as its reward, so each row that can be read is checked to the
last byte. The processes here write, learn and tune until they are killed."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from patience import HANG_S

import sharpwave as sw

_processes = mp.get_context("forkserver")
_processes.set_forkserver_preload(["numpy", "sharpwave"])

EPISODE = 7  # steps of an episode
ENVS = 2
STACK = 3
SIDE = 12
RUN = 400_000  # numbers of one writer's life; a float32 tells them apart
FINAL = 1 << 26  # added to a number: the observation after an episode's last row
_pixels = np.arange(SIDE * SIDE, dtype=np.int64).reshape(SIDE, SIDE)


def frame(number: np.ndarray) -> np.ndarray:
    """One frame a number: neighbours differ, and it compresses."""
    number = np.asarray(number, np.int64)[..., None, None]
    return ((_pixels // 9 * (number % 241 + 1) + number // 7) % 251).astype(np.uint8)


def number_of(run: int, step: Any, env: Any) -> Any:
    return run * RUN + step * ENVS + env


def next_number(number: np.ndarray) -> np.ndarray:
    is_last = number % RUN // ENVS % EPISODE == EPISODE - 1
    return np.where(is_last, number + FINAL, number + ENVS)


def make(capacity: int = 240, **options: Any) -> sw.ReplayBuffer:
    schema = {"obs": sw.Field((SIDE, SIDE), "uint8", stack=STACK, compression="lz4")}
    defaults = {"next_obs": "derived", "num_envs": ENVS, "writers": 8, "seed": 3}
    return sw.ReplayBuffer(capacity, schema=schema, **{**defaults, **options})


def by_priority(**changes: Any) -> sw.Prioritized:
    return sw.Prioritized(**{"alpha": 1.0, "eps": 0.0, "new_rows": 1.0, **changes})


def add_step(target: Any, run: int, step: int) -> None:
    numbers = number_of(run, step, np.arange(ENVS))
    done = np.full(ENVS, step % EPISODE == EPISODE - 1)
    target.add(obs=frame(numbers), reward=numbers.astype(np.float32), next_obs=frame(next_number(numbers)), done=done)


def check_batch(batch: dict[str, Any]) -> np.ndarray:
    """Every array of a batch is what its rows' numbers say; returns the numbers."""
    numbers = batch["reward"].astype(np.int64)
    steps = numbers % RUN // ENVS
    ages = np.minimum(np.arange(STACK - 1, -1, -1), (steps % EPISODE)[:, None])  # an episode's start is repeated
    stacks = numbers[:, None] - ages * ENVS
    np.testing.assert_array_equal(batch["obs"], frame(stacks))
    after = np.concatenate([stacks[:, 1:], next_number(numbers)[:, None]], axis=1)
    np.testing.assert_array_equal(batch["next_obs"], frame(after))
    np.testing.assert_array_equal(batch["done"], steps % EPISODE == EPISODE - 1)
    return numbers


def check_rows(buffer: sw.ReplayBuffer, alone: bool = True) -> dict[int, bool]:
    """Reads everything; returns truncated by number.

    Where one writer wrote at a time, each env's rows of one run follow each other. With several, old rows may stand in
    the block that a slower writer holds.
    """
    truncated: dict[int, bool] = {}
    for batch in buffer.rows():
        numbers = check_batch(batch)
        assert not set(numbers.tolist()) & truncated.keys(), "a row twice"
        truncated.update(zip(numbers.tolist(), batch["truncated"].tolist(), strict=True))
    held = np.array(sorted(truncated), np.int64)
    for run in np.unique(held // RUN) if alone else []:
        for env in range(ENVS):
            steps = held[(held // RUN == run) & (held % ENVS == env)] % RUN // ENVS
            assert (np.diff(steps) == 1).all(), f"run {run}, env {env} has holes: {steps}"
    return truncated


def check_ends(truncated: dict[int, bool], run: int) -> None:
    """Of a run that is over, the newest row of each env ended its episode; no other row says so."""
    mine = [number for number in truncated if number // RUN == run]
    for env in range(ENVS):
        rows = sorted(number for number in mine if number % ENVS == env)
        for number in rows:
            is_last = number % RUN // ENVS % EPISODE == EPISODE - 1
            assert truncated[number] == (number == rows[-1] and not is_last), (number, rows[-1])


def check_index(buffer: sw.ReplayBuffer) -> None:
    """While nobody else runs: all rows can be drawn, and their probabilities are one in all.

    No priority is three times another, so that of eight strata a row each row fills one at least.
    """
    held = np.concatenate([batch["indices"] for batch in buffer.rows()])
    # Rows that several writers kept for their neighbours' stacks only leave the index when a draw meets them.
    buffer.sample(8 * len(held))
    batch = buffer.sample(8 * len(held))
    drawn, first = np.unique(batch["indices"], return_index=True)
    missing = set(held.tolist()) - set(drawn.tolist())
    assert not missing, f"{len(missing)} of {len(held)} rows cannot be drawn"
    assert batch["probabilities"][first].sum() == pytest.approx(1, abs=1e-9)
    # And they are those of the priorities: given anew, all are alike.
    assert buffer.update_priorities(held, np.ones(len(held))) == {"applied": len(held), "stale": 0}
    again = buffer.sample(2 * len(held))
    np.testing.assert_allclose(again["probabilities"], 1 / len(held), rtol=1e-6)
    assert len(np.unique(again["indices"])) == len(held)


def write_forever(address: str, run: int, ready: Any) -> None:
    buffer = sw.open(address)
    writer = buffer.writer()
    step = 0
    while True:
        add_step(writer, run, step)
        step += 1
        if step == 20:
            ready.set()


def learn_forever(address: str, seed: int, ready: Any) -> None:
    buffer = sw.open(address)
    stream = np.random.default_rng(seed)
    while True:
        try:
            batch = buffer.sample(512)
        except sw.errors.NotReady:
            continue
        buffer.update_priorities(batch["indices"], stream.uniform(0.5, 1.5, 512))
        ready.set()


def tune_forever(address: str, ready: Any) -> None:
    buffer = sw.open(address)
    while True:
        for alpha in (0.5, 1.0):
            buffer.tune(alpha=alpha)
            ready.set()


class Process:
    def __init__(self, target: Any, *arguments: Any) -> None:
        ready = _processes.Event()
        self._process = _processes.Process(target=target, args=(*arguments, ready), daemon=True)
        self._process.start()
        assert ready.wait(2 * HANG_S), "the process did not get going"

    def kill(self) -> None:
        if self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(HANG_S)
        assert self._process.exitcode == -signal.SIGKILL, self._process.exitcode


@contextmanager
def running(*processes: Process) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            if process._process.is_alive():
                process.kill()
