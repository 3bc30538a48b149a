"""Windows from the outside: settings and their errors, what a batch looks like, what has no meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numbered import make, row, rows, unchanged

import sharpwave as sw
from sharpwave.errors import NotReady, SchemaError


def filled(view: Any, count: int = 10, *, ends: tuple[int, ...] = (), capacity: int = 20, **options: Any) -> Any:
    buffer = make(capacity, view=view, **options)
    for number in range(count):
        buffer.add(**row(number, truncated=number in ends))
    return buffer


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("length", [0, -1, 1.5, "3", None, True]),
        ("burn_in", [-1, 1.5, "3", None, True]),
        ("stride", [0, -1, 1.5, "3", None, True]),
        ("bootstrap", [-1, 1.5, "3", None, True]),
        ("end", ["shift", "", None, 1, True]),
        ("start", ["row", "", None, 1]),
        ("priority_eta", [-0.1, 1.1, float("nan"), "high", None]),
        ("n_step", [0, -1, 1.5, "3", None, True]),
        ("gamma", [-0.1, 1.1, float("nan"), "high", None]),
        ("truncated", [1, "yes", None]),
        ("place_indices", [1, "yes", None]),
    ],
)
def test_wrong_settings_are_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(SchemaError, match=name):
            sw.Windows(**{"length": 3, name: value})


def test_settings_are_told_and_kept(tmp_path: Path) -> None:
    view = sw.Windows(4, burn_in=2, stride=3, bootstrap=1, end="stop", priority_eta=0.5)
    buffer = filled(view)
    buffer.save(tmp_path / "snapshot")
    for held in (view, buffer.view, sw.open(tmp_path / "snapshot").view):
        assert (held.length, held.burn_in, held.stride, held.bootstrap) == (4, 2, 3, 1)
        assert (held.end, held.start, held.priority_eta) == ("stop", "uniform", 0.5)
        assert "Windows(" in repr(held)
        assert "4" in repr(held)


def test_attaching_with_another_view_is_refused(shm_address: str) -> None:
    buffer = filled(sw.Windows(4), storage=shm_address)
    with pytest.raises(SchemaError, match="view"):
        make(20, view=sw.Windows(5), storage=shm_address, exist="attach")
    make(20, view=sw.Windows(4), storage=shm_address, exist="attach").close()
    buffer.close(unlink=True)


@pytest.mark.parametrize("sampler", ["Prioritized", "Recent", "Shuffle", "Fifo", "Lifo"])
def test_equally_likely_episodes_need_uniform_draws(sampler: str) -> None:
    made = getattr(sw, sampler)(*([3] if sampler == "Recent" else []))
    with pytest.raises(SchemaError, match="start"):
        make(10, view=sw.Windows(3, start="per_episode"), sampler=made)


def test_equally_likely_episodes_go_with_newest_and_max_reads() -> None:
    sampler = sw.Uniform(newest=2, max_reads=3)
    buffer = filled(sw.Windows(3, start="per_episode"), sampler=sampler, ends=(4,))
    assert buffer.sample(6)["reward"][:2, 0].tolist() == [9, 8]


def test_several_rows_at_once_need_num_envs() -> None:
    buffer = make(20, view=sw.Windows(3))
    with unchanged(buffer), pytest.raises(SchemaError, match="num_envs"):
        buffer.add(**rows(range(4)))
    buffer.add(**row(0))
    one = make(20, view=sw.Windows(3), num_envs=1)
    one.add(**rows(range(4)))
    assert one.sample(64)["reward"].max() == 3


# ---- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("next_obs", ["stored", "derived"])
def test_shapes_and_dtypes_of_a_batch(next_obs: Any) -> None:
    buffer = filled(sw.Windows(3, burn_in=2, bootstrap=1), next_obs=next_obs, sampler=sw.Prioritized())
    batch = buffer.sample(7)
    shapes = {name: (value.shape, str(value.dtype)) for name, value in batch.items()}
    assert shapes == {
        "obs": ((7, 6, 2), "float32"),
        "action": ((7, 6), "float32"),
        "reward": ((7, 6), "float32"),
        "next_obs": ((7, 6, 2), "float32"),
        "done": ((7, 6), "bool"),
        "indices": ((7,), "int64"),
        "valid": ((7, 6), "bool"),
        "mask": ((7, 6), "bool"),
        "first": ((7, 6), "bool"),
        "weights": ((7,), "float32"),
        "probabilities": ((7,), "float64"),
    }


def test_no_next_obs_gives_none() -> None:
    buffer = make(20, view=sw.Windows(3), next_obs=None)
    for number in range(5):
        values = row(number)
        values.pop("next_obs")
        buffer.add(**values)
    assert "next_obs" not in buffer.sample(3)


def test_nested_fields_and_stacks_have_two_leading_axes() -> None:
    schema = {"obs": {"image": sw.Field((4, 4), "uint8", stack=3), "state": (sw.Field((2,)), sw.Field(()))}}
    buffer = sw.ReplayBuffer(20, schema=schema, next_obs=None, view=sw.Windows(5), seed=0)
    for _ in range(6):
        obs = {"image": np.zeros((4, 4), np.uint8), "state": (np.zeros(2, np.float32), np.float32(0))}
        buffer.add(obs=obs, reward=0.0, done=False)
    obs = buffer.sample(3)["obs"]
    assert obs["image"].shape == (3, 5, 3, 4, 4)
    assert (obs["state"][0].shape, obs["state"][1].shape) == ((3, 5, 2), (3, 5))


def test_batch_may_be_reused() -> None:
    buffer = filled(sw.Windows(3, burn_in=1))
    batch = buffer.sample(5)
    places = {name: value.ctypes.data for name, value in batch.items()}
    assert buffer.sample(5, out=batch) is batch
    assert {name: value.ctypes.data for name, value in batch.items()} == places
    anchors = buffer.get(batch["indices"])["reward"]
    assert (batch["reward"][np.arange(5), batch["mask"].argmax(axis=1)] == anchors).all()
    with unchanged(buffer), pytest.raises(SchemaError):
        buffer.sample(6, out=batch)


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    buffer = filled(sw.Windows(3, burn_in=1), sampler=sw.Prioritized())
    batch = buffer.sample(5, device="cpu")
    assert batch["obs"].shape == (5, 4, 2)
    assert batch["mask"].dtype == torch.bool
    report = buffer.update_priorities(batch["indices"], torch.ones(5, 4), mask=batch["mask"])
    assert report == {"applied": 5, "stale": 0}


def test_get_and_rows_give_single_rows() -> None:
    buffer = filled(sw.Windows(3))
    (batch,) = buffer.rows()
    assert batch["reward"].tolist() == list(range(10))
    assert buffer.get(batch["indices"][2:4])["reward"].tolist() == [2, 3]
    assert not {"valid", "mask", "first"} & set(batch)


def test_window_of_one_row_is_a_transition() -> None:
    buffer = filled(sw.Windows(1), ends=(3,))
    plain = filled(None, ends=(3,))
    ours, theirs = buffer.sample(50), plain.sample(50)
    assert ours["valid"].all()
    assert ours["mask"].all()
    assert set(ours["reward"][:, 0].tolist()) == set(theirs["reward"].tolist())
    assert (ours["first"][:, 0] == np.isin(ours["reward"][:, 0], [0, 4])).all()


def test_not_ready_says_what_is_missing() -> None:
    for end in ("stop", "cross"):
        buffer = filled(sw.Windows(8, end=end), count=5)
        with unchanged(buffer), pytest.raises(NotReady, match=r"sample\(\).*8") as caught:
            buffer.sample(1)
        assert "\n" not in str(caught.value)
    with pytest.raises(NotReady):
        make(10, view=sw.Windows(3)).sample(1)
    assert filled(sw.Windows(8, end="stop"), count=8).sample(2)["reward"][:, 0].tolist() == [0, 0]


def test_window_longer_than_the_ring_is_padded_or_never_ready() -> None:
    assert filled(sw.Windows(30), capacity=5).sample(2)["valid"].sum(axis=1).max() <= 5
    with pytest.raises((NotReady, SchemaError)):
        filled(sw.Windows(30, end="cross"), capacity=5).sample(2)


@pytest.mark.parametrize("end", ["pad", "stop"])
def test_steps_are_counted_from_the_true_start_after_it_was_overwritten(end: str) -> None:
    buffer = make(10, view=sw.Windows(2, stride=4, end=end), sampler=sw.Fifo(max_reads=None))
    for number in range(35):
        buffer.add(**row(number))
        if number >= 5:
            buffer.sample(1)
    # Rows 25 to 34 are left.
    assert buffer.sample(2)["reward"][:, 0].tolist() == [28, 32]


def test_steps_are_counted_from_what_is_left_when_nobody_looked_for_a_lap() -> None:
    buffer = make(10, view=sw.Windows(2, stride=4), sampler=sw.Fifo(max_reads=None))
    for number in range(35):
        buffer.add(**row(number))
    assert buffer.sample(3)["reward"][:, 0].tolist() == [25, 29, 33]
    for number in range(35, 40):
        buffer.add(**row(number))
    assert buffer.sample(2)["reward"][:, 0].tolist() == [33, 37]


def test_another_handle_counts_the_same_steps(shm_address: str) -> None:
    buffer = make(10, view=sw.Windows(2, stride=4), sampler=sw.Fifo(max_reads=None), storage=shm_address)
    other = sw.open(shm_address)
    for number in range(35):
        buffer.add(**row(number))
        if number >= 5:
            (buffer if number % 2 else other).sample(1)
    for held in (buffer, other, sw.open(shm_address)):
        assert held.sample(2)["reward"][:, 0].tolist() == [28, 32]
    buffer.close(unlink=True)


# ---- priorities ------------------------------------------------------------------------------------------------------


def test_wrong_errors_are_refused_and_change_nothing() -> None:
    buffer = filled(sw.Windows(3, burn_in=1), sampler=sw.Prioritized(alpha=1.0, eps=0.0))
    batch = buffer.sample(4)
    indices, mask, errors = batch["indices"], batch["mask"], np.full((4, 4), 9.0)
    empty = mask.copy()
    empty[2] = False
    nan = errors.copy()
    nan[1, mask[1].argmax()] = np.nan
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (errors, {}, "mask="),
        (errors, {"mask": empty}, "mask"),
        (errors, {"mask": mask[:, :3]}, "mask"),
        (errors, {"mask": mask[:3]}, "mask"),
        (errors[:3], {"mask": mask[:3]}, "priorities|mask|indices"),
        (np.ones((4, 4, 1)), {"mask": mask}, "priorities|mask|indices"),
        (nan, {"mask": mask}, "priorities|mask|indices"),
        (np.ones(3), {}, "priorities|mask|indices"),
    ]
    for values, more, word in cases:
        with unchanged(buffer), pytest.raises(SchemaError, match=word):
            buffer.update_priorities(indices, values, **more)
    assert buffer.sample(50)["probabilities"] == pytest.approx(0.1)


def test_one_error_a_window_needs_no_mask() -> None:
    buffer = filled(sw.Windows(3), sampler=sw.Prioritized(alpha=1.0, eps=0.0))
    (held,) = buffer.rows()
    buffer.update_priorities(held["indices"], np.arange(10.0))
    batch = buffer.sample(200)
    chance = {int(r): p for r, p in zip(batch["reward"][:, 0], batch["probabilities"], strict=True)}
    assert all(p == pytest.approx(number / 45) for number, p in chance.items())
    assert 0 not in chance


def test_errors_of_steps_have_no_meaning_for_transitions() -> None:
    buffer = filled(None, sampler=sw.Prioritized())
    with pytest.raises(SchemaError):
        buffer.update_priorities(buffer.sample(4)["indices"], np.ones((4, 3)))


# ---- ends that come late ---------------------------------------------------------------------------------------------


def add_three(target: Any, first: int) -> None:
    for number in range(first, first + 3):
        target.add(obs=[0.0, 0.0], action=0.0, reward=float(number), next_obs=[0.0, 0.0], terminated=False)


@pytest.mark.parametrize("looks", [False, True])
def test_short_episode_of_a_closed_writer_gives_its_window(looks: bool) -> None:
    """Whether the rows were taken in before the writer closed, and whether its place was taken by another since."""
    buffer = sw.ReplayBuffer(1000, obs_shape=(2,), view=sw.Windows(5, end="stop"), sampler=sw.Fifo(max_reads=None))
    for episode in range(6):
        writer = buffer.writer()
        add_three(writer, 10 * episode)
        if looks:
            with pytest.raises(NotReady):
                buffer.sample(episode + 1)
        writer.close()
        if looks and episode % 2:
            assert buffer.sample(episode + 1)["reward"][:, 0].tolist() == [10.0 * i for i in range(episode + 1)]
    assert buffer.sample(6)["reward"][:, 0].tolist() == [10.0 * i for i in range(6)]
    with pytest.raises(NotReady):
        buffer.sample(7)
