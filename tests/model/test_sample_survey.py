"""What the engine says of many samples in one step, against the same said slowly, one sample after the other."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sharpwave as sw
from sharpwave import _core
from sharpwave.sequences.safetensors import encode_arrays

_DTYPES = st.sampled_from(["<i8", "<f4", "?", "<f2"])


@st.composite
def samples(draw: st.DrawFn) -> list[sw.SequenceSample]:
    made = []
    for at in range(draw(st.integers(0, 12))):
        keys = draw(st.lists(st.sampled_from("abc"), unique=True, max_size=3))
        lens = {key: [draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))] for key in keys}
        shapes = {key: draw(st.sampled_from([(), (2,)])) for key in keys}
        data = {key: np.ones((sum(lens[key][0]), *shapes[key]), draw(_DTYPES)) for key in keys}
        described = draw(st.booleans())
        metadata = {"m": [at]} if draw(st.booleans()) else None
        kept: Any = None if described else data
        options: Any = (
            {"trailing_shapes": shapes, "dtypes": {key: data[key].dtype for key in keys}} if described else {}
        )
        made.append(sw.SequenceSample([f"{at}"], lens, kept, metadata=metadata, **options))
    return made


def form(sample: sw.SequenceSample) -> Any:
    columns = {key: (column.shape, column.dtype, column.data is None) for key, column in sample._columns.items()}
    return columns, set(sample.metadata)


@given(samples())
def test_survey_is_that_of_each_sample(given: list[sw.SequenceSample]) -> None:
    found = _core.survey_samples(given, sw.SequenceSample)
    assert found is not None
    ids, tokens, nbytes, ends = found
    assert ids == [one.ids[0] for one in given]
    assert tokens == [one.tokens for one in given]
    assert nbytes == [one.nbytes for one in given]
    assert ends == [at for at in range(1, len(given) + 1) if at == len(given) or form(given[at]) != form(given[at - 1])]


def test_survey_is_left_to_python_where_a_sample_has_several_data_or_is_none() -> None:
    one = sw.SequenceSample(["a"], {"k": [1]}, {"k": np.ones(1)})
    two = sw.SequenceSample(["b", "c"], {"k": [1, 1]}, {"k": np.ones(2)})
    assert _core.survey_samples([one, two], sw.SequenceSample) is None
    assert _core.survey_samples([one, "x"], sw.SequenceSample) is None


_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers(-(2**70), 2**70) | st.text() | st.text('abc"\\\x1f\x7f ~'), lambda inner: st.lists(inner)
)


@given(_JSON)
def test_json_is_that_of_the_standard_library(value: Any) -> None:
    assert _core.to_json(value) == json.dumps(value, separators=(",", ":"))


@pytest.mark.parametrize("value", [1.5, True, (1,), {"a": 1}, b"a"])
def test_json_of_other_kinds_is_refused(value: Any) -> None:
    with pytest.raises(TypeError):
        _core.to_json([value])


def test_a_described_key_has_no_piece_and_its_lengths_are_kept() -> None:
    described = sw.SequenceSample(["a"], {"k": [[2, 3]]}, None, trailing_shapes={"k": (4,)}, dtypes={"k": "float32"})
    assert len(encode_arrays([described], ["a"])) == 1
    assert sw.SequenceSample.from_bytes(described.to_bytes()) == described


def test_put_looks_at_its_own_ids_and_not_at_all_that_are_held() -> None:
    class Held(dict[Any, Any]):
        def __iter__(self) -> Any:
            raise AssertionError("a put that costs more the more is held")

    seq = sw.SequenceBuffer(100, flow=sw.Dataflow([sw.Consumer("train", {"k"}, batch_size=1)]))
    made = [sw.SequenceSample([f"{at}"], {"k": [1]}, {"k": np.ones(1)}) for at in range(40)]
    seq.put(made[:30])
    index = seq._store.index
    index.by_id = Held(index.by_id)
    seq.put(made[30:32])
    with pytest.raises(sw.errors.SchemaError, match="'7': held already"):
        seq.put([made[32], made[7]])
    assert len(seq) == 32


def test_samples_that_left_are_kept_by_no_reference() -> None:
    values = np.ones(3)
    seq = sw.SequenceBuffer(100, flow=sw.Dataflow([sw.Consumer("train", {"k"}, batch_size=5)]))
    before = sys.getrefcount(values)
    for turn in range(50):
        seq.put([sw.SequenceSample([f"{turn}-{at}"], {"k": [3]}, {"k": values}) for at in range(5)])
        with seq.get("train"):
            pass
    assert sys.getrefcount(values) <= before + 8  # the line keeps the places of some that left
    seq.close()
