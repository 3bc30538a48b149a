"""Every wrong argument has a class, words that mend it, and no effect."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numbered import filled, make, numbers_in, row, rows, state_of, unchanged

import sharpwave as sw
from sharpwave.errors import BufferFull, ClosedError, NotReady, SchemaError, StaleHandle, StorageError

# ---- the constructor -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [0, -1, 2.5, float("nan"), True, "10", None, 2**63])
def test_capacity_must_be_a_whole_number(capacity: Any) -> None:
    with pytest.raises(SchemaError, match=r"ReplayBuffer\(\): capacity: expected a whole number, at least 1, got"):
        make(capacity)


@pytest.mark.parametrize("name", ["num_envs", "writers", "seed"])
@pytest.mark.parametrize("value", [-1, 1.5, "1", True])
def test_other_counts_must_be_whole_numbers(name: str, value: Any) -> None:
    with pytest.raises(SchemaError, match=rf"ReplayBuffer\(\): {name}: expected a whole number.*got {value!r}"):
        make(10, **{name: value})


def test_writers_have_an_upper_bound() -> None:
    with pytest.raises(SchemaError, match="writers: expected 1 to 4096, got 5000"):
        make(10, writers=5000)


@pytest.mark.parametrize(("num_envs", "kept"), [(3, 12), (30, 30), (5, 10), (1, 10), (None, 10)])
def test_capacity_is_rounded_up_to_whole_steps_and_told(num_envs: int | None, kept: int) -> None:
    words = rf"ReplayBuffer\(\): capacity=10 is not a multiple of num_envs={num_envs}: the buffer keeps {kept} rows"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        buffer = sw.ReplayBuffer(10, obs_shape=(3,), num_envs=num_envs)
    assert [warning.filename for warning in caught] == [__file__] * (kept != 10)  # the line that made the buffer
    assert all(warning.category is UserWarning and re.match(words, str(warning.message)) for warning in caught)
    assert buffer.capacity == buffer.stats()["capacity"] == kept
    row = [np.zeros((num_envs or 1, *shape)) for shape in ((3,), (), (), (3,), ())]
    for _ in range(40):
        buffer.add(*row)
    assert len(buffer) == kept


def test_reward_with_an_axis_too_many_is_named_and_nothing_else() -> None:
    obs = np.zeros(3, np.float32)
    words = (
        r"field 'reward': got shape \(1,\), a leading axis of one row, and field 'obs' has shape \(3,\), without that "
        r"axis; give 'reward' shape \(\) for one row, or every field the leading axis \(1,\)"
    )
    for reward in (np.zeros(1), [0.0]):
        with pytest.raises(SchemaError, match=words):
            sw.ReplayBuffer(10, obs_shape=(3,)).add(obs, 0.0, reward, obs, False)
    made = sw.ReplayBuffer(10, schema={"obs": sw.Field((2,)), "reward": sw.Field((4,))})
    with pytest.raises(
        SchemaError, match=r"field 'reward': got shape \(1, 4\), .* give 'reward' shape \(4,\) for one row"
    ):
        made.add(obs[:2], np.zeros((1, 4)), obs[:2], False)
    made.add(obs[None, :2], np.zeros((1, 4)), obs[None, :2], [False])
    assert len(made) == 1


@pytest.mark.parametrize("capacity", [10**15, 2**62, 2**63 - 1])
@pytest.mark.parametrize("place", ["memory", "shm", "file"])
def test_sizes_beyond_memory_are_refused_and_leave_nothing(
    capacity: int, place: str, tmp_path: Path, shm_address: str
) -> None:
    storage = {"memory": None, "shm": shm_address, "file": f"file://{tmp_path}/big.sw"}[place]
    with pytest.raises(StorageError, match="give a smaller capacity"):
        make(capacity, storage=storage)
    assert list(tmp_path.iterdir()) == []
    assert list(Path("/dev/shm").glob(f"*{shm_address.removeprefix('shm://')}*")) == []


@pytest.mark.parametrize(
    ("storage", "words"),
    [
        ("replay", "expected 'shm://name' or 'file://path', got 'replay'"),
        ("tcp://host", "expected 'shm://name' or 'file://path', got 'tcp://host'"),
        ("shm://", "after shm://, got ''"),
        ("shm://a/b", "after shm://, got 'a/b'"),
        ("shm://" + "a" * 201, "after shm://"),
        ("file://", "expected a path after file://"),
        (5, "got 5"),
        (Path("x"), "got PosixPath"),
    ],
)
def test_wrong_storage_address_is_refused(storage: Any, words: str) -> None:
    with pytest.raises(StorageError, match="ReplayBuffer") as caught:
        make(10, storage=storage)
    assert words in str(caught.value)


@pytest.mark.parametrize("exist", ["overwrite", None, 1])
def test_wrong_exist_is_refused(exist: Any, shm_address: str) -> None:
    with pytest.raises(SchemaError, match="exist: expected 'error', 'replace' or 'attach', got"):
        make(10, storage=shm_address, exist=exist)


@pytest.mark.parametrize("value", ["Derived", "Stored", True, 1])
def test_wrong_next_obs_is_refused(value: Any) -> None:
    with pytest.raises(SchemaError, match="next_obs: expected 'stored', 'derived' or None, got"):
        make(10, next_obs=value)


@pytest.mark.parametrize("option", [{"sampler": 5}, {"sampler": "uniform"}, {"view": sw.Uniform()}])
def test_wrong_sampler_or_view_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match=r"expected (Uniform\(\), Prioritized\(\)|Transitions\(\) or Windows).*, got"):
        make(10, **option)


RESERVED = ["indices", "weights", "probabilities", "discount", "terminated", "truncated", "mask", "priority", "timeout"]


@pytest.mark.parametrize("name", RESERVED)
def test_reserved_names_are_refused_at_the_top_and_allowed_below(name: str) -> None:
    with pytest.raises(SchemaError, match=f"field '{name}': the name is reserved"):
        sw.ReplayBuffer(4, schema={"obs": sw.Field(2), name: sw.Field()})
    sw.ReplayBuffer(4, schema={"obs": {name: sw.Field(2)}}).close()


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({}, "the schema has no 'obs' to copy; give next_obs=None"),
        ({"obs": {}}, "field 'obs' needs at least one field"),
        ({"obs": ()}, "field 'obs' needs at least one field"),
        ({"obs": [sw.Field(2)]}, "expected a Field, a dict or a tuple of them"),
        ({"obs": "float32"}, "expected a Field, a dict or a tuple of them"),
        ({"obs": np.float32}, "expected a Field, a dict or a tuple of them"),
        ({"obs": {"a": None}}, "field 'obs/a': expected a Field"),
        ({"obs": sw.Field(2), "a/b": sw.Field()}, "expected names without '/', got 'a/b'"),
        ({"obs": sw.Field(2), "": sw.Field()}, "expected names without '/', got ''"),
        ({"obs": sw.Field(2), 3: sw.Field()}, "expected names without '/', got 3"),
        ({"obs": sw.Field(2), "done": sw.Field(2, stack=2)}, "field 'done': expected a plain Field"),
        ({"obs": sw.Field(2), "done": {"a": 3}}, "field 'done/a': expected a Field"),
        ({"obs": sw.Field(2), "reward": (sw.Field(2, compression="lz4"),)}, "field 'reward/0': expected a plain Field"),
        ({"obs": sw.Field(2), "x" * 100: sw.Field()}, "name over 95 bytes"),
        ({"obs": sw.Field(2**50)}, "more than 1 TiB a row"),
        (5, "schema: expected a dict of fields, got 5"),
        ([("obs", sw.Field(2))], "schema: expected a dict of fields"),
    ],
)
def test_wrong_schemas_are_refused(schema: Any, words: str) -> None:
    with pytest.raises(SchemaError) as caught:
        sw.ReplayBuffer(4, schema=schema)
    assert words in str(caught.value)


def test_schema_and_obs_shape_exclude_each_other() -> None:
    with pytest.raises(SchemaError, match=r"expected schema= or obs_shape=, got neither"):
        sw.ReplayBuffer(4)
    with pytest.raises(SchemaError, match=r"expected schema= or obs_shape=, got both"):
        sw.ReplayBuffer(4, schema={"obs": sw.Field(2)}, obs_shape=2)
    with pytest.raises(SchemaError, match="next_obs: the schema has the field"):
        sw.ReplayBuffer(4, schema={"obs": sw.Field(2), "next_obs": sw.Field(2)}, next_obs=None)


@pytest.mark.parametrize("shape", [(0,), (2, 0), -1, (2, -3), 1.5, "3", None, (2.0,), {}, (1,) * 9])
def test_wrong_shapes_are_refused(shape: Any) -> None:
    with pytest.raises(SchemaError, match=r"Field\(\): shape: expected"):
        sw.Field(shape)


@pytest.mark.parametrize("dtype", [object, "O", "V0", "S0", "S", "U", [("a", "f4")], "(2,)f4", "nonsense", 5, "T"])
def test_wrong_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(SchemaError, match=r"Field\(\): dtype: expected"):
        sw.Field((), dtype)


@pytest.mark.parametrize(("dtype", "native"), [(">f4", "float32"), (">i8", "int64"), (">c16", "complex128")])
def test_big_endian_dtypes_are_refused_and_the_native_one_is_named(dtype: str, native: str) -> None:
    with pytest.raises(SchemaError, match=f"expected native byte order, got '{dtype}'; give {native}"):
        sw.Field((), dtype)


@pytest.mark.parametrize("shape", [(2**62, 2**62), (2**70,)])
def test_extents_beyond_64_bits_are_schema_errors(shape: tuple[int, ...]) -> None:
    with pytest.raises(SchemaError):
        sw.ReplayBuffer(4, schema={"obs": sw.Field(shape)})


def test_name_that_cannot_be_encoded_is_a_schema_error() -> None:
    with pytest.raises(SchemaError):
        sw.ReplayBuffer(4, schema={"obs": sw.Field(2), "\ud800": sw.Field()})


# ---- add -------------------------------------------------------------------------------------------------------------

NESTED = {
    "obs": {"image": sw.Field((2, 3), "uint8"), "pair": (sw.Field((2,)), sw.Field((), "int64"))},
    "action": sw.Field((), "int64"),
}
ZEROS = np.zeros((4, 2), np.float32)

BAD_ADDS: list[tuple[str, dict[str, Any], str]] = [
    (
        "shape of one row",
        row(0, obs=np.zeros(3)),
        "field 'obs': expected shape (2,), got (3,); give the field shape (3,)",
    ),
    (
        "rank of one row",
        row(0, obs=np.zeros((2, 2))),
        "field 'obs': expected leading shape () as 'reward' has, got (2,)",
    ),
    ("number for a vector", row(0, obs=1.0), "field 'obs': expected shape (2,), got ()"),
    (
        "vector for a number",
        row(0, action=[1.0, 2.0]),
        "field 'action': expected leading shape () as 'reward' has, got (2,)",
    ),
    ("shape in a batch", rows(range(4), obs=np.zeros((4, 3))), "expected shape (2,), got (3,) in row 0 of 4"),
    ("too few rows", rows(range(4), obs=ZEROS[:3]), "expected leading shape (4,) as 'reward' has, got (3,)"),
    ("one action for all", rows(range(4), action=1.0), "field 'action': expected leading shape (4,)"),
    ("done of one row", rows(range(4), done=False), "field 'done': expected leading shape (4,)"),
    (
        "reward of two axes",
        rows(range(4), reward=np.zeros((2, 2))),
        "give the buffer num_envs=2 to add (steps, num_envs)",
    ),
    ("reward of three axes", row(0, reward=np.zeros((1, 1, 1))), "field 'reward': expected shape () or (rows,)"),
    ("text", row(0, action="fast"), "field 'action': expected float32, got <U4"),
    ("complex", row(0, reward=1j), "field 'reward': expected float32, got complex128"),
    ("object", row(0, obs=object()), "field 'obs': expected numbers, got Python objects (object)"),
    ("None", row(0, obs=None), "field 'obs': expected numbers, got Python objects (NoneType)"),
    ("list of None", row(0, obs=[None, 1.0]), "expected numbers, got Python objects (list)"),
    ("huge int", row(0, action=2**70), "expected numbers, got Python objects (int)"),
    ("beyond float32", row(0, reward=1e300), "expected float32, got float64 with values beyond float32"),
    (
        "beyond float32 in obs",
        row(0, obs=np.array([1e300, 0])),
        "field 'obs': expected float32, got float64 with values beyond",
    ),
    ("ragged list", row(0, obs=[[1.0], [1.0, 2.0]]), "field 'obs': expected an array, got list"),
    ("done of 2", row(0, done=2), "field 'done': expected bool, got int64 with values other than 0 and 1"),
    ("done of 0.5", row(0, done=0.5), "field 'done': expected bool, got float64 with values other than 0 and 1"),
    ("done of nan", row(0, done=float("nan")), "values other than 0 and 1"),
    ("no rows", rows([]), "field 'reward': expected at least one row, got shape (0,)"),
    ("more rows than capacity", rows(range(11)), "add(): got 11 rows, the capacity is 10; add fewer at once"),
    (
        "unknown field",
        row(0, velocity=1.0),
        "unknown field 'velocity'; the schema has obs, action, reward, next_obs, done",
    ),
    ("done and terminated", row(0, terminated=True), "expected terminated= or done=, got both"),
    ("truncated of 2", row(0, truncated=2), "truncated: expected truth values, got int64"),
    (
        "truncated of a wrong shape",
        rows(range(4), truncated=[True]),
        "truncated: expected shape (4,), one truth value per row, got (1,)",
    ),
    ("truncated of one row", rows(range(4), truncated=True), "truncated: expected shape (4,)"),
    (
        "mask of a wrong shape",
        rows(range(4), mask=[True] * 5),
        "mask: expected shape (4,), one truth value per row, got (5,)",
    ),
    ("mask of text", row(0, mask="yes"), "mask: expected truth values, got <U3"),
]


@pytest.mark.parametrize(("values", "words"), [case[1:] for case in BAD_ADDS], ids=[case[0] for case in BAD_ADDS])
@pytest.mark.parametrize("held", [0, 3, 17])
def test_bad_add_is_refused_with_words_and_changes_nothing(values: dict[str, Any], words: str, held: int) -> None:
    buffer = filled(held)
    with unchanged(buffer), pytest.raises(SchemaError, match=r"^add\(\): ") as caught:
        buffer.add(**values)
    assert words in str(caught.value)
    # The next good row goes where it would have gone.
    buffer.add(**row(held))
    assert numbers_in(buffer) == list(range(max(0, held - 9), held + 1))


@pytest.mark.parametrize("missing", ["obs", "action", "reward", "next_obs", "done"])
def test_missing_field_is_named(missing: str) -> None:
    buffer = filled(2)
    values = row(2)
    del values[missing]
    with (
        unchanged(buffer),
        pytest.raises(SchemaError, match=rf"add\(\): missing '{missing}'.*the schema has obs, action"),
    ):
        buffer.add(**values)
    if missing == "done":
        with pytest.raises(SchemaError, match="or terminated="):
            buffer.add(**values)


def test_values_by_position_and_by_name_at_once_are_refused() -> None:
    buffer = filled(2)
    obs = np.zeros(2, np.float32)
    with unchanged(buffer):
        with pytest.raises(SchemaError, match="field 'obs': given by position and by name; leave one out"):
            buffer.add(obs, 0.0, 0.0, obs, False, obs=obs)
        with pytest.raises(SchemaError, match="expected terminated= or done=, got both"):
            buffer.add(obs, 0.0, 0.0, obs, False, terminated=False)
        with pytest.raises(
            SchemaError, match=r"at most 5 positional values \(obs, action, reward, next_obs, done\), got 6"
        ):
            buffer.add(obs, 0.0, 0.0, obs, False, 1.0)
        with pytest.raises(SchemaError, match="missing 'action', 'reward', 'next_obs', 'done'"):
            buffer.add(obs)
        with pytest.raises(SchemaError, match="missing 'obs'"):
            buffer.add()


class KeysOnly:
    """As Tianshou's Batch: keys, and no Mapping."""

    def keys(self) -> Any:
        return {"obs": 0, "act": 0}.keys()


