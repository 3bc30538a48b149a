"""What goes into samples comes out as it was, or is refused: nothing is cast, cut or lost without a word."""

from __future__ import annotations

import asyncio
import copy
import enum
import json
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import SchemaError, SharpwaveError

torch: Any = pytest.importorskip("torch")
from sharpwave.compat import areal  # noqa: E402

Sample = sw.SequenceSample


def whole_numbers(dtype: Any = np.int64) -> Sample:
    return Sample(["x", "y"], {"a": [2, 1]}, {"a": np.array([1, 2, 3], dtype)}, metadata={"m": [1, 2]})


# ---- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("int64", float("nan")), ("int64", float("inf")), ("int64", 0.5), ("int64", 2**63), ("uint8", 256),
        ("uint8", -1), ("int8", 200), ("float32", 1e300), ("float16", 70000), ("bool", 2), ("int64", "0"),
        ("int64", None), ("int64", 1j), ("float32", [1.0]), ("float32", 1j),
    ],
)  # fmt: skip
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_padding_that_the_dtype_does_not_hold_is_refused(library: str, dtype: str, value: Any) -> None:
    data: Any = np.ones(3, dtype) if library == "numpy" else torch.ones(3, dtype=getattr(torch, dtype))
    sample = Sample(["x", "y"], {"a": [2, 1]}, {"a": data})
    with pytest.raises(SchemaError, match=r"pad\(\): value: expected a number that .* of key 'a' holds, got"):
        sample.pad("a", value)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("int64", -100), ("int64", 3.0), ("int64", np.int8(3)), ("uint8", 255), ("float32", float("nan")),
     ("float32", float("-inf")), ("float32", 1), ("bool", False), ("bool", 1), ("int64", np.array(7))],
)  # fmt: skip
def test_padding_that_the_dtype_holds_is_what_is_there(dtype: str, value: Any) -> None:
    padded, mask = Sample(["x", "y"], {"a": [2, 1]}, {"a": np.ones(3, dtype)}).pad("a", value)
    np.testing.assert_array_equal(padded[~mask], np.array([value], dtype))


# ---- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "data"),
    [
        ("int64", [0.9]), ("int64", [2**63]), ("uint8", [300]), ("int8", [-129]), ("uint64", [-1]), ("int64", [True]),
        ("int64", ["1"]), ("int64", [None]), ("float32", [1e300]), ("float16", [1e300, float("inf")]), ("bool", [1]),
        ("float32", [float("nan"), 1e300]), ("float32", [2**24 + 1]), ("torch.int64", [0.9]), ("torch.bool", [2]),
        ("torch.float32", [1e300]), ("torch.bfloat16", [257]), ("int64", [[1], [2, 3]]), ("int64", [[1, 2]]),
        ("int64", 3), ("int64", {"0": 1}),
    ],
)  # fmt: skip
def test_json_that_the_dtype_does_not_hold_is_refused(dtype: str, data: Any) -> None:
    document = {
        "ids": ["x"], "seqlens": {"a": [[1]]}, "trailing_shapes": {"a": []}, "dtypes": {"a": dtype},
        "data": {"a": data}, "metadata": {},
    }  # fmt: skip
    with pytest.raises(SchemaError):
        Sample.from_json(document)


@pytest.mark.parametrize("name", ["int64", "uint64", "uint8", "float64", "float32", "float16", "bool"])
def test_json_round_trips_hold_extremes(name: str) -> None:
    dtype = np.dtype(name)
    if dtype.kind in "iu":
        values = np.array([np.iinfo(dtype).min, 0, np.iinfo(dtype).max], dtype)
    elif dtype.kind == "f":
        values = np.array([np.finfo(dtype).min, np.nan, np.inf, np.finfo(dtype).max, 0.1], dtype)
    else:
        values = np.array([True, False])
    sample = Sample(["x"], {"a": [len(values)]}, {"a": values})
    assert Sample.from_json(json.loads(json.dumps(sample.to_json()))) == sample
    empty = Sample(["x"], {"a": [0]}, {"a": values[:0]})
    assert Sample.from_json(empty.to_json()) == empty


