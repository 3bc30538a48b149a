"""What add() accepts beside exact arrays, and that it stores what NumPy itself would."""

from __future__ import annotations

import array
import collections
from typing import Any

import numpy as np
import pytest
from numbered import filled, make, numbers_in, row, rows

import sharpwave as sw
from sharpwave.errors import ClosedError, SchemaError

KEPT = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
KEPT += ["float16", "float32", "float64", "longdouble", "complex64", "complex128", "longlong", "ulonglong"]


def store(field: sw.Field, value: Any, rows: int | None = None) -> np.ndarray:
    """Adds one value (or `rows` of them) to a field and reads back what is stored."""
    buffer = sw.ReplayBuffer(8, schema={"obs": field}, next_obs=None, seed=0)
    if rows is None:
        buffer.add(obs=value, reward=0.0, done=False)
    else:
        buffer.add(obs=value, reward=np.zeros(rows), done=np.zeros(rows, bool))
    (batch,) = buffer.rows()
    assert batch["obs"].dtype == field.dtype
    assert batch["obs"].shape[1:] == field.shape
    return batch["obs"] if rows is not None else batch["obs"][0:1].reshape(field.shape)


def same(stored: np.ndarray, expected: np.ndarray) -> bool:
    return stored.dtype == expected.dtype and np.array_equal(stored, expected, equal_nan=expected.dtype.kind in "fc")


def limits_of(dtype: np.dtype) -> list[Any]:
    if dtype.kind == "b":
        return [False, True]
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return [info.min, info.max, 0, 1]
    info = np.finfo(dtype)
    return [info.min, info.max, info.tiny, np.inf, -np.inf, np.nan, 0.0, -0.0]


@pytest.mark.parametrize("dtype", KEPT)
def test_every_limit_of_every_dtype_is_kept(dtype: str) -> None:
    values = np.array(limits_of(np.dtype(dtype)), dtype)
    assert same(store(sw.Field((), dtype), values, len(values)), values)
    assert same(store(sw.Field((len(values),), dtype), values), values)
    for value in values:  # NumPy scalars
        assert same(store(sw.Field((), dtype), value), np.array(value))
        assert same(store(sw.Field((), dtype), np.array(value)), np.array(value))  # 0-d arrays


@pytest.mark.parametrize("dtype", [name for name in KEPT if np.dtype(name).kind in "iu"])
def test_whole_numbers_are_kept_up_to_the_limit_and_refused_beyond(dtype: str) -> None:
    info = np.iinfo(dtype)
    for value in (info.min, info.max, 0, 7):
        assert int(store(sw.Field((), dtype), int(value))) == value
        # NumPy reads a list of whole numbers beyond int64 as float64, so such a list cannot be told apart from floats.
        several = [int(value), 0] if value < 2**63 else np.array([value, 0], dtype)
        assert store(sw.Field((2,), dtype), several).tolist() == [value, 0]
    for value in (int(info.min) - 1, int(info.max) + 1):
        with pytest.raises(SchemaError):
            store(sw.Field((), dtype), value)
        with pytest.raises(SchemaError):
            store(sw.Field((2,), dtype), [value, 0])
    with pytest.raises(SchemaError, match="the cast would lose meaning"):
        store(sw.Field((), dtype), 0.5)


@pytest.mark.parametrize("have", KEPT)
@pytest.mark.parametrize("want", KEPT)
def test_casts_keep_the_value_or_are_refused(have: str, want: str) -> None:
    """Same kind or wider kind is NumPy's own conversion; a kind that would lose meaning is an error."""
    value = np.array([0, 1, 1], have)
    order = "biufc"
    kinds = np.dtype(have).kind, np.dtype(want).kind
    allowed = order.index(kinds[0]) <= order.index(kinds[1]) or kinds in [("u", "i"), ("i", "u")]
    allowed |= kinds[1] == "b" and kinds[0] in "iuf"
    for shaped, field, count in ((value, sw.Field((3,), want), None), (value, sw.Field((), want), 3)):
        if allowed:
            assert same(store(field, shaped, count), shaped.astype(want))
        else:
            with pytest.raises(SchemaError, match="the cast would lose meaning; give the field dtype"):
                store(field, shaped, count)


