"""SequenceSample and Dataflow: packed data that can be cut, joined, padded and sent, and comes back as it was."""

from __future__ import annotations

import contextlib
import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sharpwave as sw
from sharpwave.errors import SchemaError, StorageError
from sharpwave.sequences.packs import ffd_allocate

torch = pytest.importorskip("torch")
Sample = sw.SequenceSample


def build(lens: dict[str, list[list[int]]], kind: str = "numpy", empty: tuple[str, ...] = (), **more: Any) -> Sample:
    """A sample whose every value follows from its place."""
    data: dict[str, Any] = {}
    for at, (key, rows) in enumerate(lens.items()):
        values = (
            np.arange(sum(map(sum, rows)) * 2).reshape(-1, 2) if at % 2 else np.arange(sum(map(sum, rows)))
        ) + 100 * at
        values = values.astype([np.int64, np.float32][at % 2])
        data[key] = None if key in empty else torch.from_numpy(values) if kind == "torch" else values
    count = len(next(iter(lens.values())))
    meta = {"birth": list(range(count)), "who": [f"w{i}" for i in range(count)]}
    return Sample([f"id{i}" for i in range(count)], lens, data, metadata=meta, **more)


FORMS = {
    "single": {"ids": [[3], [1], [4], [1], [5]]},
    "grouped": {"ids": [[2, 3], [1, 1], [4, 2], [2, 2]], "logp": [[1, 2], [0, 0], [3, 1], [1, 1]]},
    "paired": {"prompt": [[13], [6]], "answers": [[6, 17, 15], [13, 15, 13]], "rewards": [[1, 1, 1], [1, 1, 1]]},
    "ragged groups": {"ids": [[2], [3, 1], [], [4, 4, 4]], "score": [[1], [1, 1], [], [1, 1, 1]]},
}
KINDS = ["numpy", "torch"]


@pytest.fixture(params=[(form, kind) for form in FORMS for kind in KINDS], ids=lambda p: f"{p[0]}, {p[1]}")
def sample(request: pytest.FixtureRequest) -> Sample:
    form, kind = request.param
    return build(FORMS[form], kind)


def test_gather_undoes_every_split(sample: Sample) -> None:
    for parts in range(1, len(sample) + 1):
        cut = sample.split(parts)
        assert len(cut) == parts
        assert Sample.gather(cut) == sample
        sizes = [len(part) for part in cut]
        assert max(sizes) - min(sizes) <= 1
    assert Sample.gather(sample.unpack()) == sample
    assert all(len(part) == 1 for part in sample.unpack())


def test_parts_are_views(sample: Sample) -> None:
    key = next(iter(sample.seqlens))
    whole, part = sample[key], sample.split(1)[0][key]
    assert np.shares_memory(np.asarray(whole), np.asarray(part))


def test_keys_without_values_stay_without() -> None:
    half = build(FORMS["paired"], empty=("answers",))
    assert half["answers"] is None
    assert Sample.gather(half.unpack()) == half
    assert Sample.from_json(json.loads(json.dumps(half.to_json()))) == half
    assert Sample.from_bytes(half.to_bytes()) == half
    meta = half.meta()
    assert meta.data is None
    assert meta.seqlens == half.seqlens
    assert meta.dtypes == half.dtypes
    assert Sample.gather(meta.unpack()) == meta
    assert Sample.from_bytes(meta.to_bytes()) == meta


def test_json_and_safetensors_round_trips(sample: Sample, tmp_path: Any) -> None:
    assert Sample.from_json(json.loads(json.dumps(sample.to_json()))) == sample
    assert Sample.from_bytes(sample.to_bytes()) == sample
    sample.save(tmp_path / "s.safetensors")
    assert Sample.load(tmp_path / "s.safetensors") == sample
    assert [path.name for path in tmp_path.iterdir()] == ["s.safetensors"]


