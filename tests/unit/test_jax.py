"""Batches as JAX arrays: the same memory where it may be, the same numbers always, and never one that changes."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import SchemaError

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from sharpwave.adapters.jax import to_jax  # noqa: E402


def address(array: Any) -> int:
    # An array that is not ready yet is waited for with the interpreter's lock held, which freeing a NumPy array needs.
    return int(jax.block_until_ready(array).unsafe_buffer_pointer())


def filled(rows: int = 1_000, width: int = 64, **options: Any) -> sw.ReplayBuffer:
    """Row i holds i everywhere."""
    schema = {"obs": sw.Field((width,), "float32"), "action": sw.Field((), "int32")}
    buf = sw.ReplayBuffer(rows, schema=schema, seed=0, **options)
    number = np.arange(rows, dtype=np.float32)
    obs = np.repeat(number[:, None], width, 1)
    buf.add(obs=obs, action=number.astype(np.int32), reward=number, next_obs=obs + 1, done=number % 2 == 0)
    return buf


def aligned(shape: tuple[int, ...], dtype: str, off: int = 0) -> np.ndarray:
    """Zeros that start so many bytes behind a multiple of 64."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(count + 128, np.uint8)
    start = -memory.ctypes.data % 64 + off
    return memory[start : start + count].view(dtype).reshape(shape)


# ---- memory and numbers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [None, "cpu"])
def test_large_arrays_are_not_copied(device: str | None) -> None:
    if device:
        pytest.importorskip("torch")
    batch = filled().sample(128, device=device)
    made = to_jax(batch)
    for name in ("obs", "next_obs"):
        assert batch[name].nbytes >= 16 << 10
        assert address(made[name]) == np.asarray(batch[name]).ctypes.data


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("rows", [1, 3, 16, 128])
def test_arrays_of_every_size_hold_the_batch(rows: int, device: str | None) -> None:
    if device:
        pytest.importorskip("torch")
    batch = filled(num_envs=1, view=sw.Transitions(n_step=2), sampler=sw.Prioritized()).sample(rows, device=device)
    made = to_jax(batch)
    assert list(made) == list(batch)
    for name in set(made) - {"indices", "probabilities"}:
        assert isinstance(made[name], jax.Array), name
        assert np.array_equal(made[name], batch[name]), name
        assert made[name].dtype == np.asarray(batch[name]).dtype, name
    assert made["indices"] is batch["indices"]
    assert made["probabilities"] is batch["probabilities"], "float64"


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "uint32", "float16", "float32", "complex64"])
@pytest.mark.parametrize("off", [0, 16])
def test_memory_is_shared_exactly_at_multiples_of_64_bytes(dtype: str, off: int) -> None:
    array = aligned((8, 4), dtype, off)
    array[...] = np.arange(32).reshape(8, 4) % 3
    made = to_jax({"x": array})["x"]
    assert (address(made) == array.ctypes.data) == (off == 0)
    assert made.dtype == array.dtype
    assert np.array_equal(made, array)


def test_read_only_arrays_and_arrays_with_gaps_are_copied() -> None:
    frozen = aligned((64,), "float32")
    frozen.flags.writeable = False
    sparse = aligned((8, 8), "float32")
    sparse[...] = np.arange(64).reshape(8, 8)
    made = to_jax({"frozen": frozen, "sparse": sparse[:, ::2], "turned": sparse.T, "none": sparse[:0]})
    assert address(made["frozen"]) != frozen.ctypes.data
    assert np.array_equal(made["sparse"], sparse[:, ::2])
    assert np.array_equal(made["turned"], sparse.T)
    assert address(made["turned"]) != sparse.ctypes.data, "not every version of JAX reads its strides"
    assert made["none"].shape == (0, 8)


def test_tree_keeps_its_shape() -> None:
    one = np.ones(3, np.float32)
    made = to_jax({"obs": {"a": one, "b": (one, {"c": one})}, "privileged_observations": None})
    assert jax.tree.structure(made) == jax.tree.structure(
        {"obs": {"a": 0, "b": (0, {"c": 0})}, "privileged_observations": None}
    )
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(made))


