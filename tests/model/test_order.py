"""Recent, Shuffle, Fifo, Lifo, newest= and max_reads=: what they hand out, in what order, and what they remember."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from order_model import RANDOM, Draw, OrderPair, Single, Slices, chi_square, letters

import sharpwave as sw
from sharpwave.errors import NotReady

SCHEMA: dict[str, Any] = {"obs": sw.Field((2,)), "action": sw.Field((), "int64")}
VIEWS: list[Single | Slices] = [
    Single(),
    Single(n_step=3),
    Slices(1),
    Slices(3, burn_in=1, bootstrap=1),
    Slices(2, stride=2, end="stop"),
    Slices(4, stride=2, end="cross"),
]


# ---- random calls ----------------------------------------------------------------------------------------------------

kinds = ["Uniform", "Prioritized", "Recent", "Shuffle", "Shuffle", "Fifo", "Lifo"]
values = st.sampled_from([0.0, 0.5, 1.0, 2.0, 30.0])


class OrderCalls(RuleBasedStateMachine):
    @initialize(data=st.data())
    def create(self, data: st.DataObject) -> None:
        draw = data.draw
        self.folder = tempfile.TemporaryDirectory()
        kind = draw(st.sampled_from(kinds))
        prioritized = {}
        if kind == "Prioritized":
            prioritized = {
                "alpha": draw(st.sampled_from([0.0, 0.5, 1.0])),
                "beta": draw(st.sampled_from([0.0, 0.4, 1.0])),
                "normalize": draw(st.sampled_from(["batch", "buffer", "none"])),
                "mix": draw(st.sampled_from([0.0, 0.0, 0.3])),
                "stratified": draw(st.booleans()),
            }
        self.num_envs = draw(st.sampled_from([None, 1, 2]))
        width = self.num_envs or 1
        self.pair = OrderPair(
            width * draw(st.one_of(st.integers(1, 6), st.integers(1, 20))),
            SCHEMA,
            view=draw(st.sampled_from(VIEWS)),
            draw=Draw(
                kind,
                n=draw(st.integers(1, 9)),
                newest=draw(st.integers(0, 3)) if kind in RANDOM else 0,
                max_reads=draw(st.sampled_from([None, None, 1, 2, 5])),
                settings=prioritized,
            ),
            next_obs=draw(st.sampled_from(["derived", "stored"])),
            num_envs=self.num_envs,
            writers=1,
        )
        self.by_priority = kind == "Prioritized"
        self.unseen = 0

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check_memory()
            self.pair.close()
            self.folder.cleanup()

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        model = self.pair.model
        steps = 1 if self.num_envs is None else data.draw(st.integers(1, min(5, model.capacity // model.width)))
        if self.unseen + steps > model.capacity // model.width:
            self.sample(1)
        count = steps * model.width
        given = None
        if self.by_priority and data.draw(st.booleans()):
            given = data.draw(st.lists(values, min_size=count, max_size=count))
        codes = "".join(data.draw(st.sampled_from(".....TURBMM")) for _ in range(count))
        self.pair.add(codes, () if self.num_envs is None else None, priority=given)
        self.unseen += steps

    @rule(n=st.sampled_from([1, 1, 2, 3, 4, 7, 12]))
    def sample(self, n: int) -> None:
        self.unseen = 0
        batch = self.pair.refuse_or_sample(n)
        if batch is not None and self.by_priority:
            self.last = batch["indices"].tolist()

    @rule()
    def sample_all(self) -> None:
        self.unseen = 0
        legal = len(self.pair.legal_starts())
        if legal >= max(1, self.pair.model.draw.newest):
            self.pair.sample(legal)

    @rule()
    def sample_more_than_there_is(self) -> None:
        if self.pair.model.draw.kind not in RANDOM:
            self.unseen = 0
            self.pair.refuse_or_sample(len(self.pair.legal_starts()) + 1)

    @precondition(lambda self: self.by_priority and hasattr(self, "last"))
    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        """Rows that were drawn: some have left since, some are consumed."""
        serials = data.draw(st.lists(st.sampled_from(self.last), min_size=1, max_size=6))
        self.pair.update(serials, data.draw(st.lists(values, min_size=len(serials), max_size=len(serials))))

    @rule(really=st.sampled_from([False, False, False, True]))
    def clear(self, really: bool) -> None:
        if really:
            self.pair.clear()
            self.unseen = 0

    @rule(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4))
    def saved_copy_draws_the_same(self, sizes: list[int]) -> None:
        path = f"{self.folder.name}/snapshot"
        self.pair.buffer.save(path)
        with sw.open(path) as copy:
            for n in sizes:
                self.unseen = 0
                batch = self.pair.refuse_or_sample(n)
                if batch is None:
                    with pytest.raises(Exception):  # noqa: B017, PT011
                        copy.sample(n)
                    continue
                theirs = copy.sample(n)
                for name in ("indices", "weights", "probabilities", "reward", "valid"):
                    assert batch.get(name, np.empty(0)).tolist() == theirs.get(name, np.empty(0)).tolist()
            for name in ("epoch", "rows_consumed", "sample_calls"):
                assert copy.stats().get(name) == self.pair.buffer.stats().get(name)

    @invariant()
    def all_rows_can_be_read(self) -> None:
        """Also those that were read often enough."""
        if hasattr(self, "pair"):
            self.pair.check()


MORE = 50 if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else 1
TestOrderCalls = OrderCalls.TestCase
TestOrderCalls.settings = settings(max_examples=MORE * 50, stateful_step_count=25)


# ---- long streams ----------------------------------------------------------------------------------------------------


def pair_of(draw: Draw, view: Single | Slices | None = None, capacity: int = 30, **options: Any) -> OrderPair:
    view = Single() if view is None else view
    return OrderPair(capacity, SCHEMA, view=view, draw=draw, **{"num_envs": 1, "writers": 1, **options})


@pytest.mark.parametrize("view", VIEWS, ids=str)
@pytest.mark.parametrize("kind", kinds)
def test_order_holds_through_many_wraps(kind: str, view: Any) -> None:
    stream = np.random.default_rng(4)
    for max_reads in (None, 1, 3):
        draw = Draw(kind, n=6, newest=2 if kind in RANDOM else 0, max_reads=max_reads)
        pair = pair_of(draw, view, capacity=24, num_envs=2, next_obs="derived")
        for turn in range(40 if MORE > 1 else 24):
            pair.add(letters(stream, 2 * int(stream.integers(1, 5))))
            for n in stream.integers(2, 9, size=int(stream.integers(0, 4))).tolist():
                pair.refuse_or_sample(n)
            if turn % 8 == 0:
                pair.check()
        pair.close()


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_epoch_gives_each_start_exactly_once(view: Any) -> None:
    pair = pair_of(Draw("Shuffle"), view)
    pair.add("....T......U" + "." * 18)
    legal = pair.legal_serials()
    for epoch in range(1, 5):
        left, seen = len(legal), []
        while left:
            n = min(left, 4)
            seen += pair.sample(n)["indices"].tolist()
            left -= n
        assert sorted(seen) == legal
        assert seen != legal
        assert pair.buffer.stats()["epoch"] == epoch


def test_epochs_are_shuffled_evenly() -> None:
    """Every place of an epoch is equally likely to hold every row, and one epoch says nothing of the next."""
    pair = pair_of(Draw("Shuffle"), capacity=6)
    pair.add("......")
    epochs = 6000
    orders = np.stack([pair.buffer.sample(6)["id"] for _ in range(epochs)])
    assert (np.sort(orders, axis=1) == np.arange(6)).all()
    for place in range(6):
        counts = np.bincount(orders[:, place], minlength=6)
        assert chi_square(counts, [epochs / 6] * 6) < 5
    pairs = Counter((orders[1:, 0] * 6 + orders[:-1, 0]).tolist())
    assert chi_square([pairs[i] for i in range(36)], [(epochs - 1) / 36] * 36) < 5


def test_rows_that_come_in_an_epoch_wait_for_the_next() -> None:
    pair = pair_of(Draw("Shuffle"), capacity=10)
    pair.add("......")
    first = pair.sample(4)["id"].tolist()
    pair.add("...")
    second = pair.sample(2)["id"].tolist()
    assert sorted(first + second) == [0, 1, 2, 3, 4, 5]
    assert sorted(pair.sample(9)["id"].tolist()) == list(range(9))
    # Rows 0 to 3 leave in an epoch that has begun, rows 9 to 13 come; one row more begins another.
    begun = pair.sample(2)["id"].tolist()
    pair.add("." * 5)
    left = [number for number in range(4, 9) if number not in begun]
    batch = pair.sample(len(left) + 1)["id"].tolist()
    assert sorted(batch[:-1]) == left
    assert pair.buffer.stats()["epoch"] == 4


def test_recent_draws_evenly_from_the_newest_legal_starts() -> None:
    pair = pair_of(Draw("Recent", n=5), Slices(3, end="stop"), capacity=20)
    for _ in range(5):
        pair.add("." * 7)
    counts = Counter(pair.sample(200)["id"][:, 0].tolist())
    assert set(counts) == {28, 29, 30, 31, 32}
    by_id = Counter(pair.buffer.sample(10_000)["id"][:, 0].tolist())
    assert chi_square([by_id[i] for i in range(28, 33)], [2000] * 5) < 5
    few = pair_of(Draw("Recent", n=100))
    few.add("...")
    assert set(few.sample(100)["id"].tolist()) == {0, 1, 2}


@pytest.mark.parametrize("kind", ["Uniform", "Prioritized", "Recent"])
def test_first_places_hold_the_newest(kind: str) -> None:
    pair = pair_of(Draw(kind, n=4, newest=3), capacity=10)
    pair.add("..")
    batch = pair.sample(8)
    assert batch["id"][:2].tolist() == [1, 0]
    assert set(batch["id"][2:].tolist()) <= {0, 1}
    for _ in range(3):
        pair.add("." * 5)
    batch = pair.sample(600)
    assert batch["id"][:3].tolist() == [16, 15, 14]
    assert set(batch["id"][3:].tolist()) == set(range(13 if kind == "Recent" else 7, 17))
    assert pair.sample(3)["id"].tolist() == [16, 15, 14]
    assert pair.refuse_or_sample(2) is None


def test_weights_of_the_newest_are_one_and_the_others_are_scaled_among_themselves() -> None:
    draw = Draw("Prioritized", newest=1, settings={"alpha": 1.0, "beta": 1.0, "eps": 0.0})
    pair = pair_of(draw, capacity=10)
    pair.add("...", priority=[1.0, 2.0, 4.0])
    batch = pair.sample(50)
    # p = 1, 2, 4 of 7: the weights 7/3, 7/6, 7/12, divided by the largest that was drawn.
    assert (batch["id"][0], batch["weights"][0], batch["probabilities"][0]) == (2, 1.0, 1.0)
    told = {number: float(w) for number, w in zip(batch["id"][1:].tolist(), batch["weights"][1:], strict=True)}
    assert told == pytest.approx({0: 1.0, 1: 0.5, 2: 0.25})


# ---- reads -----------------------------------------------------------------------------------------------------------


def test_queue_hands_out_each_row_once_in_order() -> None:
    pair = pair_of(Draw("Fifo", max_reads=1), capacity=8)
    pair.add(".....")
    assert pair.sample(3)["id"].tolist() == [0, 1, 2]
    assert pair.refuse_or_sample(3) is None
    assert pair.sample(2)["id"].tolist() == [3, 4]
    assert pair.refuse_or_sample(1) is None
    assert len(pair.buffer) == 5
    pair.check()  # rows() and get() still see them
    assert pair.buffer.stats()["rows_consumed"] == 5
    pair.add("....")
    assert pair.sample(4)["id"].tolist() == [5, 6, 7, 8]


def test_stack_hands_out_the_newest_first() -> None:
    pair = pair_of(Draw("Lifo", max_reads=1), capacity=8)
    pair.add(".....")
    assert pair.sample(2)["id"].tolist() == [4, 3]
    pair.add("..")
    assert pair.sample(3)["id"].tolist() == [6, 5, 2]


def test_defaults_of_fifo_and_lifo_consume() -> None:
    for sampler in (sw.Fifo(), sw.Lifo()):
        buffer = sw.ReplayBuffer(10, obs_shape=2, sampler=sampler, num_envs=1)
        rows = np.zeros((3, 2), np.float32)
        buffer.add(rows, np.zeros(3), np.arange(3.0), rows, np.zeros(3, bool))
        assert sorted(buffer.sample(3)["reward"].tolist()) == [0, 1, 2]
        with pytest.raises(NotReady):
            buffer.sample(1)


def test_unread_rows_that_leave_are_not_consumed() -> None:
    pair = pair_of(Draw("Fifo", max_reads=1), capacity=4)
    pair.add("....")
    pair.sample(2)
    pair.add("....")
    assert pair.sample(4)["id"].tolist() == [4, 5, 6, 7]
    assert pair.buffer.stats()["rows_consumed"] == 6


def test_row_drawn_more_often_than_allowed_in_one_call_is_delivered_and_then_consumed() -> None:
    pair = pair_of(Draw("Uniform", max_reads=2))
    pair.add(".")
    assert pair.sample(3)["id"].tolist() == [0, 0, 0]
    assert pair.refuse_or_sample(1) is None
    assert pair.buffer.stats()["rows_consumed"] == 1


@pytest.mark.parametrize("kind", ["Uniform", "Prioritized", "Recent", "Shuffle"])
def test_every_row_is_read_as_often_as_allowed(kind: str) -> None:
    pair = pair_of(Draw(kind, n=3, max_reads=2), capacity=20)
    pair.add("." * 12)
    reads: Counter[int] = Counter()
    for _ in range(200):
        batch = pair.refuse_or_sample(1)
        if batch is not None:
            reads.update(batch["id"].tolist())
    assert dict(reads) == dict.fromkeys(range(12), 2)
    assert pair.buffer.stats()["rows_consumed"] == 12


def test_bytes_of_a_consumed_row_serve_its_neighbours() -> None:
    pair = pair_of(Draw("Lifo", max_reads=1), Single(n_step=3), next_obs="derived")
    pair.add("......")
    pair.sample(3)
    pair.sample(3)  # compares rewards and next observations that come from consumed rows
    windows = pair_of(Draw("Lifo", max_reads=1), Slices(3, burn_in=2))
    windows.add("......")
    windows.sample(3)
    windows.sample(3)


def test_updating_a_consumed_row_is_stale() -> None:
    pair = pair_of(Draw("Prioritized", max_reads=1))
    pair.add("...")
    serials = pair.legal_serials()
    drawn = pair.sample(1)["indices"].tolist()
    report = pair.buffer.update_priorities(serials, [5.0] * 3)
    assert report == {"applied": 2, "stale": 1}
    assert pair.model.update(serials, [5.0] * 3) == report
    assert drawn[0] not in pair.sample(2)["indices"].tolist()


# ---- save and open ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [view for view in VIEWS if getattr(view, "end", "") != "cross"], ids=str)
@pytest.mark.parametrize("kind", kinds)
def test_opened_copy_goes_on_as_the_buffer_does(kind: str, view: Any, tmp_path: Path) -> None:
    """Every episode is over when it is saved; from then on both get the same rows and the same calls."""
    stream = np.random.default_rng(8)
    draw = Draw(kind, n=9, newest=1 if kind in RANDOM else 0, max_reads=4)
    pair = pair_of(draw, view, capacity=22, num_envs=2)
    for _ in range(9):
        pair.add(letters(stream, 6))
        pair.refuse_or_sample(3)
    pair.add("UU")
    pair.refuse_or_sample(3)
    pair.buffer.save(tmp_path / "snapshot")
    copy = sw.open(tmp_path / "snapshot")
    for _ in range(25):
        steps = pair.make_steps(letters(stream, 2, "....TU"), None, None)
        arguments = pair.arguments(steps, (2,), stacks=False)
        outcomes = []
        for buffer in (pair.buffer, copy):
            buffer.add(**arguments)
            try:
                batch = buffer.sample(4)
            except NotReady:
                outcomes.append((None, None))
            else:
                outcomes.append((batch["indices"].tolist(), batch["id"].tolist()))
        assert outcomes[0] == outcomes[1]
    assert any(outcome is not None for outcome in outcomes[0])


@pytest.mark.parametrize("kind", kinds)
def test_handles_on_shared_memory_draw_from_one_order(kind: str, shm_address: str) -> None:
    draw = Draw(kind, n=9, max_reads=2)
    pair = pair_of(draw, capacity=12, storage=shm_address)
    other = sw.open(shm_address)
    stream = np.random.default_rng(0)
    for turn in range(30):
        pair.add(letters(stream, 2))
        pair.learn_serials()
        if turn % 2 or pair.model.refusal(2) is not None:
            pair.refuse_or_sample(2)
            continue
        pair.model.look()
        batch = other.sample(2)
        by_serial = {step.serial: step for step in pair.model.rows()}
        pair.calls += 1
        pair.model.accept([by_serial[serial] for serial in batch["indices"].tolist()])
        pair.check_memory()
    other.close()
    pair.close()


def test_several_writers_in_the_order_of_serials() -> None:
    stream = np.random.default_rng(0)
    for kind in ("Fifo", "Lifo", "Recent", "Shuffle"):
        pair = pair_of(Draw(kind, n=20), capacity=2000, num_envs=None, writers=4)
        names = [pair.open_writer() for _ in range(3)]
        for _ in range(60):
            pair.add(letters(stream, 1), (), writer=names[int(stream.integers(3))])
        pair.check()
        legal = pair.legal_serials()
        assert legal == sorted(legal)
        pair.sample(len(legal))
        pair.close()
