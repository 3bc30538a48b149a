"""The decode step of a GPU against plain torch: without graphs on a CPU, as CUDA graphs on a GPU (`-m gpu`)."""

import numpy as np
import pytest
import torch
from engine_references import SAMPLINGS, made, prompt_of, scores_of, states_of

from sharpwave.llm.generators import Engine, Sampling
from sharpwave.llm.generators.decode import EagerDecode
from sharpwave.llm.generators.graph_decode import GraphDecode
from sharpwave.llm.kernels import plain
from sharpwave.llm.kernels.forward import FusedForward
from sharpwave.llm.model import KVCache

HAS_GPU = torch.cuda.is_available()
OPTIONS = [
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    {"model_type": "qwen2", "num_key_value_heads": 1, "tie_word_embeddings": True},
    {"model_type": "qwen3"},
]


def with_graphs(model, **options):
    """An engine that runs what a GPU runs; on a CPU without capturing it."""
    engine = Engine(model, **options)
    if model.device.type == "cpu":
        engine._decode = GraphDecode(model, engine._cache, engine._sampler, engine.chunk, plain)
    assert isinstance(engine._decode, GraphDecode)
    return engine


def answers_of(engine, states=()):
    """Groups, all kinds of sampling, chunks of prompts, more requests than slots, aborts, and swaps in mid-answer."""
    requests = []
    for number, sampling in enumerate(SAMPLINGS.values()):
        requests += engine.submit(prompt_of(1 + 13 * number, number), sampling, n=3)
    requests += engine.submit(prompt_of(5), Sampling(max_tokens=20, temperature=0, ignore_eos=True))
    (aborted,) = engine.submit(prompt_of(6), Sampling(max_tokens=90, ignore_eos=True))
    for version, state in enumerate(states, 1):
        engine.run(15)
        engine.update(state, version, kv=("keep", "recompute")[version % 2])
    engine.abort(aborted)
    engine.run()
    return requests


@pytest.mark.parametrize("options", OPTIONS, ids=lambda one: one["model_type"])
def test_fixed_memory_gives_the_answers_of_plain_torch(options):
    """Token by token; the timelines are equal, too: when a slot works does not depend on how it computes."""
    states = states_of(made(**options), 5)[1:]
    eager, graphs = Engine(made(**options), slots=4, context=120, chunk=40, seed=2), None
    graphs = with_graphs(made(**options), slots=4, context=120, chunk=40, seed=2)
    assert isinstance(eager._decode, EagerDecode)
    for one, other in zip(answers_of(eager, states), answers_of(graphs, states), strict=True):
        assert other.answer.tokens == one.answer.tokens
        assert np.allclose(other.answer.logprobs, one.answer.logprobs, atol=1e-5)
        assert (other.answer.versions, other.answer.stop) == (one.answer.versions, one.answer.stop)
    for one, other in zip(eager.timeline, graphs.timeline, strict=True):
        assert one._replace(began_ns=0, took_ns=0) == other._replace(began_ns=0, took_ns=0)


def test_memory_keeps_its_addresses_through_steps_and_swaps():
    """Otherwise a captured graph would read what is no longer there."""
    engine = with_graphs(made(), slots=3, context=64, chunk=8)
    decode = engine._decode

    def addresses():
        weights = [one.data_ptr() for one in engine.model.parameters()]
        inputs = [one.data_ptr() for one in (*decode._fed.device, decode._drawn, decode._every)]
        settings = [engine._sampler.temperature.data_ptr(), engine._sampler.seed.data_ptr()]
        packed = [
            one.data_ptr() for pair in decode._forward._packed for part in pair for one in part if one is not None
        ]
        return (
            weights,
            inputs,
            settings,
            packed,
            [cache.data_ptr() for cache in (engine._cache.keys, engine._cache.values)],
        )

    before = addresses()
    for version in range(1, 4):
        engine.submit(prompt_of(20, version), Sampling(max_tokens=10, top_k=5), n=3)
        engine.run(6)
        engine.update(dict(made(seed=version).weights()), version)
    engine.run()
    assert addresses() == before
    for (weight, _), layer in zip(
        (pair[0] for pair in decode._forward._packed), engine.model.model.layers, strict=True
    ):
        parts = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        assert torch.equal(weight, torch.cat([part.weight for part in parts]))