def test_masked_arrays_are_refused() -> None:
    with pytest.raises(SchemaError, match=r"without a mask, which would be lost; take filled\(\)"):
        Sample(["x"], {"a": [2]}, {"a": np.ma.masked_array([1, 2], [True, False])})


# ---- writes into a sample --------------------------------------------------------------------------------------------


def test_writes_into_a_sample_are_refused_not_lost() -> None:
    sample = whole_numbers()
    before = copy.deepcopy(sample.to_json())
    writes: list[Callable[[], Any]] = [
        lambda: sample.metadata.__setitem__("scores", [1, 2]),
        lambda: sample.metadata.update(scores=[1, 2]),
        lambda: sample.metadata.pop("m"),
        lambda: sample.metadata["m"].append(3),
        lambda: sample.metadata["m"].__setitem__(0, 3),
        lambda: (sample.data or {}).__setitem__("a", np.ones(3)),
        lambda: sample.seqlens.__setitem__("a", [[3]]),
        lambda: sample.seqlens["a"].append([1]),
        lambda: sample.seqlens["a"][0].__setitem__(0, 7),
        lambda: sample.ids.append("z"),
        lambda: sample.dtypes.clear(),
        lambda: sample.trailing_shapes.setdefault("z", ()),
    ]
    for write in writes:
        with pytest.raises(SchemaError, match="sample"):
            write()
    assert sample.to_json() == before
    assert (sample.ids, sample.seqlens, sample.metadata) == (["x", "y"], {"a": [[2], [1]]}, {"m": [1, 2]})
    for copied in (copy.deepcopy(sample.metadata), pickle.loads(pickle.dumps(sample.metadata)), dict(sample.metadata)):
        copied["more"] = [3, 4]  # a copy is the caller's own
        assert type(copied) is dict


def areal_sample() -> areal.SequenceSample:
    return areal.SequenceSample(
        ids=["x", "y"], seqlens={"a": [2, 1]}, data={"a": torch.arange(3)}, metadata={"m": [1, 2]}
    )


def test_areal_metadata_and_data_are_stored() -> None:
    sample = areal_sample()
    other = sample.select(["a"])  # shares what it holds
    sample.metadata["scores"] = [0.5, 1.5]
    sample.metadata.update(more=[3, 4])
    del sample.metadata["m"]
    assert sample.metadata == {"scores": [0.5, 1.5], "more": [3, 4]}
    assert sample.metadata.pop("more") == [3, 4]
    assert sample.metadata.setdefault("scores", [9, 9]) == [0.5, 1.5]
    assert sample.unpack()[1].metadata == {"scores": [1.5]}
    assert sample.data is not None
    sample.data["a"] = torch.ones(3, 2)
    assert (sample["a"].shape, sample.trailing_shapes) == ((3, 2), {"a": (2,)})
    assert (other.metadata, other["a"].tolist()) == ({"m": [1, 2]}, [0, 1, 2])


def test_areal_writes_that_do_not_fit_are_refused() -> None:
    sample = areal_sample()
    writes: list[Callable[[], Any]] = [
        lambda: sample.metadata.__setitem__("scores", [1]),
        lambda: sample.metadata.__setitem__("scores", 3),
        lambda: sample.metadata["m"].append(3),
        lambda: (sample.data or {}).__setitem__("a", torch.ones(4)),
        lambda: (sample.data or {}).__setitem__("a", "text"),
        lambda: (sample.data or {}).__setitem__("new", torch.ones(3)),
    ]
    for write in writes:
        with pytest.raises(SchemaError):
            write()
    assert sample == areal_sample()


# ---- AReaL's graph, order and buffer ---------------------------------------------------------------------------------


class Upstream(enum.Enum):
    """As AReaL's own: another class, the same values."""

    GENERATE = "generate"
    TRAIN_STEP = "train_step"
    EVALUATE = "evaluate"
    INFERENCE = "inference"


