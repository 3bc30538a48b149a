"""Prioritized buffers from the outside: arguments and their errors, kinds of arrays, threads, the service's names."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numbered import make, row, rows, state_of
from test_threads import check_rows, checked_row, checked_schema, run_all

import sharpwave as sw
from sharpwave.compat.replay_buffer import BufferConfig
from sharpwave.compat.replay_buffer import ReplayBuffer as ServiceBuffer
from sharpwave.errors import ClosedError, NotReady, SchemaError, StorageError


def filled(count: int = 5, capacity: int = 10, **settings: Any) -> sw.ReplayBuffer:
    """Rows 0 .. count-1 with the priorities 1 .. count, alpha 1 and eps 0 unless told otherwise."""
    buffer = make(capacity, sampler=sw.Prioritized(**{"alpha": 1.0, "eps": 0.0, **settings}))
    if count:
        buffer.add(**rows(range(count)), priority=np.arange(1.0, count + 1))
    return buffer


def serials(buffer: sw.ReplayBuffer) -> np.ndarray:
    return np.concatenate([batch["indices"] for batch in buffer.rows()])


def chances(buffer: sw.ReplayBuffer) -> dict[int, float]:
    """The probability of every row, by its number. A look costs one call of the random stream."""
    batch = buffer.sample(2000)
    told = zip(batch["reward"].astype(int).tolist(), batch["probabilities"].tolist(), strict=True)
    return dict(sorted(set(told)))


@contextmanager
def priorities_unchanged(buffer: sw.ReplayBuffer) -> Iterator[None]:
    before, held = chances(buffer), state_of(buffer)
    yield
    assert state_of(buffer) == held
    assert chances(buffer) == before


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("alpha", [-0.1, 1.1, float("nan"), float("inf"), "0.6", None, True]),
        ("beta", [-0.1, 1.1, float("nan"), float("inf"), "0.4", None, (0.4, 1.0)]),
        ("eps", [-1e-9, float("nan"), float("inf"), "small", None]),
        ("mix", [-0.1, 1.1, float("nan"), "half", None]),
        ("normalize", ["max", "", None, 1, True]),
        ("new_rows", ["max", "", None, -1.0, float("nan"), float("inf")]),
        ("stratified", ["yes", None, 2]),
        ("rank_based", ["yes", None, 2]),
    ],
)
def test_wrong_settings_are_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(SchemaError, match=rf"Prioritized\(\): {name}: expected .* got"):
            sw.Prioritized(**{name: value})


@pytest.mark.parametrize(
    "arguments",
    [(-0.1, 1.0, 10), (0.4, 1.5, 10), (0.4, float("nan"), 10), (0.4, 1.0, 0), (0.4, 1.0, 1.5), ("a", 1.0, 3)],
)
def test_wrong_schedules_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(SchemaError):
        sw.Prioritized(beta=sw.Linear(*arguments))


def test_bounds_themselves_are_allowed() -> None:
    for alpha in (0, 1, 0.0, 1.0, np.float32(0.5)):
        sw.Prioritized(alpha, 0)
        sw.Prioritized(alpha, 1, eps=0, mix=1, new_rows=0)


def test_settings_in_force_are_told(tmp_path: Path) -> None:
    schedule = sw.Linear(0.4, 1.0, 1000)
    sampler = sw.Prioritized(0.7, schedule, eps=1e-3, stratified=False, normalize="buffer", mix=0.1, new_rows=2.0)
    buffer = make(10, sampler=sampler)
    buffer.add(**row(0))
    buffer.tune(alpha=0.2)
    buffer.save(tmp_path / "snapshot")
    for held in (buffer, sw.open(tmp_path / "snapshot")):
        told = held.sampler
        assert (told.alpha, told.eps, told.stratified, told.rank_based) == (0.2, 1e-3, False, False)
        assert (told.normalize, told.mix, told.new_rows) == ("buffer", 0.1, 2.0)
        assert (told.beta.start, told.beta.end, told.beta.steps) == (0.4, 1.0, 1000)
        assert "0.2" in repr(told)
    assert sampler.alpha == 0.7  # what was given is not ours to change
    assert isinstance(make(10).sampler, sw.Uniform)
    assert isinstance(make(10).view, sw.Transitions)


@pytest.mark.parametrize("settings", [{"alpha": 1.5}, {"beta": -1}, {"alpha": "high"}, {"beta": float("nan")}])
def test_wrong_tuning_is_refused_and_changes_nothing(settings: dict[str, Any]) -> None:
    buffer = filled(beta=0.5)
    with priorities_unchanged(buffer), pytest.raises(SchemaError, match=next(iter(settings))):
        buffer.tune(**settings)
    with priorities_unchanged(buffer), pytest.raises(SchemaError):
        buffer.tune(alpha=0.5, beta=7)
    assert (buffer.sampler.alpha, buffer.sampler.beta) == (1.0, 0.5)


def test_uniform_buffer_has_nothing_to_tune_or_update() -> None:
    buffer = make(10)
    buffer.add(**row(0))
    with pytest.raises(SchemaError, match=r"sampler=.*Prioritized\(\)"):
        buffer.update_priorities([0], [1.0])
    with pytest.raises(SchemaError, match=r"Prioritized\(\)"):
        buffer.tune(alpha=0.5)
    with pytest.raises(SchemaError, match="priority"):
        buffer.add(**row(1), priority=1.0)
    assert len(buffer) == 1
    assert set(buffer.sample(2)) == {"obs", "action", "reward", "next_obs", "done", "indices"}


def test_attach_needs_the_same_sampler(shm_address: str) -> None:
    options: dict[str, Any] = {"storage": shm_address, "sampler": sw.Prioritized(0.5)}
    buffer = make(10, **options)
    with make(10, exist="attach", **options) as second:
        assert second.sampler.alpha == 0.5
    with pytest.raises((SchemaError, StorageError)):
        make(10, storage=shm_address, exist="attach", sampler=sw.Uniform())
    buffer.close(unlink=True)


# ---- update_priorities -----------------------------------------------------------------------------------------------


def kinds_of_arrays() -> dict[str, Callable[[list[float]], Any]]:
    kinds: dict[str, Callable[[list[float]], Any]] = {
        "list": list,
        "tuple": tuple,
        "float32": lambda values: np.array(values, np.float32),
        "float64": lambda values: np.array(values, np.float64),
        "float16": lambda values: np.array(values, np.float16),
        "int64": lambda values: np.array(values, np.int64),
        "uint8": lambda values: np.array(values, np.uint8),
        "big endian": lambda values: np.array(values, ">f8"),
        "every other": lambda values: np.repeat(np.array(values, np.float32), 2)[::2],
        "backwards": lambda values: np.array(values, np.float32)[::-1].copy()[::-1],
        "read only": lambda values: np.broadcast_to(np.array(values, np.float32), (len(values),)),
    }
    try:
        import torch
    except ImportError:
        return kinds
    return kinds | {
        "torch float32": lambda values: torch.tensor(values, dtype=torch.float32),
        "torch float64": lambda values: torch.tensor(values, dtype=torch.float64),
        "torch with a gradient": lambda values: torch.tensor(values, dtype=torch.float32, requires_grad=True),
        "torch int64": lambda values: torch.tensor(values, dtype=torch.int64),
    }


@pytest.mark.parametrize("kind", list(kinds_of_arrays()))
def test_priorities_of_any_kind_are_taken(kind: str) -> None:
    buffer = filled(4)
    report = buffer.update_priorities(serials(buffer), kinds_of_arrays()[kind]([8, 2, 4, 2]))
    assert report == {"applied": 4, "stale": 0}
    assert {type(count) for count in report.values()} == {int}
    assert chances(buffer) == pytest.approx({0: 0.5, 1: 0.125, 2: 0.25, 3: 0.125})


@pytest.mark.parametrize("kind", ["list", "tuple", "int32", "uint64", "int64", "torch"])
def test_indices_of_any_kind_are_taken(kind: str) -> None:
    buffer = filled(4)
    held = serials(buffer)[[1, 3]]
    if kind == "torch":
        indices: Any = pytest.importorskip("torch").from_numpy(held)
    else:
        indices = {"list": held.tolist(), "tuple": tuple(held.tolist())}.get(kind)
        indices = held.astype(kind) if indices is None else indices
    assert buffer.update_priorities(indices, [6.0, 6.0]) == {"applied": 2, "stale": 0}
    assert chances(buffer) == pytest.approx({0: 1 / 16, 1: 6 / 16, 2: 3 / 16, 3: 6 / 16})


def test_batch_of_torch_tensors_goes_round() -> None:
    torch = pytest.importorskip("torch")
    buffer = filled(4)
    batch = buffer.sample(16, device="cpu")
    assert (batch["weights"].dtype, batch["probabilities"].dtype) == (torch.float32, torch.float64)
    errors = torch.full((16,), -2.5, requires_grad=True)
    assert buffer.update_priorities(batch["indices"], errors) == {"applied": 16, "stale": 0}


@pytest.mark.parametrize(
    "kind", ["float32", "float64", "float16", "int64", "bool", "strided", "swapped", "list", "tensor"]
)
def test_usual_indices_and_priorities_take_no_step_in_python(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, twin = filled(10), filled(10)
    held, values = serials(buffer), np.arange(10) % 2
    twin.update_priorities(held, values.astype(np.float32))
    monkeypatch.setattr("sharpwave.rows.host.as_handles", None)
    monkeypatch.setattr("sharpwave.rows.host.read_update", None)
    indices: Any = held
    priorities: Any = values.astype(np.float32)
    if kind == "tensor":
        torch = pytest.importorskip("torch")
        if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
            pytest.skip("this torch does not lend the memory of its tensors")
        indices, priorities = torch.from_numpy(held), torch.from_numpy(-priorities).requires_grad_()
    elif kind == "list":
        indices, priorities = held.tolist(), values.tolist()
    elif kind == "strided":
        indices, priorities = np.repeat(held, 2)[::2], np.repeat(priorities, 2)[::2]
    elif kind == "swapped":
        indices, priorities = held.astype(">i8"), priorities.astype(">f4")
    else:
        indices, priorities = held.astype(np.int32), values.astype(kind)
    assert buffer.update_priorities(indices, priorities) == {"applied": 10, "stale": 0}
    assert chances(buffer) == chances(twin)


def test_signed_errors_count_by_magnitude() -> None:
    buffer = filled(3)
    buffer.update_priorities(serials(buffer), np.array([-1.0, 2.0, -5.0]))
    assert chances(buffer) == pytest.approx({0: 1 / 8, 1: 2 / 8, 2: 5 / 8})


def test_last_of_several_writes_wins() -> None:
    buffer = filled(2)
    first, second = serials(buffer).tolist()
    report = buffer.update_priorities([first, second, first, first], [100.0, 3.0, 50.0, 1.0])
    assert report == {"applied": 4, "stale": 0}
    assert chances(buffer) == pytest.approx({0: 0.25, 1: 0.75})


def test_serials_that_are_not_there_are_counted() -> None:
    buffer = filled(4, capacity=4)
    for number in range(4, 10):
        buffer.add(**row(number))
    held = serials(buffer)
    report = buffer.update_priorities([held[0] - 1, held[0], -1, 10**12, -(10**12)], [1.0] * 5)
    assert report == {"applied": 1, "stale": 4}


def test_serials_of_masked_rows_are_stale() -> None:
    buffer = filled(0)
    buffer.add(**rows(range(3)), mask=[True, False, True])
    held = serials(buffer)
    assert len(held) == 2
    between = list(range(held[0] + 1, held[1]))
    assert len(between) == 1
    assert buffer.update_priorities(between, [9.0]) == {"applied": 0, "stale": 1}
    assert chances(buffer) == pytest.approx({0: 0.5, 2: 0.5})


def test_nothing_to_update_is_no_error() -> None:
    buffer = filled(2)
    assert buffer.update_priorities([], []) == {"applied": 0, "stale": 0}
    assert filled(0).update_priorities([0], [1.0]) == {"applied": 0, "stale": 1}


@pytest.mark.parametrize(
    ("indices", "values"),
    [
        ([0, 1], [1.0, float("nan")]),
        ([0, 1], [float("inf"), 1.0]),
        ([0, 1], [1.0, float("-inf")]),
        ([0, 1], [1.0, 1e39]),  # beyond float32
        ([10**12, 0], [float("nan"), 1.0]),  # not even where the row is gone
        ([0, 1], [1.0]),
        ([0], [1.0, 2.0]),
        ([0, 1], 1.0),
        (0, [1.0]),
        ([[0, 1]], [[1.0, 2.0]]),
        ([0, 1], [[1.0, 2.0]]),
        ([0, 1], [[[1.0]], [[2.0]]]),
        ([0.0, 1.0], [1.0, 2.0]),
        ([0, 1], ["a", "b"]),
        ([0, 1], [None, 1.0]),
        ([0, 1], [1j, 1.0]),
        (["0", "1"], [1.0, 2.0]),
        (None, [1.0]),
        ([0, 1], None),
        ([0, 1], [[1.0], [2.0, 3.0]]),
        ([True, False], [1.0, 2.0]),
    ],
    ids=repr,
)
def test_wrong_updates_are_refused_whole(indices: Any, values: Any) -> None:
    buffer = filled(4)
    with priorities_unchanged(buffer), pytest.raises(SchemaError, match=r"update_priorities\(\)"):
        buffer.update_priorities(indices, values)


@pytest.mark.parametrize("count", [3, 9_000])  # more than the engine reads by itself
@pytest.mark.parametrize("form", ["array", "list", "tensor", "strided"])
def test_errors_with_an_axis_of_one_are_one_for_each_row(form: str, count: int) -> None:
    names, errors = np.arange(count) % 4, np.linspace(-1, 2, count)[:, None]
    forms: dict[str, Any] = {"array": errors, "list": errors.tolist(), "strided": np.repeat(errors, 3, axis=1)[:, 1:2]}
    if form == "tensor":
        forms["tensor"] = pytest.importorskip("torch").tensor(errors, requires_grad=True)
    one, other = filled(4), filled(4)
    assert one.update_priorities(names, forms[form]) == other.update_priorities(names, errors[:, 0])
    assert chances(one) == chances(other)


def test_windows_take_one_error_each_with_an_axis_of_one() -> None:
    buffers = [sw.ReplayBuffer(8, obs_shape=(1,), view=sw.Windows(3), sampler=sw.Prioritized(), seed=0) for _ in "ab"]
    for buffer in buffers:
        for step in range(6):
            buffer.add([step], 0.0, 0.0, [step + 1], False)
    errors = np.arange(6.0)
    for buffer, values in zip(buffers, (errors, errors[:, None]), strict=True):
        buffer.update_priorities(np.arange(6), values)
    first, second = (buffer.sample(64) for buffer in buffers)
    assert first["probabilities"].tolist() == second["probabilities"].tolist()


def test_refusal_names_the_place_of_the_first_bad_value() -> None:
    buffer = filled(4)
    with pytest.raises(SchemaError, match=r"nan.*2|2.*nan"):
        buffer.update_priorities(serials(buffer), [1.0, 2.0, float("nan"), float("inf")])


def test_closed_buffer_refuses() -> None:
    buffer = filled(3)
    buffer.close()
    for call in (lambda: buffer.update_priorities([0], [1.0]), lambda: buffer.tune(alpha=0.1)):
        with pytest.raises(ClosedError):
            call()


# ---- priority= -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", [3, 3.0, np.float32(3), np.array(3.0), np.int64(3)], ids=repr)
def test_priority_of_one_row_is_taken(priority: Any) -> None:
    buffer = filled(1)
    buffer.add(**row(7), priority=priority)
    assert chances(buffer) == pytest.approx({0: 0.25, 7: 0.75})


@pytest.mark.parametrize("kind", [name for name in kinds_of_arrays() if name != "tuple"])
def test_priorities_of_several_rows_are_taken(kind: str) -> None:
    buffer = filled(1)
    buffer.add(**rows(range(7, 10)), priority=kinds_of_arrays()[kind]([1, 2, 4]))
    assert chances(buffer) == pytest.approx({0: 1 / 8, 7: 1 / 8, 8: 2 / 8, 9: 4 / 8})


def test_priorities_come_by_steps_where_there_are_environments() -> None:
    buffer = make(12, num_envs=3, sampler=sw.Prioritized(1.0, eps=0.0))
    values = {name: value.reshape(2, 3, *value.shape[1:]) for name, value in rows(range(6)).items()}
    buffer.add(**values, priority=np.arange(6.0).reshape(2, 3))
    assert chances(buffer) == pytest.approx({number: number / 15 for number in range(1, 6)})
    writer = buffer.writer()
    writer.add(**rows(range(6, 9)), priority=[15.0, 0.0, 0.0])
    assert chances(buffer)[6] == pytest.approx(0.5)


@pytest.mark.parametrize("priority", [float("nan"), float("inf"), 1e39, "high", [1.0], [1.0, 2.0], 1j, {}], ids=repr)
def test_wrong_priority_of_one_row_is_refused_and_nothing_added(priority: Any) -> None:
    buffer = filled(2)
    with priorities_unchanged(buffer), pytest.raises(SchemaError, match="priority"):
        buffer.add(**row(7), priority=priority)


@pytest.mark.parametrize(
    "priority",
    [[1.0, float("nan")], [float("inf"), 1.0], [1.0], [1.0] * 3, [[1.0, 1.0]], ["a", "b"]],
    ids=repr,
)
def test_wrong_priorities_of_several_rows_are_refused_and_nothing_added(priority: Any) -> None:
    buffer = filled(2)
    with priorities_unchanged(buffer), pytest.raises(SchemaError, match="priority"):
        buffer.add(**rows([7, 8]), priority=priority)


def test_no_priority_is_the_rule_for_new_rows() -> None:
    buffer = filled(2)
    buffer.add(**row(7), priority=None)
    assert chances(buffer) == pytest.approx({0: 1 / 5, 1: 2 / 5, 7: 2 / 5})


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_batches_carry_weights_and_probabilities() -> None:
    batch = filled(5).sample(32)
    assert set(batch) == {"obs", "action", "reward", "next_obs", "done", "weights", "probabilities", "indices"}
    assert (batch["weights"].dtype, batch["weights"].shape) == (np.float32, (32,))
    assert (batch["probabilities"].dtype, batch["probabilities"].shape) == (np.float64, (32,))
    assert batch["weights"].max() == 1.0


def test_out_is_filled_and_checked() -> None:
    buffer = filled(5)
    out = buffer.sample(8)
    before = {name: out[name].copy() for name in ("indices", "weights")}
    assert buffer.sample(8, out=out) is out
    assert out["indices"].tolist() != before["indices"].tolist()
    wanted = {number: (number + 1) / 15 for number in range(5)}
    assert out["probabilities"].tolist() == pytest.approx([wanted[int(n)] for n in out["reward"]])
    for name in ("weights", "probabilities"):
        less = {key: value for key, value in out.items() if key != name}
        with pytest.raises(SchemaError, match=name):
            buffer.sample(8, out=less)
        with pytest.raises(SchemaError, match=name):
            buffer.sample(8, out={**out, name: out[name].astype(np.float16)})


def test_empty_buffer_is_not_ready() -> None:
    buffer = filled(0)
    with pytest.raises(NotReady, match="empty"):
        buffer.sample(1)
    buffer.add(**rows(range(3)), mask=[False] * 3)
    with pytest.raises(NotReady, match="empty"):
        buffer.sample(1)
    buffer.add(**row(1))
    buffer.sample(1)
    buffer.clear()
    with pytest.raises(NotReady, match="empty"):
        buffer.sample(1)


@pytest.mark.parametrize("size", [0, -1, 1.5, "3", None])
def test_wrong_batch_size_is_refused(size: Any) -> None:
    with pytest.raises(SchemaError, match="batch_size"):
        filled(3).sample(size)


def test_get_and_rows_have_no_weights() -> None:
    buffer = filled(3)
    keys = {"obs", "action", "reward", "next_obs", "done", "truncated", "indices"}
    assert set(buffer.get(serials(buffer))) == keys
    assert set(next(iter(buffer.rows()))) == keys


# ---- life ------------------------------------------------------------------------------------------------------------


def test_snapshot_keeps_raw_priorities(tmp_path: Path) -> None:
    """A copy tuned from alpha 0 finds the priorities that were given then."""
    buffer = filled(4, alpha=0.0)
    buffer.add(**row(7), priority=10.0)  # not caught up when saved
    buffer.save(tmp_path / "snapshot")
    copy = sw.open(tmp_path / "snapshot")
    assert copy.sampler.alpha == 0.0
    for held in (buffer, copy):
        held.tune(alpha=1.0)
        assert chances(held) == pytest.approx({0: 0.05, 1: 0.1, 2: 0.15, 3: 0.2, 7: 0.5})


def test_second_handle_sees_and_sets_the_same_priorities(shm_address: str) -> None:
    buffer = make(10, storage=shm_address, sampler=sw.Prioritized(1.0, eps=0.0))
    buffer.add(**rows(range(2)), priority=[1.0, 3.0])
    with sw.open(shm_address) as other:
        assert chances(other) == pytest.approx({0: 0.25, 1: 0.75})
        other.update_priorities(serials(other), [1.0, 1.0])
        assert chances(buffer) == pytest.approx({0: 0.5, 1: 0.5})
        buffer.tune(alpha=0.0)
        buffer.update_priorities(serials(buffer), [1.0, 100.0])
        assert chances(other) == pytest.approx({0: 0.5, 1: 0.5})
        assert other.sampler.alpha == 0.0
        other.tune(alpha=1.0)
        assert chances(buffer) == pytest.approx({0: 1 / 101, 1: 100 / 101})
    buffer.close(unlink=True)


def test_global_random_state_is_not_used() -> None:
    def draws() -> list[int]:
        return filled(9).sample(64)["indices"].tolist()

    np.random.seed(1)
    first = draws()
    state = np.random.get_state()[1].tolist()
    assert draws() == first
    assert np.random.get_state()[1].tolist() == state


# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank_based", [False, True])
@pytest.mark.parametrize("shared", [False, True], ids=["own writers", "one shared writer"])
def test_writers_samplers_and_updaters_run_at_once(shared: bool, rank_based: bool) -> None:
    sampler = sw.Prioritized(0.6, rank_based=rank_based)
    buffer = sw.ReplayBuffer(300, schema=checked_schema(30), next_obs=None, seed=0, sampler=sampler)
    stop = threading.Event()
    added = [0, 0]
    rounds = [0, 0]
    updated = {"applied": 0, "stale": 0}

    def write(which: int) -> Callable[[], None]:
        def job() -> None:
            writer: Any = buffer if shared else buffer.writer()
            number = which * 10**9
            while not stop.is_set():
                given = {"priority": [0.5, 1.0, 2.0]} if number % 2 else {}
                writer.add(**checked_row(number, 30, 3), **given)
                number += 3
                added[which] += 3

        return job

    def learn(which: int) -> Callable[[], None]:
        def job() -> None:
            stream = np.random.default_rng(which)
            while not stop.is_set():
                try:
                    batch = buffer.sample(64)
                except NotReady:
                    if any(added):
                        raise
                    continue
                check_rows(batch)
                assert np.isfinite(batch["weights"]).all()
                assert (batch["weights"] > 0).all()
                assert batch["weights"].max() == 1.0
                assert ((batch["probabilities"] > 0) & (batch["probabilities"] <= 1)).all()
                report = buffer.update_priorities(batch["indices"], stream.normal(size=64))
                assert report["applied"] + report["stale"] == 64
                for name, count in report.items():
                    updated[name] += count
                if which and rounds[which] % 20 == 0:
                    buffer.tune(alpha=float(stream.uniform()))
                rounds[which] += 1

        return job

    run_all([write(0), write(1), learn(0), learn(1)], stop, 1.5)
    assert min(added) > 0
    assert min(rounds) > 0
    assert updated["applied"] > 0
    # When all is quiet, the probabilities are whole again.
    buffer.tune(alpha=1.0)
    held = serials(buffer)
    buffer.update_priorities(held, np.ones(len(held)))
    if not rank_based:
        batch = buffer.sample(100)
        np.testing.assert_allclose(batch["probabilities"], 1 / len(held), rtol=1e-6)


# ---- the service's names ---------------------------------------------------------------------------------------------

SERVICE_SNIPPET = """
from sharpwave.compat.replay_buffer import ReplayBuffer, BufferConfig

