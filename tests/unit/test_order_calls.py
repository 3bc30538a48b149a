"""Samplers from the outside: settings and their errors, what they count, what they refuse."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numbered import check_whole, filled, make, row, rows, unchanged

import sharpwave as sw
from sharpwave.errors import NotReady, SchemaError

COUNTS: list[Any] = [0, -1, 1.5, "3", True]


@pytest.mark.parametrize("name", ["Uniform", "Prioritized", "Recent", "Shuffle", "Fifo", "Lifo"])
def test_wrong_max_reads_is_refused(name: str) -> None:
    for value in COUNTS:
        with pytest.raises(SchemaError, match="max_reads"):
            getattr(sw, name)(*([3] if name == "Recent" else []), max_reads=value)


@pytest.mark.parametrize("name", ["Uniform", "Prioritized", "Recent"])
def test_wrong_newest_is_refused(name: str) -> None:
    for value in [-1, 1.5, "3", None, True]:
        with pytest.raises(SchemaError, match="newest"):
            getattr(sw, name)(*([3] if name == "Recent" else []), newest=value)


@pytest.mark.parametrize("name", ["Shuffle", "Fifo", "Lifo"])
def test_samplers_that_fix_the_order_have_no_newest(name: str) -> None:
    with pytest.raises(SchemaError, match="newest"):
        getattr(sw, name)(newest=1)


def test_wrong_n_of_recent_is_refused() -> None:
    for value in [*COUNTS, None]:
        with pytest.raises(SchemaError, match="n"):
            sw.Recent(value)


@pytest.mark.parametrize(
    ("sampler", "settings"),
    [
        (lambda: sw.Uniform(newest=2, max_reads=3), {"newest": 2, "max_reads": 3}),
        (lambda: sw.Prioritized(0.7, newest=2, max_reads=3), {"alpha": 0.7, "newest": 2, "max_reads": 3}),
        (lambda: sw.Recent(50, newest=1), {"n": 50, "newest": 1, "max_reads": None}),
        (lambda: sw.Shuffle(), {"max_reads": None}),
        (lambda: sw.Fifo(), {"max_reads": 1}),
        (lambda: sw.Fifo(max_reads=None), {"max_reads": None}),
        (lambda: sw.Lifo(max_reads=4), {"max_reads": 4}),
    ],
)
def test_settings_in_force_are_told(sampler: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    made = sampler()
    buffer = filled(3, sampler=made)
    buffer.save(tmp_path / "snapshot")
    for held in (made, buffer.sampler, sw.open(tmp_path / "snapshot").sampler):
        assert type(held) is type(made)
        assert {name: getattr(held, name) for name in settings} == settings
        assert type(made).__name__ in repr(held)


def test_batch_smaller_than_newest_is_refused() -> None:
    for sampler in (sw.Uniform(newest=4), sw.Prioritized(newest=4), sw.Recent(9, newest=4)):
        buffer = filled(6, sampler=sampler)
        with unchanged(buffer), pytest.raises(SchemaError, match="newest"):
            buffer.sample(3)
        assert buffer.sample(4)["reward"].tolist() == [5, 4, 3, 2]


@pytest.mark.parametrize("name", ["Shuffle", "Fifo", "Lifo"])
def test_more_than_there_is_is_refused_and_nothing_is_consumed(name: str) -> None:
    buffer = filled(6, sampler=getattr(sw, name)())
    with unchanged(buffer), pytest.raises(NotReady) as caught:
        buffer.sample(7)
    assert "6" in str(caught.value)
    assert "7" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(buffer.sample(6)["reward"].tolist()) == list(range(6))


def test_failed_out_consumes_nothing() -> None:
    buffer = filled(6, sampler=sw.Fifo())
    other = filled(6).sample(3)
    with unchanged(buffer), pytest.raises(SchemaError):
        buffer.sample(4, out=other)
    assert buffer.stats()["rows_consumed"] == 0
    assert buffer.sample(3, out=other)["reward"].tolist() == [0, 1, 2]
    assert buffer.stats()["rows_consumed"] == 3


def test_same_seed_draws_the_same() -> None:
    for make_sampler in (lambda: sw.Shuffle(), lambda: sw.Recent(7), lambda: sw.Uniform(newest=2, max_reads=3)):
        first, second = (filled(10, sampler=make_sampler(), seed=5) for _ in range(2))
        for _ in range(3):
            assert first.sample(4)["reward"].tolist() == second.sample(4)["reward"].tolist()
    ours, theirs = (filled(10, sampler=sw.Shuffle(), seed=seed).sample(10)["reward"].tolist() for seed in (1, 2))
    assert ours != theirs


def test_counters_are_told() -> None:
    buffer = filled(6, sampler=sw.Shuffle(max_reads=2))
    assert (buffer.stats()["epoch"], buffer.stats()["rows_consumed"]) == (0, 0)
    buffer.sample(6)
    assert (buffer.stats()["epoch"], buffer.stats()["rows_consumed"]) == (1, 0)
    buffer.sample(4)
    assert (buffer.stats()["epoch"], buffer.stats()["rows_consumed"]) == (2, 4)
    buffer.sample(2)
    assert (buffer.stats()["epoch"], buffer.stats()["rows_consumed"]) == (2, 6)
    with pytest.raises(NotReady):
        buffer.sample(1)
    assert len(buffer) == 6
    buffer.clear()
    assert buffer.stats()["rows_consumed"] == 6  # ever


def test_cleared_buffer_begins_anew() -> None:
    for name in ("Shuffle", "Fifo", "Lifo"):
        buffer = filled(6, sampler=getattr(sw, name)())
        buffer.sample(2)
        buffer.clear()
        with pytest.raises(NotReady):
            buffer.sample(1)
        for number in range(10, 13):
            buffer.add(**row(number))
        assert sorted(buffer.sample(3)["reward"].tolist()) == [10, 11, 12]


@pytest.mark.parametrize("name", ["Shuffle", "Fifo", "Lifo"])
def test_threads_share_one_order(name: str) -> None:
    """Each row goes to exactly one of them."""
    buffer = make(4000, sampler=getattr(sw, name)(max_reads=1), num_envs=1)
    for first in range(0, 4000, 500):
        buffer.add(**rows(range(first, first + 500)))
    got: list[list[int]] = [[] for _ in range(4)]
    errors: list[BaseException] = []

    def learn(mine: list[int]) -> None:
        try:
            while True:
                batch = buffer.sample(5)
                check_whole(batch)
                mine.extend(batch["reward"].astype(int).tolist())
        except NotReady:
            pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=learn, args=(mine,)) for mine in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert sorted(np.concatenate(got).tolist()) == list(range(4000))
    assert buffer.stats()["rows_consumed"] == 4000


def test_queue_is_read_while_it_is_written() -> None:
    buffer = make(64, sampler=sw.Fifo(max_reads=None))
    stop = threading.Event()
    errors: list[BaseException] = []

    def write() -> None:
        number = 0
        while not stop.is_set():
            buffer.add(**row(number))
            number += 1

    def learn() -> None:
        try:
            while not stop.is_set():
                try:
                    batch = buffer.sample(16)
                except NotReady:
                    continue
                check_whole(batch)
                assert (np.diff(batch["reward"]) == 1).all()
                assert (np.diff(batch["indices"]) > 0).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=job) for job in (write, learn)]
    for thread in threads:
        thread.start()
    stop.wait(0.6)
    stop.set()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


@pytest.mark.parametrize(
    "sampler", [sw.Fifo(max_reads=1), sw.Lifo(max_reads=1), sw.Shuffle()], ids=["fifo", "lifo", "shuffle"]
)
@pytest.mark.parametrize("added", range(24, 100, 2))
def test_every_row_is_handed_out_however_many_laps_went_by_since_the_last_draw(sampler: sw.Fifo, added: int) -> None:
    """The oldest rows share a block with the newest; those of a lap that no draw saw were left out."""
    buffer = sw.ReplayBuffer(24, obs_shape=(), num_envs=2, sampler=sampler, writers=1, seed=0)

    def add(steps: int) -> None:
        zeros = np.zeros((steps, 2), np.float32)
        buffer.add(zeros, zeros, zeros, zeros, zeros > 0)

    add(3)
    buffer.sample(6)
    for _ in range(added // 2):
        add(1)
    drawn = buffer.sample(len(buffer))["indices"].tolist()
    assert sorted(drawn) == next(buffer.rows())["indices"].tolist()


@pytest.mark.parametrize("sampler", [sw.Fifo(), sw.Lifo(), sw.Shuffle()], ids=["fifo", "lifo", "shuffle"])
@pytest.mark.parametrize(("pace", "count"), [(None, 0), (None, 5), (sw.Pace.queue(10), 0), (sw.Pace.queue(10), 5)])
def test_batch_that_no_buffer_of_this_capacity_can_give_is_refused_at_once(
    sampler: sw.Fifo, pace: sw.Pace | None, count: int
) -> None:
    buffer = make(10, sampler=sampler, pace=pace)
    for number in range(count):
        buffer.add(**row(number))
    with pytest.raises(SchemaError, match=r"batch_size: expected at most capacity=10, got 11: each row is given once"):
        buffer.sample(11)
    for iterate in (buffer.batches, buffer.stream):
        with pytest.raises(SchemaError, match=r"batch_size: expected at most capacity=10, got 11"):
            iterate(11)


class Preset(sw.Prioritized):
    def __init__(self) -> None:
        super().__init__(alpha=0.7, beta=0.5)


class Queue(sw.Fifo):
    pass


@pytest.mark.parametrize("sampler", [Preset(), Queue()], ids=["Prioritized", "Fifo"])
def test_sampler_of_a_users_subclass_draws_and_is_saved_as_its_base(sampler: sw.Fifo, tmp_path: Path) -> None:
    buffer = make(10, sampler=sampler)
    for number in range(4):
        buffer.add(**row(number))
    buffer.save(tmp_path / "saved")
    again = sw.open(tmp_path / "saved")
    plain = sw.Prioritized(0.7, 0.5) if isinstance(sampler, Preset) else sw.Fifo()
    assert (type(again.sampler), str(again.sampler)) == (type(plain), str(plain))
    assert buffer.sample(3)["indices"].tolist() == again.sample(3)["indices"].tolist()


@pytest.mark.parametrize("chunk", [10, 70, 130, 400, 1000])
@pytest.mark.parametrize("kind", [sw.Fifo, sw.Lifo, sw.Shuffle])
def test_rows_that_came_in_bulk_between_two_draws_are_all_handed_out_once(kind: Any, chunk: int) -> None:
    buffer = sw.ReplayBuffer(1003, obs_shape=(1,), action_shape=(), sampler=kind(max_reads=None), seed=0)
    for first in range(0, 4000, chunk):
        numbers = np.arange(first, first + chunk, dtype=np.float32)
        buffer.add(numbers[:, None], numbers, numbers, numbers[:, None], np.zeros(chunk, bool))
        expected = np.arange(max(0, first + chunk - 1003), first + chunk)
        got = buffer.sample(len(buffer))["obs"][:, 0]
        if kind is sw.Lifo:
            got = got[::-1]
        assert (np.sort(got) if kind is sw.Shuffle else got).tolist() == expected.tolist()