@pytest.mark.parametrize("kind", [areal.ModelInterfaceType, Upstream, str])
def test_calls_know_their_interface_by_value(kind: Any) -> None:
    def is_what(value: str) -> tuple[bool, bool, bool]:
        call = areal.MFCDef("x", 1, kind(value))
        assert call.interface_type == kind(value), "kept as it was given"
        return call.is_generate(), call.is_train(), call.is_inference()

    assert is_what("generate") == (True, False, False)
    assert is_what("train_step") == (False, True, False)
    assert is_what("inference") == (False, False, True)
    assert is_what("evaluate") == (False, False, False)
    with pytest.raises(SchemaError, match="interface_type: expected one of GENERATE"):
        areal.MFCDef("x", 1, "unheard of")


@pytest.mark.parametrize(
    ("output", "lens", "forward", "backward"),
    [
        (np.arange(5), [[2], [1], [3]], [2, 0, 1], [1, 2, 0]),
        (np.arange(7), [[2], [1], [3]], [2, 0, 1], [1, 2, 0]),
        (np.arange(6), [[2], [1]], [2, 0, 1], [1, 2, 0]),
        (np.arange(6), [[2], [1], [3]], [2, 0], [1, 2, 0]),
        (np.arange(6), [[2], [1], [3]], [2, 0, 0], [1, 2, 0]),
        (np.arange(6), [[2], [1], [3]], [2, 0, 1], [2, 0, 1]),
    ],
)
def test_reordering_what_does_not_fit_is_refused(output: Any, lens: Any, forward: Any, backward: Any) -> None:
    with pytest.raises(SchemaError, match=r"reorder_output\(\)"):
        areal.SequenceSample.reorder_output(output, lens, forward, backward)
    good = areal.SequenceSample.reorder_output(np.arange(6), [[2], [1], [3]], [2, 0, 1], [1, 2, 0])
    assert good.tolist() == [3, 4, 5, 0, 1, 2]


def test_areal_buffers_with_a_journal_keep_disk_work_off_the_loop(tmp_path: Path, monkeypatch: Any) -> None:
    import os

    threads = set()
    real = os.pwritev

    def seen(*arguments: Any) -> int:
        threads.add(threading.get_ident())
        return real(*arguments)

    monkeypatch.setattr(os, "pwritev", seen)
    call = areal.MFCDef("train", 1, areal.ModelInterfaceType.TRAIN_STEP, input_keys=("a",))

    def one(name: str) -> areal.SequenceSample:
        return areal.SequenceSample(ids=[name], seqlens={"a": [2]}, data={"a": torch.arange(2)})

    async def run() -> None:
        buffer = areal.AsyncIOSequenceBuffer([call], 10, journal=tmp_path / "journal")
        threads.clear()  # to open a journal is disk work; no verb is
        slots = await buffer.put_batch([one("x"), one("y")])
        await buffer.amend_batch(slots[:1], [one("x")])
        with pytest.raises(sw.errors.StaleHandle, match="expected the id"):
            await buffer.amend_batch(slots[:1], [one("y")])
        with pytest.raises(SchemaError, match="whole numbers"):
            await buffer.amend_batch([0.9], [one("x")])
        got, batch = await buffer.get_batch_for_rpc(call)
        assert (got.tolist(), batch.ids) == ([0], ["x"])
        buffer.close()

    asyncio.run(run())
    assert threads
    assert threading.get_ident() not in threads
    flow = sw.Dataflow([sw.Consumer("train", {"a"}, batch_size=1)])
    assert sw.SequenceBuffer(10, flow=flow, journal=tmp_path / "journal").ids() == ["y"]


# ---- values of every wrong kind --------------------------------------------------------------------------------------

WRONG: list[Any] = [
    None, True, -1, 0, 1.5, float("nan"), 2**70, 1j, "", "text", "\0", b"bytes", [], [None], [1.5], ["a", 1], {},
    {"a": 1}, {1: 2}, {1, 2}, object(), np.array(["text"]), np.array([None]), np.zeros((2, 2)),
    np.array(1.5), int, print,
]  # fmt: skip