def test_every_reader_of_safetensors_reads_the_arrays(sample: Sample, tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    sample.save(tmp_path / "s")
    read = safetensors.load_file(tmp_path / "s")
    assert set(read) == sample.keys
    for key, value in read.items():
        assert torch.equal(value, torch.as_tensor(sample[key]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "bool", "uint8", "int32", "float64"])
def test_dtypes_survive_files(dtype: str) -> None:
    values = torch.tensor([0, 1, 1, 0, 1]).to(getattr(torch, dtype))
    one = Sample(["a"], {"x": [5]}, {"x": values})
    assert Sample.from_bytes(one.to_bytes()) == one
    assert Sample.from_json(one.to_json()) == one
    assert one != Sample(["a"], {"x": [5]}, {"x": values.double() + 1})


def test_damaged_bytes_are_refused_with_a_reason() -> None:
    raw = build(FORMS["paired"]).to_bytes()
    for cut in (0, 5, 20, len(raw) // 2, len(raw) - 1):
        with pytest.raises(StorageError):
            Sample.from_bytes(raw[:cut])
    huge = (2**60).to_bytes(8, "little") + raw[8:]
    with pytest.raises(StorageError, match="claims"):
        Sample.from_bytes(huge)
    with pytest.raises(StorageError):
        Sample.from_bytes(raw.replace(b'"F32"', b'"F64"'))
    with pytest.raises(StorageError, match="No such file"):
        Sample.load("/nowhere/at/all")


@given(st.binary(max_size=200), st.integers(0, 400))
def test_no_bytes_crash_the_reader(junk: bytes, at: int) -> None:
    raw = bytearray(build(FORMS["grouped"]).to_bytes())
    raw[at : at + len(junk)] = junk
    with contextlib.suppress(StorageError):
        Sample.from_bytes(bytes(raw))


def test_split_by_tokens_bounds_tokens_and_can_be_undone(sample: Sample) -> None:
    heaviest = max(sum(map(sum, rows)) for rows in sample.seqlens.values())
    most = max(sum(row) for rows in sample.seqlens.values() for row in rows)
    for max_tokens in (None, most, most + 1, heaviest):
        for parts in (1, 2):
            made, forward, backward = sample.split_by_tokens(max_tokens, parts)
            assert len(made) >= parts
            key = max(sample.seqlens, key=lambda one: sum(map(sum, sample.seqlens[one])))
            assert all(max_tokens is None or sum(map(sum, part.seqlens[key])) <= max_tokens for part in made)
            joined = Sample.gather(made)
            assert joined.ids == [sample.ids[at] for at in forward]
            assert joined.reorder(backward) == sample
    finest, _, _ = sample.split_by_tokens(None, len(sample))
    assert sorted(one for part in finest for one in part.ids) == sorted(sample.ids)


def test_ffd_allocate_gives_the_known_groups() -> None:
    assert ffd_allocate([100, 1, 1, 1, 1, 1], None, 2) == [[0, 3, 5], [1, 2, 4]]
    assert ffd_allocate([5, 3, 8, 2, 7, 4], None, 3) == [[0, 5], [1, 4], [2, 3]]
    assert ffd_allocate([5, 3, 8, 2, 7, 4], 10, 1) == [[0, 5], [1, 4], [2, 3]]
    sums = [sum([90, 80, 5, 5, 5, 5][at] for at in group) for group in ffd_allocate([90, 80, 5, 5, 5, 5], 100, 2)]
    assert sorted(sums) == [90, 100]
    with pytest.raises(SchemaError, match="item 1 has 12, the capacity is 10"):
        ffd_allocate([5, 12], 10, 1)
    with pytest.raises(SchemaError, match="expected at least 3 items"):
        ffd_allocate([5, 2], 10, 3)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 5), st.none() | st.integers(50, 80))
def test_ffd_allocate_places_each_item_once_within_bounds(lens: list[int], groups: int, capacity: int | None) -> None:
    if groups > len(lens):
        return
    made = ffd_allocate(lens, capacity, groups)
    assert sorted(at for group in made for at in group) == list(range(len(lens)))
    assert len(made) >= groups
    assert all(capacity is None or sum(lens[at] for at in group) <= capacity for group in made)