config = BufferConfig(
    capacity=1_000_000,
    strategy="prioritized",
    alpha=0.6,
    beta=0.4
)
buffer = ReplayBuffer(config, obs_shape=(84, 84, 4), action_dim=6)
buffer.add(obs, action, reward, next_obs, done)
batch = buffer.sample(batch_size=32)
buffer.update_priorities(batch["indices"], errors)
"""


def test_service_snippet_runs_prioritized() -> None:
    obs = np.zeros((84, 84, 4), np.uint8)
    names: dict[str, Any] = {"obs": obs, "action": 3, "reward": 1.5, "next_obs": obs + 1, "done": True}
    names["errors"] = np.linspace(-1, 1, 32)
    exec(SERVICE_SNIPPET, names)
    batch, buffer = names["batch"], names["buffer"]
    assert {"weights", "probabilities", "indices"} < set(batch)
    assert batch["weights"].tolist() == [1.0] * 32
    assert (buffer.inner.sampler.alpha, buffer.inner.sampler.beta) == (0.6, 0.4)


def test_service_strategies_are_named_in_the_refusal() -> None:
    with pytest.raises(SchemaError, match=r"strategy.*'uniform'.*'prioritized'"):
        BufferConfig(capacity=10, strategy="priority")
    uniform = ServiceBuffer(BufferConfig(capacity=10), obs_shape=(2,), action_dim=2)
    uniform.add(np.zeros(2), 0, 0.0, np.zeros(2), False)
    with pytest.raises(SchemaError, match=r"(?i)prioritized"):
        uniform.update_priorities([0], [1.0])


def test_file_with_the_largest_priorities_opens_again(tmp_path):
    address = f"file://{tmp_path}/live.sw"
    with sw.ReplayBuffer(100, obs_shape=(2,), storage=address, seed=0, sampler=sw.Prioritized()) as buf:
        for _ in range(10):
            buf.add(obs=np.zeros(2), action=0.0, reward=0.0, next_obs=np.zeros(2), done=False)
        buf.update_priorities(buf.sample(4)["indices"], np.full(4, 3e38))
    with sw.open(address) as again:
        assert len(again.sample(4)["weights"]) == 4


def test_every_row_can_be_drawn_when_the_first_draw_comes_after_the_ring_went_round() -> None:
    sampler = sw.Prioritized(alpha=1.0, eps=0.0, new_rows=1.0)
    buffer = sw.ReplayBuffer(64, obs_shape=(2,), sampler=sampler, writers=2, seed=0)
    for number in range(64 + 11):
        buffer.add(np.full(2, number), 0.0, float(number), np.full(2, number), False)
    assert buffer.stats()["block_rows"] > 1
    held = np.concatenate([batch["indices"] for batch in buffer.rows()])
    batch = buffer.sample(2 * len(held))  # stratified, and all priorities are equal: two strata for each row
    assert set(batch["indices"].tolist()) == set(held.tolist())
    np.testing.assert_allclose(batch["probabilities"], 1 / len(held), rtol=1e-6)
