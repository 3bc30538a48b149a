"""ReplayBuffer on a GPU, call by call: what it takes, what it refuses, what it tells late, what a graph captures."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.device_place import HAS_GPU, PLACES, SOAK, device_of, here, on_device

import sharpwave as sw
from sharpwave.errors import ClosedError, NotReady, SchemaError, StaleHandle

torch = pytest.importorskip("torch")
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no GPU here")


@pytest.fixture(params=PLACES)
def device(request: pytest.FixtureRequest) -> str:
    return device_of(request.param)


def make(device: str, capacity: int = 12, **options: Any) -> Any:
    return on_device(capacity, device=device, **({"obs_shape": (3,), "seed": 0} | options))


def rows(first: int, count: int, device: str | None = None) -> tuple[Any, ...]:
    """Every number of a row names the row."""
    name = np.arange(first, first + count, dtype=np.float32)
    obs = np.stack([name] * 3, 1)
    values = obs, name, name, obs + 1, name < 0
    return values if device is None else tuple(torch.from_numpy(value.copy()).to(device) for value in values)


def test_values_of_the_host_and_of_the_device_are_the_same(device: str) -> None:
    one, other = make(device), make(device)
    one.add(*rows(0, 5))
    other.add(*rows(0, 5, device))
    mixed = rows(5, 2, device)
    one.add(*rows(5, 2))
    other.add(mixed[0], np.asarray(rows(5, 2)[1]), *mixed[2:])
    for a, b in zip(one.rows(), other.rows(), strict=True):
        for name in a:
            assert torch.equal(a[name], b[name])
    assert isinstance(one.sample(4)["obs"], torch.Tensor)
    assert len(one) == 7


def test_adds_tell_the_serials_of_their_rows_as_a_tensor_there(device: str) -> None:
    """By both ways: tensors of the device as they are, and values that are sent there."""
    buffer = make(device, num_envs=2, sampler=sw.Prioritized(alpha=1.0, eps=0.0))
    for first in range(0, 32, 4):  # round the ring
        for told in (
            buffer.add(*rows(first, 2, device), return_indices=True),
            buffer.add(*rows(first + 2, 2), return_indices=True),
        ):
            assert (told.dtype, told.shape, told.device) == (torch.int64, (2,), buffer.device)
            assert here(buffer.get(told))["reward"].tolist() == [first, first + 1]
            first += 2
    told = buffer.add(*rows(32, 4), mask=[True, False, False, True], return_indices=True)
    assert (here(told) == -1).tolist() == [False, True, True, False]
    report = buffer.update_priorities(told, torch.tensor([3.0, 9.0, 9.0, 1.0], device=device))
    assert {name: int(count) for name, count in report.items()} == {"applied": 2, "stale": 2}
    assert buffer.add(*rows(40, 2, device)) is None
    assert buffer.add(*rows(40, 2, device), return_indices=False) is None
    with pytest.raises(SchemaError, match="return_indices: expected True or False"):
        buffer.add(*rows(40, 2, device), return_indices=1)


def test_batches_tell_where_episodes_were_truncated(device: str) -> None:
    buffer = make(device, view=sw.Transitions(n_step=2, gamma=0.5, truncated=True), num_envs=1)
    buffer.add(*rows(0, 8), truncated=np.arange(8) == 4)
    batch = buffer.sample(64)
    assert (batch["truncated"].dtype, batch["truncated"].shape) == (torch.bool, (64,))
    for _ in range(2):
        first = here(batch["obs"])[:, 0]
        assert (here(batch["truncated"]) == np.isin(first, (3, 4))).all()
        assert (here(batch["discount"]) == np.where(np.isin(first, (4, 7)), 0.5, 0.25)).all()
        assert buffer.sample(64, out=batch) is batch
    with pytest.raises(SchemaError, match="truncated"):
        buffer.sample(64, out={**batch, "truncated": None})


def test_adds_wait_while_a_save_copies_the_rows(device: str, tmp_path: Path) -> None:
    """The copy takes many launches: the file has the rows of one instant."""
    buffer = make(device)
    buffer.add(*rows(0, 12))
    table = buffer._rows.table
    read, late = table.read, []

    def read_late(slots: Any) -> Any:
        if not late:  # the copy has begun
            late.append(threading.Thread(target=buffer.add, args=rows(12, 12)))
            late[0].start()
            late[0].join(0.5)
        return read(slots)

    table.read = read_late
    try:
        buffer.save(tmp_path / "copy.sw")
    finally:
        table.read = read
    late[0].join()
    saved = np.concatenate([part["reward"] for part in sw.open(tmp_path / "copy.sw").rows()])
    assert saved.tolist() == list(range(12))
    assert here(next(buffer.rows()))["reward"].tolist() == list(range(12, 24))


def test_wrong_timeouts_are_refused_though_nothing_waits(device: str) -> None:
    buffer = make(device)
    with pytest.raises(SchemaError, match="timeout: expected a number"):
        buffer.add(*rows(0, 2), timeout="soon")
    buffer.add(*rows(0, 2), timeout=0)
    assert len(buffer) == 2


def test_nested_batches_are_freed_with_their_last_reference(device: str) -> None:
    """Without a garbage collection: on a GPU the memory of every batch would wait for one."""
    buffer = make(device, obs_shape=None, schema={"obs": {"a": sw.Field((2,))}, "action": sw.Field()})
    obs = {"a": np.zeros((4, 2), np.float32)}
    buffer.add(obs, np.zeros(4), np.zeros(4), obs, np.zeros(4, bool))
    gc.disable()
    try:
        for call in (lambda: buffer.sample(3), lambda: buffer.get([0, 1]), lambda: next(buffer.rows())):
            memory = weakref.ref(call()["obs"]["a"])
            assert memory() is None
        out = buffer.sample(3)
        memory = weakref.ref(buffer.sample(3, out=out)["obs"]["a"])
        del out
        assert memory() is None
    finally:
        gc.enable()


def test_one_row_and_nested_fields_and_gradients(device: str) -> None:
    schema = {"obs": {"a": sw.Field((2,)), "b": (sw.Field((), "int64"), sw.Field((3,), "uint8"))}, "action": sw.Field()}
    buffer = make(device, obs_shape=None, schema=schema)
    there = torch.ones(2, device=device, requires_grad=True)
    obs = {"a": there * 2, "b": (7, [1, 2, 3])}
    buffer.add(obs, 0.5, 1.0, obs, terminated=True)
    batch = buffer.sample(3)
    assert here(batch["obs"]["b"][1]).tolist() == [[1, 2, 3]] * 3
    assert here(batch["obs"]["a"]).tolist() == [[2, 2]] * 3
    assert here(batch["done"]).all()
    assert not batch["obs"]["a"].requires_grad


def test_slices_of_something_larger_and_other_dtypes(device: str) -> None:
    buffer = make(device)
    wide = torch.arange(80.0, device=device, dtype=torch.float64).reshape(8, 10)
    buffer.add(
        wide[1:4, 1:4], wide[1:4, 0], wide[1:4, 0], wide[1:4, 2:5], torch.zeros(3, dtype=torch.bool, device=device)
    )
    assert here(next(buffer.rows())["obs"]).tolist() == wide[1:4, 1:4].tolist()
    odd = torch.arange(10, dtype=torch.uint8, device=device)[1:4]
    small = make(device, obs_shape=(), obs_dtype="uint8")
    small.add(odd, odd.float(), odd.float(), odd, odd > 100)
    assert here(next(small.rows())["obs"]).tolist() == [1, 2, 3]


def test_what_does_not_fit_is_refused_and_changes_nothing(device: str) -> None:
    buffer = make(device, action_shape=(), action_dtype="int64")
    good = [torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), torch.zeros(2), torch.zeros(2, 3), torch.zeros(2) > 0]
    good = [value.to(device) for value in good]
    for at, wrong, what in (
        (0, torch.zeros(2, 4), "field 'obs': expected shape"),
        (1, torch.zeros(2), "field 'action': expected int64"),
        (3, torch.zeros(3, 3), "field 'next_obs': expected shape"),
    ):
        values = list(good)
        values[at] = wrong.to(device)
        with pytest.raises(SchemaError, match=what):
            buffer.add(*values)
    with pytest.raises(SchemaError, match="missing 'done'"):
        buffer.add(*good[:4])
    with pytest.raises(SchemaError, match="capacity is 12"):
        buffer.add(*rows(0, 13))
    with pytest.raises(SchemaError, match="priority"):
        buffer.add(*good, priority=torch.ones(2, device=device))
    with pytest.raises(SchemaError, match="drawn uniformly"):
        buffer.update_priorities([1], [1.0])
    assert len(buffer) == 0
    with pytest.raises(NotReady, match="empty"):
        buffer.sample(1)
    with pytest.warns(UserWarning, match="capacity=13 is not a multiple of num_envs=2: the buffer keeps 14 rows"):
        assert make(device, 13, num_envs=2).capacity == 14
    with pytest.raises(SchemaError, match="needs their order"):
        make(device, view=sw.Transitions(n_step=2)).add(*rows(0, 2))


def test_only_the_next_observation_is_of_the_last_row(device: str) -> None:
    schema = {"obs": sw.Field(), "action": sw.Field(), "next_obstacle": sw.Field()}
    buffer = make(device, obs_shape=None, schema=schema, view=sw.Transitions(n_step=3), num_envs=1)
    for step in range(6):
        buffer.add([step], [0.0], [1.0], [step + 1], [False], next_obstacle=[step])
    batch = here(buffer.sample(64))
    np.testing.assert_array_equal(batch["next_obstacle"], batch["obs"])
    assert (batch["next_obs"] > batch["obs"] + 1).any()


def test_out_is_filled_and_checked(device: str) -> None:
    buffer = make(device, sampler=sw.Prioritized(), view=sw.Transitions(n_step=2), num_envs=1)
    buffer.add(*rows(0, 6, device))
    twin = make(device, sampler=sw.Prioritized(), view=sw.Transitions(n_step=2), num_envs=1)
    twin.add(*rows(0, 6, device))
    out = buffer.sample(4)
    twin.sample(4)
    assert buffer.sample(4, out=out) is out
    again = twin.sample(4)
    for name in again:
        assert torch.equal(out[name], again[name]), name
    with pytest.raises(SchemaError, match=r"out\['weights'\]"):
        buffer.sample(4, out={**out, "weights": out["weights"][:3]})
    with pytest.raises(SchemaError, match="share memory"):
        buffer.sample(4, out={**out, "weights": out["discount"]})
    with pytest.raises(SchemaError, match="expected a batch of tensors"):
        buffer.sample(4, out=[1])
    with pytest.raises(SchemaError, match="rows are on"):
        buffer.sample(4, device="meta")
    with pytest.raises(SchemaError, match="expected a torch device"):
        buffer.sample(4, device="nonsense")


def test_loops_are_refused_when_they_are_asked_for(device: str) -> None:
    buffer = make(device)
    for loop in (buffer.batches, buffer.stream):
        with pytest.raises(SchemaError, match="prefetch"):
            loop(4, prefetch=0)
        with pytest.raises(SchemaError, match="batch_size"):
            loop(0)
        with pytest.raises(SchemaError, match="rows are on"):
            loop(4, device="meta")


def test_subclass_keeps_its_own_verbs_wherever_its_rows_are(device: str) -> None:
    class Doubled(sw.ReplayBuffer):
        def add(self, obs: Any, *rest: Any, **more: Any) -> None:
            super().add(obs * 2, *rest, **more)

        def sample(self, batch_size: int, **options: Any) -> dict[str, Any]:
            return {"twice": super().sample(batch_size, **options)}

    there, host = Doubled._over(make(device)._rows), Doubled(12, obs_shape=(3,))
    for buffer in (there, host):
        for _ in range(2):  # the second add of a plain buffer goes straight to the engine
            buffer.add(*rows(1, 2))
        assert set(here(buffer.sample(8)["twice"]["obs"]).ravel()) <= {2.0, 4.0}


def test_last_of_several_updates_holds_and_large_ones_do_the_same(device: str) -> None:
    few, many = (make(device, 2500, sampler=sw.Prioritized(alpha=1.0, eps=0.0)) for _ in range(2))
    for buffer in (few, many):
        buffer.add(*rows(0, 2400, device))
    serials = np.random.default_rng(0).integers(0, 2500, 2200)
    errors = np.random.default_rng(1).normal(size=2200).astype(np.float32)
    told = many.update_priorities(torch.from_numpy(serials).to(device), torch.from_numpy(errors).to(device))
    applied = stale = 0
    for first in range(0, 2200, 500):
        part = few.update_priorities(serials[first : first + 500], errors[first : first + 500])
        applied, stale = applied + int(part["applied"]), stale + int(part["stale"])
    assert (int(told["applied"]), int(told["stale"])) == (applied, stale)
    expected = np.ones(2400, np.float32)
    for serial, error in zip(serials, errors, strict=True):
        if serial < 2400:
            expected[serial] = abs(error)
    for buffer in (few, many):
        assert here(buffer._rows.table.priorities)[:2400].tolist() == expected.tolist()
        total = here(buffer._rows.table.nodes.view(torch.float64))[buffer._rows.table.levels[-1]]
        assert total == pytest.approx(expected.astype(np.float64).sum(), rel=1e-12)
        assert buffer.stats()["updates_applied"] == applied


def test_number_that_is_none_is_told_by_the_next_call(device: str) -> None:
    buffer = make(device, sampler=sw.Prioritized())
    buffer.add(*rows(0, 6, device))
    before = here(buffer._rows.table.priorities).copy()
    bad = torch.tensor([1.0, float("nan"), 2.0], device=device)
    told = buffer.update_priorities(torch.tensor([0, 1, 2], device=device), bad)
    assert (int(told["applied"]), int(told["stale"])) == (0, 0)
    with pytest.raises(SchemaError, match=r"earlier update_priorities.* not finite"):
        buffer.sample(2)
    np.testing.assert_array_equal(here(buffer._rows.table.priorities), before)
    buffer.sample(2)
    with pytest.raises(SchemaError, match="expected finite numbers, got nan at position 1"):
        buffer.update_priorities([0, 1], [1.0, float("nan")])
    for errors in (np.array([[1.0], [3.0]]), [[1.0], [3.0]], torch.tensor([[1.0], [3.0]], device=device)):
        assert int(buffer.update_priorities([0, 1], errors)["applied"]) == 2  # as critics give them
    buffer.update_priorities([0, 1], [1.0, 3.0])
    assert here(buffer._rows.table.priorities)[:2].tolist() == [1.0, 3.0]


def test_priorities_that_come_with_rows(device: str) -> None:
    buffer = make(device, sampler=sw.Prioritized(alpha=1.0, eps=0.0))
    buffer.add(*rows(0, 3), priority=[1.0, -4.0, 0.5])
    buffer.add(*rows(3, 2, device), priority=torch.tensor([2.0, 3.0], device=device))
    buffer.add(*rows(5, 1))
    assert here(buffer._rows.table.priorities)[:6].tolist() == [1, 4, 0.5, 2, 3, 4]
    buffer.add(*rows(6, 11))  # over the 4
    assert here(buffer._rows.table.priorities)[:5].tolist() == [4, 4, 4, 4, 4]
    buffer.add(*rows(17, 2, device), priority=torch.tensor([float("nan"), 9.0], device=device))
    with pytest.raises(SchemaError, match=r"add\(priority=...\) on .* not finite"):
        len(buffer)
    assert here(buffer._rows.table.priorities)[5:7].tolist() == [4, 9]


def test_empty_buffer_of_masked_rows_is_told_by_the_next_call(device: str) -> None:
    buffer = make(device)
    buffer.add(*rows(0, 3), mask=np.zeros(3, bool))
    buffer.sample(2)
    if device == "cuda":
        torch.cuda.synchronize()
    with pytest.raises(NotReady, match="was empty in an earlier sample"):
        buffer.sample(2)
    assert len(buffer) == 0


def test_handles_go_stale_and_life_ends(device: str) -> None:
    buffer = make(device)
    buffer.add(*rows(0, 12))
    assert here(buffer.get([3, 3, 11])["obs"])[:, 0].tolist() == [3, 3, 11]
    buffer.add(*rows(12, 4))
    with pytest.raises(StaleHandle, match="row 3 is not in the buffer"):
        buffer.get([5, 3])
    assert buffer.is_full
    assert "cpu" in repr(buffer) or "cuda" in repr(buffer)
    with pytest.raises(TypeError, match="belongs to one process"):
        pickle.dumps(buffer)
    with pytest.raises(SchemaError, match="one writer"):
        buffer.writer()
    with pytest.raises(SchemaError, match="saved whole"):
        buffer.save("never", incremental=True)
    buffer.close()
    buffer.close()
    for call in (lambda: buffer.sample(1), lambda: len(buffer), lambda: buffer.add(*rows(0, 1)), buffer.stats):
        with pytest.raises(ClosedError):
            call()


def test_batches_are_never_changed_by_later_ones(device: str) -> None:
    buffer = make(device, 64)
    buffer.add(*rows(0, 64))
    batches = [buffer.sample(16) for _ in range(40)]
    for batch in batches:
        assert torch.equal(batch["obs"][:, 0].long(), batch["indices"])


@pytest.mark.parametrize("size", [16, 5])
def test_batch_may_be_changed_in_place_while_a_gradient_of_another_is_to_come(device: str, size: int) -> None:
    buffer = make(device, 64)
    buffer.add(*rows(0, 64))
    scale = torch.ones(3, device=device, requires_grad=True)
    one, other = buffer.sample(size), buffer.sample(size)
    loss = (one["obs"] * scale).sum()
    one["reward"].clamp_(-1, 1)
    other["obs"].mul_(0)
    other["reward"].mul_(scale.sum())  # a gradient may go through what was handed out
    loss.backward()
    assert scale.grad is not None
    assert torch.equal(scale.grad, one["obs"].sum(0))


def test_batches_of_a_slab_have_memory_of_their_own(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a small sample on a GPU hands out, one after the other."""
    from sharpwave.device import table as module

    monkeypatch.setattr(module, "_WEIGH_ALONE", 8)  # the weights are another kernel's
    buffer = make(device, 64, sampler=sw.Prioritized(beta=0.5), num_envs=1, view=sw.Transitions(n_step=2))
    buffer.add(*rows(0, 64), priority=np.arange(1, 65))
    slab = buffer._rows.memory._slab(16, 3, buffer._rows.memory.shapes(16))
    for i in range(3):
        buffer._rows.table.draw(16, slab.draws, i)
    scale = torch.ones(3, device=device, requires_grad=True)
    loss = (slab.batches[0]["obs"] * scale).sum()
    slab.batches[1]["next_obs"].mul_(1)
    slab.batches[1]["obs"].mul_(1)  # as views of one tensor this would spoil the gradient
    loss.backward()
    for batch in slab.batches:
        assert torch.equal(batch["obs"][:, 0].long(), batch["indices"])
        expected = (batch["probabilities"] / batch["probabilities"].min()) ** -0.5
        torch.testing.assert_close(batch["weights"], expected.float())
    assert not torch.equal(slab.batches[0]["indices"], slab.batches[1]["indices"])


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    ("capacity", "nodes"),  # so many at a time; a level of more has branches of its own
    [(20, 32), (100, 2), (1090, 2), (1090, 32), *([(3333, 2)] if HAS_GPU or SOAK else [])],
)
def test_sums_are_those_of_the_rows_whatever_was_written(
    device: str, capacity: int, alone: bool, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sharpwave.device import table as module

    monkeypatch.setattr(module, "_NODES", nodes)
    monkeypatch.setattr(module, "_NODES_ALONE", nodes * 4)
    if not alone:
        monkeypatch.setattr(module, "_ENTER_ALONE", 0)
        monkeypatch.setattr(module, "_UPDATE_ALONE", 0)
    buffer = make(device, capacity, sampler=sw.Prioritized(alpha=1.0, eps=0.0), obs_shape=())
    draw = np.random.default_rng(capacity)
    table = buffer._rows.table
    for turn in range(8 if HAS_GPU else 4):  # the interpreter of kernels is slow
        count = int(draw.integers(1, capacity + 1)) if turn % 2 else int(draw.integers(1, 40)) % capacity + 1
        value = torch.zeros(count, device=device)
        given = torch.from_numpy((draw.random(count) * (draw.random(count) < 0.5)).astype(np.float32)).to(device)
        buffer.add(value, value, value, value, value > 0, priority=given)
        named = 300 if turn % 3 else 40
        names = table.serials()[torch.from_numpy(draw.integers(0, len(buffer), named)).to(device)]
        buffer.update_priorities(names, torch.from_numpy(draw.random(named).astype(np.float32)).to(device))
        mass = here(table.priorities)[table.padded :].astype(np.float64)
        nodes = here(table.nodes)
        sums = nodes[: 2 * table.total].view(np.float64)
        upto = nodes[4 * table.total :].view(np.float64)
        below, before = mass, upto[table.total :]
        for first, size in zip(table.levels, table.level_sizes, strict=True):
            groups = below.reshape(-1, 32)[:size]
            np.testing.assert_allclose(sums[first : first + size], groups.sum(1), rtol=1e-12)
            np.testing.assert_allclose(before.reshape(-1, 32)[:size], groups.cumsum(1), rtol=1e-12)
            width = -(-size // 32) * 32
            below, before = sums[first : first + width], upto[first : first + width]
        slots = here(buffer.sample(200)["indices"]) % table.span
        assert (mass[slots] > 0).all()


@pytest.mark.parametrize("way", ["by position", "by name", "terminated"])
def test_whole_tensors_and_others_are_added_alike(device: str, way: str) -> None:
    """The first are not looked at one by one."""
    whole, slow = (make(device, 16, num_envs=1, view=sw.Transitions(n_step=3, gamma=0.5)) for _ in range(2))
    names = ["obs", "action", "reward", "next_obs", "terminated" if way == "terminated" else "done"]
    for first in (0, 9):
        values = [*rows(first, 9, device)[:4], torch.arange(9, device=device) % 4 == 3]
        if way == "by position":
            assert whole._rows._add_at_once(tuple(values), {})
        else:
            assert whole._rows._add_at_once((), dict(zip(names, values, strict=True)))
        slow.add(*(here(value) for value in values))
    assert torch.equal(whole._rows.table.flags, slow._rows.table.flags)
    one, other = whole.sample(64), slow.sample(64)
    for name in one:
        assert torch.equal(one[name], other[name])
    for wrong in (
        [*values[:4], values[4][:8]],
        [values[0].double(), *values[1:]],
        [values[0][:, :2], *values[1:]],
        [*values[:2], values[2][:0], *values[3:]],
    ):
        assert not whole._rows._add_at_once(tuple(wrong), {})


def test_cleared_buffer_has_nothing_to_draw(device: str) -> None:
    buffer = make(device, 64)
    buffer.add(*rows(0, 64))
    buffer.sample(32)
    buffer.clear()
    for size in (32, 16):
        with pytest.raises(NotReady):
            buffer.sample(size)
    buffer.add(*rows(0, 1))
    assert len(buffer) == 1
    buffer.sample(32)
    for size in (32.0, [32], "32", True):
        with pytest.raises(SchemaError, match="batch_size"):
            buffer.sample(size)


@gpu
@needs_gpu
def test_kernels_are_started_by_the_driver() -> None:
    from sharpwave.device.launch import Kernel

    buffer = sw.ReplayBuffer(100_000, obs_shape=(3,), device="cuda", sampler=sw.Prioritized(), seed=0)
    host = sw.ReplayBuffer(100, obs_shape=(3,), seed=0)
    host.add(*rows(0, 100))
    buffer.add(*rows(0, 512))
    buffer.add(*rows(0, 90_000))
    for size in (256, 8192):
        batch = buffer.sample(size)
        buffer.update_priorities(batch["indices"], torch.rand(size, device="cuda"))
    buffer.tune(alpha=0.5)
    host.sample(16, device="cuda")
    kernels = [host._rows._feeds["cuda"].feed.plan.pull]
    for part in vars(buffer._rows.table).values():
        parts = part.values() if isinstance(part, dict) else part if isinstance(part, list) else [part]
        kernels += [one for one in parts if isinstance(one, Kernel)]
    used = [kernel for kernel in kernels if kernel.compiled is not None]
    assert len(used) >= 12
    assert all(kernel.run is not None for kernel in used)  # else Triton's way, which looks at every argument


@gpu
@needs_gpu
def test_weights_are_those_of_their_batch_every_time() -> None:
    buffer = sw.ReplayBuffer(50_000, obs_shape=(3,), device="cuda", sampler=sw.Prioritized(beta=0.4), seed=0)
    buffer.add(*rows(0, 50_000), priority=np.random.default_rng(0).random(50_000))
    for size, times in ((256, 20_000), (4096, 2_000), (8192, 200)):
        largest = torch.zeros(size, device="cuda")
        for _ in range(times):
            batch = buffer.sample(size)
            torch.maximum(largest, batch["weights"], out=largest)
        assert float(largest.max()) <= 1 + 1e-6
        expected = (batch["probabilities"] / batch["probabilities"].min()) ** -0.4
        torch.testing.assert_close(batch["weights"], expected.float())


@gpu
@needs_gpu
def test_rows_that_a_graph_adds_are_there_after_a_clear() -> None:
    buffer = sw.ReplayBuffer(4096, obs_shape=(3,), device="cuda", seed=0)
    values = rows(0, 64, "cuda")
    buffer.add(*values)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        buffer.add(*values)
    buffer.clear()
    graph.replay()
    assert buffer.sample(32)["obs"].shape == (32, 3)
    assert len(buffer) == 64


@gpu
@needs_gpu
def test_threads_that_never_spoke_to_the_gpu_may_draw() -> None:
    import threading

    buffer = sw.ReplayBuffer(4096, obs_shape=(3,), device="cuda", seed=0)
    buffer.add(*rows(0, 512))
    first = buffer.sample(64)
    seen: list[Any] = []
    threads = [threading.Thread(target=lambda: seen.append(buffer.sample(64, out=first))) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    assert len(seen) == 3


@gpu
@needs_gpu
def test_constructor_and_open_give_a_buffer_on_the_gpu(tmp_path: Any) -> None:
    buffer = sw.ReplayBuffer(100, obs_shape=(3,), device="cuda", seed=1)
    assert isinstance(buffer, sw.ReplayBuffer)
    buffer.add(*rows(0, 10))
    assert buffer.sample(4)["obs"].device.type == "cuda"
    buffer.save(tmp_path / "snapshot")
    again = sw.open(tmp_path / "snapshot", device="cuda")
    assert torch.equal(buffer.sample(16)["indices"], again.sample(16)["indices"])
    host = sw.ReplayBuffer(100, obs_shape=(3,), storage=f"file://{tmp_path}/live.sw")
    with pytest.raises(SchemaError, match="stays on the host"):
        sw.open(f"file://{tmp_path}/live.sw", device="cuda")
    host.close()


@gpu
@needs_gpu
def test_nothing_waits_for_the_device() -> None:
    buffer = sw.ReplayBuffer(4096, obs_shape=(3,), device="cuda", sampler=sw.Prioritized(), seed=0)
    values = rows(0, 512, "cuda")
    errors = torch.rand(256, device="cuda")

    def step() -> None:
        buffer.add(*values)
        batch = buffer.sample(256)
        buffer.update_priorities(batch["indices"], errors)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(buffer) == 6 * 512


@gpu
@needs_gpu
@pytest.mark.parametrize("sampler", [sw.Uniform(), sw.Prioritized()], ids=str)
def test_graph_goes_on_from_where_the_last_replay_ended(sampler: Any) -> None:
    def build() -> Any:
        return sw.ReplayBuffer(
            600, obs_shape=(3,), device="cuda", sampler=sampler, seed=5, num_envs=2, view=sw.Transitions(n_step=3)
        )

    eager, caught = build(), build()
    inputs = [value.clone() for value in rows(0, 64, "cuda")]
    errors = torch.rand(128, device="cuda")

    def step(buffer: Any) -> Any:
        buffer.add(*inputs)
        batch = buffer.sample(128)
        if isinstance(sampler, sw.Prioritized):
            buffer.update_priorities(batch["indices"], errors)
        return batch

    for _ in range(3):  # kernels are compiled outside
        step(eager)
        step(caught)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch = step(caught)
    for turn in range(30):
        for value, fresh in zip(inputs, rows(64 * turn, 64, "cuda"), strict=True):
            value.copy_(fresh)
        errors.uniform_()
        expected = step(eager)
        graph.replay()
        for name in expected:
            assert torch.equal(expected[name], batch[name]), (turn, name)
    assert len(eager) == len(caught) == 600
    assert eager.stats() == caught.stats()