def test_whole_row_in_place_of_its_fields_is_refused_with_the_way_to_give_it() -> None:
    buffer = filled(2)
    row = {"obs": np.zeros(2), "action": 0.0, "reward": 0.0, "next_obs": np.zeros(2), "done": False}
    mend = r"give the fields of a row by name, add\(\*\*row\) with the names obs, action, reward, next_obs, done"
    with unchanged(buffer):
        with pytest.raises(SchemaError, match=rf"add\(\): got one dict with the keys obs, .*; {mend}"):
            buffer.add(row)
        with pytest.raises(SchemaError, match=r"got one KeysOnly with the keys obs, act"):
            buffer.add(KeysOnly())
    buffer.add(**row)
    with sw.ReplayBuffer(4, schema={"obs": {"x": sw.Field(())}, "action": sw.Field(())}) as nested:
        with pytest.raises(SchemaError, match="missing 'action', 'reward', 'next_obs', 'done'"):
            nested.add({"x": 0.0})  # the observation, and nothing else
        with pytest.raises(SchemaError, match="got one dict with the keys obs, action"):
            nested.add({"obs": {"x": 0.0}, "action": 0.0})


def nested_row(**changes: Any) -> dict[str, Any]:
    obs = {"image": np.zeros((2, 3), np.uint8), "pair": (np.zeros(2, np.float32), 1)}
    return {"obs": obs, "action": 1, "reward": 0.0, "next_obs": obs, "done": False, **changes}


