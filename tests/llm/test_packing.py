"""Packing: every token in one place, rows of one shape, and the same log-probabilities as each sequence alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from sharpwave.errors import SchemaError
from sharpwave.llm.model import ValueModel, small_model
from sharpwave.llm.model.visibility import flex_visibility
from sharpwave.llm.packing import Packing
from sharpwave.llm.scorer import Scorer

torch.set_num_threads(1)


@given(st.lists(st.integers(1, 32), max_size=60), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_every_token_has_one_place_and_sequences_stay_whole(lens, multiple):
    packing = Packing.of(lens, row_tokens=32, multiple=multiple)
    values = np.arange(1, sum(lens) + 1)
    packed = packing.place(values)
    assert packed.shape == packing.shape == packing.segments.shape
    assert packing.rows % multiple == 0
    assert np.array_equal(packing.take(packed), values)
    assert np.array_equal(np.sort(packed[packed > 0]), values)
    assert np.array_equal(packing.segments > 0, packed > 0)
    at = 0
    for row, start, length in zip(packing.row, packing.start, lens, strict=True):
        own = slice(start, start + length)
        assert packed[row, own].tolist() == values[at : at + length].tolist()
        assert packing.positions[row, own].tolist() == list(range(length))
        assert len(set(packing.segments[row, own].tolist())) == 1
        at += length
    for segments in packing.segments:
        used = segments[segments > 0]
        assert sorted(set(used.tolist())) == list(range(1, len(set(used.tolist())) + 1))


@given(st.lists(st.integers(1, 32), min_size=1, max_size=60))
@settings(max_examples=200, deadline=None)
def test_no_two_rows_could_be_one(lens):
    """So all rows but one are more than half full."""
    packing = Packing.of(lens, row_tokens=32)
    held = np.bincount(packing.row, packing.lens, packing.rows)
    assert packing.rows >= -(-sum(lens) // 32)
    assert held.sum() == sum(lens)
    assert len(held) == 1 or np.sort(held)[:2].sum() > 32


def test_a_long_tail_of_lengths_leaves_little_padding():
    lens = np.minimum(np.random.default_rng(0).lognormal(4, 1, 1000).astype(int) + 1, 900)
    assert Packing.of(lens, row_tokens=4096).fill > 0.97


def test_a_sequence_longer_than_a_row_is_refused():
    with pytest.raises(SchemaError, match="sequence 1 has 9 tokens, row_tokens=8; raise row_tokens="):
        Packing.of([3, 9], row_tokens=8)


def flat_ids(lens, seed=0):
    return np.random.default_rng(seed).integers(0, 259, int(np.sum(lens)))


def alone(model, ids, lens, temperature=1.0):
    made, at = [], 0
    for length in lens:
        own = torch.from_numpy(ids[at : at + length])[None]
        every = torch.log_softmax(model(own).double() / temperature, -1)
        made.append(torch.cat([torch.zeros(1), every[0, :-1].gather(-1, own[0, 1:, None])[:, 0]]))
        at += length
    return torch.cat(made).numpy()


@pytest.mark.parametrize(("model_type", "temperature"), [("qwen3", 1.0), ("llama", 0.7)])
def test_packed_log_probabilities_are_those_of_each_sequence_alone(model_type, temperature):
    model = small_model(model_type)
    lens = [5, 17, 1, 30, 9, 2, 2, 24, 31, 12]
    ids = flat_ids(lens)
    scorer = Scorer(model, row_tokens=32, rows=3, temperature=temperature, head_tokens=40)
    with torch.no_grad():
        expected = alone(model, ids, lens, temperature)
    assert np.abs(scorer.flat(ids, np.array(lens)) - expected).max() < 1e-5


def test_every_pass_has_the_same_shape():
    model, shapes = small_model(), set()
    hidden = model.hidden
    model.hidden = lambda ids, *more: shapes.add(tuple(ids.shape)) or hidden(ids, *more)
    scorer = Scorer(model, row_tokens=32, rows=2)
    for seed in range(5):
        lens = np.random.default_rng(seed).integers(1, 33, seed + 1)
        assert len(scorer.flat(flat_ids(lens), lens)) == lens.sum()
    assert shapes == {(2, 32)}
    assert scorer.flat(flat_ids([]), np.zeros(0, np.int64)).shape == (0,)


def test_flex_attention_sees_what_the_mask_lets_see():
    model, lens = small_model(), np.array([100, 40, 90, 128, 3])
    ids = flat_ids(lens)
    dense = Scorer(model, row_tokens=256, rows=2).flat(ids, lens)
    model.packed_attention = "flex"
    with pytest.warns(UserWarning, match="flex_attention called without torch.compile"):
        flex = Scorer(model, row_tokens=256, rows=2).flat(ids, lens)
    assert np.abs(dense - flex).max() < 1e-5


def test_values_are_those_of_the_state_in_which_a_token_was_chosen():
    model = ValueModel.like(small_model())
    assert {name.removeprefix("transformer.") for name, _ in model.named_parameters()} == {
        *(name for name, _ in small_model().named_parameters() if name != "lm_head.weight"),
        "value_head.weight",
        "value_head.bias",
    }
    # Values of about 1, always the same: the bound below is absolute.
    torch.nn.init.normal_(model.value_head.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    lens = [4, 6]
    ids = flat_ids(lens)
    made = Scorer(model, row_tokens=16, rows=1).flat(ids, np.array(lens))
    with torch.no_grad():
        first, second = (model(torch.from_numpy(part)[None])[0] for part in (ids[:4], ids[4:]))
    expected = torch.cat([torch.zeros(1), first[:-1], torch.zeros(1), second[:-1]])
    assert np.abs(made - expected.numpy()).max() < 1e-5


@given(
    st.lists(st.lists(st.integers(1, 300), max_size=6), min_size=1, max_size=3), st.sampled_from([64, 128, 200, 384])
)
@settings(max_examples=40)
def test_blocks_are_those_that_a_look_at_all_pairs_finds(rows, time):
    segments = torch.zeros(len(rows), time, dtype=torch.long)
    for row, lens in enumerate(rows):
        at = 0
        for number, length in enumerate(lens, 1):
            segments[row, at : at + length] = number
            at += length

    def sees(row, head, query, key):
        return (query >= key) & (segments[row, query] == segments[row, key])

    found = flex_visibility(segments)
    wanted = create_block_mask(sees, len(rows), None, time, time, device="cpu")
    assert torch.equal(found.to_dense(), wanted.to_dense())
    if time % 128 == 0:
        assert torch.equal(found.full_kv_num_blocks, wanted.full_kv_num_blocks)