def test_batches_of_rollouts_and_of_distillation_convert() -> None:
    pytest.importorskip("torch")
    rollout = sw.RolloutBuffer(4, 8, obs_shape=(3,), device="cpu", seed=0)
    zeros = np.zeros(4, np.float32)
    for step in range(8):
        obs = np.full((4, 3), step, np.float32)
        rollout.add(obs, None, zeros, zeros + 1, zeros > 0, zeros, zeros)
    rollout.compute_returns_and_advantages(zeros)
    batch = next(rollout.minibatches(2))
    made = to_jax(batch)
    assert np.array_equal(made["observations"], batch["observations"])

    rows = sw.DistillationBuffer(64, obs_shape=(3,), seed=0)
    rows.add(np.ones((8, 3), np.float32), np.arange(8))
    batch = to_jax(rows.sample(5))
    assert isinstance(batch["obs"], jax.Array)
    assert isinstance(batch["action"], jax.Array)


def test_ragged_fields_convert() -> None:
    for kind in ("padded", True):
        buf = sw.ReplayBuffer(8, schema={"obs": sw.Field((4,), "float32", ragged=kind)}, seed=0)
        buf.add(obs=np.ones(3, np.float32), reward=0, next_obs=np.ones(2, np.float32), done=False)
        batch = buf.sample(2)
        for name, value in to_jax(batch)["obs"].items():
            assert isinstance(value, jax.Array)
            assert np.array_equal(value, batch["obs"][name])


def test_what_is_no_array_is_refused() -> None:
    with pytest.raises(SchemaError) as raised:
        to_jax({"obs": {"x": [1.0]}})
    assert str(raised.value) == "to_jax(): 'obs/x': expected a NumPy array or a torch tensor, got list"
    with pytest.raises(SchemaError, match=r"to_jax\(\): 'when': JAX does not take datetime64\[s\]: "):
        to_jax({"when": np.zeros(2, "M8[s]")})


# ---- 64 bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_64_bits_are_never_cut(kind: str) -> None:
    give = pytest.importorskip("torch").from_numpy if kind == "torch" else np.asarray
    edge = give(np.array([-(2**31), 2**31 - 1]))
    made = to_jax({"action": edge, "none": edge[:0], "half": give(np.array([0.1]))})
    assert made["action"].dtype == made["none"].dtype == jnp.int32
    assert made["action"].tolist() == [-(2**31), 2**31 - 1]
    assert type(made["half"]) is type(edge), "0.1 has no equal in 32 bits"
    for beyond in (-(2**31) - 1, 2**40 + 1):
        with pytest.raises(SchemaError) as raised:
            to_jax({"obs": (give(np.array([0, beyond])),)})
        assert str(raised.value) == (
            f"to_jax(): 'obs/0': expected numbers that fit int32, got {beyond}; call "
            'jax.config.update("jax_enable_x64", True) for 64 bits'
        )


