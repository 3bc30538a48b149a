"""add() converts values in C++ by the rules of src/sharpwave/arrays.py: both accept the same values and store the same
bytes, or both refuse with the same message and nothing changes. ``arrays.prepare`` is the specification."""

from __future__ import annotations

import itertools
import os
import re
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import sharpwave as sw
from sharpwave.arrays import prepare
from sharpwave.errors import SchemaError

SOAK = os.environ.get("SHARPWAVE_SOAK") == "1"
torch: Any
try:
    import torch
except ImportError:
    torch = None

DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "longlong", "ulonglong"]
DTYPES += ["float16", "float32", "float64", "longdouble", "complex64", "complex128"]
USUAL = ["bool", "int64", "float32", "float64", "uint8"]
NUMBERS: list[Any] = [0, 1, -1, 2, 127, 128, 255, 256, -129, 32768, 65504, 65519, 65520, 70000, 2**24 + 1, 2**31, 2**32]
NUMBERS += [2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 2**100, True, False]
NUMBERS += [0.0, -0.0, 1.0, 0.5, np.nan, np.inf, -np.inf, 5e-324, 1e-45, 1e-40, 6e-8, 3e-8, 1e-300, 1e39, -1e39, 1e308]
NUMBERS += [float(np.finfo(np.float32).max), 3.4028235677973366e38, 3.4028235677973362e38, 0.1, 2.0**60 + 2.0**36]


class Matrix(np.ndarray):
    pass


class Wrapped:
    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.array


def unaligned(array: np.ndarray) -> np.ndarray:
    raw = np.zeros(array.nbytes + 1, np.uint8)[1:]
    raw[:] = np.frombuffer(array.tobytes(), np.uint8)
    return raw.view(array.dtype).reshape(array.shape)


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def spaced(array: np.ndarray) -> np.ndarray:
    return np.repeat(array, 3, axis=-1)[..., ::3] if array.ndim else array


LAYOUTS: dict[str, Any] = {
    "plain": lambda a: a,
    "spaced": spaced,
    "fortran": np.asfortranarray,
    "reversed": lambda a: np.ascontiguousarray(a[::-1])[::-1] if a.ndim else a,
    "moved axes": lambda a: np.moveaxis(np.ascontiguousarray(np.moveaxis(a, -1, 0)), 0, -1) if a.ndim > 1 else a,
    "broadcast": lambda a: np.broadcast_to(a, a.shape),
    "swapped": lambda a: a.astype(a.dtype.newbyteorder(">")),
    "swapped and spaced": lambda a: spaced(a.astype(a.dtype.newbyteorder(">"))),
    "unaligned": unaligned,
    "read-only": lambda a: read_only(a.copy()),
    "subclass": lambda a: a.view(Matrix),
    "masked array without a mask": np.ma.masked_array,
    "masked array": lambda a: np.ma.masked_array(a, mask=np.ones(a.shape, bool)),
    "lists": lambda a: a.tolist(),
    "tuples": lambda a: tuple(map(tuple, a.tolist())) if a.ndim == 2 else tuple(a.tolist()) if a.ndim else a.item(),
    "list of arrays": lambda a: list(a) if a.ndim else a[()],
    "scalar": lambda a: a[()],
    "object with __array__": Wrapped,
    "memoryview": lambda a: memoryview(np.ascontiguousarray(a)) if a.ndim and a.dtype.kind != "c" else a,
    "array of objects": lambda a: a.astype(object),
}
TENSORS: dict[str, Any] = {
    "tensor": lambda t: t,
    "tensor with a gradient": lambda t: t.requires_grad_() if t.dtype.is_floating_point else t,
    "negated view of a tensor": lambda t: torch._neg_view(t) if t.dtype is not torch.bool else t,
    "transposed tensor": lambda t: t.T.contiguous().T if t.dim() == 2 else t,
    "strided tensor": lambda t: torch.repeat_interleave(t, 2, -1)[..., ::2] if t.dim() else t,
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "bfloat16": lambda t: t.bfloat16(),
    "on meta": lambda t: t.to("meta"),
    "conjugated": lambda t: t.conj() if t.dtype.is_complex else t,
}


REFUSED = {"masked array", "array of objects", "negated view of a tensor", "bfloat16", "on meta", "conjugated"}