@pytest.mark.parametrize(
    "values", [[0.1, 1e-30, 3e38, -2.5], [np.inf, -np.inf, np.nan, 1.0], [1e-46, 1e-40, -0.0, 0.0]]
)
def test_float64_becomes_float32_as_numpy_does_it(values: list[float]) -> None:
    expected = np.array(values).astype(np.float32)
    small, large = np.array(values), np.tile(values, 2000)
    assert store(sw.Field((4,)), small).tobytes() == expected.tobytes()
    assert store(sw.Field((4,)), values).tobytes() == expected.tobytes()
    assert store(sw.Field((8000,)), large).tobytes() == np.tile(expected, 2000).tobytes()
    for value, wanted in zip(values, expected, strict=True):
        assert store(sw.Field(()), value).tobytes() == wanted.tobytes()
        assert store(sw.Field(()), np.float64(value)).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("make_value", [np.array, float, np.float64, lambda v: [v], lambda v: np.full(3000, v)])
def test_overflow_to_infinity_is_refused(make_value: Any) -> None:
    value = make_value(1e39)
    with pytest.raises(SchemaError, match="with values beyond float32"):
        store(sw.Field(np.shape(value)), value)


def test_users_error_state_does_not_change_what_is_accepted() -> None:
    with np.errstate(all="raise"):
        assert store(sw.Field((2,)), np.array([1e-300, 1.0])).tolist() == [0.0, 1.0]  # the fast path
        assert store(sw.Field((2,)), [1e-300, 1.0]).tolist() == [0.0, 1.0]  # the careful one


@pytest.mark.parametrize(
    "done", [True, False, 0, 1, 0.0, 1.0, np.bool_(True), np.float32(1), np.int8(0), np.array(True)]
)
@pytest.mark.parametrize("dtype", ["bool", "float32", "float64", "uint8", "int64"])
@pytest.mark.parametrize("name", ["done", "terminated"])
def test_done_may_be_any_truth_value(done: Any, dtype: str, name: str) -> None:
    buffer = sw.ReplayBuffer(4, schema={"obs": sw.Field(()), "done": sw.Field((), dtype)}, next_obs=None)
    if np.dtype(dtype).kind in "iu" and isinstance(done, (float, np.floating)):
        with pytest.raises(SchemaError, match="the cast would lose meaning"):
            buffer.add(obs=0.0, reward=0.0, **{name: done})
        return
    buffer.add(obs=0.0, reward=0.0, **{name: done})
    assert buffer.sample(1)["done"][0] == bool(done)
    assert buffer.stats()["episodes"] == bool(done)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "complex64"])
def test_minus_zero_does_not_end_an_episode(dtype: str) -> None:
    buffer = sw.ReplayBuffer(4, schema={"obs": sw.Field(()), "done": sw.Field((), dtype)}, next_obs=None)
    buffer.add(obs=0.0, reward=0.0, done=np.array(-0.0, dtype))
    assert buffer.stats()["episodes"] == 0


# ---- layouts ---------------------------------------------------------------------------------------------------------

PLAIN = np.arange(24, dtype=np.float32).reshape(4, 6)


def unaligned(plain: np.ndarray) -> np.ndarray:
    raw = np.zeros(plain.nbytes + 1, np.uint8)[1:]
    raw[:] = np.frombuffer(plain.tobytes(), np.uint8)
    return raw.view(plain.dtype).reshape(plain.shape)