@pytest.mark.parametrize("kind", KINDS)
def test_pad_and_pack_undo_each_other(kind: str) -> None:
    one = build({"ids": [[3], [1], [4]], "logp": [[3], [1], [4]]}, kind)
    padded, mask = one.pad("ids", value=-1)
    assert tuple(padded.shape) == tuple(mask.shape) == (3, 4)
    assert padded[1].tolist() == [3, -1, -1, -1]
    logp, _ = one.pad("logp")
    again = Sample.pack(one.ids, {"ids": padded, "logp": logp}, mask)
    assert again == Sample(one.ids, one.seqlens, one.data)
    assert one.pad("ids", length=6)[0].shape[1] == 6
    with pytest.raises(SchemaError, match="length"):
        one.pad("ids", length=2)
    with pytest.raises(SchemaError, match="values first"):
        Sample.pack(one.ids, {"ids": padded}, mask[:, ::-1] if kind == "numpy" else mask.flip(1))


def test_select_update_remap() -> None:
    one = build(FORMS["paired"])
    assert one.select(["prompt"]).keys == {"prompt"}
    other = Sample(one.ids, {"prompt": [1, 1], "extra": [1, 1]}, {"prompt": np.zeros(2), "extra": np.ones(2)})
    both = one.update(other)
    assert both.keys == {"prompt", "answers", "rewards", "extra"}
    assert both["prompt"].tolist() == [0, 0], "the newcomer wins"
    assert one["prompt"][0] == 0
    assert one.seqlens["prompt"] == [[13], [6]], "a sample is never changed"
    assert one.remap({"prompt": "question"}).keys == {"question", "answers", "rewards"}
    with pytest.raises(SchemaError, match="ids"):
        one.update(Sample(["other", "ids"], {"x": [1, 1]}))
    with pytest.raises(SchemaError, match="more than once"):
        one.remap({"prompt": "answers"})
    with pytest.raises(SchemaError, match="has the keys answers, prompt, rewards"):
        one.select(["nothing"])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "duplicate ids": ({"ids": ["a", "a"]}, "got 'a' more than once"),
    "no ids": ({"ids": [], "seqlens": {}, "data": None}, "at least one"),
    "other keys": ({"data": {"y": np.zeros(3)}}, r"expected the keys \['x'\], got \['y'\]"),
    "too few lengths": ({"seqlens": {"x": [3]}}, "expected a list of 2"),
    "lengths that are no numbers": ({"seqlens": {"x": [1.0, 2]}}, "a list of lengths"),
    "negative lengths": ({"seqlens": {"x": [[-1], [4]]}}, "0 or more, got -1"),
    "wrong shape": ({"data": {"x": np.zeros(4)}}, r"expected shape \(3, ...\), the sum of its seqlens, got \(4,\)"),
    "wrong trailing shape": ({"trailing_shapes": {"x": (2,)}}, r"expected shape \(3, 2\)"),
    "wrong dtype": ({"dtypes": {"x": "int64"}}, "expected int64 as .* says, got float64"),
    "objects": ({"data": {"x": np.array([None] * 3)}}, "Python objects"),
    "lists": ({"data": {"x": [1, 2, 3]}}, "got list"),
    "short metadata": ({"metadata": {"m": [1]}}, "expected a list of 2"),
    "metadata that is no list": ({"metadata": {"m": 7}}, "expected a list of 2"),
    "keys that are not those": ({"keys": ["z"]}, "expected the keys"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str) -> None:
    change, words = BAD[name]
    good: dict[str, Any] = {"ids": ["a", "b"], "seqlens": {"x": [1, 2]}, "data": {"x": np.zeros(3)}}
    Sample(**good)
    with pytest.raises(SchemaError, match=words):
        Sample(**{**good, **change})


def test_gather_refuses_what_differs() -> None:
    one = Sample(["a"], {"x": [1]}, {"x": np.zeros(1)})
    for other in (
        Sample(["b"], {"x": [1]}, {"x": np.zeros(1, np.int32)}),
        Sample(["b"], {"x": [1]}, {"x": np.zeros((1, 2))}),
        Sample(["b"], {"x": [1]}),
        Sample(["b"], {"y": [1]}),
        one,
    ):
        with pytest.raises(SchemaError, match=r"gather\(\)"):
            Sample.gather([one, other])


