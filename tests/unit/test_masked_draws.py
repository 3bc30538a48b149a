"""Uniform draws where environments were masked out of most steps: every row that is there, and no other."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import NotReady

ENVS = 16


def make(capacity: int, **options: Any) -> sw.ReplayBuffer:
    return sw.ReplayBuffer(capacity, obs_shape=(1,), action_shape=(), num_envs=ENVS, seed=3, **options)


def add_step(buffer: Any, at: int, mask: np.ndarray[Any, Any]) -> None:
    numbers = np.arange(at, at + ENVS, dtype=np.float32)
    buffer.add(numbers[:, None], numbers, numbers, numbers[:, None], np.zeros(ENVS, bool), mask=mask)


def live(buffer: sw.ReplayBuffer) -> set[float]:
    return {float(value) for batch in buffer.rows() for value in batch["obs"][:, 0]}


def drawn(buffer: sw.ReplayBuffer, batches: int) -> np.ndarray[Any, Any]:
    return np.concatenate([buffer.sample(256)["obs"][:, 0] for _ in range(batches)])


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("storage", ["memory", "shm"])
def test_draws_reach_every_row_and_no_other_lap_after_lap(share: float, storage: str) -> None:
    options = (
        {} if storage == "memory" else {"storage": f"shm://masked-{share}-{np.random.default_rng().integers(1e9)}"}
    )
    generator = np.random.default_rng(int(share * 100))
    buffer = make(1024, **options)
    try:
        for lap in range(5):
            for step in range(37):  # not a divisor of a lap: the ring is never cut at the same place
                mask = generator.random(ENVS) >= share
                mask[step % ENVS] = True
                add_step(buffer, (lap * 37 + step) * ENVS, mask)
                if step % 5 == 0:
                    assert set(drawn(buffer, 1).tolist()) <= live(buffer)
            expected = live(buffer)
            assert len(expected) == len(buffer)
            got = drawn(buffer, 8 + len(expected) // 8)  # each is drawn 32 times on average, and never is once in e^32
            assert set(got.tolist()) == expected
    finally:
        buffer.close(unlink=storage == "shm")


def test_rows_are_equally_likely_however_they_are_spread() -> None:
    buffer = make(64 * 1024)
    for step in range(4096):
        mask = np.zeros(ENVS, bool)
        mask[0] = step % 64 == 0 or step > 3900  # a few here and there, then one a step
        add_step(buffer, step * ENVS, mask)
    rows = sorted(live(buffer))
    counts = np.bincount(np.searchsorted(rows, drawn(buffer, 300)), minlength=len(rows))
    expected = counts.sum() / len(rows)
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_squared - len(rows)) < 6 * np.sqrt(2 * len(rows))


def test_cleared_rows_are_not_drawn_and_new_ones_are() -> None:
    buffer = make(1024)
    mask = np.arange(ENVS) % 4 == 0
    for step in range(20):
        add_step(buffer, step * ENVS, mask)
    assert set(drawn(buffer, 8).tolist()) == live(buffer)
    buffer.clear()
    with pytest.raises(NotReady):
        buffer.sample(1)
    for step in range(20, 30):
        add_step(buffer, step * ENVS, mask)
        assert set(drawn(buffer, 8).tolist()) == live(buffer)


def test_several_writers_fill_blocks_that_are_all_looked_at() -> None:
    buffer = make(4096)
    mask = np.arange(ENVS) % 8 == 0
    with buffer.writer() as one, buffer.writer() as two:
        for step in range(200):
            add_step(one if step % 3 else two, step * ENVS, mask)
            if step % 20 == 19:
                assert set(drawn(buffer, 40).tolist()) == live(buffer)
    add_step(buffer, 200 * ENVS, mask)
    assert set(drawn(buffer, 60).tolist()) == live(buffer)


def test_draws_beside_a_writer_give_rows_that_were_added() -> None:
    buffer = make(1024)
    mask = np.arange(ENVS) % 8 == 0
    add_step(buffer, 0, mask)
    ended = threading.Event()

    def write() -> None:
        for step in range(1, 3000):
            add_step(buffer, step * ENVS, mask)
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not ended.is_set():
        batch = buffer.sample(64)
        assert (batch["obs"][:, 0] == batch["reward"]).all()
        assert (batch["obs"][:, 0] % 8 == 0).all()
    thread.join()
    assert set(drawn(buffer, 40).tolist()) == live(buffer)


def test_copy_draws_what_the_buffer_would_have_drawn(tmp_path: Any) -> None:
    schema = {"obs": sw.Field((1,), "float32", stack=2)}
    buffer = sw.ReplayBuffer(2, schema=schema, next_obs="derived", num_envs=1, seed=0)  # half of its slots hold no row
    for step in range(12):
        number = np.full((1, 1), step, np.float32)
        buffer.add(obs=number, reward=np.zeros(1), next_obs=number + 1, done=np.zeros(1, bool))
        buffer.save(tmp_path / "copy.sw")
        with sw.open(tmp_path / "copy.sw") as copy:
            assert copy.sample(33)["indices"].tolist() == buffer.sample(33)["indices"].tolist()