LAYOUTS: dict[str, Any] = {
    "contiguous": lambda a: a,
    "fortran": np.asfortranarray,
    "strided": lambda a: np.repeat(a, 2, axis=1)[:, ::2],
    "reversed": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "transposed": lambda a: np.ascontiguousarray(a.T).T,
    "broadcast": lambda a: np.broadcast_to(a, a.shape),
    "other byte order": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "lists": lambda a: a.tolist(),
    "tuples": lambda a: tuple(map(tuple, a)),
    "list of arrays": list,
    "memoryview": memoryview,
    "subclass": np.ma.masked_array,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_in_memory_does_not_matter(layout: str) -> None:
    assert store(sw.Field((4, 6)), LAYOUTS[layout](PLAIN)).tolist() == PLAIN.tolist()
    assert store(sw.Field((6,)), LAYOUTS[layout](PLAIN), 4).tolist() == PLAIN.tolist()


def test_unaligned_array_is_stored() -> None:
    """What np.frombuffer(message, offset=1) gives."""
    value = unaligned(PLAIN)
    assert not value.flags.aligned
    assert store(sw.Field((4, 6)), value).tolist() == PLAIN.tolist()


def test_read_only_arrays_are_stored_and_stay_as_they_are() -> None:
    value = PLAIN.copy()
    value.flags.writeable = False
    assert store(sw.Field((4, 6)), value).tolist() == PLAIN.tolist()
    assert not value.flags.writeable


def test_inputs_may_change_after_add() -> None:
    buffer = make()
    values = rows(range(4))
    buffer.add(**values)
    for value in values.values():
        value[...] = 0
    assert numbers_in(buffer) == [0, 1, 2, 3]


def test_array_module_bytes_and_buffers_are_stored() -> None:
    assert store(sw.Field((3,), "float64"), array.array("d", [1, 2, 3])).tolist() == [1, 2, 3]
    assert store(sw.Field((3,), "uint8"), memoryview(b"abc")).tolist() == [97, 98, 99]
    assert store(sw.Field((3,), "uint8"), np.frombuffer(b"abc", np.uint8)).tolist() == [97, 98, 99]


def test_objects_that_can_become_arrays_are_stored() -> None:
    class Image:
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return PLAIN

    class Number:
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return np.array(3.5)

    assert store(sw.Field((4, 6)), Image()).tolist() == PLAIN.tolist()
    assert store(sw.Field(()), Number()) == 3.5


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, collections.UserDict, type("Mine", (dict,), {})])
def test_any_mapping_may_hold_nested_values(kind: Any) -> None:
    schema = {"obs": {"b": sw.Field((2,)), "a": (sw.Field(()), sw.Field((), "int64"))}}
    buffer = sw.ReplayBuffer(4, schema=schema, next_obs=None)
    buffer.add(obs=kind(a=(1.5, 7), b=np.ones(2, np.float32)), reward=0.0, done=False)
    buffer.add(obs=kind(b=[2, 2], a=[2.5, 8]), reward=0.0, done=False)
    (batch,) = buffer.rows()
    assert batch["obs"]["b"].tolist() == [[1, 1], [2, 2]]
    assert [part.tolist() for part in batch["obs"]["a"]] == [[1.5, 2.5], [7, 8]]


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("S5", [b"", b"abc", b"12345", b"a\x00b"]),
        ("U4", ["", "añ", "four"]),
        ("M8[s]", [np.datetime64("2024-05-06T07:08:09"), np.datetime64("NaT")]),
        ("m8[us]", [np.timedelta64(5, "us")]),
        ("V3", [np.void(b"xyz")]),
    ],
)
def test_fixed_size_dtypes_that_are_no_numbers_are_kept(dtype: str, values: list[Any]) -> None:
    for value in values:
        expected = np.array(value, dtype)
        assert store(sw.Field((), dtype), value).tobytes() == expected.tobytes()
        assert store(sw.Field((), dtype), expected).tobytes() == expected.tobytes()
    several = np.array(values, dtype)
    assert store(sw.Field((), dtype), several, len(several)).tobytes() == several.tobytes()


def test_bytes_that_would_be_cut_are_refused() -> None:
    with pytest.raises(SchemaError, match=r"expected \|S5, got \|S6, and the cast would lose meaning"):
        store(sw.Field((), "S5"), b"123456")