def fitting(want: str) -> tuple[list[str], list[Any]]:
    """Dtypes and numbers that a field of this dtype takes."""
    kind, order = np.dtype(want).kind, "biufc"
    taken = "iuf" if kind == "b" else "biu" if kind in "iu" else order[: order.index(kind) + 1]
    dtypes = [want, *(name for name in DTYPES if np.dtype(name).kind in taken)]
    if kind == "b":
        return dtypes, [0, 1, True, False]
    if kind in "iu":
        return dtypes, [0, 1, 2, 127, True]
    most = float(np.finfo(want).max)
    return dtypes, [number for number in NUMBERS if abs(number) <= most or not abs(number) <= 1e308]


@st.composite
def arrays(draw: Any, shape: tuple[int, ...], dtypes: list[str], numbers: list[Any], tame: bool = False) -> Any:
    """Numbers of a shape as an array, a list, a number or a tensor; if not tame, some that are refused."""
    if not tame and draw(st.integers(0, 11)) == 0:
        shape = draw(st.sampled_from([(), (1,), (3,), (0,), (2, 2), (*shape, 1), shape[1:], (1, *shape)]))
    count = int(np.prod(shape, dtype=int))
    values = draw(st.lists(st.sampled_from(numbers), min_size=count, max_size=count))
    if draw(st.integers(0, 3)) == 0:  # Python's own numbers, of mixed kinds
        if shape == ():
            return values[0]
        if len(shape) == 1:
            return draw(st.sampled_from([list, tuple]))(values)
        if len(shape) == 2:
            return [values[i * shape[1] : (i + 1) * shape[1]] for i in range(shape[0])]
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    with np.errstate(all="ignore"):
        array = np.zeros(shape, dtype)
        for place, value in zip(np.ndindex(*shape), values, strict=True):
            try:
                array[place] = value
            except (OverflowError, ValueError):  # the number nearest to it
                array[place] = 1
    layouts = [*LAYOUTS, *(TENSORS if torch else [])]
    layout = draw(st.sampled_from([name for name in layouts if not tame or name not in REFUSED]))
    if layout in LAYOUTS:
        return LAYOUTS[layout](array)
    try:
        tensor = torch.from_numpy(array)
    except TypeError:
        return array
    return TENSORS[layout](tensor)


def make(field: sw.Field, done: str, num_envs: int | None) -> sw.ReplayBuffer:
    schema = {"obs": field, "done": sw.Field((), done)}
    return sw.ReplayBuffer(
        12, schema=schema, next_obs=None, seed=3, num_envs=num_envs, sampler=sw.Prioritized(), writers=2
    )


def contents(buffer: sw.ReplayBuffer) -> list[Any]:
    told: list[Any] = [len(buffer), buffer.stats()["episodes"]]
    for batch in buffer.rows():
        told += [(name, value.dtype, bytes_of(value)) for name, value in sorted(batch.items())]
    return told


def bytes_of(array: np.ndarray) -> bytes:
    if array.dtype == np.longdouble and array.itemsize == 16:  # six bytes of each are padding
        return array.view(np.uint8).reshape(-1, 16)[:, :10].tobytes()
    return array.tobytes()


def drawn(buffer: sw.ReplayBuffer) -> Any:
    batch = buffer.sample(4)
    return [(name, bytes_of(value)) for name, value in sorted(batch.items())]


