"""Pace against its two inequalities: the same answer to every call, the same counts, whoever asks in what order."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from order_model import Draw, Limiter
from patience import HANG_S, until

import sharpwave as sw
from sharpwave.errors import NotReady, SchemaError


class PacedPair:
    """A buffer that never waits, and its limiter. The sampler may consume: rows that were read do not count."""

    def __init__(self, capacity: int, limiter: Limiter, draw: Draw | None = None) -> None:
        self.capacity, self.limiter = capacity, limiter
        self.draw = Draw() if draw is None else draw
        self.buffer = sw.ReplayBuffer(
            capacity, obs_shape=(2,), sampler=self.draw.public(), pace=limiter.public(), num_envs=1, seed=0, writers=1
        )
        self.ring: list[tuple[int, bool]] = []  # number, and whether it counts
        self.consumed: set[int] = set()
        self.made = self.calls = 0

    def unread(self) -> list[int]:
        return [number for number, counts in self.ring if counts and number not in self.consumed]

    def add(self, mask: list[bool], buffer: Any = None) -> type[Exception] | None:
        numbers = list(range(self.made, self.made + len(mask)))
        self.made += len(mask)  # numbers of rows that were refused are not given again
        n, size = sum(mask), len(self.unread())
        wanted: type[Exception] | None = None
        if self.limiter.refuses_add(n, size):
            wanted = SchemaError
        elif not self.limiter.may_add(n, size):
            wanted = NotReady
        obs = np.repeat(np.array(numbers, np.float32)[:, None], 2, axis=1)
        end = np.zeros(len(mask), bool)
        more = {} if all(mask) else {"mask": np.array(mask)}
        values = {"obs": obs, "action": obs[:, 0], "reward": obs[:, 0], "next_obs": obs, "done": end, **more}
        target = self.buffer if buffer is None else buffer
        self.expect(wanted, lambda: target.add(**values, timeout=0))
        if wanted is None:
            self.limiter.inserts += n
            self.ring = [*self.ring, *zip(numbers, mask, strict=True)][-self.capacity :]
        return wanted

    def sample(self, n: int) -> type[Exception] | None:
        unread = self.unread()
        wanted: type[Exception] | None = None
        if self.limiter.refuses_sample(n) or (self.draw.kind == "Fifo" and n > self.capacity):
            wanted = SchemaError
        elif not self.limiter.may_sample(n, len(unread)) or len(unread) < (n if self.draw.kind == "Fifo" else 1):
            wanted = NotReady
        batch = self.expect(wanted, lambda: self.buffer.sample(n, timeout=0))
        if wanted is None:
            self.limiter.samples += n
            drawn = batch["reward"].astype(int).tolist()
            assert set(drawn) <= set(unread)
            if self.draw.kind == "Fifo":
                assert drawn == unread[:n]
                if self.draw.max_reads == 1:
                    self.consumed |= set(drawn)
        return wanted

    def expect(self, wanted: type[Exception] | None, call: Callable[[], Any]) -> Any:
        self.calls += 1
        if wanted is None:
            return call()
        size, before = len(self.buffer), self.counts() if self.calls % 8 == 0 else None
        with pytest.raises(wanted):
            call()
        assert len(self.buffer) == size
        assert before is None or self.counts() == before
        return None

    def clear(self) -> None:
        self.buffer.clear()
        self.limiter.clear()
        self.ring = []

    def counts(self) -> tuple[int, int, int]:
        """Milliseconds, so not at every call."""
        stats = self.buffer.stats()
        return stats["pace_inserts"], stats["pace_samples"], stats["pace_waiting"]

    def check(self, counts: bool = True) -> None:
        if self.calls % 8 == 0 or counts:
            assert self.counts() == (self.limiter.inserts, self.limiter.samples, 0)
        held = [int(number) for batch in self.buffer.rows() for number in batch["reward"]]
        assert held == [number for number, counts in self.ring if counts]


# ---- the reference, by hand ------------------------------------------------------------------------------------------


def test_inequalities_by_hand() -> None:
    queue = Limiter(1, 1.0, 0, 3)
    assert not queue.may_sample(1, 0)
    assert queue.may_add(3, 0)
    assert not queue.may_add(4, 0)
    queue.inserts = 3
    assert queue.may_sample(3, 3)
    assert not queue.may_sample(4, 3)
    assert not queue.may_add(1, 3)
    queue.samples = 1
    assert queue.may_add(1, 3)
    ratio = Limiter(100, 8.0, 800 - 64, 800 + 64)
    assert ratio.may_add(100, 0)  # free until the minimum size
    assert not ratio.may_add(109, 0)
    ratio.inserts = 100
    assert ratio.may_sample(64, 100)
    assert not ratio.may_sample(65, 100)
    assert not ratio.may_sample(1, 99)
    assert ratio.may_add(8, 100)
    assert not ratio.may_add(9, 100)
    assert ratio.refuses_sample(129)
    assert not ratio.refuses_sample(128)
    assert ratio.refuses_add(17, 84)
    assert not ratio.refuses_add(17, 83)


# ---- random calls ----------------------------------------------------------------------------------------------------


@st.composite
def limiters(draw: Callable[..., Any]) -> Limiter:
    spi = draw(st.sampled_from([0.25, 0.5, 1.0, 1.0, 2.0, 3.0, 8.0]))
    min_size = draw(st.integers(1, 6))
    centre = spi * min_size
    low = draw(st.sampled_from([-math.inf, 0.0, centre, centre - 2, centre - 8 * spi, -5.0]))
    high = draw(st.sampled_from([math.inf, centre, centre + 4 * spi, centre + 16, centre + 1]))
    return Limiter(min_size, spi, min(low, centre), max(high, centre))


class PaceCalls(RuleBasedStateMachine):
    @initialize(data=st.data())
    def create(self, data: st.DataObject) -> None:
        limiter = data.draw(limiters())
        draw = data.draw(st.sampled_from([Draw(), Draw(), Draw("Fifo", max_reads=1), Draw("Prioritized")]))
        # Large enough that pace, not the ring, decides; queue(n) with less room than n is refused.
        least = limiter.min_size if math.isinf(limiter.max_diff) else math.ceil(limiter.max_diff)
        capacity = max(limiter.min_size, least, 1) + data.draw(st.integers(0, 12))
        self.pair = PacedPair(capacity, limiter, draw)

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            try:
                self.pair.check()
            finally:
                self.pair.buffer.close()

    @rule(n=st.integers(1, 5), data=st.data())
    def add(self, n: int, data: st.DataObject) -> None:
        rows = min(n, self.pair.capacity)
        # One row counts at the least: what an add of nothing waits for is nobody's question.
        self.pair.add(
            [True, *data.draw(st.lists(st.sampled_from([True, True, False]), min_size=rows - 1, max_size=rows - 1))]
        )

    @rule(n=st.sampled_from([1, 2, 3, 5, 8, 16]))
    def sample(self, n: int) -> None:
        self.pair.sample(n)

    @rule(really=st.sampled_from([False, False, False, True]))
    def clear(self, really: bool) -> None:
        if really:
            self.pair.clear()

    @invariant()
    def counts_are_equal(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check(counts=False)


MORE = 50 if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else 1
TestPaceCalls = PaceCalls.TestCase
TestPaceCalls.settings = settings(max_examples=MORE * 60, stateful_step_count=30)


@pytest.mark.parametrize("spi", [0.5, 1.0, 4.0])
def test_ratio_is_kept_over_a_long_run(spi: float) -> None:
    stream = np.random.default_rng(0)
    limiter = Limiter(20, spi, 20 * spi - 16, 20 * spi + 16)
    pair = PacedPair(60, limiter)
    for _ in range(1500):
        if stream.random() < 0.5:
            pair.add([True] * int(stream.integers(1, 4)))
        else:
            pair.sample(int(stream.integers(1, 9)))
        if limiter.inserts >= 20:
            assert -16 <= (limiter.inserts - 20) * spi - limiter.samples + 0 <= 16
    pair.check()
    assert limiter.inserts > 150
    assert limiter.samples / limiter.inserts == pytest.approx(spi, rel=0.25)


def test_counts_go_on_in_an_opened_copy(tmp_path: Path) -> None:
    pair = PacedPair(40, Limiter(4, 2.0, 0, 20))
    pair.add([True] * 6)
    pair.sample(8)
    pair.buffer.save(tmp_path / "snapshot")
    pair.buffer.close()
    pair.buffer = sw.open(tmp_path / "snapshot")
    pair.check()
    assert pair.sample(4) is None
    assert pair.sample(1) is NotReady
    assert pair.add([True] * 10) is None
    assert pair.add([True]) is NotReady
    pair.check()


# ---- threads ---------------------------------------------------------------------------------------------------------


def run_threads(jobs: list[Callable[[], None]], seconds: float = 4 * HANG_S) -> None:
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), "a thread waits for ever"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("spi", [1.0, 4.0])
def test_inequalities_hold_while_writers_and_learners_run(spi: float) -> None:
    min_size, error, rows, batch = 20, 32.0, 600, 8
    buffer = sw.ReplayBuffer(
        200, obs_shape=(2,), pace=sw.Pace.samples_per_insert(spi, min_size, error), writers=4, seed=0
    )
    low, high = spi * min_size - error, spi * min_size + error
    going = threading.Event()
    going.set()
    samples = [0, 0]

    def write() -> None:
        with buffer.writer() as writer:
            for number in range(rows):
                obs = np.full(2, number, np.float32)
                writer.add(obs=obs, action=0.0, reward=float(number), next_obs=obs, done=False, timeout=HANG_S)

    def learn(name: int) -> None:
        while going.is_set():
            try:
                buffer.sample(batch, timeout=0.2)
            except NotReady:
                continue
            samples[name] += batch

    def watch() -> None:
        """Both counts only grow, so one read before the other bounds the difference on one side."""
        while going.is_set():
            first, second, third = (buffer.stats() for _ in range(3))
            if first["pace_inserts"] > min_size:
                assert second["pace_inserts"] * spi - first["pace_samples"] >= low
                assert second["pace_inserts"] * spi - third["pace_samples"] <= high
            time.sleep(0.002)

    def write_all() -> None:
        try:
            run_threads([write, write], 2 * HANG_S)
            until(lambda: 2 * rows * spi - buffer.stats()["pace_samples"] < low + batch, "learners take what is left")
        finally:
            going.clear()

    run_threads([write_all, lambda: learn(0), lambda: learn(1), watch])
    stats = buffer.stats()
    assert stats["pace_inserts"] == 2 * rows
    assert stats["pace_samples"] == sum(samples)
    assert stats["pace_waiting"] == 0
    # They took as much as the inequality gave, and not one batch more.
    left = stats["pace_inserts"] * spi - stats["pace_samples"]
    assert low <= left < low + batch


def test_queue_between_threads_loses_and_repeats_nothing() -> None:
    buffer = sw.ReplayBuffer(
        16, obs_shape=(2,), sampler=sw.Fifo(), pace=sw.Pace.queue(16), num_envs=None, writers=2, seed=0
    )
    rows, got = 500, []

    def write() -> None:
        for number in range(rows):
            obs = np.full(2, number, np.float32)
            buffer.add(obs, 0.0, float(number), obs, False, timeout=HANG_S)

    def learn() -> None:
        while len(got) < rows:
            got.extend(buffer.sample(4, timeout=HANG_S)["reward"].astype(int).tolist())

    run_threads([write, learn])
    assert got == list(range(rows))
