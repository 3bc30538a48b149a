"""Arrays that a view adds when it is asked: truncated flags beside done, the serials of a window's places. And the
other settings of windows that change what a place is or where windows start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numbered import make, row, unchanged
from patience import HANG_S

import sharpwave as sw
from sharpwave.errors import NotReady, SchemaError, StaleHandle


def filled(view: Any, count: int = 10, *, cut: tuple[int, ...] = (), capacity: int = 20, **options: Any) -> Any:
    buffer = make(capacity, view=view, **options)
    for number in range(count):
        buffer.add(**row(number, truncated=number in cut))
    return buffer


def by_row(batch: Any, name: str) -> dict[int, Any]:
    return dict(
        zip(batch["obs"][..., 0].astype(int).reshape(-1).tolist(), batch[name].reshape(-1).tolist(), strict=True)
    )


# ---- truncated -------------------------------------------------------------------------------------------------------


def test_batches_have_no_truncated_unless_asked() -> None:
    for view in (sw.Transitions(), sw.Transitions(n_step=3), sw.Windows(3)):
        assert "truncated" not in filled(view).sample(4)
    for wrong in (1, None, "yes"):
        with pytest.raises(SchemaError, match=r"Transitions\(\): truncated: expected True or False"):
            sw.Transitions(truncated=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("next_obs", ["stored", "derived"])
@pytest.mark.parametrize(
    "sampler", [sw.Uniform(newest=1), sw.Prioritized(), sw.Fifo(), sw.Uniform(max_reads=9)], ids=str
)
def test_truncated_is_that_of_the_row(sampler: Any, next_obs: Any) -> None:
    buffer = filled(sw.Transitions(truncated=True), cut=(3, 6), sampler=sampler, next_obs=next_obs)
    batch = buffer.sample(10)
    assert (batch["truncated"].dtype, batch["truncated"].shape) == (np.dtype(bool), (10,))
    assert (batch["truncated"] == buffer.get(batch["indices"])["truncated"]).all()
    assert (batch["truncated"] == np.isin(batch["obs"][:, 0], (3, 6))).all()
    assert not batch["done"].any()


@pytest.mark.parametrize("obs", [2, 700], ids=["small rows", "large rows"])
def test_truncated_of_several_steps_is_that_of_the_last(obs: int) -> None:
    """Small rows are made by a kernel, large ones one by one."""
    view = sw.Transitions(n_step=3, truncated=True)
    buffer = sw.ReplayBuffer(20, schema={"obs": sw.Field((obs,))}, view=view, seed=0)
    for number in range(10):
        values = {"obs": np.full(obs, number), "next_obs": np.full(obs, number + 1)}
        buffer.add(**values, reward=1.0, done=number == 8, truncated=number == 4)
    batch = buffer.sample(200)
    assert by_row(batch, "truncated") == {number: number in (2, 3, 4) for number in range(10)}
    assert by_row(batch, "done") == {number: number in (6, 7, 8) for number in range(10)}


def test_a_row_with_both_flags_has_both() -> None:
    buffer = make(view=sw.Transitions(truncated=True))
    buffer.add(**row(0, done=True, truncated=True))
    batch = buffer.sample(2)
    assert batch["done"].all()
    assert batch["truncated"].all()


def test_episodes_that_the_engine_ends_are_truncated() -> None:
    """By a closed writer, by a reset that nobody flagged."""
    for view in (sw.Transitions(truncated=True), sw.Windows(2, truncated=True)):
        buffer = make(20, view=view, next_obs="derived", writers=2)
        with buffer.writer() as writer:
            for number in (0, 1, 5, 6):  # after 1 comes 5
                writer.add(**row(number))
            assert by_row(buffer.sample(64), "truncated") == {0: False, 1: True, 5: False, 6: False}
        assert by_row(buffer.sample(64), "truncated") == {0: False, 1: True, 5: False, 6: True}


def test_episode_of_a_killed_writer_is_truncated(shm_address: str) -> None:
    buffer = filled(sw.Transitions(n_step=2, truncated=True), count=0, storage=shm_address)
    code = (
        "import os, signal, sys, sharpwave as sw\n"
        "buf = sw.open(sys.argv[1])\n"
        "for t in range(3): buf.add(obs=[t, t], action=0.0, reward=0.0, next_obs=[t, t], done=False)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, shm_address], timeout=HANG_S, env=dict(os.environ))
    assert killed.returncode == -signal.SIGKILL
    buffer.add(**row(7))  # takes a writer's place, and settles those of the dead
    assert buffer.stats()["writers_reclaimed"] == 1
    assert by_row(buffer.sample(64), "truncated") == {0: False, 1: True, 2: True, 7: False}
    buffer.close(unlink=True)


@pytest.mark.parametrize("view", [sw.Transitions(truncated=True), sw.Transitions(n_step=2, truncated=True)], ids=str)
@pytest.mark.parametrize("field", [{}, {"stack": 2}, {"compression": "lz4"}, {"ragged": "padded"}], ids=str)
def test_truncated_goes_with_every_kind_of_field(field: dict[str, Any], view: Any) -> None:
    schema = {"obs": sw.Field((3, 2), "uint8", **field), "id": sw.Field((), "int64")}
    buffer = sw.ReplayBuffer(20, schema=schema, next_obs="derived", view=view, seed=0)
    for number in range(9):
        obs, after = (np.full((3, 2), value, np.uint8) for value in (number, number + 1))
        buffer.add(obs=obs, next_obs=after, id=number, reward=0.0, done=False, truncated=number in (2, 5))
    batch = buffer.sample(100)
    last = np.minimum(batch["id"] + view.n_step - 1, 8)
    last = np.where(np.isin(batch["id"], (2, 5)), batch["id"], last)
    assert (batch["truncated"] == np.isin(last, (2, 5))).all()


def test_views_with_more_arrays_are_told_and_kept(tmp_path: Path) -> None:
    views = [
        sw.Transitions(n_step=2, truncated=True),
        sw.Windows(4, n_step=3, gamma=0.9, truncated=True, place_indices=True, start="episode"),
    ]
    for number, view in enumerate(views):
        buffer = filled(view)
        buffer.save(tmp_path / f"{number}")
        for held in (buffer.view, sw.open(tmp_path / f"{number}").view):
            assert repr(held) == repr(view)
            assert eval(repr(held), {"Transitions": sw.Transitions, "Windows": sw.Windows}).truncated
        assert sw.open(tmp_path / f"{number}").sample(3).keys() == buffer.sample(3).keys()


# ---- every way to a batch --------------------------------------------------------------------------------------------

VIEWS = [
    sw.Transitions(n_step=2, truncated=True),
    sw.Windows(3, burn_in=1, truncated=True, place_indices=True),
    sw.Windows(3, burn_in=1, n_step=2, truncated=True, place_indices=True),
]


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_batches_that_are_filled_again_and_tensors_have_them(view: Any) -> None:
    torch = pytest.importorskip("torch")
    one, other = (filled(view, cut=(4,)) for _ in range(2))
    wanted = [one.sample(6) for _ in range(4)]
    batch = other.sample(6)
    batches = [{name: value.copy() for name, value in batch.items()}]
    assert other.sample(6, out=batch) is batch
    batches.append({name: value.copy() for name, value in batch.items()})
    tensors = other.sample(6, device="cpu")
    assert tensors["truncated"].dtype == torch.bool
    batches.append({name: value.numpy().copy() for name, value in tensors.items()})
    assert other.sample(6, out=tensors, device="cpu") is tensors
    batches.append({name: value.numpy().copy() for name, value in tensors.items()})
    for ours, theirs in zip(wanted, batches, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert (value == theirs[name]).all(), name
    for name in {"truncated", "discount", "place_indices"} & set(batch):
        for wrong in (None, batch[name][:5], batch[name].astype(np.int8)):
            with unchanged(other), pytest.raises(SchemaError, match=name):
                other.sample(6, out={**batch, name: wrong})
    with pytest.raises(SchemaError, match="share memory"):
        other.sample(6, out={**batch, "truncated": batch["done"]})


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_iterators_event_loops_and_paces_have_them(view: Any) -> None:
    import asyncio

    pace = sw.Pace(min_size=1, samples_per_insert=100.0)
    drawn, waited, paced, plain = (filled(view, cut=(4,), pace=p) for p in (None, None, pace, None))
    wanted = plain.sample(6)
    iterator = drawn.batches(6)
    for batch in (next(iterator), asyncio.run(waited.sample_async(6)), paced.sample(6)):
        assert all((batch[name] == value).all() for name, value in wanted.items())
        assert list(batch) == list(wanted)
    iterator.close()  # type: ignore[attr-defined]


# ---- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("next_obs", ["stored", "derived"])  # rows copied as a run, and one by one
@pytest.mark.parametrize("end", ["pad", "stop", "cross"])
def test_places_are_told_by_their_serials(end: Any, next_obs: Any) -> None:
    view = sw.Windows(4, burn_in=2, bootstrap=1, end=end, place_indices=True)
    buffer = filled(view, 70, cut=(20, 33, 50), capacity=40, next_obs=next_obs)
    batch = buffer.sample(64)
    places, valid = batch["place_indices"], batch["valid"]
    assert (places.dtype, places.shape) == (np.int64, (64, 7))
    assert ((places == -1) == ~valid).all()
    assert (buffer.get(places[valid])["obs"] == batch["obs"][valid]).all()
    drawn = batch["mask"].argmax(axis=1)
    assert (places[np.arange(64), drawn] == batch["indices"]).all()
    if not valid.all():
        with pytest.raises(StaleHandle):
            buffer.get(places[~valid][:1])
    assert "place_indices" not in filled(sw.Windows(4)).sample(2)


def test_rows_of_places_get_priorities_of_their_own() -> None:
    view = sw.Windows(4, place_indices=True, end="stop")
    buffer = filled(view, 12, cut=(11,), sampler=sw.Prioritized(alpha=1.0, eps=0.0))
    batch = buffer.sample(64)
    named = batch["place_indices"][batch["mask"]]
    report = buffer.update_priorities(named, batch["obs"][..., 0][batch["mask"]])
    assert report == {"applied": len(named), "stale": 0}
    after = buffer.sample(400)
    told = dict(zip(after["obs"][:, 0, 0].astype(int).tolist(), after["probabilities"].tolist(), strict=True))
    assert told == pytest.approx({number: number / 36 for number in range(1, 9)})  # 0 has no mass


# ---- several steps a place -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("next_obs", ["stored", "derived"])
@pytest.mark.parametrize("end", ["pad", "stop", "cross"])
def test_every_place_is_the_transition_of_its_row(end: Any, next_obs: Any) -> None:
    windows = sw.Windows(4, burn_in=1, end=end, n_step=3, gamma=0.5, truncated=True)
    options: dict[str, Any] = {"cut": (12, 25), "capacity": 30, "next_obs": next_obs}
    placed = filled(windows, 40, **options).sample(128)
    single = filled(sw.Transitions(n_step=3, gamma=0.5, truncated=True), 40, **options).sample(1024)
    assert placed["discount"].shape == (128, 5)
    for name in ("reward", "done", "discount", "truncated"):
        wanted = by_row(single, name)
        assert by_row(placed, name).items() <= wanted.items(), name
    after = by_row({**single, "after": single["next_obs"][:, 0]}, "after")
    assert by_row({**placed, "after": placed["next_obs"][:, :, 0]}, "after").items() <= after.items()


def test_rewards_that_cannot_be_summed_are_refused_for_windows_too() -> None:
    schema = {"obs": sw.Field(), "reward": sw.Field((), "int64")}
    with pytest.raises(SchemaError, match="n_step > 1 sums it"):
        sw.ReplayBuffer(10, schema=schema, view=sw.Windows(3, n_step=2))
    sw.ReplayBuffer(10, schema=schema, view=sw.Windows(3))


# ---- starts ----------------------------------------------------------------------------------------------------------


def starts(buffer: Any) -> set[int]:
    batch = buffer.sample(300)
    drawn = batch["mask"].argmax(axis=1)
    return set(batch["obs"][np.arange(300), drawn, 0].astype(int).tolist())


def test_windows_begin_with_their_episode() -> None:
    cut = (4, 6, 13)  # episodes of five, two and seven rows, and an open one of three
    assert starts(filled(sw.Windows(4, start="episode"), 17, cut=cut)) == {0, 5, 7, 14}
    assert starts(filled(sw.Windows(4, start="episode", end="stop"), 17, cut=cut)) == {0, 5, 7}
    assert starts(filled(sw.Windows(4, start="episode", end="cross"), 17, cut=cut)) == {0, 5, 7}
    assert starts(filled(sw.Windows(4, start="episode", burn_in=2, end="cross"), 18, cut=cut)) == {0, 5, 7, 14}
    # Capacity 12: rows 5 to 16 are left, then 6 to 17.
    assert starts(filled(sw.Windows(4, start="episode"), 17, cut=cut, capacity=12)) == {5, 7, 14}
    assert starts(filled(sw.Windows(4, start="episode"), 18, cut=cut, capacity=12)) == {7, 14}
    batch = filled(sw.Windows(4, start="episode", burn_in=2), 17, cut=cut).sample(50)
    assert batch["first"][:, 0].all()
    assert not batch["first"][:, 1:].any()


def test_an_order_counts_the_beginnings_alone() -> None:
    buffer = filled(sw.Windows(2, start="episode"), 12, cut=(3, 5, 8), sampler=sw.Fifo(max_reads=2), next_obs="derived")
    assert buffer.sample(4)["obs"][:, 0, 0].tolist() == [0, 4, 6, 9]
    assert buffer.sample(4)["obs"][:, 0, 0].tolist() == [0, 4, 6, 9]
    with pytest.raises(NotReady):
        buffer.sample(1)


def test_no_beginning_left_is_said() -> None:
    buffer = filled(sw.Windows(2, start="episode"), 30, capacity=10)  # one episode, its beginning long gone
    with unchanged(buffer), pytest.raises(NotReady, match=r'the first row of no episode.*start="uniform"') as caught:
        buffer.sample(1)
    assert "\n" not in str(caught.value)


def test_a_beginning_has_no_stride() -> None:
    with pytest.raises(SchemaError, match=r"stride: expected 1 with start='episode'.*got 2") as caught:
        sw.Windows(4, start="episode", stride=2)
    assert "\n" not in str(caught.value)
    sw.Windows(4, start="per_episode", stride=2)


# ---- while others write ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", [sw.Transitions(n_step=3, gamma=1.0, truncated=True), VIEWS[1], VIEWS[2]], ids=str)
def test_what_is_told_is_of_the_rows_in_the_batch_while_writers_wrap(view: Any) -> None:
    """Every eleventh row is cut. Rows are small and overwritten all the time."""
    buffer = sw.ReplayBuffer(300, schema={"obs": sw.Field((), "int64")}, view=view, writers=2, seed=0)
    stop, errors, told = threading.Event(), [], {}

    def write() -> None:
        with buffer.writer() as writer:
            number = 0
            while not stop.is_set():
                serial = writer.add(
                    obs=number, reward=1.0, next_obs=number + 1, done=False, truncated=number % 11 == 10,
                    return_indices=True,
                )  # fmt: skip
                told[int(serial[0])] = number
                number += 1

    def guarded() -> None:
        try:
            write()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    try:
        seen = 0
        while seen < 300 and thread.is_alive():
            try:
                batch = buffer.sample(16)
            except NotReady:
                continue
            seen += 1
            last = batch["next_obs"] - 1
            assert (batch["truncated"] == (last % 11 == 10)).all()
            if "place_indices" in batch:
                places, valid, obs = batch["place_indices"], batch["valid"], batch["obs"]
                known = dict(told)  # but for rows that were added just now
                for serial, number in zip(places[valid].tolist(), obs[valid].tolist(), strict=True):
                    assert known.get(serial, number) == number
                assert (places[np.arange(16), batch["mask"].argmax(axis=1)] == batch["indices"]).all()
    finally:
        stop.set()
        thread.join(HANG_S)
    assert not errors
    assert seen == 300