# ---- torch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"])
def test_torch_tensors_are_stored(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    value = torch.tensor([[0, 1, 1], [1, 0, 1]], dtype=getattr(torch, dtype))
    expected = value.numpy()
    assert same(store(sw.Field((2, 3), dtype), value), expected)
    assert same(store(sw.Field((3,), dtype), value, 2), expected)
    assert same(store(sw.Field((), dtype), value[0, 1]), expected[0, 1])
    assert same(store(sw.Field((3, 2), getattr(torch, dtype)), value.T), expected.T)


def test_torch_tensors_that_require_grad_are_stored_without_their_graph() -> None:
    torch = pytest.importorskip("torch")
    value = torch.ones(3, requires_grad=True)
    assert store(sw.Field((3,)), value * 2).tolist() == [2, 2, 2]
    assert value.grad is None


def test_torch_bfloat16_and_other_devices_are_refused_with_a_mend() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(SchemaError, match=r"field 'obs': .*; pass \.float\(\)"):
        store(sw.Field((3,)), torch.ones(3, dtype=torch.bfloat16))
    with pytest.raises(SchemaError, match=r"expected a tensor on the CPU, got one on meta; pass \.cpu\(\)"):
        store(sw.Field((3,)), torch.ones(3, device="meta"))


def test_torch_flags_are_read() -> None:
    torch = pytest.importorskip("torch")
    buffer = make()
    ends = torch.tensor([False, True, False, True])
    buffer.add(**rows(range(4), truncated=ends, mask=~ends))
    (batch,) = buffer.rows()
    assert batch["reward"].tolist() == [0, 2]
    assert batch["truncated"].tolist() == [False, False]
    buffer.add(**rows(range(4, 8), truncated=ends.float()))
    assert buffer.get(next(buffer.rows())["indices"])["truncated"].tolist() == [False] * 3 + [True, False, True]


# ---- by C++ or by Python ---------------------------------------------------------------------------------------------


def never(*args: Any) -> Any:
    raise AssertionError(f"a step in Python: {args}")


def converted(forms: str) -> list[Any]:
    """One value of three numbers in forms that are converted without a step in Python."""
    plain = np.array([0.5, -0.0, 1.5], np.float32)
    if forms == "torch":
        torch = pytest.importorskip("torch")
        tensor = torch.from_numpy(plain)
        if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
            pytest.skip("this torch does not lend the memory of its tensors")
        spaced = torch.repeat_interleave(tensor, 2)[::2]
        return [tensor, tensor.double(), tensor.half(), spaced, tensor.clone().requires_grad_()]
    fixed = plain.copy()
    fixed.flags.writeable = False
    arrays = [plain.astype(kind) for kind in ("f8", ">f4", ">f8", "f2")]
    arrays += [np.repeat(plain, 2)[::2], plain[::-1].copy()[::-1], fixed, np.broadcast_to(plain, 3)]
    return [*arrays, plain.tolist(), tuple(plain.tolist()), list(plain), [0.5, -0.0, np.float64(1.5)]]


@pytest.mark.parametrize("forms", ["NumPy and lists", "torch"])
def test_usual_values_take_no_step_in_python(forms: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharpwave.rows.host.prepare", never)
    monkeypatch.setattr("sharpwave.rows.host.read_leaf", never)
    buffer = sw.ReplayBuffer(64, schema={"obs": sw.Field((3,))}, next_obs=None, sampler=sw.Prioritized())
    values = converted(forms)
    for value in values:
        buffer.add(obs=value, reward=1, done=0)
    for number in (np.float16(1), np.int8(1), np.uint64(1), np.array(1), True, np.bool_(True)):
        flags = {"truncated": 0, "mask": np.int64(1), "priority": number}
        buffer.add(obs=values[0], reward=number, done=np.uint8(0), **flags)
    buffer.add(
        obs=[[1, 2, 3], [4, 5, 6]],
        reward=[1, True],
        done=[0, 1.0],
        truncated=[False, 0],
        mask=[1, 1],
        priority=[1, 0.5],
    )
    buffer.add(**{"".join(["o", "bs"]): values[0], "".join(["re", "ward"]): 1.0, "done": False})
    (batch,) = buffer.rows()
    expected = [[0.5, -0.0, 1.5]] * (len(values) + 6) + [[1, 2, 3], [4, 5, 6], [0.5, -0.0, 1.5]]
    assert batch["obs"].tobytes() == np.array(expected, np.float32).tobytes()
    assert batch["reward"].tolist() == [1.0] * len(expected)
    assert batch["done"].tolist() == [False] * (len(expected) - 2) + [True, False]


def test_a_value_that_needs_python_does_not_take_the_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharpwave.rows.host.prepare", never)
    buffer = sw.ReplayBuffer(4, schema={"obs": sw.Field((3,), "S2"), "more": sw.Field(())}, next_obs=None)
    for obs in (["a", "b", "cd"], np.array([b"a", b"b", b"cd"]), memoryview(np.array([b"a", b"b", b"cd"], "S2"))):
        if isinstance(obs, list):
            obs = [part.encode() for part in obs]
        buffer.add(obs=obs, more=np.float64(2), reward=1, done=False)
    (batch,) = buffer.rows()
    assert batch["obs"].tolist() == [[b"a", b"b", b"cd"]] * 3


def test_batches_of_any_size_are_converted_without_a_step_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory for converted values grows with the call, and is used again."""
    monkeypatch.setattr("sharpwave.rows.host.prepare", never)
    monkeypatch.setattr("sharpwave.rows.host.read_leaf", never)
    buffer = sw.ReplayBuffer(200_000, schema={"obs": sw.Field((17,))}, next_obs=None)
    stream = np.random.default_rng(0)
    for count in (1, 15, 16, 17, 31, 200, 4096, 3, 150_000, 4096, 33):
        obs = stream.standard_normal((count, 17))
        rewards = stream.integers(-5, 5, count)
        buffer.clear()
        buffer.add(obs=obs, reward=rewards, done=np.zeros(count, np.int64), truncated=np.zeros(count))
        stored = list(buffer.rows())
        assert np.concatenate([batch["obs"] for batch in stored]).tobytes() == obs.astype(np.float32).tobytes()
        assert np.concatenate([batch["reward"] for batch in stored]).tolist() == rewards.tolist()


def test_value_that_empties_the_dict_it_came_in_harms_nothing() -> None:
    class Emptying:
        def __init__(self, holder: dict[str, Any]) -> None:
            self.holder = holder

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            self.holder["a"] = None
            return np.full(4096, 2.0)

    field = sw.Field((4096,))
    buffer = sw.ReplayBuffer(4, schema={"obs": {"a": field, "b": field}}, next_obs=None)
    obs: dict[str, Any] = {"a": np.ones(4096, np.float32)}
    obs["b"] = Emptying(obs)
    buffer.add(obs=obs, reward=0.0, done=False)
    (batch,) = buffer.rows()
    assert (batch["obs"]["a"] == 1).all()
    assert (batch["obs"]["b"] == 2).all()


def test_value_that_closes_the_buffer_it_is_added_to_is_an_error() -> None:
    class Closing:
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            buffer.close()
            return np.ones(2)

    buffer = make()
    with pytest.raises(ClosedError):
        buffer.add(**row(1, obs=Closing()))


def test_value_that_adds_to_another_buffer_leaves_the_converted_ones_alone() -> None:
    class Adding:
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            other.add(**{**values, "obs": np.full((200, 64), 7.0), "more": np.full((200, 64), 8.0)})
            return np.full((200, 64), 2.0)

    schema = {"obs": sw.Field((64,)), "more": sw.Field((64,))}
    buffer, other = (sw.ReplayBuffer(400, schema=schema, next_obs=None) for _ in range(2))
    values: dict[str, Any] = {"obs": np.full((200, 64), 1.0), "reward": np.zeros(200), "done": np.zeros(200)}
    buffer.add(**values, more=Adding())
    (batch,), (apart,) = buffer.rows(), other.rows()
    assert (batch["obs"] == 1).all()
    assert (batch["more"] == 2).all()
    assert (apart["obs"] == 7).all()
    assert (apart["more"] == 8).all()


# ---- forms -----------------------------------------------------------------------------------------------------------


def test_one_row_and_many_rows_by_position_and_by_name_are_the_same() -> None:
    one, many, named, positional = make(), make(), make(), make()
    for number in range(6):
        one.add(**row(number))
        positional.add(*row(number).values())
        named.add(**dict(reversed(row(number).items())))
    many.add(**rows(range(6)))
    assert numbers_in(one) == numbers_in(many) == numbers_in(named) == numbers_in(positional) == list(range(6))
    assert len({tuple(buffer.sample(8)["indices"].tolist()) for buffer in (one, many, named, positional)}) == 1


def test_names_that_are_not_interned_are_understood() -> None:
    buffer = make()
    buffer.add(**{"".join(list(name)): value for name, value in row(3).items()})
    buffer.add(**{("x" + name)[1:]: value for name, value in row(4, truncated=True).items()})
    assert numbers_in(buffer) == [3, 4]


def test_none_means_not_given_for_truncated_and_mask() -> None:
    buffer = filled(1)
    buffer.add(**row(1, truncated=None, mask=None))
    assert numbers_in(buffer) == [0, 1]
    assert buffer.stats()["episodes"] == 0


def test_steps_of_several_environments_are_stored_in_time_order() -> None:
    buffer = make(12, num_envs=3)
    flat = rows(range(6))
    buffer.add(**{name: value.reshape(2, 3, *value.shape[1:]) for name, value in flat.items()})
    buffer.add(**rows(range(6, 9)))
    assert numbers_in(buffer) == list(range(9))


def test_subclass_that_overrides_add_keeps_its_own() -> None:
    class Counting(sw.ReplayBuffer):
        calls = 0

        def add(self, *args: Any, **kwargs: Any) -> None:
            self.calls += 1
            super().add(*args, **kwargs)

    buffer = Counting(4, obs_shape=(2,))
    for number in range(3):
        buffer.add(**row(number))
    assert (buffer.calls, numbers_in(buffer)) == (3, [0, 1, 2])