def test_64_bits_stay_64_where_jax_has_them() -> None:
    code = (
        "import jax, numpy as np\n"
        "from sharpwave.adapters.jax import to_jax\n"
        'jax.config.update("jax_enable_x64", True)\n'
        "array = np.array([2**40 + 1])\n"
        'made = to_jax({"a": array, "f": np.array([0.1]), "indices": array})\n'
        'print(made["a"].dtype, made["a"][0], made["f"].dtype, made["f"][0] == 0.1, made["indices"] is array)\n'
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["int64", str(2**40 + 1), "float64", "True", "True"], done.stderr


# ---- whose memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [4, 100, 1_000], ids=["NumPy's memory", "kept arrays", "pooled memory"])
@pytest.mark.parametrize("keep_batch", [True, False])
def test_memory_that_jax_holds_is_not_given_out_again(rows: int, keep_batch: bool) -> None:
    buf, held = filled(), []
    for _ in range(50):
        batch = buf.sample(rows)
        held.append(
            (to_jax(batch), {name: np.copy(value) for name, value in batch.items()}, batch if keep_batch else 0)
        )
        del batch
    for _ in range(200):
        buf.sample(rows)
    gc.collect()
    addresses = [address(made["obs"]) for made, _, _ in held]
    assert len(set(addresses)) == 50
    for made, copy, _ in held:
        assert all(np.array_equal(made[name], copy[name]) for name in copy)


def test_memory_is_given_out_again_once_jax_lets_go() -> None:
    # Addresses would tell nothing: memory that went back to the system is often had again at the same place.
    buf = filled()

    def taken_from_the_pool() -> tuple[int, Any]:
        before = buf.stats()["pooled_bytes"]
        batch = buf.sample(1_000)
        return before - buf.stats()["pooled_bytes"], batch

    held: list[Any] = []
    while (drawn := taken_from_the_pool())[0]:  # what other tests have left there
        held.append(drawn)
    made = to_jax(drawn[1])
    del drawn
    gc.collect()
    assert taken_from_the_pool()[0] == 0, "JAX still holds it"
    gc.collect()
    held.append(taken_from_the_pool())  # the two arrays of the batch before
    del made
    gc.collect()
    bytes_taken, batch = taken_from_the_pool()
    assert bytes_taken >= batch["obs"].nbytes + batch["next_obs"].nbytes


def test_jax_sees_what_is_drawn_into_out() -> None:
    buf = filled()
    out = buf.sample(128)
    made = to_jax(out)
    buf.sample(128, out=out)
    assert np.array_equal(made["obs"], out["obs"]), "shared, as the docstring says"


def test_compiled_functions_learn_from_batches_and_may_donate_them() -> None:
    buf = filled()
    mean = jax.jit(lambda batch: batch["obs"].mean() - batch["reward"].mean())
    grown = jax.jit(lambda obs: obs + 1, donate_argnums=0)
    for _ in range(300):
        batch = buf.sample(128)
        made = to_jax(batch)
        indices = made.pop("indices")
        assert abs(float(mean(made))) < 1e-2
        before = batch["obs"].copy()
        after = grown(made["obs"])
        assert np.array_equal(after, before + 1)
        assert np.array_equal(batch["obs"], before), "donated memory is not ours"
        assert len(indices) == 128


# ---- priorities ------------------------------------------------------------------------------------------------------


def test_priorities_come_back_as_jax_arrays() -> None:
    buf = filled(4, sampler=sw.Prioritized(alpha=1.0, eps=0.0))
    batch = to_jax(buf.sample(64))
    errors = jnp.where(batch["reward"] == 3, -3.0, 0.0)
    assert (errors != 0).any()
    assert buf.update_priorities(batch["indices"], errors) == {"applied": 64, "stale": 0}
    for _ in range(8):
        buf.update_priorities(batch["indices"], errors)
    drawn = buf.sample(64)["reward"]
    missing = set(range(4)) - set(np.asarray(batch["reward"]).astype(int))
    assert not missing
    assert (drawn == 3).all()
    with pytest.raises(SchemaError, match="expected finite numbers, got nan"):
        buf.update_priorities(batch["indices"], errors * jnp.nan)


def test_rows_may_be_added_from_jax_arrays() -> None:
    buf = filled(4)
    obs = jnp.full((64,), 7.0)
    buf.add(obs=obs, action=jnp.int32(1), reward=jnp.float32(7), next_obs=obs, done=jnp.bool_(False))
    assert 7 in {row for batch in buf.rows() for row in batch["reward"]}


# ---- import ----------------------------------------------------------------------------------------------------------


def test_adapter_without_jax_says_what_to_install() -> None:
    code = "import sys; sys.modules['jax'] = None\nimport sharpwave.adapters.jax\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert 'pip install "sharpwave[jax]"' in done.stderr
    assert "ModuleNotFoundError" in done.stderr


@pytest.mark.gpu
def test_tensors_on_a_gpu_are_not_copied() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or jax.default_backend() != "gpu":
        pytest.skip("no GPU here that torch and JAX both see")
    batch = filled().sample(128, device="cuda")
    made = to_jax(batch)
    assert address(made["obs"]) == batch["obs"].data_ptr()
    for name in set(made) - {"indices"}:
        assert np.array_equal(made[name], batch[name].cpu()), name
    assert made["indices"] is batch["indices"]