@pytest.mark.parametrize(
    ("obs", "words"),
    [
        (np.zeros(2), "field 'obs': expected a dict with image, pair, got ndarray"),
        ({}, "field 'obs': expected the keys image, pair, got missing ['image', 'pair']"),
        ({"image": 0, "pair": 0, "depth": 0}, "got unknown ['depth']"),
        ({"image": np.zeros((2, 3), np.uint8), "pair": 1}, "field 'obs/pair': expected a tuple of 2 values, got int"),
        ({"image": np.zeros((2, 3), np.uint8), "pair": (1,)}, "'obs/pair': expected a tuple of 2 values, got 1 values"),
        (
            {"image": np.zeros((3, 2), np.uint8), "pair": ([0, 0], 1)},
            "field 'obs/image': expected shape (2, 3), got (3, 2)",
        ),
        (
            {"image": np.full((2, 3), 300), "pair": ([0, 0], 1)},
            "field 'obs/image': expected uint8, got int64 with values beyond",
        ),
        ({"image": np.full((2, 3), -1), "pair": ([0, 0], 1)}, "with values beyond uint8; give the field dtype int64"),
        (
            {"image": np.zeros((2, 3)), "pair": ([0, 0], 1)},
            "'obs/image': expected uint8, got float64, and the cast would lose",
        ),
        (
            {"image": np.zeros((2, 3), np.uint8), "pair": ([0, 0], 0.5)},
            "field 'obs/pair/1': expected int64, got float64",
        ),
        ({"image": np.zeros((2, 3), np.uint8), "pair": ([0, 0], 2**63)}, "got uint64 with values beyond int64"),
    ],
)
def test_bad_nested_values_are_refused_by_path(obs: Any, words: str) -> None:
    buffer = sw.ReplayBuffer(4, schema=NESTED, seed=0)
    buffer.add(**nested_row())
    with unchanged(buffer), pytest.raises(SchemaError) as caught:
        buffer.add(**nested_row(obs=obs))
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["mask", "truncated"])
def test_message_about_a_flag_does_not_speak_of_a_field(name: str) -> None:
    with pytest.raises(SchemaError) as caught:
        make().add(**row(0, **{name: "yes"}))
    assert "field" not in str(caught.value)


