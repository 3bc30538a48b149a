"""Prioritized draws: the model and the engine side by side, frequencies against probabilities, weights, ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from replay_model import Pair, PairMachine, betas, priorities

import sharpwave as sw

DRAWS = 60_000
NUMBERS = {"obs": sw.Field((), "int64")}


def make(capacity: int, seed: int = 11, num_envs: int | None = None, **settings: Any) -> sw.ReplayBuffer:
    sampler = sw.Prioritized(**settings)
    return sw.ReplayBuffer(
        capacity, schema=NUMBERS, next_obs=None, seed=seed, sampler=sampler, num_envs=num_envs, writers=4
    )


def add(target: Any, numbers: Iterable[int], **options: Any) -> None:
    values = np.asarray(list(numbers), np.int64)
    target.add(obs=values, reward=values.astype(np.float32), done=np.zeros(len(values), bool), **options)


def serials(buffer: sw.ReplayBuffer) -> np.ndarray:
    """Of all rows, oldest first."""
    return np.concatenate([batch["indices"] for batch in buffer.rows()])


def chances(buffer: sw.ReplayBuffer, batches: int = 40, size: int = 2000) -> dict[int, float]:
    """Probabilities as told, by the row's number, of every row that came up."""
    told: dict[int, float] = {}
    for _ in range(batches):
        batch = buffer.sample(size)
        for number, chance in zip(batch["obs"].tolist(), batch["probabilities"].tolist(), strict=True):
            assert told.setdefault(number, chance) == chance
    return told


def surprise(counts: np.ndarray, expected: np.ndarray) -> float:
    """Of these counts, in standard deviations: the Wilson-Hilferty cube root of chi-square, cells under 5 joined.

    4.9 is one run in two million; the seeds are fixed besides.
    """
    order = np.argsort(expected)
    cells: list[list[float]] = [[0.0, 0.0]]
    for i in order:
        cells[-1][0] += float(counts[i])
        cells[-1][1] += float(expected[i])
        if cells[-1][1] >= 5:
            cells.append([0.0, 0.0])
    rest = cells.pop()
    if not cells:
        return 0.0
    cells[-1][0] += rest[0]
    cells[-1][1] += rest[1]
    freedom = len(cells) - 1
    if freedom == 0:
        return 0.0
    chi_square = sum((count - mean) ** 2 / mean for count, mean in cells)
    return float(((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / np.sqrt(2 / (9 * freedom)))


def assert_frequencies(
    buffer: sw.ReplayBuffer, expected: dict[int, float], batch_size: int = 1000, draws: int = DRAWS
) -> None:
    """Rows come up as often as `expected` says (stratified draws more evenly than by chance), and are told so."""
    numbers = np.array(sorted(expected))
    wanted = np.array([expected[int(number)] for number in numbers])
    counts = np.zeros(len(numbers))
    for _ in range(draws // batch_size):
        batch = buffer.sample(batch_size)
        places = np.searchsorted(numbers, batch["obs"])
        assert (numbers[places] == batch["obs"]).all()
        np.testing.assert_allclose(batch["probabilities"], wanted[places], rtol=1e-6)
        counts += np.bincount(places, minlength=len(numbers))
    assert (counts[wanted == 0] == 0).all()
    assert surprise(counts, wanted * counts.sum()) < 4.9


def proportional(raw: Iterable[float], alpha: float, eps: float = 0.0, mix: float = 0.0) -> np.ndarray:
    """The probabilities of these priorities."""
    raised = np.abs(np.asarray(list(raw), np.float32).astype(np.float64)) + eps
    mass = np.where(raised > 0, np.where(raised > 0, raised, 1.0) ** alpha, 0.0).astype(np.float32).astype(np.float64)
    if mass.sum() == 0:
        return np.full(len(mass), 1 / len(mass))
    return (1 - mix) * mass / mass.sum() + mix / len(mass)


# ---- the model -------------------------------------------------------------------------------------------------------


def draw_settings(draw: Callable[..., Any]) -> dict[str, Any]:
    rank_based = draw(st.sampled_from([False, False, False, True]))
    return {
        "alpha": draw(st.sampled_from([0.0, 0.5, 0.6, 1.0])),
        "beta": draw(betas),
        "eps": 1e-6 if rank_based else draw(st.sampled_from([0.0, 1e-6, 0.1])),
        "rank_based": rank_based,
        "stratified": draw(st.booleans()),
        "normalize": draw(st.sampled_from(["batch", "buffer", "none"])),
        "mix": draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])),
        "new_rows": draw(st.one_of(st.sampled_from(["live_max", "live_max", "running_max"]), priorities)),
    }


