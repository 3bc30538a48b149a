"""Uniform draws: every row equally likely in every state of the ring, and nobody else's randomness touched."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import NotReady

DRAWS = 200_000


def make(capacity: int, seed: int = 11, **options: object) -> sw.ReplayBuffer:
    return sw.ReplayBuffer(
        capacity,
        schema={"obs": sw.Field((), "int64")},
        next_obs=None,
        seed=seed,
        **options,  # type: ignore[arg-type]
    )


def add(target: object, numbers: Iterable[int], **options: object) -> None:
    values = np.asarray(list(numbers), np.int64)
    target.add(  # type: ignore[attr-defined]
        obs=values, reward=values.astype(np.float32), done=np.zeros(len(values), bool), **options
    )


def assert_uniform(buffer: sw.ReplayBuffer, expected: Iterable[int], batch_size: int = 2000) -> None:
    """Draws hit exactly the expected rows, and their counts pass a chi-square test: z < 5, one run in three million.

    z is the Wilson-Hilferty cube root of chi-square, nearly normal from few degrees of freedom on.
    """
    numbers = np.array(sorted(expected))
    drawn = np.concatenate([buffer.sample(batch_size)["obs"] for _ in range(DRAWS // batch_size)])
    found, counts = np.unique(drawn, return_counts=True)
    assert found.tolist() == numbers.tolist()
    freedom = len(numbers) - 1
    if freedom == 0:
        return
    mean = len(drawn) / len(numbers)
    chi_square = float(((counts - mean) ** 2).sum() / mean)
    z = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom))
    assert abs(z) < 5, (z, chi_square, freedom)


def test_statistic_rejects_a_small_bias() -> None:
    buffer = make(101)
    add(buffer, [*range(100), 0])  # one row is stored twice: two in a hundred and one instead of one
    with pytest.raises(AssertionError):
        assert_uniform(buffer, range(100))


@pytest.mark.parametrize("size", [1, 2, 99, 100])
def test_every_row_is_equally_likely_at_size(size: int) -> None:
    buffer = make(100)
    add(buffer, range(size))
    assert_uniform(buffer, range(size))


@pytest.mark.parametrize("batch_size", [1, 7, 20_000])
def test_every_row_is_equally_likely_at_batch_size(batch_size: int) -> None:
    buffer = make(13)
    add(buffer, range(13))
    if batch_size == 1:
        drawn = [int(buffer.sample(1)["obs"][0]) for _ in range(26_000)]
        counts = np.bincount(drawn, minlength=13)
        assert abs(counts - 2000).max() < 5 * 2000**0.5
    else:
        assert_uniform(buffer, range(13), batch_size)


def test_positions_of_a_batch_are_independent() -> None:
    buffer = make(4)
    add(buffer, range(4))
    pairs = np.concatenate([buffer.sample(1000)["obs"].reshape(-1, 2) for _ in range(100)])
    counts = np.bincount(pairs[:, 0] * 4 + pairs[:, 1], minlength=16)
    assert abs(counts - len(pairs) / 16).max() < 5 * (len(pairs) / 16) ** 0.5


@pytest.mark.parametrize("capacity", [1, 10, 100, 1000])
def test_every_row_is_equally_likely_after_three_and_a_half_wraps(capacity: int) -> None:
    buffer = make(capacity)
    total = capacity * 7 // 2
    for number in range(total):
        add(buffer, [number])
    assert_uniform(buffer, range(total - capacity, total))


def test_cleared_rows_are_never_drawn_again() -> None:
    buffer = make(100)
    add(buffer, range(100))
    buffer.clear()
    with pytest.raises(NotReady):
        buffer.sample(1)
    add(buffer, range(1000, 1033))
    assert_uniform(buffer, range(1000, 1033))
    add(buffer, range(2000, 2090))
    assert_uniform(buffer, [*range(1023, 1033), *range(2000, 2090)])


def test_overwritten_rows_are_never_drawn_again() -> None:
    buffer = make(50)
    for first in range(0, 1000, 7):
        add(buffer, range(first, first + 7))
        drawn = buffer.sample(500)["obs"]
        assert drawn.min() >= max(0, first + 7 - 50)
        assert drawn.max() < first + 7


@pytest.mark.parametrize("kept", [1, 5, 50, 99])
def test_masked_rows_are_never_drawn_and_the_rest_stays_uniform(kept: int) -> None:
    buffer = make(100)
    mask = np.zeros(100, bool)
    mask[np.random.default_rng(5).permutation(100)[:kept]] = True
    add(buffer, range(100), mask=mask)
    assert len(buffer) == kept
    assert_uniform(buffer, np.flatnonzero(mask))


def test_a_buffer_of_masked_rows_alone_is_empty() -> None:
    buffer = make(100)
    add(buffer, range(100), mask=np.zeros(100, bool))
    with pytest.raises(NotReady, match="empty"):
        buffer.sample(1)


def test_sixty_four_writers_with_one_row_each_are_equally_likely() -> None:
    buffer = make(100_000)
    writers = [buffer.writer() for _ in range(64)]
    for number, writer in enumerate(writers):
        add(writer, [number])
    before = buffer.stats()["redraws"]
    assert_uniform(buffer, range(64))
    # Blind draws would find one slot in hundreds; where so few hold a row, those that do are known.
    assert buffer.stats()["redraws"] == before


@pytest.mark.parametrize("wraps", [0, 3])
def test_writers_of_uneven_speed_leave_a_uniform_buffer(wraps: int) -> None:
    buffer = make(1000, writers=4)
    writers = [buffer.writer() for _ in range(4)]
    numbers = iter(range(1_000_000))
    for _ in range(1 + 20 * wraps):
        for writer, count in zip(writers, (1, 3, 10, 41), strict=True):
            add(writer, [next(numbers) for _ in range(count)])
    held = np.concatenate([batch["obs"] for batch in buffer.rows()])
    assert len(held) == len(buffer) > 50
    assert_uniform(buffer, held.tolist())


def test_the_same_seed_gives_the_same_batches() -> None:
    buffers = [make(100, seed=5) for _ in range(2)]
    for buffer in buffers:
        add(buffer, range(60))
    for size in (1, 32, 5000, 1):
        first, second = (buffer.sample(size)["indices"].tolist() for buffer in buffers)
        assert first == second


def test_another_seed_or_another_call_gives_other_batches() -> None:
    buffers = [make(1000, seed=seed) for seed in (0, 1, 2, 2**63 - 1)]
    batches = []
    for buffer in buffers:
        add(buffer, range(1000))
        batches += [tuple(buffer.sample(64)["obs"].tolist()) for _ in range(3)]
    assert len(set(batches)) == len(batches)


def test_no_seed_takes_one_from_the_system_and_tells_it() -> None:
    first, second = (sw.ReplayBuffer(8, obs_shape=()) for _ in range(2))
    assert first.stats()["seed"] != second.stats()["seed"]
    known = make(50, seed=first.stats()["seed"])
    assert known.stats()["seed"] == first.stats()["seed"]


def test_global_random_states_are_neither_used_nor_changed() -> None:
    def draws() -> list[int]:
        buffer = make(100, seed=5)
        add(buffer, range(100))
        return buffer.sample(64)["obs"].tolist()

    random.seed(1)
    np.random.seed(1)
    first = draws()
    states = random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]
    sw.ReplayBuffer(8, obs_shape=())  # an own seed is not taken from them either
    random.seed(2)
    np.random.seed(2)
    assert draws() == first
    random.seed(1)
    np.random.seed(1)
    draws()
    assert (random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]) == states
