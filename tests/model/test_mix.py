"""Mix against its specification: counts, rows, weights, probabilities, and updates that reach the right rows."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from contract.device_place import PLACES, SOAK, device_of, here, on_device
from hypothesis import given, settings
from mix_model import Source, expected

import sharpwave as sw
from sharpwave.rows.shares import Shares

ROWS = 7


@st.composite
def samplers(draw: st.DrawFn, normalize: str, on_a_device: bool = False) -> Any:
    newest = draw(st.integers(0, 2))
    kind = draw(st.sampled_from(["uniform", "prioritized", "prioritized", *([] if on_a_device else ["recent"])]))
    if kind == "uniform":
        return sw.Uniform(newest=newest)
    if kind == "recent":
        return sw.Recent(100, newest=newest)
    return sw.Prioritized(
        alpha=draw(st.sampled_from([0.0, 0.5, 1.0])),
        beta=draw(st.sampled_from([0.0, 0.4, 1.0])),
        eps=draw(st.sampled_from([0.01, 1.0])),
        mix=draw(st.sampled_from([0.0, 0.3])),
        stratified=draw(st.booleans()),
        normalize=normalize,  # type: ignore[arg-type]
        newest=newest,
    )


@st.composite
def shares(draw: st.DrawFn, count: int) -> list[float]:
    parts = draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    return [part / sum(parts) for part in parts]


def fill(buffer: sw.ReplayBuffer, number: int, priorities: np.ndarray) -> None:
    """Row i of buffer b is named 100 * b + i, everywhere."""
    name = (100 * number + np.arange(len(priorities))).astype(np.float32)
    obs = np.stack([name, name], 1)
    given = {"priority": priorities} if isinstance(buffer.sampler, sw.Prioritized) else {}
    buffer.add(obs, name, name, obs + 1, name < 0, **given)


def check_batch(mix: sw.Mix, batch: dict[str, Any], sources: list[Source], size: int) -> None:
    name, source = batch["reward"].astype(int), batch["source"]
    assert len(source) == size
    assert source.dtype == np.int64
    assert (np.diff(source) >= 0).all()  # contiguous, in the order of the buffers
    assert (name // 100 == source).all()
    for field, plus in (("obs", 0), ("next_obs", 1)):
        assert (batch[field] == name[:, None] + plus).all()
    assert (batch["action"] == name).all()
    assert not batch["done"].any()
    assert (batch["indices"] >> 50 == source + 1).all()
    if any(isinstance(s.sampler, sw.Prioritized) for s in sources):
        weights, probabilities = expected(sources, source, name % 100)
        assert batch["weights"] == pytest.approx(weights, rel=1e-5)
        assert batch["probabilities"] == pytest.approx(probabilities, rel=1e-5)
    else:
        assert "weights" not in batch
        assert "probabilities" not in batch
    order = np.random.default_rng(0).permutation(size)
    back = here(mix.get(batch["indices"][order]))
    assert (back["reward"] == batch["reward"][order]).all()
    assert (back["indices"] == batch["indices"][order]).all()
    assert (back["source"] == source[order]).all()


def check_mixture(data: Any, make: Any, most: int) -> None:
    """``make``: a buffer of the number b with a sampler."""
    count = data.draw(st.integers(1, most))
    normalize = data.draw(st.sampled_from(["batch", "buffer", "none"]))
    chosen = [data.draw(samplers(normalize, make.on_a_device)) for _ in range(count)]
    parts = data.draw(shares(count))
    stream = np.random.default_rng(data.draw(st.integers(0, 99)))
    sources = [Source(chosen[b], stream.integers(0, 4, ROWS + b).astype(np.float64), parts[b]) for b in range(count)]
    buffers = [make(b, source.sampler) for b, source in enumerate(sources)]
    for b, source in enumerate(sources):
        fill(buffers[b], b, source.priorities)
    mix = sw.Mix(dict(zip(buffers, parts, strict=True)))
    taken, total = np.zeros(count), 0
    least = max(math.ceil(4 / part) for part in parts)  # so that every buffer gets its newest
    for _ in range(data.draw(st.integers(1, 4))):
        size = least + data.draw(st.integers(0, 9))
        batch = here(mix.sample(size))
        check_batch(mix, batch, sources, size)
        taken, total = taken + np.bincount(batch["source"], minlength=count), total + size
        assert (np.abs(taken - total * np.array(parts)) <= count / 2 + 1e-6).all()
        assert mix.stats()["rows_by_buffer"] == taken.tolist()
        if any(isinstance(s.sampler, sw.Prioritized) for s in sources):
            new = stream.integers(0, 9, size).astype(np.float64)
            done = mix.update_priorities(batch["indices"], -new)
            is_counted = np.array([isinstance(sources[b].sampler, sw.Prioritized) for b in batch["source"]])
            assert {name: int(value) for name, value in done.items()} == {
                "applied": is_counted.sum(),
                "stale": 0,
                "skipped": (~is_counted).sum(),
            }
            for b, i, value in zip(batch["source"], batch["reward"].astype(int) % 100, new, strict=True):
                sources[b].priorities[i] = value  # the last one holds


class Host:
    on_a_device = False

    def __call__(self, number: int, sampler: Any) -> sw.ReplayBuffer:
        return sw.ReplayBuffer(20, obs_shape=(2,), sampler=sampler, seed=number)


class Device:
    on_a_device = True

    def __init__(self, device: str, and_host: bool) -> None:
        self.device, self.and_host = device, and_host

    def __call__(self, number: int, sampler: Any) -> sw.ReplayBuffer:
        if self.and_host and number % 2:
            return Host()(number, sampler)
        return on_device(20, device=self.device, obs_shape=(2,), sampler=sampler, seed=number)


@given(data=st.data())
@settings(max_examples=60)
def test_mixed_batches_are_as_specified(data: Any) -> None:
    check_mixture(data, Host(), 3)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("and_host", [False, True])
@settings(max_examples=40 if SOAK else 4)
@given(data=st.data())
def test_mixed_batches_of_rows_on_a_device_are_as_specified(place: str, and_host: bool, data: Any) -> None:
    check_mixture(data, Device(device_of(place), and_host), 2)


@given(data=st.data())
def test_counts_never_leave_their_shares(data: Any) -> None:
    count = data.draw(st.integers(1, 6))
    parts = np.array(data.draw(shares(count)))
    split, taken, total = Shares(tuple(parts)), np.zeros(count), 0
    for size in data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=60)):
        counts, changes = split.take(size)
        assert sum(counts) == size
        assert min(counts) >= 0
        if data.draw(st.integers(0, 3)) == 0:
            split.give_back(changes)  # the batch was not delivered
            continue
        taken, total = taken + counts, total + size
        bound = 0.5 if count <= 2 else count / 2
        assert (np.abs(taken - total * parts) <= bound + 1e-6).all()
        if count <= 2:
            assert all(
                math.floor(size * p - 1e-9) <= c <= math.ceil(size * p + 1e-9)
                for c, p in zip(counts, parts, strict=True)
            )


def test_weights_undo_the_priorities_and_keep_the_shares() -> None:
    """What the weights are for: with beta 1, weighted means are those of the target distribution."""
    stream = np.random.default_rng(5)
    prioritized = sw.ReplayBuffer(
        50, obs_shape=(2,), sampler=sw.Prioritized(alpha=1.0, beta=1.0, normalize="none", stratified=False), seed=3
    )
    uniform = sw.ReplayBuffer(50, obs_shape=(2,), seed=4)
    fill(prioritized, 0, stream.uniform(1, 5, 50))
    fill(uniform, 1, np.ones(50))
    mix = sw.Mix({prioritized: 0.3, uniform: 0.7})
    counts, weighted = np.zeros(200), np.zeros(200)
    for _ in range(100):
        batch = mix.sample(4_000)
        np.add.at(counts, batch["reward"].astype(int), 1)
        np.add.at(weighted, batch["reward"].astype(int), batch["weights"])
    assert counts[:50].sum() == 0.3 * counts.sum()
    assert counts[:50].max() > 3 * counts[:50].min()  # not uniform
    total = counts.sum()
    assert weighted[:50] / total == pytest.approx(np.full(50, 0.3 / 50), rel=0.15)
    assert weighted[100:150] / total == pytest.approx(np.full(50, 0.7 / 50), rel=0.15)