@settings(max_examples=20_000 if SOAK else 400, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_both_ways_of_add_accept_the_same_and_store_the_same(data: Any) -> None:
    draw = data.draw
    own = draw(st.sampled_from([(), (1,), (3,), (2, 3)]), "shape")
    field = sw.Field(own, draw(st.sampled_from(DTYPES), "dtype"), stack=draw(st.sampled_from([1, 1, 1, 2])))
    done = draw(st.sampled_from([*USUAL, "float16"]), "dtype of done")
    lead, num_envs = draw(st.sampled_from([((), None), ((), None), ((3,), None), ((2,), 2), ((2, 2), 2)]), "rows")
    buffer, twin = make(field, done, num_envs), make(field, done, num_envs)
    shape = (*lead, *((field.stack,) if field.stack > 1 and draw(st.booleans()) else ()), *own)
    tame = draw(st.integers(0, 3), "tame") > 0
    kinds = {
        "obs": fitting(field.dtype.name) if tame else (DTYPES, NUMBERS),
        "reward": fitting("float32") if tame else (USUAL, NUMBERS),
        "done": (["bool", "uint8", done], [0, 1, -0.0, True]) if tame else (USUAL, [0, 1, 1.0, -0.0, True, np.nan]),
        "truncated": (["bool", "float32", "int8"], [0, 1, True]),
        "mask": (["bool", "float64", "uint8"], [1, 1.0, 0, True]),
        "priority": ([*USUAL, "float16", "int8"], [0, 1, 0.5, -2.5, 2**24 + 1, True] if tame else NUMBERS),
    }
    given_values: dict[str, Any] = {}
    for name, (dtypes, numbers) in kinds.items():
        if name in ("obs", "reward", "done") or draw(st.integers(0, 2), name) == 0:
            given_values[name] = draw(arrays(shape if name == "obs" else lead, dtypes, numbers, tame), name)
    error = None
    try:
        expected, _, flags, priorities = prepare(
            buffer._rows.spec.schema, 12, num_envs, buffer._rows.spec.order_reason if num_envs is None else None, True,
            (), given_values,
        )  # fmt: skip
    except Exception as raised:  # what a tensor raises itself is passed on
        error = raised
    before = contents(buffer)
    if error is not None:
        with pytest.raises(type(error)) as refused:
            buffer.add(**given_values)
        assert str(refused.value) == str(error)
        assert contents(buffer) == before
        return
    names = [name for name, _ in buffer._rows.spec.schema.leaves]
    came = expected[names.index("reward")].shape  # not `lead` where a reward of another shape was drawn
    options = {"truncated": (flags & 2 != 0).reshape(came), "mask": (flags & 4 == 0).reshape(came)}
    if priorities is not None:
        options["priority"] = priorities.reshape(came)
    try:
        twin.add(**dict(zip(names, expected, strict=True)), **options)
    except SchemaError as error:  # a stack whose frames differ
        with pytest.raises(SchemaError, match=re.escape(str(error))):
            buffer.add(**given_values)
        assert contents(buffer) == before
        return
    buffer.add(**given_values)
    assert contents(buffer) == contents(twin)
    if len(buffer) and np.isfinite(buffer.sample(1)["probabilities"]).all():
        twin.sample(1)
        assert drawn(buffer) == drawn(twin)


@settings(max_examples=4000 if SOAK else 100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_both_ways_of_add_agree_on_ragged_values(data: Any) -> None:
    draw = data.draw
    item = draw(st.sampled_from([(), (2,)]), "item")
    field = sw.Field((3, *item), draw(st.sampled_from(DTYPES), "dtype"), ragged=True)
    buffer, twin = (sw.ReplayBuffer(4, schema={"obs": field}, next_obs=None, seed=3) for _ in range(2))
    rows = draw(st.sampled_from([None, 2]), "rows")
    parts = [draw(arrays((draw(st.integers(0, 3)), *item), DTYPES, NUMBERS), f"part {i}") for i in range(rows or 1)]
    value = parts[0] if rows is None else parts
    reward, ends = (0.0, False) if rows is None else (np.zeros(rows), np.zeros(rows, bool))
    given_values = {"obs": value, "reward": reward, "done": ends}
    error = None
    try:
        expected, *_ = prepare(buffer._rows.spec.schema, 4, None, None, False, (), given_values)
    except Exception as raised:
        error = raised
    if error is not None:
        with pytest.raises(type(error)) as refused:
            buffer.add(**given_values)
        assert str(refused.value) == str(error)
        assert len(buffer) == 0
        return
    buffer.add(**given_values)
    values, starts = expected[[name for name, _ in buffer._rows.spec.schema.leaves].index("obs")]
    cut = [
        values.view(np.uint8)[int(a) : int(b)].view(values.dtype).reshape(-1, *item)
        for a, b in itertools.pairwise(starts)
    ]
    for part in cut:
        twin.add(obs=part, reward=0.0, done=False)
    (batch,), (same,) = buffer.rows(), twin.rows()
    assert bytes_of(batch["obs"]["values"]) == bytes_of(same["obs"]["values"])
    assert batch["obs"]["offsets"].tolist() == same["obs"]["offsets"].tolist()