class PrioritizedCalls(PairMachine):
    @staticmethod
    def arguments(draw: Callable[..., Any]) -> dict[str, Any]:
        chosen = draw_settings(draw)
        # Up to fifteen rows, every change of a rank-based buffer sorts it anew.
        sizes = st.integers(1, 15) if chosen["rank_based"] else st.one_of(st.integers(1, 8), st.integers(1, 60))
        num_envs = draw(st.sampled_from([None, None, 1, 3]))
        return {
            "capacity": draw(sizes),
            "schema": {"obs": sw.Field((2,))},
            "next_obs": draw(st.sampled_from(["stored", None])),
            "num_envs": num_envs,
            "prioritized": chosen,
            "writers": draw(st.sampled_from([1, 4, 64])),
        }


MORE = 50 if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else 1
TestPrioritizedCalls = PrioritizedCalls.TestCase
TestPrioritizedCalls.settings = settings(max_examples=MORE * 70, stateful_step_count=25)


# ---- frequencies -----------------------------------------------------------------------------------------------------

SPREADS: dict[str, Callable[[int], np.ndarray]] = {
    "24 orders of magnitude": lambda n: np.random.default_rng(3).permutation(np.logspace(-12, 12, n)),
    "all zero": np.zeros,
    "one of them not zero": lambda n: np.eye(1, n, n // 2)[0],
    "every third zero": lambda n: np.where(np.arange(n) % 3 == 1, 0.0, 1.0 + np.arange(n)),
}


@pytest.mark.parametrize("mix", [0.0, 0.25])
@pytest.mark.parametrize("stratified", [True, False], ids=["stratified", "independent"])
@pytest.mark.parametrize("spread", list(SPREADS))
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("size", ["1", "2", "capacity - 1", "capacity", "3.5 wraps"])
def test_rows_come_up_as_often_as_they_should(
    size: str, alpha: float, spread: str, stratified: bool, mix: float
) -> None:
    capacity = 100
    total = {"1": 1, "2": 2, "capacity - 1": 99, "capacity": 100, "3.5 wraps": 350}[size]
    buffer = make(capacity, alpha=alpha, eps=0.0, stratified=stratified, mix=mix)
    stream = np.random.default_rng(5)
    done = 0
    while done < total:
        count = min(total - done, int(stream.integers(1, 24)))
        add(buffer, range(done, done + count))
        done += count
        # Earlier priorities leave no trace.
        drawn = buffer.sample(16)["indices"]
        buffer.update_priorities(drawn, stream.lognormal(0, 5, 16))
    held = np.arange(max(0, total - capacity), total)
    raw = SPREADS[spread](len(held))
    assert buffer.update_priorities(serials(buffer), raw) == {"applied": len(held), "stale": 0}
    wanted = proportional(raw, alpha, mix=mix)
    assert_frequencies(buffer, dict(zip(held.tolist(), wanted.tolist(), strict=True)), batch_size=500, draws=20_000)


def test_statistic_rejects_a_small_bias() -> None:
    buffer = make(100, alpha=1.0, eps=0.0, stratified=False)
    add(buffer, range(100))
    buffer.sample(1)
    raw = np.ones(100)
    raw[:50] = 1.1
    buffer.update_priorities(serials(buffer), raw)
    counts = np.zeros(100)
    for _ in range(60):
        counts += np.bincount(buffer.sample(2000)["obs"], minlength=100)
    assert surprise(counts, proportional(raw, 1.0) * counts.sum()) < 4.9
    assert surprise(counts, np.full(100, counts.sum() / 100)) > 4.9


@pytest.mark.parametrize("stratified", [True, False], ids=["stratified", "independent"])
@pytest.mark.parametrize("batch_size", [1, 7])
def test_small_batches_draw_as_often(batch_size: int, stratified: bool) -> None:
    buffer = make(13, alpha=1.0, eps=0.0, stratified=stratified)
    raw = 1.0 + np.arange(13) ** 2
    add(buffer, range(13), priority=raw)
    wanted = dict(enumerate(proportional(raw, 1.0).tolist()))
    assert_frequencies(buffer, wanted, batch_size=batch_size, draws=14_000)


def test_independent_positions_of_a_batch_do_not_know_each_other() -> None:
    buffer = make(4, alpha=1.0, eps=0.0, stratified=False)
    add(buffer, range(4), priority=[1.0, 2.0, 3.0, 4.0])
    pairs = np.concatenate([buffer.sample(1000)["obs"].reshape(-1, 2) for _ in range(100)])
    counts = np.bincount(pairs[:, 0] * 4 + pairs[:, 1], minlength=16)
    chance = np.arange(1, 5) / 10
    assert surprise(counts, np.outer(chance, chance).ravel() * len(pairs)) < 4.9


def test_a_stratified_batch_takes_each_row_as_often_as_its_share_to_within_one() -> None:
    buffer = make(50, alpha=1.0, eps=0.0)
    raw = np.random.default_rng(1).lognormal(0, 2, 50)
    add(buffer, range(50), priority=raw)
    share = proportional(raw, 1.0)
    for size in (1, 10, 333, 2000):
        for _ in range(10):
            batch = buffer.sample(size)
            counts = np.bincount(batch["obs"], minlength=50)
            # A row's part of the mass covers its whole strata for certain, and the two at its ends perhaps.
            assert (counts >= np.floor(share * size * (1 - 1e-6)) - 1).all()
            assert (counts <= np.ceil(share * size * (1 + 1e-6)) + 1).all()


def test_draws_of_a_stratified_batch_go_through_the_mass_in_one_order() -> None:
    buffer = make(64, alpha=1.0, eps=0.0)
    raw = np.random.default_rng(2).lognormal(0, 1, 64)
    add(buffer, range(64), priority=raw)

    def visited(size: int) -> list[int]:
        drawn = buffer.sample(size)["obs"]
        return drawn[np.concatenate([[True], drawn[1:] != drawn[:-1]])].tolist()

    order = visited(20_000)
    assert sorted(order) == list(range(64))
    ends = dict(zip(order, np.cumsum(proportional(raw, 1.0)[order]).tolist(), strict=True))
    for size in (8, 100):
        for _ in range(20):
            drawn = buffer.sample(size)["obs"].tolist()
            for i, number in enumerate(drawn):
                assert ends[number] > i / size - 1e-6
                assert ends[number] - proportional(raw, 1.0)[number] < (i + 1) / size + 1e-6


def test_no_row_without_mass_is_ever_drawn_whatever_alpha_is() -> None:
    for alpha in (0.0, 0.5, 1.0):
        buffer = make(1000, alpha=alpha, eps=0.0)
        raw = np.where(np.arange(1000) % 7 == 0, 0.0, 1e-12)
        add(buffer, range(1000), priority=raw)
        for size in (1, 17, 4096):
            for _ in range(10):
                assert (buffer.sample(size)["obs"] % 7 != 0).all()


def test_masked_rows_have_no_mass() -> None:
    buffer = make(30, alpha=0.5)
    mask = np.arange(30) % 3 != 0
    add(buffer, range(30), mask=mask, priority=np.where(mask, 1.0, 1e12))
    assert_frequencies(buffer, {number: 1 / 20 for number in range(30) if mask[number]})
    add(buffer, [100])  # the largest priority of a row that was there, not of one that was not
    assert chances(buffer)[100] == pytest.approx(1 / 21, rel=1e-6)


def test_writers_of_uneven_speed_are_drawn_by_priority_alone() -> None:
    buffer = make(1000, alpha=1.0, eps=0.0)
    writers = [buffer.writer() for _ in range(4)]
    number = 0
    for _ in range(61):
        for writer, count in zip(writers, (1, 3, 10, 41), strict=True):
            numbers = range(number, number + count)
            add(writer, numbers, priority=[1.0 + n % 5 for n in numbers])
            number += count
        buffer.sample(3)
    held = np.concatenate([batch["obs"] for batch in buffer.rows()])
    assert len(held) > 500
    wanted = proportional(1.0 + held % 5, 1.0)
    assert_frequencies(buffer, dict(zip(held.tolist(), wanted.tolist(), strict=True)), draws=200_000)


def test_large_buffer_keeps_its_probabilities_through_many_updates() -> None:
    buffer = make(20_000, alpha=0.7, eps=1e-3)
    stream = np.random.default_rng(0)
    raw = np.ones(20_000)
    for first in range(0, 50_000, 2_500):
        add(buffer, range(first, first + 2_500))
        held = serials(buffer)
        picked = stream.integers(0, len(held), 2_000)
        values = stream.lognormal(0, 4, 2_000)
        buffer.update_priorities(held[picked], values)
    raw = stream.lognormal(0, 4, 20_000)
    buffer.update_priorities(held, raw)
    batch = buffer.sample(4096)
    wanted = proportional(raw, 0.7, 1e-3)
    np.testing.assert_allclose(batch["probabilities"], wanted[batch["obs"] - 30_000], rtol=1e-6)


# ---- the numbers of the literature -----------------------------------------------------------------------------------


def test_weights_of_one_two_four() -> None:
    """p = 1, 2, 4 and alpha = beta = 1: 7/3, 7/6, 7/12."""
    for normalize, wanted in {"none": [7 / 3, 7 / 6, 7 / 12], "buffer": [1.0, 0.5, 0.25]}.items():
        buffer = make(10, alpha=1.0, beta=1.0, eps=0.0, normalize=normalize)
        add(buffer, range(3), priority=[1.0, 2.0, 4.0])
        batch = buffer.sample(200)
        assert set(batch["obs"].tolist()) == {0, 1, 2}
        np.testing.assert_allclose(batch["weights"], np.array(wanted)[batch["obs"]], rtol=1e-6)
        np.testing.assert_allclose(batch["probabilities"], np.array([1, 2, 4])[batch["obs"]] / 7, rtol=1e-7)
    buffer = make(10, alpha=1.0, beta=1.0, eps=0.0, normalize="batch", stratified=False)
    add(buffer, range(3), priority=[1.0, 2.0, 4.0])
    kinds = set()
    for _ in range(60):
        batch = buffer.sample(2)
        lowest = min(batch["obs"])
        kinds.add(tuple(sorted(batch["obs"].tolist())))
        np.testing.assert_allclose(batch["weights"], 2.0 ** (float(lowest) - batch["obs"]), rtol=1e-6)
    assert (1, 2) in kinds  # of the rows with 2 and 4: 1 and a half


@pytest.mark.parametrize("normalize", ["batch", "buffer", "none"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("mix", [0.0, 0.3])
def test_weights_equal_numpy(normalize: str, beta: float, mix: float) -> None:
    buffer = make(400, alpha=0.8, beta=beta, eps=1e-4, normalize=normalize, mix=mix)
    raw = np.random.default_rng(1).lognormal(0, 3, 300)
    raw[::10] = 0
    add(buffer, range(300), priority=raw)
    wanted = proportional(raw, 0.8, 1e-4, mix)
    for size in (1, 5, 1000):
        batch = buffer.sample(size)
        chance = wanted[batch["obs"]]
        weights = (300 * chance) ** -beta  # 300 rows are live, 400 is only the capacity
        largest = {"batch": weights.max(), "buffer": ((300 * wanted.min()) ** -beta), "none": 1.0}[normalize]
        np.testing.assert_allclose(batch["probabilities"], chance, rtol=1e-6)
        np.testing.assert_allclose(batch["weights"], weights / largest, rtol=1e-5)
        assert batch["weights"].dtype == np.float32
        assert batch["probabilities"].dtype == np.float64
        assert batch["weights"].shape == batch["probabilities"].shape == (size,)


def test_least_probability_of_a_row_that_left_no_longer_matters() -> None:
    buffer = make(8, alpha=1.0, beta=1.0, eps=0.0, normalize="buffer")
    add(buffer, range(8), priority=[1e-9] + [1.0] * 6 + [2.0])
    assert buffer.sample(64)["weights"].max() < 1e-8
    add(buffer, [8], priority=[1.0])  # row 0 leaves
    batch = buffer.sample(64)
    np.testing.assert_allclose(batch["weights"], np.where(batch["obs"] == 7, 0.5, 1.0), rtol=1e-6)


def test_rows_that_cannot_be_drawn_do_not_set_the_largest_weight() -> None:
    buffer = make(8, alpha=1.0, beta=1.0, eps=0.0, normalize="buffer")
    add(buffer, range(3), priority=[0.0, 1.0, 4.0])
    batch = buffer.sample(64)
    np.testing.assert_allclose(batch["weights"], np.where(batch["obs"] == 1, 1.0, 0.25), rtol=1e-6)


def test_beta_follows_its_schedule_over_the_calls(tmp_path: Path) -> None:
    buffer = make(10, alpha=1.0, eps=0.0, normalize="none", beta=sw.Linear(0.2, 1.0, 4))
    add(buffer, range(2), priority=[1.0, 3.0])

    def used(buffer: sw.ReplayBuffer) -> float:
        batch = buffer.sample(50)
        i = batch["obs"].tolist().index(0)
        return float(-np.log(batch["weights"][i]) / np.log(2 * batch["probabilities"][i]))

    assert [used(buffer) for _ in range(2)] == pytest.approx([0.2, 0.4], rel=1e-5)
    buffer.save(tmp_path / "snapshot")
    copy = sw.open(tmp_path / "snapshot")
    for going_on in (buffer, copy):
        assert [used(going_on) for _ in range(4)] == pytest.approx([0.6, 0.8, 1.0, 1.0], rel=1e-5)


# ---- new rows --------------------------------------------------------------------------------------------------------


def test_new_row_has_exactly_the_mass_of_the_largest() -> None:
    """Where the largest is kept after the power instead of before it, this is wrong for every alpha but 1."""
    buffer = make(10, alpha=0.6)
    add(buffer, range(5), priority=[1.0, 2.0, 50.0, 4.0, 5.0])
    buffer.sample(1)
    add(buffer, [5])
    told = chances(buffer)
    assert told[5] == told[2] == max(told.values())


def test_live_max_sinks_when_the_largest_leaves_and_running_max_does_not() -> None:
    for rule, wanted in {"live_max": 3.0, "running_max": 100.0, 0.25: 0.25}.items():
        buffer = make(4, alpha=1.0, eps=0.0, new_rows=rule)
        add(buffer, range(4), priority=[100.0, 1.0, 2.0, 3.0])
        buffer.sample(1)
        add(buffer, [4], priority=[1.0])  # row 0 leaves
        buffer.sample(1)
        add(buffer, [5])  # row 1 leaves
        raw = np.array([2.0, 3.0, 1.0, wanted])
        assert chances(buffer) == pytest.approx(dict(zip([2, 3, 4, 5], (raw / raw.sum()).tolist(), strict=True)))


def test_live_max_sinks_when_the_largest_is_updated() -> None:
    buffer = make(4, alpha=1.0, eps=0.0)
    add(buffer, range(2), priority=[100.0, 1.0])
    buffer.update_priorities(serials(buffer), [3.0, 1.0])
    add(buffer, [2])
    assert chances(buffer) == pytest.approx({0: 3 / 7, 1: 1 / 7, 2: 3 / 7})


def test_first_rows_have_priority_one() -> None:
    for rule in ("live_max", "running_max"):
        buffer = make(4, alpha=1.0, eps=0.0, new_rows=rule)
        add(buffer, range(2))
        buffer.sample(1)
        add(buffer, [2], priority=[0.5])
        assert chances(buffer) == pytest.approx({0: 0.4, 1: 0.4, 2: 0.2})
        buffer.clear()
        add(buffer, [3])
        buffer.sample(1)
        add(buffer, [4], priority=[0.5])
        assert chances(buffer) == pytest.approx({3: 2 / 3, 4: 1 / 3})


@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_new_rows_beside_rows_of_priority_zero_have_priority_zero(eps: float) -> None:
    buffer = make(8, alpha=1.0, eps=eps)
    add(buffer, [0], priority=[0.0])
    buffer.sample(1)
    add(buffer, [1])
    assert chances(buffer) == pytest.approx({0: 0.5, 1: 0.5})
    assert buffer.update_priorities(serials(buffer), [1.0, 3.0]) == {"applied": 2, "stale": 0}
    assert chances(buffer) == pytest.approx({0: 0.25, 1: 0.75}, rel=1e-5)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_there_is_one_zero(zero: float) -> None:
    buffer = make(8, alpha=1.0, eps=0.5, new_rows=zero)
    add(buffer, [0])
    assert chances(buffer) == {0: 1.0}
    add(buffer, [1], priority=[zero])
    add(buffer, [2], priority=[0.5])
    assert chances(buffer) == pytest.approx({0: 0.25, 1: 0.25, 2: 0.5})
    assert buffer.update_priorities(serials(buffer), [zero, 0.5, zero]) == {"applied": 3, "stale": 0}
    assert chances(buffer) == pytest.approx({0: 0.25, 1: 0.5, 2: 0.25})


def test_given_priorities_count_for_the_rows_caught_up_with_them() -> None:
    buffer = make(8, alpha=1.0, eps=0.0)
    add(buffer, [0])
    add(buffer, [1], priority=[9.0])
    assert chances(buffer) == pytest.approx({0: 0.5, 1: 0.5})


def test_rows_that_left_before_a_draw_are_not_the_largest() -> None:
    buffer = make(2, alpha=1.0, eps=0.0)
    add(buffer, range(2), priority=[1.0, 2.0])
    buffer.sample(1)
    buffer.update_priorities(serials(buffer), [500.0, 2.0])
    add(buffer, [2])
    assert chances(buffer) == pytest.approx({1: 0.5, 2: 0.5})


# ---- tuning ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank_based", [False, True])
@pytest.mark.parametrize(("before", "after"), [(0.0, 0.6), (1.0, 0.3), (0.6, 0.0), (0.5, 1.0)])
def test_changed_alpha_equals_a_fresh_buffer(before: float, after: float, rank_based: bool) -> None:
    stream = np.random.default_rng(0)
    tuned, fresh = (make(100, alpha=alpha, eps=1e-3, rank_based=rank_based) for alpha in (before, after))
    for buffer in (tuned, fresh):
        for first in range(0, 160, 20):
            add(buffer, range(first, first + 20))
            buffer.sample(1)
        buffer.update_priorities(serials(buffer), np.random.default_rng(1).lognormal(0, 3, 100))
    tuned.tune(alpha=after)
    assert tuned.sampler.alpha == after
    for _ in range(3):
        first, second = tuned.sample(500), fresh.sample(500)
        assert first["indices"].tolist() == second["indices"].tolist()
        assert first["probabilities"].tolist() == second["probabilities"].tolist()
        assert first["weights"].tolist() == second["weights"].tolist()
        picked, values = first["indices"][:50], stream.lognormal(0, 1, 50)
        for buffer in (tuned, fresh):
            buffer.update_priorities(picked, values)
            add(buffer, [1000])


def test_changed_beta_equals_a_fresh_buffer() -> None:
    tuned, fresh = (make(20, alpha=1.0, beta=beta) for beta in (0.1, 0.9))
    for buffer in (tuned, fresh):
        add(buffer, range(20), priority=np.arange(1.0, 21.0))
    tuned.tune(beta=0.9)
    assert tuned.sampler.beta == 0.9
    assert tuned.sampler.alpha == 1.0
    assert tuned.sample(100)["weights"].tolist() == fresh.sample(100)["weights"].tolist()


# ---- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("stratified", [True, False], ids=["stratified", "independent"])
def test_rank_based_draws_follow_zipf(alpha: float, stratified: bool) -> None:
    for rows in (1, 2, 15, 100):
        buffer = make(100, alpha=alpha, rank_based=True, stratified=stratified)
        add(buffer, range(rows))
        buffer.sample(1)
        order = np.random.default_rng(4).permutation(rows)  # order[i] is the rank of row i, from 0
        buffer.update_priorities(serials(buffer), np.logspace(6, -6, rows)[order])
        zipf = np.arange(1, rows + 1) ** -alpha
        wanted = (zipf / zipf.sum())[order]
        assert_frequencies(buffer, dict(enumerate(wanted.tolist())), batch_size=500, draws=30_000)


def test_ranks_are_exact_again_when_a_sixteenth_of_the_rows_has_changed() -> None:
    rows = 320
    buffer = make(rows, alpha=1.0, rank_based=True)
    add(buffer, range(rows))
    raw = np.linspace(1000, 1, rows)
    held = serials(buffer)
    buffer.update_priorities(held, raw)
    zipf = 1 / np.arange(1, rows + 1)
    stream = np.random.default_rng(0)
    for _ in range(20):
        changed = stream.permutation(rows)[: rows // 16 + 1]
        raw[changed] = stream.uniform(1, 1000, len(changed))
        buffer.update_priorities(held[changed], raw[changed])
        batch = buffer.sample(2000)
        ranks = np.argsort(np.argsort(-raw.astype(np.float32)))
        wanted = (zipf / zipf.sum())[ranks]
        np.testing.assert_allclose(batch["probabilities"], wanted[batch["obs"]], rtol=1e-6)


def test_between_sorts_rows_keep_their_old_rank_and_new_ones_rank_first() -> None:
    rows = 320
    buffer = make(2 * rows, alpha=1.0, rank_based=True)
    add(buffer, range(rows))
    raw = np.linspace(1000, 1, rows)
    buffer.update_priorities(serials(buffer), raw)
    before = chances(buffer, 40, 4000)
    add(buffer, range(1000, 1003))
    after = chances(buffer, 40, 4000)
    top = after[0]
    assert after[1000] == after[1001] == after[1002] == top
    for number in set(before) & set(after):
        assert after[number] / top == pytest.approx(before[number] / before[0], rel=1e-6)


# ---- stale handles and determinism -----------------------------------------------------------------------------------


def test_handles_of_two_laps_ago_change_nothing_and_are_counted() -> None:
    buffer = make(50, alpha=1.0, eps=0.0)
    add(buffer, range(50), priority=np.arange(1.0, 51.0))
    old = buffer.sample(200)["indices"]
    add(buffer, range(50, 100), priority=np.arange(1.0, 51.0))
    add(buffer, range(100, 150), priority=np.arange(1.0, 51.0))
    before = chances(buffer)
    assert buffer.update_priorities(old, np.full(200, 1e9)) == {"applied": 0, "stale": 200}
    assert chances(buffer) == before
    mixed = np.concatenate([old[:3], serials(buffer)[:2]])
    assert buffer.update_priorities(mixed, np.ones(5)) == {"applied": 2, "stale": 3}


def scenario(buffer: sw.ReplayBuffer, reopen: Callable[[sw.ReplayBuffer], sw.ReplayBuffer]) -> list[Any]:
    """The same calls each time, and everything that was drawn; halfway the buffer may be another."""
    stream = np.random.default_rng(0)
    seen: list[Any] = []
    number = 0
    for turn in range(40):
        count = int(stream.integers(1, 8)) * 3
        given = {"priority": stream.lognormal(0, 2, count)} if turn % 3 == 0 else {}
        add(buffer, range(number, number + count), mask=stream.random(count) < 0.9, **given)
        number += count
        for size in (1, 40):
            batch = buffer.sample(size)
            seen += [batch[name].tolist() for name in ("indices", "obs", "weights", "probabilities")]
            buffer.update_priorities(batch["indices"], stream.normal(size=size))
        if turn == 10:
            buffer.tune(alpha=0.9)
        if turn == 25:
            buffer.clear()
        if turn in (5, 17):
            buffer = reopen(buffer)
    buffer.close(unlink=True)
    return seen


@pytest.mark.parametrize("rank_based", [False, True])
@pytest.mark.parametrize("num_envs", [None, 3])
def test_same_seed_and_same_calls_give_the_same_batches_everywhere(
    num_envs: int | None, rank_based: bool, shm_address: str, tmp_path: Path
) -> None:
    def run(storage: str | None, reopen: Any = lambda buffer: buffer) -> list[Any]:
        sampler = sw.Prioritized(0.6, sw.Linear(0.4, 1.0, 30), rank_based=rank_based)
        options: dict[str, Any] = {"schema": NUMBERS, "next_obs": None, "sampler": sampler, "num_envs": num_envs}
        return scenario(sw.ReplayBuffer(60, seed=4, storage=storage, **options), reopen)

    def from_snapshot(buffer: sw.ReplayBuffer) -> sw.ReplayBuffer:
        buffer.save(tmp_path / "snapshot")
        return sw.open(tmp_path / "snapshot")

    def attach(buffer: sw.ReplayBuffer) -> sw.ReplayBuffer:
        buffer.close()
        return sw.open(shm_address)

    memory = run(None)
    assert memory == run(None)
    assert memory == run(shm_address)
    assert memory == run(shm_address, attach)
    assert memory == run(f"file://{tmp_path}/live.sw")
    assert memory == run(None, from_snapshot)


def test_another_seed_gives_other_batches() -> None:
    batches = []
    for seed in (0, 1, 2**63 - 1):
        buffer = make(1000, seed=seed)
        add(buffer, range(1000))
        batches += [tuple(buffer.sample(64)["obs"].tolist()) for _ in range(3)]
    assert len(set(batches)) == len(batches)


def test_all_rows_of_a_long_run_agree_with_the_model() -> None:
    """One long stream beside the short ones of the machine: many laps, every kind of call in turn."""
    pair = Pair(48, {"obs": sw.Field((3,))}, num_envs=3, prioritized={"eps": 1e-3, "normalize": "buffer"}, writers=4)
    stream = np.random.default_rng(8)
    for turn in range(120):
        count = int(stream.integers(1, 5)) * 3
        letters = "".join(stream.choice(list("......TURM"), count))
        pair.add(letters, priority=stream.lognormal(0, 4, count).tolist() if turn % 4 == 0 else None)
        pair.check()
        batch = pair.sample(int(stream.integers(1, 100)))
        pair.update(batch["indices"].tolist(), stream.normal(0, 3, len(batch["indices"])).tolist())
        if turn % 13 == 0:
            pair.tune(alpha=float(stream.choice([0.0, 0.4, 1.0])))
        if turn % 50 == 49:
            pair.clear()
            pair.add("...")
    pair.sample_all()
    pair.close()