def test_half_a_step_of_num_envs_is_refused() -> None:
    buffer = make(12, num_envs=3)
    buffer.add(**rows(range(3)))
    by_steps = {name: value.reshape(2, 2, *value.shape[1:]) for name, value in rows(range(4)).items()}
    with unchanged(buffer):
        with pytest.raises(SchemaError, match="expected a multiple of num_envs=3 rows, got 4"):
            buffer.add(**rows(range(4)))
        with pytest.raises(SchemaError, match="expected a multiple of num_envs=3 rows, got 1"):
            buffer.add(**row(0))
        with pytest.raises(SchemaError, match=r"expected \(steps, num_envs=3\), got \(2, 2\)"):
            buffer.add(**by_steps)


def test_two_leading_axes_without_num_envs_are_refused_whatever_the_dtype() -> None:
    for dtype in (np.float64, np.float32):
        buffer = make(10)
        by_steps = {name: value.reshape(4, 1, *value.shape[1:]) for name, value in rows(range(4)).items()}
        by_steps["action"] = by_steps["action"].astype(dtype)
        by_steps["obs"] = by_steps["obs"][::-1] if dtype is np.float64 else by_steps["obs"]
        with unchanged(buffer), pytest.raises(SchemaError, match="give the buffer num_envs=1"):
            buffer.add(**by_steps)