# ---- the graph -------------------------------------------------------------------------------------------------------


def ppo() -> sw.Dataflow:
    made = {"ids", "logp", "mask"}
    return sw.Dataflow(
        [
            sw.Consumer("actor_gen", {"prompts"}, made, 8),
            sw.Consumer("rew_inf", {"ids"}, {"rewards"}, 8),
            sw.Consumer("ref_inf", {"ids"}, {"ref_logp"}, 8),
            sw.Consumer("critic_inf", {"ids", "mask"}, {"values"}, 8),
            sw.Consumer("actor_train", {*made, "rewards", "ref_logp", "values"}, batch_size=8),
            sw.Consumer("critic_train", {*made, "rewards", "ref_logp", "values"}, batch_size=8),
        ]
    )


def test_ppo_graph_has_the_right_edges() -> None:
    flow = ppo()
    assert (flow.sources, flow.sinks) == (["actor_gen"], ["actor_train", "critic_train"])
    assert flow.given_keys == {"prompts"}
    assert flow.successors("actor_gen") == ["rew_inf", "ref_inf", "critic_inf", "actor_train", "critic_train"]
    assert flow.successors("actor_train") == []
    assert flow.parents("actor_train") == ["actor_gen", "rew_inf", "ref_inf", "critic_inf"]
    assert flow.edges["actor_gen", "critic_inf"] == {"ids", "mask"}
    assert len(flow.edges) == 3 + 2 * 4
    assert flow.order[0] == "actor_gen"
    assert pickle.loads(pickle.dumps(flow)).edges == flow.edges


def test_reinforce_graph() -> None:
    flow = sw.Dataflow(
        [
            sw.Consumer("sample_gen", {"prompts"}, {"ids"}),
            sw.Consumer("greedy_gen", {"prompts"}, {"greedy_ids"}),
            sw.Consumer("sample_rew", {"ids"}, {"rewards"}),
            sw.Consumer("greedy_rew", {"greedy_ids"}, {"greedy_rewards"}),
            sw.Consumer("train", {"ids", "rewards", "greedy_rewards"}),
        ]
    )
    assert (flow.sources, flow.sinks) == (["sample_gen", "greedy_gen"], ["train"])
    assert flow.successors("greedy_gen") == ["greedy_rew", "train"]
    assert len(flow.edges) == 5


C = sw.Consumer
BAD_FLOWS: dict[str, tuple[Any, str]] = {
    "nobody": (lambda: [], "at least one"),
    "a name twice": (lambda: [C("a"), C("a")], "got 'a' twice"),
    "a key twice": (lambda: [C("a", outputs={"x"}), C("b", outputs={"x"})], "made by 'a' and by 'b'"),
    "a circle": (lambda: [C("a", {"y"}, {"x"}), C("b", {"x"}, {"y"})], "a, b wait for each other"),
    "itself": (lambda: [C("a", {"x"}, {"x"})], "circle"),
    "no consumer": (lambda: ["a"], "expected consumers"),
    "no name": (lambda: [C("")], "expected text"),
    "text for keys": (lambda: [C("a", "xy")], "got the text 'xy'"),
    "no batch": (lambda: [C("a", batch_size=0)], "batch_size"),
    "a small window": (lambda: [C("a", batch_size=4, window=3)], "window"),
    "an odd batch of groups": (lambda: [C("a", batch_size=4, group_size=3)], "multiple of group_size=3"),
    "window and groups": (lambda: [C("a", batch_size=4, group_size=2, window=8)], "exclude each other"),
    "a group's time without groups": (lambda: [C("a", group_timeout=1)], "needs group_size="),
}


@pytest.mark.parametrize("name", BAD_FLOWS)
def test_bad_graphs_are_refused(name: str) -> None:
    make, words = BAD_FLOWS[name]
    with pytest.raises(SchemaError, match=words):
        sw.Dataflow(make())