def test_idle_rows_change_nothing():
    model = made()
    cache = KVCache(model.config, 3, 32)
    forward = FusedForward(model, cache, plain)
    ids, places = torch.tensor([5, 6, 7]), torch.tensor([32, 4, 32])
    with torch.no_grad():
        forward(ids, torch.arange(3), places)
        assert not cache.keys[:, [0, 2]].any()
        assert cache.keys[:, 1, :, 4].any()
        before = cache.keys.clone()
        alone = forward(torch.tensor([9, 6, 9]), torch.arange(3), places)
        assert torch.equal(alone[1], forward(ids, torch.arange(3), places)[1])
    assert torch.equal(cache.keys, before)


def test_tokens_of_many_prompts_in_one_pass_equal_whole_sequences():
    model = made()
    cache = KVCache(model.config, 3, 64)
    forward = FusedForward(model, cache, plain)
    prompts = [prompt_of(size, size) for size in (17, 1, 9)]
    rows = [(token, slot, place) for slot, prompt in enumerate(prompts) for place, token in enumerate(prompt)]
    rows = [rows[at] for at in np.random.default_rng(0).permutation(len(rows))]  # the order of rows does not matter
    with torch.no_grad():
        hidden = forward(*torch.tensor(rows).T)
        for slot, prompt in enumerate(prompts):
            whole = model.hidden(torch.tensor([prompt]))[0]
            places = [(row, place) for row, (_, its, place) in enumerate(rows) if its == slot]
            for row, place in places:
                assert torch.allclose(hidden[row], whole[place], atol=1e-5)


def test_a_model_that_gives_nan_ends_the_answer_as_an_error():
    engine = with_graphs(made(), slots=2)
    (request,) = engine.submit(prompt_of(4), Sampling(max_tokens=20, ignore_eos=True))
    engine.run(5)
    with torch.no_grad():
        engine.model.model.norm.weight.fill_(float("nan"))
    engine.run()
    assert (request.answer.stop, len(request.answer.tokens)) == ("error", 5)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU here")
@pytest.mark.parametrize("options", OPTIONS, ids=lambda one: one["model_type"])
@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)], ids=["float32", "bfloat16"]
)
def test_graphs_on_a_gpu_give_the_log_probabilities_of_whole_forward_passes(options, dtype, near):
    model = made(initializer_range=0.1, **options).to("cuda", dtype)
    engine = with_graphs(model, slots=4, context=160, chunk=40, seed=2)
    requests = []
    for number, sampling in enumerate(SAMPLINGS.values()):
        requests += engine.submit(prompt_of(1 + 13 * number, number), sampling, n=3)
    engine.run()
    model.cpu()
    for request in requests:
        if dtype is torch.float32 or not request.sampling.is_filtered:  # rounding moves tokens across a filter's border
            assert np.allclose(request.answer.logprobs, scores_of(model, request), atol=near)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU here")
def test_graphs_on_a_gpu_give_the_answers_of_plain_torch_through_swaps():
    states = states_of(made(), 5)[1:]
    eager = Engine(made(), slots=4, context=120, chunk=40, seed=2)
    graphs = with_graphs(made().cuda(), slots=4, context=120, chunk=40, seed=2)
    pairs = list(zip(answers_of(eager, states), answers_of(graphs, states), strict=True))
    same = [one.answer.tokens == other.answer.tokens for one, other in pairs]
    assert np.mean(same) > 0.8, "a token may differ by rounding, and all after it; most answers do not"
    for (one, other), is_same in zip(pairs, same, strict=True):
        if is_same:
            assert np.allclose(other.answer.logprobs, one.answer.logprobs, atol=1e-3)
            assert other.answer.versions == one.answer.versions