def test_writers_beyond_the_limit_are_refused_until_one_closes() -> None:
    buffer = make(10, writers=2)
    writers = [buffer.writer(), buffer.writer()]
    with pytest.raises(BufferFull, match=r"writer\(\): all 2 writers are taken; close one, or give writers="):
        buffer.writer()
    with pytest.raises(BufferFull, match="all 2 writers are taken"):
        buffer.add(**row(0))
    writers[0].close()
    buffer.add(**row(0))
    assert numbers_in(buffer) == [0]


# ---- sample, get, rows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, 1.5, "3", None, True, 2**32, np.float64(3), [3]])
def test_wrong_batch_size_is_refused_and_draws_nothing(size: Any) -> None:
    buffer = filled(5)
    with unchanged(buffer), pytest.raises(SchemaError, match=r"sample\(\): batch_size: expected a whole number, 1 to"):
        buffer.sample(size)


def test_sample_from_an_empty_buffer_is_not_ready_and_draws_nothing() -> None:
    buffer = make()
    with unchanged(buffer), pytest.raises(NotReady, match=r"sample\(\): the buffer is empty; add rows first"):
        buffer.sample(4)


@pytest.mark.parametrize("indices", [[0.0], "abc", [[0, 1]], 0, [True], None, [b"1"], {}])
def test_wrong_indices_are_refused(indices: Any) -> None:
    buffer = filled(3)
    with (
        unchanged(buffer),
        pytest.raises(SchemaError, match=r"get\(\): indices: expected a list of whole numbers, got"),
    ):
        buffer.get(indices)


