"""Batches belong to the caller: nothing changes them later, and their memory is used again when they die."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numbered import check_whole, filled, make, numbers_in, row, unchanged

import sharpwave as sw
from sharpwave.errors import SchemaError

NESTED = {"obs": {"image": sw.Field((4, 4), "uint8"), "pair": (sw.Field((2,)), sw.Field((), "int64"))}}


def nested(count: int = 20) -> sw.ReplayBuffer:
    buffer = sw.ReplayBuffer(count, schema=NESTED, next_obs=None, seed=0)
    for number in range(count):
        image = np.full((4, 4), number, np.uint8)
        obs = {"image": image, "pair": (np.full(2, number, np.float32), number)}
        buffer.add(obs=obs, reward=float(number), done=False)
    return buffer


def large(seed: int = 0) -> sw.ReplayBuffer:
    """A batch of 300 takes over a megabyte: pooled memory, other threads let in."""
    buffer = sw.ReplayBuffer(50, schema={"obs": sw.Field((1024,))}, next_obs=None, seed=seed)
    for number in range(50):
        buffer.add(obs=np.full(1024, number), reward=float(number), done=False)
    return buffer


def check_large(batch: dict[str, Any]) -> None:
    assert (np.asarray(batch["obs"]) == np.asarray(batch["reward"])[:, None]).all()


# ---- fresh arrays ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 32, 3000])
def test_changing_a_batch_changes_nothing_else(size: int) -> None:
    buffer = filled(10)
    first, second = buffer.sample(size), buffer.sample(size)
    kept = {name: value.copy() for name, value in second.items()}
    for value in first.values():
        assert value.flags.writeable
        assert value.flags.c_contiguous
        value[...] = 0
    for name, value in second.items():
        assert np.array_equal(value, kept[name])
        assert not any(np.shares_memory(value, other) for other in first.values())
    assert numbers_in(buffer) == list(range(10))


def test_batch_does_not_change_when_its_rows_are_overwritten() -> None:
    buffer = filled(10)
    batch = buffer.sample(100)
    kept = {name: value.copy() for name, value in batch.items()}
    for number in range(10, 40):
        buffer.add(**row(number))
    buffer.clear()
    buffer.close()
    for name, value in batch.items():
        assert np.array_equal(value, kept[name])


def test_batch_has_the_fields_in_order_and_then_the_indices() -> None:
    batch = filled(3).sample(5)
    assert list(batch) == ["obs", "action", "reward", "next_obs", "done", "indices"]
    shapes = {name: (value.shape, value.dtype.name) for name, value in batch.items()}
    assert shapes == {
        "obs": ((5, 2), "float32"),
        "action": ((5,), "float32"),
        "reward": ((5,), "float32"),
        "next_obs": ((5, 2), "float32"),
        "done": ((5,), "bool"),
        "indices": ((5,), "int64"),
    }
    assert list(filled(3).get([0])) == ["obs", "action", "reward", "next_obs", "done", "truncated", "indices"]


def test_nested_batch_has_the_shape_of_its_schema() -> None:
    batch = nested().sample(6)
    number = batch["reward"]
    assert list(batch) == ["obs", "reward", "done", "indices"]
    assert isinstance(batch["obs"]["pair"], tuple)
    assert (batch["obs"]["image"] == number[:, None, None]).all()
    assert (batch["obs"]["pair"][0] == number[:, None]).all()
    assert (batch["obs"]["pair"][1] == number).all()


# ---- recycling -------------------------------------------------------------------------------------------------------


def test_memory_of_a_dead_batch_is_used_again() -> None:
    """In a process of its own: the pool is one for all, and other tests may have filled it."""
    code = "import test_results; test_results.use_a_dead_batch_again()"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True, timeout=120)


def use_a_dead_batch_again() -> None:
    buffer = large()
    warm = [buffer.sample(300) for _ in range(2)]
    addresses = {batch["obs"].ctypes.data for batch in warm}
    gc.collect()
    before = buffer.stats()["pooled_bytes"]
    size = warm[0]["obs"].nbytes
    del warm
    after = buffer.stats()["pooled_bytes"]
    assert after - before >= 2 * size
    again = buffer.sample(300)
    assert again["obs"].ctypes.data in addresses
    assert buffer.stats()["pooled_bytes"] <= after - size
    check_large(again)


def test_small_batches_take_nothing_from_the_pool() -> None:
    buffer = filled(5)
    before = buffer.stats()["pooled_bytes"]
    for _ in range(10):
        buffer.sample(8)
    assert buffer.stats()["pooled_bytes"] == before


def test_pool_is_bounded() -> None:
    buffer = large()
    held = [buffer.sample(20_000 + i) for i in range(5)]  # 80 MB each
    del held
    assert buffer.stats()["pooled_bytes"] <= 256 << 20
    check_large(buffer.sample(20_000))


def test_memory_is_used_again_though_the_pool_was_full_of_other_sizes() -> None:
    """In a process of its own, where nothing else gives memory back meanwhile."""
    code = "import test_results; test_results.use_again_beside_old_sizes()"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True, timeout=120)


def use_again_beside_old_sizes() -> None:
    buffer = large()

    def pooled() -> int:
        return int(buffer.stats()["pooled_bytes"])

    old = [buffer.sample(8_000 + 700 * i) for i in range(10)]  # 32 MB and more each, every one of another size
    del old
    assert pooled() > 200 << 20
    warm = [buffer.sample(3_000) for _ in range(4)]  # 12 MB
    size = warm[0]["obs"].nbytes
    del warm
    before = pooled()
    assert before <= 256 << 20
    again = [buffer.sample(3_000) for _ in range(4)]
    assert before - pooled() >= 4 * size, "all four came from the pool"
    for batch in again:
        check_large(batch)


def test_batches_larger_than_the_pool_reuse_what_fits() -> None:
    code = "import test_results; test_results.reuse_what_fits()"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True, timeout=120)


def reuse_what_fits() -> None:
    schema = {"obs": {str(i): sw.Field((1024 + 64 * i,)) for i in range(4)}}
    buffer = sw.ReplayBuffer(4, schema=schema, next_obs=None, seed=0)
    buffer.add(obs={str(i): np.zeros(1024 + 64 * i) for i in range(4)}, reward=0, done=False)
    for turn in range(3):
        before = buffer.stats()["pooled_bytes"]
        batch = buffer.sample(20_000)  # four arrays of 80 MB and more: three fit
        reused = before - buffer.stats()["pooled_bytes"]
        assert (reused > 160 << 20) == (turn > 0)
        del batch


@pytest.mark.parametrize("keep", ["view", "tensor", "slice of a tensor", "memoryview"])
def test_whatever_still_looks_at_a_batch_keeps_its_memory(keep: str) -> None:
    buffer = large()
    batch = buffer.sample(300)
    if "tensor" in keep:
        torch = pytest.importorskip("torch")
        kept: Any = torch.from_numpy(batch["obs"])
        kept = kept[10:20, 3:5] if keep.startswith("slice") else kept
    else:
        kept = batch["obs"][5:7] if keep == "view" else memoryview(batch["obs"])
    copy = np.asarray(kept).copy()
    address = batch["obs"].ctypes.data
    del batch
    for _ in range(20):
        other = buffer.sample(300)
        assert other["obs"].ctypes.data != address
        other["obs"][...] = -1
    assert np.array_equal(np.asarray(kept), copy)


def test_batches_that_are_alive_together_share_no_memory() -> None:
    buffer = large()
    batches = []
    for turn in range(30):
        batches.append(buffer.sample(200))
        if turn % 3 == 2:
            del batches[turn % len(batches)]
    spans = sorted((batch["obs"].ctypes.data, batch["obs"].nbytes) for batch in batches)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    for batch in batches:
        check_large(batch)


# ---- out= ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [lambda: filled(10), nested, large])
@pytest.mark.parametrize("size", [1, 300])
def test_out_is_filled_and_returned_and_equals_a_fresh_batch(build: Any, size: int) -> None:
    fresh, reused = build(), build()
    out = reused.sample(size)
    fresh.sample(size)
    arrays = {name: id(value) for name, value in out.items()}
    for _ in range(3):
        expected = fresh.sample(size)
        assert reused.sample(size, out=out) is out
        assert {name: id(value) for name, value in out.items()} == arrays
        assert str(out) == str(expected)
        assert np.array_equal(out["indices"], expected["indices"])


def test_out_made_by_hand_with_further_keys_is_filled() -> None:
    buffer = filled(10)
    out = {name: np.empty_like(value) for name, value in buffer.sample(7).items()}
    out["mine"] = np.zeros(3)
    assert buffer.sample(7, out=out) is out
    check_whole(out)
    assert out["mine"].tolist() == [0, 0, 0]


def wrong_outs() -> dict[str, Any]:
    shared = np.zeros((4, 4), np.float32)
    read_only = np.zeros(4, np.float32)
    read_only.flags.writeable = False
    return {
        "dtype": ({"obs": np.zeros((4, 2))}, "out['obs']: expected float32 array of shape (4, 2), got float64 array"),
        "byte order": ({"obs": np.zeros((4, 2), ">f4")}, "out['obs']: expected float32 array"),
        "shape": ({"obs": np.zeros((4, 3), np.float32)}, "out['obs']: expected float32 array of shape (4, 2)"),
        "rank": ({"reward": np.zeros((4, 1), np.float32)}, "out['reward']: expected float32 array of shape (4,)"),
        "rows": ({"reward": np.zeros(5, np.float32)}, "out['reward']: expected float32 array of shape (4,)"),
        "order": ({"obs": np.zeros((2, 4), np.float32).T}, "float32 array of shape (4, 2), not C-contiguous"),
        "read-only": ({"reward": read_only}, "float32 array of shape (4,), read-only"),
        "list": ({"reward": [0.0] * 4}, "out['reward']: expected float32 array of shape (4,), got list"),
        "missing": ({"reward": None}, "out['reward']: expected float32 array of shape (4,), got NoneType"),
        "indices": ({"indices": np.zeros(4, np.int32)}, "out['indices']: expected int64 array of shape (4,)"),
        "overlap": ({"obs": shared.reshape(-1)[:8].reshape(4, 2), "reward": shared.reshape(-1)[4:8]}, "share memory"),
        "twice": ({"obs": shared[:2].reshape(4, 2), "next_obs": shared[:2].reshape(4, 2)}, "share memory"),
    }


@pytest.mark.parametrize("case", wrong_outs())
def test_wrong_out_is_refused_before_anything_is_drawn(case: str) -> None:
    changes, words = wrong_outs()[case]
    buffer = filled(10)
    out = {**buffer.sample(4), **changes}
    kept = {name: np.array(value) for name, value in out.items()}
    with unchanged(buffer), pytest.raises(SchemaError, match=r"sample\(\): out") as caught:
        buffer.sample(4, out=out)
    assert words in str(caught.value)
    assert all(np.array_equal(kept[name], np.array(value)) for name, value in out.items())


def test_out_without_a_key_is_refused() -> None:
    buffer = filled(10)
    for name in ("obs", "done", "indices"):
        out = buffer.sample(4)
        del out[name]
        with unchanged(buffer), pytest.raises(SchemaError, match=rf"out\['{name}'\]: expected .*, got NoneType"):
            buffer.sample(4, out=out)


@pytest.mark.parametrize("out", [[], "batch", 5, (1,), np.zeros(4)])
def test_out_that_is_no_dict_is_refused(out: Any) -> None:
    buffer = filled(10)
    with unchanged(buffer), pytest.raises(SchemaError, match=r"sample\(\): out: expected a dict of arrays"):
        buffer.sample(4, out=out)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        pytest.param(
            ("obs",),
            np.zeros(4),
            "out['obs']: expected a dict, got float64 array",
            id="array for a dict",
        ),
        (("obs", "image"), None, "out['obs']['image']: expected uint8 array of shape (4, 4, 4)"),
        (("obs", "pair"), [1, 2], "out['obs']['pair']: expected a tuple, got list"),
        (("obs", "pair"), (), "out['obs']['pair']['0']: expected float32 array of shape (4, 2)"),
    ],
)
def test_wrong_nested_out_is_refused_by_path(path: tuple[str, ...], value: Any, words: str) -> None:
    buffer = nested()
    out = buffer.sample(4)
    place = out
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with unchanged(buffer), pytest.raises(SchemaError) as caught:
        buffer.sample(4, out=out)
    assert words in str(caught.value)


# ---- torch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [lambda: filled(10), nested, large])
def test_cpu_tensors_are_the_same_batch_over_the_same_memory(build: Any) -> None:
    torch = pytest.importorskip("torch")
    buffer, twin = build(), build()
    tensors, arrays = buffer.sample(300, device="cpu"), twin.sample(300)
    assert isinstance(tensors["reward"], torch.Tensor)
    assert isinstance(tensors["indices"], torch.Tensor)
    assert tensors["indices"].tolist() == arrays["indices"].tolist()
    assert tensors["reward"].numpy().dtype == arrays["reward"].dtype
    assert str(np.asarray(tensors["reward"])) == str(arrays["reward"])
    tensors["reward"][0] = -7  # writable, and without a warning
    assert twin.sample(3, device=torch.device("cpu"))["reward"].shape == (3,)


def test_out_may_hold_tensors() -> None:
    torch = pytest.importorskip("torch")
    buffer, twin = nested(), nested()
    out = buffer.sample(64, device="cpu")
    twin.sample(64)
    address = out["obs"]["image"].data_ptr()
    assert buffer.sample(64, out=out, device="cpu") is out
    expected = twin.sample(64)
    assert out["obs"]["image"].data_ptr() == address
    assert torch.equal(out["obs"]["image"], torch.from_numpy(expected["obs"]["image"]))
    assert torch.equal(out["obs"]["pair"][1], torch.from_numpy(expected["obs"]["pair"][1]))
    assert torch.equal(out["indices"], torch.from_numpy(expected["indices"]))


def test_tensors_share_memory_with_the_arrays_they_were_made_of() -> None:
    pytest.importorskip("torch")
    buffer = large()
    out = buffer.sample(300)
    pool = buffer.stats()["pooled_bytes"]
    tensors = buffer.sample(300, device="cpu")
    # One array a field and no copy beside it: dropping the tensors gives back exactly one batch.
    view = tensors["obs"].numpy()
    assert view.ctypes.data == tensors["obs"].data_ptr()
    del tensors, view
    gc.collect()
    assert buffer.stats()["pooled_bytes"] - pool <= out["obs"].nbytes + (64 << 10)


def test_out_on_another_device_is_refused() -> None:
    pytest.importorskip("torch")
    buffer = filled(5)
    out = buffer.sample(4, device="cpu")
    with unchanged(buffer), pytest.raises(SchemaError, match="is filled on the host; give device='cpu'"):
        buffer.sample(4, out=out, device="meta")


def test_wrong_tensors_in_out_are_refused() -> None:
    torch = pytest.importorskip("torch")
    buffer = filled(5)
    out = buffer.sample(4, device="cpu")
    out["obs"] = torch.zeros(4, 3)
    with unchanged(buffer), pytest.raises(SchemaError, match=r"out\['obs'\]: expected float32 array of shape \(4, 2\)"):
        buffer.sample(4, out=out, device="cpu")


def test_tensors_in_out_that_do_not_fit_are_refused_as_at_the_first_call() -> None:
    """The first call with a device checks more than the later ones need; what is refused stays the same."""
    torch = pytest.importorskip("torch")
    wrong: dict[str, Any] = {
        "another shape": lambda out: out | {"obs": torch.zeros(4, 3)},
        "another dtype": lambda out: out | {"reward": torch.zeros(4, dtype=torch.float64)},
        "strided": lambda out: out | {"obs": torch.zeros(2, 4).T},
        "a graph": lambda out: out | {"obs": torch.zeros(4, 2, requires_grad=True)},
        "shared memory": lambda out: out | {"next_obs": out["obs"]},
        "missing": lambda out: {name: value for name, value in out.items() if name != "action"},
        "no tensor": lambda out: out | {"action": [0.0] * 4},
        "no dict": lambda out: list(out),
        "read-only array": lambda out: out | {"reward": np.broadcast_to(np.float32(0), 4)},
    }
    for name, change in wrong.items():
        told = []
        for is_first in (True, False):
            buffer = filled(5)
            out = change(make_out(buffer))
            if not is_first:
                buffer.sample(4, device="cpu")
            with unchanged(buffer), pytest.raises(SchemaError) as error:
                buffer.sample(4, out=out, device="cpu")
            told.append(str(error.value))
        assert told[0] == told[1], name
    for size in (0, 5):
        buffer = filled(5)
        out = buffer.sample(4, device="cpu")
        with unchanged(buffer), pytest.raises(SchemaError):
            buffer.sample(size, out=out, device="cpu")


def make_out(buffer: sw.ReplayBuffer) -> dict[str, Any]:
    import torch

    batch = next(iter(filled(5).batches(4)))
    return {name: torch.from_numpy(value.copy()) for name, value in batch.items()}


@pytest.mark.parametrize(
    "options",
    [{}, {"sampler": sw.Prioritized()}, {"view": sw.Windows(2), "num_envs": 1}, {"view": sw.Transitions(n_step=3)}],
)
def test_tensors_in_out_get_what_arrays_get(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    buffer, twin = filled(10, **options), filled(10, **options)
    out = buffer.sample(4, device="cpu")
    arrays = twin.sample(4)
    if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        monkeypatch.setattr("sharpwave.rows.host.as_host_arrays", None)  # is not asked
    for _ in range(3):
        assert buffer.sample(4, out=out, device="cpu") is out
        twin.sample(4, out=arrays)
        assert {name: value.tolist() for name, value in out.items()} == {n: a.tolist() for n, a in arrays.items()}


def test_tensors_in_out_without_a_device_are_refused() -> None:
    pytest.importorskip("torch")
    buffer = filled(5)
    out = buffer.sample(4, device="cpu")
    with unchanged(buffer), pytest.raises(SchemaError, match=r"out\['obs'\]: expected float32 array.*got Tensor"):
        buffer.sample(4, out=out)


def test_tensor_that_requires_grad_in_out_is_a_schema_error() -> None:
    pytest.importorskip("torch")
    buffer = filled(5)
    out = buffer.sample(4, device="cpu")
    out["obs"].requires_grad_()
    with unchanged(buffer), pytest.raises(SchemaError, match="out"):
        buffer.sample(4, out=out, device="cpu")


# ---- get and rows ----------------------------------------------------------------------------------------------------


def test_get_gives_rows_in_the_order_asked_for_and_repeated() -> None:
    buffer = filled(10)
    batch = buffer.get([7, 2, 2, 9])
    check_whole(batch)
    assert batch["reward"].tolist() == [7, 2, 2, 9]
    assert batch["indices"].tolist() == [7, 2, 2, 9]
    for kind in (np.uint8, np.int16, np.uint64):
        assert buffer.get(np.array([7, 2], kind))["reward"].tolist() == [7, 2]
    assert buffer.get(np.arange(10)[::-3])["reward"].tolist() == [9, 6, 3, 0]


@pytest.mark.parametrize("size", [1, 3, 10, 4096])
def test_rows_come_oldest_first_in_batches(size: int) -> None:
    buffer = filled(17)
    batches = list(buffer.rows(size))
    assert [len(batch["reward"]) for batch in batches] == [min(size, 10 - i) for i in range(0, 10, size)]
    assert [int(n) for batch in batches for n in batch["reward"]] == list(range(7, 17))


def test_rows_leave_out_what_was_overwritten_meanwhile() -> None:
    buffer = filled(10)
    batches = buffer.rows(4)
    first = next(batches)
    for number in range(10, 16):
        buffer.add(**row(number))
    rest = list(batches)
    seen = [int(n) for batch in (first, *rest) for n in batch["reward"]]
    for batch in rest:
        check_whole(batch)
        assert {len(value) for value in batch.values()} == {len(batch["indices"])}
    assert seen == [0, 1, 2, 3, 6, 7, 8, 9]


def test_empty_buffer_has_no_rows() -> None:
    assert list(make().rows()) == []


# ---- arrays that come back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["array", "view", "memoryview", "tensor", "transposed"])
def test_small_array_that_somebody_still_holds_is_never_given_out_again(keep: str) -> None:
    buffer = filled(50)
    batch = buffer.sample(8)
    held: Any = {
        "array": lambda a: a,
        "view": lambda a: a[2:4],
        "memoryview": memoryview,
        "tensor": lambda a: pytest.importorskip("torch").from_numpy(a),
        "transposed": lambda a: a.T,
    }[keep](batch["obs"])
    expected = np.array(held)
    del batch
    for _ in range(20):
        fresh = buffer.sample(8)
        assert not np.shares_memory(np.asarray(held), fresh["obs"])
    assert np.array_equal(np.asarray(held), expected)


def test_small_array_that_was_dropped_is_given_out_again_only_as_it_was_made() -> None:
    buffer = filled(50)
    for change in (lambda a: setattr(a, "shape", (4, 4)), lambda a: a.setflags(write=False)):
        for _ in range(4):
            batch = buffer.sample(8)
            change(batch["obs"])
            del batch
        batch = buffer.sample(8)
        assert batch["obs"].shape == (8, 2)
        assert batch["obs"].flags.writeable
    seen = set()
    for _ in range(20):
        batch = buffer.sample(8)
        seen.add(batch["obs"].ctypes.data)
    assert len(seen) <= 2, "a loop that drops its batches goes round between two"