def calls_of(sample: Sample) -> dict[str, Callable[[Any], Any]]:
    array = np.arange(3)
    return {
        "ids": lambda x: Sample(x, {"a": [3]}, {"a": array}),
        "seqlens": lambda x: Sample(["x"], x, {"a": array}),
        "lens": lambda x: Sample(["x"], {"a": x}, {"a": array}),
        "data": lambda x: Sample(["x"], {"a": [3]}, x),
        "values": lambda x: Sample(["x"], {"a": [3]}, {"a": x}),
        "trailing_shapes": lambda x: Sample(["x"], {"a": [3]}, {"a": array}, trailing_shapes=x),
        "shape": lambda x: Sample(["x"], {"a": [3]}, {"a": array}, trailing_shapes={"a": x}),
        "dtypes": lambda x: Sample(["x"], {"a": [3]}, {"a": array}, dtypes=x),
        "dtype": lambda x: Sample(["x"], {"a": [3]}, {"a": array}, dtypes={"a": x}),
        "metadata": lambda x: Sample(["x"], {"a": [3]}, {"a": array}, metadata=x),
        "entries": lambda x: Sample(["x"], {"a": [3]}, {"a": array}, metadata={"m": x}),
        "keys": lambda x: Sample(["x"], {"a": [3]}, {"a": array}, keys=x),
        "[]": lambda x: sample[x],
        "gather": lambda x: Sample.gather(x),
        "gather keys": lambda x: Sample.gather([sample], x),
        "split": sample.split,
        "split_by_tokens": sample.split_by_tokens,
        "min_parts": lambda x: sample.split_by_tokens(10, x),
        "reorder": sample.reorder,
        "select": sample.select,
        "update": sample.update,
        "remap": sample.remap,
        "remap to": lambda x: sample.remap({"a": x}),
        "pad": sample.pad,
        "pad value": lambda x: sample.pad("a", x),
        "pad length": lambda x: sample.pad("a", 0, x),
        "pack": lambda x: Sample.pack(["x"], x, np.ones((1, 3), bool)),
        "pack values": lambda x: Sample.pack(["x"], {"a": x}, np.ones((1, 3), bool)),
        "pack mask": lambda x: Sample.pack(["x"], {"a": np.ones((1, 3))}, x),
        "from_json": Sample.from_json,
        "from_json part": lambda x: Sample.from_json({**sample.to_json(), "data": x}),
        "from_json values": lambda x: Sample.from_json({**sample.to_json(), "data": {"a": x}}),
        "from_json lens": lambda x: Sample.from_json({**sample.to_json(), "seqlens": {"a": x}}),
        "from_json dtypes": lambda x: Sample.from_json({**sample.to_json(), "dtypes": {"a": x}}),
        "from_json shapes": lambda x: Sample.from_json({**sample.to_json(), "trailing_shapes": {"a": x}}),
        "from_bytes": Sample.from_bytes,
        "save": lambda x: sample.save(x) if not isinstance(x, (str, bytes)) else None,
        "load": Sample.load,
        "consumer": lambda x: sw.Consumer(x, {"a"}),
        "inputs": lambda x: sw.Consumer("x", x),
        "outputs": lambda x: sw.Consumer("x", {"a"}, x),
        "batch_size": lambda x: sw.Consumer("x", {"a"}, batch_size=x),
        "reuse": lambda x: sw.Consumer("x", {"a"}, reuse=x),
        "window": lambda x: sw.Consumer("x", {"a"}, window=x),
        "group_size": lambda x: sw.Consumer("x", {"a"}, group_size=x),
        "group_timeout": lambda x: sw.Consumer("x", {"a"}, group_size=1, group_timeout=x),
        "dataflow": sw.Dataflow,
    }


@pytest.mark.parametrize("name", calls_of(whole_numbers()))
def test_values_of_a_wrong_kind_are_refused_by_our_own_errors(name: str) -> None:
    sample = whole_numbers()
    before = copy.deepcopy(sample.to_json())
    call = calls_of(sample)[name]
    for value in WRONG:
        try:
            call(value)
        except SharpwaveError:
            pass
        except Exception as error:
            raise AssertionError(f"{name} of {value!r}: {type(error).__name__}: {error}") from error
    assert sample.to_json() == before