@pytest.mark.parametrize("index", [3, 10**12, 2**60, -1, 2**63, 2**64 - 1])
def test_indices_that_name_no_row_are_stale(index: int) -> None:
    buffer = filled(3)
    with pytest.raises(StaleHandle, match="is not in the buffer: it was overwritten, cleared or never added"):
        buffer.get(np.array([0, index], np.uint64 if index > 0 else np.int64))


def test_stale_message_names_the_index_that_was_given() -> None:
    with pytest.raises(StaleHandle, match="row -1 "):
        filled(3).get([-1])


def test_getting_no_rows_gives_an_empty_batch() -> None:
    assert filled(3).get(np.array([], np.int64))["obs"].shape == (0, 2)
    assert filled(3).get([])["obs"].shape == (0, 2)


@pytest.mark.parametrize("size", [0, -1, 1.5, "3"])
def test_wrong_batch_size_of_rows_is_refused(size: Any) -> None:
    with pytest.raises(SchemaError, match=r"rows\(\): batch_size: expected a whole number, at least 1"):
        list(filled(3).rows(size))


# ---- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["warp", object(), "cuda:x", ""])
def test_unknown_device_is_refused(device: Any) -> None:
    pytest.importorskip("torch")
    with pytest.raises(SchemaError, match=r"sample\(\): device: expected a torch device, got"):
        filled(3).sample(2, device=device)


def test_cuda_without_cuda_is_refused() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("CUDA is here")
    with pytest.raises(SchemaError, match=r"device: torch finds no CUDA here, got 'cuda'; give device='cpu'"):
        filled(3).sample(2, device="cuda")


@pytest.mark.parametrize("device", ["xpu", "mps"])
def test_device_that_this_torch_lacks_is_refused(device: str) -> None:
    pytest.importorskip("torch")
    with pytest.raises(SchemaError, match=r"sample\(\): device"):
        filled(3).sample(2, device=device)


@pytest.mark.parametrize("device", ["cuda:99", "warp"])
def test_refused_device_draws_nothing(device: str) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("CUDA is here")
    buffer = filled(3)
    with unchanged(buffer), pytest.raises(SchemaError):
        buffer.sample(2, device=device)


def test_field_without_a_torch_dtype_is_refused_and_draws_nothing() -> None:
    pytest.importorskip("torch")
    buffer = sw.ReplayBuffer(4, schema={"obs": sw.Field((), "S5")}, next_obs=None)
    buffer.add(obs=b"abc", reward=0.0, done=False)
    with unchanged(buffer), pytest.raises(SchemaError, match="torch has no dtype"):
        buffer.sample(2, device="cpu")


def test_missing_torch_is_named_with_the_extra_that_brings_it() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import sharpwave as sw\n"
        "b = sw.ReplayBuffer(2, obs_shape=()); b.add(0., 0., 0., 0., False)\n"
        "try: b.sample(1, device='cpu')\n"
        "except sw.errors.SchemaError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert 'pip install "sharpwave[torch]"' in done.stdout


# ---- closed ----------------------------------------------------------------------------------------------------------

VERBS = {
    "add": lambda b: b.add(**row(0)),
    "add batch": lambda b: b.add(**rows(range(3))),
    "sample": lambda b: b.sample(1),
    "sample torch": lambda b: b.sample(1, device="cpu"),
    "get": lambda b: b.get([0]),
    "rows": lambda b: list(b.rows()),
    "len": len,
    "is_full": lambda b: b.is_full,
    "stats": lambda b: b.stats(),
    "clear": lambda b: b.clear(),
    "save": lambda b: b.save("/nonexistent/never"),
    "flush": lambda b: b.flush(),
    "writer": lambda b: b.writer(),
    "pickle": lambda b: b.__reduce__(),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("place", ["memory", "shm"])
def test_closed_buffer_refuses_every_verb(verb: str, place: str, shm_address: str) -> None:
    if "torch" in verb:
        pytest.importorskip("torch")
    buffer = filled(3, storage=shm_address if place == "shm" else None)
    add = buffer.add
    buffer.close(unlink=True)
    if verb != "save":  # its folder cannot be made, and that is noticed first
        with pytest.raises(ClosedError, match="closed"):
            VERBS[verb](buffer)
    else:
        with pytest.raises((ClosedError, StorageError)):
            VERBS[verb](buffer)
    with pytest.raises(ClosedError, match="closed"):
        add(**row(0))
    assert "closed" in repr(buffer)
    buffer.close()
    buffer.close(unlink=True)


def test_closed_writer_refuses_add_and_the_buffer_goes_on() -> None:
    buffer = make()
    writer = buffer.writer()
    writer.add(**row(0))
    writer.close()
    writer.close()
    with unchanged(buffer), pytest.raises(ClosedError, match=r"add\(\): this writer is closed"):
        writer.add(**row(1))
    buffer.add(**row(1))
    assert numbers_in(buffer) == [0, 1]


def test_writer_of_a_closed_buffer_refuses_add() -> None:
    buffer = make()
    writer = buffer.writer()
    buffer.close()
    with pytest.raises(ClosedError, match="closed"):
        writer.add(**row(1))
    writer.close()


def test_error_inside_a_value_reaches_the_caller_and_changes_nothing() -> None:
    class Broken:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise ZeroDivisionError("mine")

    buffer = filled(3)
    with unchanged(buffer), pytest.raises(ZeroDivisionError, match="mine"):
        buffer.add(**row(3, obs=Broken()))


def test_state_of_sees_a_change() -> None:
    """The check behind every 'changes nothing' above is not blind."""
    buffer = filled(3)
    before = state_of(buffer)
    buffer.sample(1)
    assert state_of(buffer) != before
    before = state_of(buffer)
    buffer.add(**row(0, mask=False))
    assert state_of(buffer) != before
