"""The engine against whole forward passes of the model: what it draws, what it reports, and when its slots work."""

import heapq
import threading
from itertools import chain

import numpy as np
import pytest
import torch
from patience import HANG_S

from sharpwave.errors import SchemaError, StorageError
from sharpwave.llm.generators import Engine, Sampling
from sharpwave.llm.generators.sampler import Sampler
from sharpwave.llm.model import KVCache, load_state, save_model, small_model, small_tokenizer
from sharpwave.llm.weights import Weights

VOCABULARY = 40


def made(**changes):
    given = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "head_dim": 8,
        "initializer_range": 0.2,
    }
    return small_model(**{**given, "max_position_embeddings": 160, **changes})


def prompt_of(size, seed=0):
    return np.random.default_rng(seed).integers(3, VOCABULARY, size).tolist()


def states_of(model, count):
    """Versions of weights that differ much."""
    state = {name: tensor.clone() for name, tensor in model.weights()}
    source = torch.Generator().manual_seed(5)
    made = [state]
    for _ in range(count - 1):
        made.append({n: t + torch.randn(t.shape, generator=source) * 0.05 for n, t in state.items()})
    return made


def filtered(logits, sampling):
    """The slow, obvious filter: log-probabilities over the vocabulary, -inf where a token cannot be drawn."""
    logits = np.asarray(logits, np.float64) / sampling.temperature
    chances = np.exp(logits - logits.max())
    order = np.argsort(-chances, kind="stable")
    if sampling.top_k:
        chances[order[sampling.top_k :]] = 0
    chances /= chances.sum()
    if sampling.top_p < 1:
        before = np.cumsum(chances[order]) - chances[order]
        chances[order[before >= sampling.top_p]] = 0
    chances[chances < sampling.min_p * chances.max()] = 0
    with np.errstate(divide="ignore"):
        return np.log(chances / chances.sum())


@torch.no_grad()
def scores_of(model, request):
    """Log-probabilities of an answer by one whole forward pass."""
    whole = torch.tensor([[*request.prompt.tolist(), *request.answer.tokens]])
    logits = model(whole)[0, len(request.prompt) - 1 : -1].float()
    return [filtered(row, request.sampling)[token] for row, token in zip(logits, request.answer.tokens, strict=True)]


SAMPLINGS = {
    "plain": Sampling(max_tokens=30),
    "temperature": Sampling(max_tokens=30, temperature=0.6),
    "top-k": Sampling(max_tokens=30, top_k=5),
    "top-p": Sampling(max_tokens=30, top_p=0.7),
    "min-p": Sampling(max_tokens=30, min_p=0.2),
    "all": Sampling(max_tokens=30, temperature=1.5, top_k=12, top_p=0.9, min_p=0.05),
}


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_log_probabilities_equal_a_whole_forward_pass(model_type):
    engine = Engine(made(model_type=model_type), slots=3, context=120, chunk=7)
    requests = []
    for number, sampling in enumerate(SAMPLINGS.values()):
        requests += engine.submit(prompt_of(1 + 13 * number, number), sampling, n=2)
    engine.run()
    for request in requests:
        assert len(request.answer.tokens) == len(request.answer.logprobs) == len(request.answer.versions) > 0
        assert np.allclose(request.answer.logprobs, scores_of(engine.model, request), atol=1e-4)
    assert engine.step() == []


def test_log_probabilities_in_bfloat16_equal_a_whole_forward_pass():
    engine = Engine(made(initializer_range=0.1).bfloat16(), slots=3, context=120, chunk=7)
    requests = [engine.submit(prompt_of(11 * n + 3, n), Sampling(max_tokens=60, ignore_eos=True))[0] for n in range(5)]
    engine.run()
    for request in requests:
        assert np.allclose(request.answer.logprobs, scores_of(engine.model, request), atol=2e-2)


def test_every_swap_that_recomputes_gives_the_log_probabilities_of_its_version():
    model = made()
    states = states_of(model, 4)
    engine = Engine(model, slots=3, context=80, chunk=25)
    requests = [
        engine.submit(prompt_of(size, size), Sampling(max_tokens=40, ignore_eos=True))[0] for size in (3, 9, 30, 17)
    ]
    for version in range(1, 12):
        engine.run(9)
        engine.update(states[version % 4], version, kv="recompute")
    engine.run()
    crossed = 0
    for request in requests:
        answer = request.answer
        assert answer.stop == "length"
        assert len(answer.tokens) == 40
        assert answer.versions == sorted(answer.versions)
        crossed += len(set(answer.versions)) > 2
        for version in set(answer.versions):
            load_state(model, states[version % 4])
            whole = scores_of(model, request)
            made_by = [at for at in range(40) if answer.versions[at] == version]
            assert np.allclose([answer.logprobs[at] for at in made_by], [whole[at] for at in made_by], atol=1e-4)
    assert crossed == 4


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_groups_swaps_and_aborts_gives_right_answers(seed):
    """Small chunks, so that swaps and aborts also come while prompts are half computed or wait for each other."""
    source, model = np.random.default_rng(seed), made(num_hidden_layers=1, tie_word_embeddings=True)
    states, requests, version = states_of(model, 3), [], 0
    engine = Engine(model, slots=4, context=64, chunk=int(source.integers(6, 20)))
    for _ in range(60):
        kind = source.integers(0, 5)
        if kind == 0:
            pieces = [prompt_of(7, int(piece)) for piece in source.integers(0, 2, source.integers(1, 4))]
            settings = Sampling(max_tokens=int(source.integers(1, 20)), ignore_eos=True)
            requests += engine.submit(list(chain(*pieces)), settings, n=int(source.integers(1, 6)))
        elif kind == 1:
            version += 1
            engine.update(states[version % 3], version, kv="recompute")
        elif kind == 2 and requests:
            engine.abort(requests[source.integers(len(requests))])
        else:
            engine.run(int(source.integers(1, 15)))
    engine.run()
    whole = []
    for state in states:
        load_state(model, state)
        whole.append([scores_of(model, request) for request in requests])
    for number, request in enumerate(requests):
        answer = request.answer
        assert answer.versions == sorted(answer.versions)
        assert answer.stop == "abort" or len(answer.tokens) == request.sampling.max_tokens
        wanted = [whole[made_by % 3][number][at] for at, made_by in enumerate(answer.versions)]
        assert np.allclose(answer.logprobs, wanted, atol=1e-4)
    assert not any(step.idle and step.waiting for step in engine.timeline)


@torch.no_grad()
def replayed(model, states, request, prompt_versions):
    """Log-probabilities where each place's keys and values stay as the version that fed it made them."""
    cache, prompt, answer = KVCache(model.config, 1, 160), request.prompt.tolist(), request.answer
    fed, versions = [*prompt, *answer.tokens], [*prompt_versions, *answer.versions]
    found = []
    for place, version in enumerate(versions):
        load_state(model, states[version % len(states)])
        hidden = model.extend(torch.tensor([[fed[place]]]), torch.tensor([[place]]), cache, slot=0)
        if place >= len(prompt) - 1:
            found.append(float(model.logits(hidden)[0, 0].log_softmax(-1)[fed[place + 1]]))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_swaps_that_keep_old_keys_give_the_log_probabilities_of_new_weights_over_them(seed):
    """Swaps also come while prompts are half computed, so a prompt may have keys of several versions."""
    source, model = np.random.default_rng(seed), made(num_hidden_layers=2)
    states, version, slots, ended = states_of(model, 3), 0, {}, []
    engine = Engine(model, slots=3, context=64, chunk=4)
    for round in range(8):
        settings = Sampling(max_tokens=int(source.integers(4, 20)), ignore_eos=True)
        engine.submit(prompt_of(int(source.integers(10, 30)), round), settings, n=int(source.integers(1, 4)))
    while engine.is_busy:
        for request in engine.step():
            row = engine._held._versions[slots[request]]
            ended.append((request, row[: len(request.prompt) - 1].tolist()))
        slots.update((request, slot) for slot, request in enumerate(engine._request) if request is not None)
        if source.integers(3) == 0:
            version += 1
            engine.update(states[version % 3], version)
    assert any(len(set(versions)) > 1 for _, versions in ended), "no swap came while a prompt was being computed"
    for request, versions in ended:
        assert np.allclose(request.answer.logprobs, replayed(model, states, request, versions), atol=1e-4)


def test_a_thousand_swaps_in_mid_answer_lose_and_repeat_nothing():
    model = made(num_hidden_layers=1)
    states = states_of(model, 3)
    engine = Engine(model, slots=8, context=140, timeline=5000)
    first = [engine.submit(prompt_of(5, n), Sampling(max_tokens=100, ignore_eos=True))[0] for n in range(8)]
    later = [engine.submit(prompt_of(5, n), Sampling(max_tokens=130, ignore_eos=True))[0] for n in range(8, 64)]
    version = 0
    while version < 1000:
        engine.step()
        version += 1
        engine.update(states[version % 3], version)
    engine.run()
    for request in [*first, *later]:
        answer = request.answer
        assert answer.stop == "length"
        assert len(answer.tokens) == len(answer.logprobs) == len(answer.versions) == request.sampling.max_tokens
        # One token a step and one swap between two steps: a lost or repeated token would show as a gap or a twin.
        numbers = [one for one in answer.versions if one < 1000]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert {one for request in [*first, *later] for one in request.versions} >= set(range(1000))
    for request in first[:3]:
        assert np.allclose(request.answer.logprobs, replayed(model, states, request, [0] * 4), atol=1e-4)


def test_an_update_from_another_thread_comes_between_two_steps():
    model = made(num_hidden_layers=1)
    states = states_of(model, 2)
    engine = Engine(model, slots=2, context=140)
    done = threading.Event()

    def update():
        for version in range(1, 41):
            engine.update(states[version % 2], version)
        done.set()

    thread = threading.Thread(target=update)
    thread.start()
    requests = []
    while not done.is_set():
        if not engine.is_busy:
            requests += engine.submit(prompt_of(4), Sampling(max_tokens=60, ignore_eos=True), n=2)
        engine.step()
    thread.join(HANG_S)
    engine.run()
    assert engine.version == 40
    for request in requests:
        assert len(request.answer.tokens) == 60
        assert request.answer.versions == sorted(request.answer.versions)


def test_weights_that_do_not_fit_leave_the_old_ones(tmp_path):
    model = made()
    engine = Engine(model, slots=1, version=3)
    before = {name: tensor.clone() for name, tensor in model.weights()}
    nan = {**before, "model.norm.weight": torch.full((32,), float("nan"))}
    for state, version, error, message in [
        (before, 3, SchemaError, "version=3, but the engine has 3; versions only grow"),
        (before, None, SchemaError, "version=None, but the engine has 3"),
        (nan, 4, SchemaError, r"model\.norm\.weight has values that are NaN or infinite; the old weights stay"),
        ({"a": torch.zeros(1)}, 4, SchemaError, "missing; the model has"),
        (tmp_path / "nothing", 4, StorageError, "has neither model.safetensors nor"),
    ]:
        with pytest.raises(error, match=message):
            engine.update(state, version)
    with pytest.raises(SchemaError, match="kv='flush', expected 'keep' or 'recompute'"):
        engine.update(before, 4, kv="flush")
    assert engine.version == 3
    assert all(torch.equal(before[name], tensor) for name, tensor in model.weights())


def test_published_weights_and_folders_go_in(tmp_path):
    model, other = made(), made(seed=9)
    engine = Engine(model, slots=1)
    engine.update(Weights(tmp_path / "weights").publish(other, 7))
    assert engine.version == 7
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    save_model(made(seed=2), tmp_path / "folder")
    engine.update(tmp_path / "folder", 8)
    assert torch.equal(model.model.norm.weight, torch.ones(32))
    assert torch.equal(next(model.parameters()), next(made(seed=2).parameters()))


def surprise(counts, chances):
    """Pearson's chi-square as standard deviations above its mean; rare tokens are taken together."""
    expected = chances * counts.sum()
    rare = expected < 5
    assert not counts[chances == 0].any(), "a token that the filter excludes was drawn"
    seen, wanted = counts[~rare], expected[~rare]
    if expected[rare].sum() >= 5:
        seen, wanted = np.append(seen, counts[rare].sum()), np.append(wanted, expected[rare].sum())
    freedom = len(wanted) - 1
    return (((seen - wanted) ** 2 / wanted).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_are_drawn_as_often_as_the_softmax_says(name):
    engine = Engine(made(), slots=64, context=16, seed=1)
    given, settings = prompt_of(6), SAMPLINGS[name]
    one = Sampling(1, settings.temperature, settings.top_k, settings.top_p, settings.min_p)
    requests = engine.submit(given, one, n=8192)
    engine.run()
    counts = np.bincount([request.answer.tokens[0] for request in requests], minlength=VOCABULARY)
    with torch.no_grad():
        chances = np.exp(filtered(engine.model(torch.tensor([given]))[0, -1], one))
    assert counts.sum() == 8192
    assert surprise(counts, chances) < 4


def test_the_draws_of_one_answer_are_uniform_and_do_not_depend_on_each_other():
    sampler = Sampler(2)
    for slot, seed in enumerate((12345, 12346)):
        sampler.set(slot, Sampling(), seed)
    flat = torch.zeros(2, 16)
    drawn = np.array([sampler.draw(flat, torch.tensor([at, at]))[0].tolist() for at in range(8192)])
    for column in (0, 1):
        following = drawn[:-1, column] * 16 + drawn[1:, column]
        assert surprise(np.bincount(following, minlength=256), np.full(256, 1 / 256)) < 4
    beside = drawn[:, 0] * 16 + drawn[:, 1]
    assert surprise(np.bincount(beside, minlength=256), np.full(256, 1 / 256)) < 4


def test_a_seed_gives_the_same_answer_whatever_runs_beside_it():
    settings = Sampling(max_tokens=40, seed=77, ignore_eos=True)
    alone = Engine(made(), slots=1, context=64)
    (first,) = alone.submit(prompt_of(6), settings)
    alone.run()
    crowded = Engine(made(), slots=5, context=64, seed=3)
    for number, other in enumerate(SAMPLINGS.values()):
        crowded.submit(prompt_of(9, number), other, n=2)
    crowded.run(11)
    second, third = crowded.submit(prompt_of(6), settings, n=2)
    crowded.run()
    assert first.answer.tokens == second.answer.tokens
    assert third.answer.tokens != second.answer.tokens


def test_temperature_zero_equals_greedy_search_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = made(other={"eos_token_id": None})
    save_model(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    engine = Engine(model, slots=3, chunk=4)
    requests = [
        engine.submit(prompt_of(size, size), Sampling(max_tokens=32, temperature=0))[0] for size in (4, 11, 23, 2)
    ]
    engine.run()
    for request in requests:
        given = torch.tensor([request.prompt.tolist()])
        wanted = theirs.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=32, do_sample=False, pad_token_id=0
        )
        assert request.answer.tokens == wanted[0, len(request.prompt) :].tolist()
        plain = scores_of(model, type(request)(0, request.prompt, Sampling(), 0, frozenset(), answer=request.answer))
        assert np.allclose(request.answer.logprobs, plain, atol=1e-4)


def test_no_slot_is_idle_while_requests_wait():
    """The engine takes exactly the steps that a list schedule takes: each slot gets the next request at once."""
    lengths = np.random.default_rng(0).lognormal(2.5, 1.0, 60).astype(int).clip(1, 100).tolist()
    engine = Engine(made(num_hidden_layers=1), slots=6, context=128, chunk=1000)
    requests = [
        engine.submit(prompt_of(8, n), Sampling(max_tokens=size, ignore_eos=True))[0] for n, size in enumerate(lengths)
    ]
    engine.run()
    assert [len(request.answer.tokens) for request in requests] == lengths
    assert not any(step.idle and step.waiting for step in engine.timeline)
    ends = [0] * 6
    for size in lengths:
        heapq.heapreplace(ends, ends[0] + size)
    assert len(engine.timeline) == max(ends)
    assert sum(step.decoding for step in engine.timeline) == sum(lengths)
    assert sum(step.finished for step in engine.timeline) == 60
    assert all(
        a.began_ns + a.took_ns <= b.began_ns for a, b in zip(engine.timeline, list(engine.timeline)[1:], strict=False)
    )


def test_a_long_prompt_is_computed_in_chunks_while_answers_go_on():
    engine = Engine(made(), slots=2, chunk=10)
    (short,) = engine.submit(prompt_of(3), Sampling(max_tokens=60, ignore_eos=True))
    engine.run(5)
    (long,) = engine.submit(prompt_of(96, 1), Sampling(max_tokens=4, ignore_eos=True))
    for chunk in range(9):
        engine.run(1)
        assert engine.timeline[-1].prefilled == 10
        assert len(short.tokens) == 6 + chunk
        assert not long.tokens
    engine.run()
    assert np.allclose(long.answer.logprobs, scores_of(engine.model, long), atol=1e-4)


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_the_prompt_of_a_group_is_computed_once(slots):
    engine = Engine(made(), slots=slots, chunk=16)
    requests = engine.submit(prompt_of(50), Sampling(max_tokens=12), n=8)
    engine.run()
    assert sum(step.prefilled for step in engine.timeline) == 49
    assert sum(step.copied for step in engine.timeline) == 7 * 49
    assert len({tuple(request.answer.tokens) for request in requests}) == 8
    for request in requests:
        assert np.allclose(request.answer.logprobs, scores_of(engine.model, request), atol=1e-4)
    engine.update(dict(made(seed=4).weights()), 1)
    (after,) = engine.submit(prompt_of(50), Sampling(max_tokens=5))
    engine.run()
    assert sum(step.prefilled for step in engine.timeline) == 98, "keys of old weights were used for a new request"
    assert np.allclose(after.answer.logprobs, scores_of(engine.model, after), atol=1e-4)


def test_a_conversation_that_goes_on_computes_only_its_new_tokens():
    engine = Engine(made(), slots=2)
    (first,) = engine.submit(prompt_of(20), Sampling(max_tokens=10, ignore_eos=True))
    engine.run()
    longer = [*first.prompt.tolist(), *first.answer.tokens, *prompt_of(6, 3)]
    before = sum(step.prefilled for step in engine.timeline)
    (second,) = engine.submit(longer, Sampling(max_tokens=10))
    engine.run()
    assert sum(step.prefilled for step in engine.timeline) - before == 6  # and the last answer token, less the last new
    assert np.allclose(second.answer.logprobs, scores_of(engine.model, second), atol=1e-4)


def test_requests_that_share_parts_of_their_prompts_never_use_keys_of_another_sequence():
    """Prompts of two pieces in every order: a slot often holds the right token behind the wrong beginning."""
    engine = Engine(made(), slots=3, chunk=4)
    source, requests = np.random.default_rng(0), []
    for _ in range(12):
        for _ in range(6):
            pieces = [prompt_of(5, int(piece)) for piece in source.integers(0, 2, source.integers(1, 5))]
            requests += engine.submit(list(chain(*pieces)), Sampling(max_tokens=3), n=2)
        engine.run(int(source.integers(1, 12)))
    engine.run()
    assert sum(step.copied for step in engine.timeline) > 500
    for request in requests:
        assert np.allclose(request.answer.logprobs, scores_of(engine.model, request), atol=1e-4)


def test_stop_ids_strings_and_the_end_of_text_end_an_answer():
    model = small_model(max_position_embeddings=128)
    engine = Engine(model, slots=4, tokenizer=small_tokenizer())
    (free,) = engine.submit([50], Sampling(max_tokens=100, seed=1, ignore_eos=True))
    engine.run()
    tokens = free.answer.tokens
    (by_id,) = engine.submit([50], Sampling(max_tokens=100, seed=1, ignore_eos=True, stop_ids=(tokens[30],)))
    text = small_tokenizer().decode(tokens[40:43], skip_special_tokens=False)
    (by_text,) = engine.submit([50], Sampling(max_tokens=100, seed=1, ignore_eos=True, stop=text))
    engine.run()
    cut = tokens.index(tokens[30]) + 1
    assert by_id.answer == type(by_id.answer)(
        tokens[:cut], *(part[:cut] for part in (free.logprobs, free.versions)), "stop", tokens[30]
    )
    assert by_text.answer.stop == "stop"
    assert by_text.answer.matched == text
    assert by_text.answer.tokens == tokens[: len(by_text.answer.tokens)]
    assert text in small_tokenizer().decode(by_text.answer.tokens, skip_special_tokens=False)
    assert text not in small_tokenizer().decode(by_text.answer.tokens[:-1], skip_special_tokens=False)

    ending = Engine(small_model(other={"eos_token_id": [tokens[9], 2]}, max_position_embeddings=128), slots=1)
    (ended,) = ending.submit([50], Sampling(max_tokens=100, seed=1))
    ending.run()
    assert ended.answer.matched == tokens[9]
    assert ended.answer.tokens == tokens[: tokens.index(tokens[9]) + 1]


def test_an_aborted_request_returns_what_it_has_and_frees_its_slot():
    engine = Engine(made(), slots=1)
    running, waiting, last = (
        engine.submit(prompt_of(4), Sampling(max_tokens=20, ignore_eos=True))[0] for _ in range(3)
    )
    engine.run(7)
    engine.abort(running)
    engine.abort(waiting)
    assert {request.number for request in engine.step()} == {0, 1}
    assert (running.answer.stop, len(running.answer.tokens)) == ("abort", 7)
    assert (waiting.answer.stop, waiting.answer.tokens) == ("abort", [])
    assert len(last.tokens) == 1
    engine.run()
    before = last.answer
    engine.abort(last)
    engine.step()
    assert last.answer is before
    assert before.stop == "length"


def test_a_model_that_gives_nan_ends_the_answer_as_an_error():
    model = made()
    engine = Engine(model, slots=1)
    (request,) = engine.submit(prompt_of(4), Sampling(max_tokens=20, ignore_eos=True))
    engine.run(5)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    engine.run()
    assert (request.answer.stop, len(request.answer.tokens)) == ("error", 5)


def test_memory_is_taken_once():
    engine = Engine(made(), slots=3, context=50)
    assert engine.memory_bytes == sum(one.nbytes for one in (engine._cache.keys, engine._cache.values))
    places = engine._cache.keys.data_ptr(), engine._cache.values.data_ptr()
    weights = [parameter.data_ptr() for parameter in engine.model.parameters()]
    engine.submit(prompt_of(20), Sampling(max_tokens=30), n=5)
    engine.run(8)
    engine.update(dict(made(seed=4).weights()), 1, kv="recompute")
    engine.run()
    assert places == (engine._cache.keys.data_ptr(), engine._cache.values.data_ptr())
    assert weights == [parameter.data_ptr() for parameter in engine.model.parameters()]


def test_requests_that_cannot_be_answered_are_refused_with_the_numbers():
    engine = Engine(made(), slots=1, context=50)
    for ids, sampling, message in [
        (
            prompt_of(30),
            Sampling(21),
            "a prompt of 30 tokens and max_tokens=21 need 51 places, context=50; shorten the",
        ),
        ([3, VOCABULARY, 4], Sampling(1), r"ids\[1\]=40, expected 0 to 39"),
        ([3, -1], Sampling(1), r"ids\[1\]=-1, expected 0 to 39"),
        ([], Sampling(1), r"ids of shape \(0,\)"),
        ([1.5], Sampling(1), "dtype float64, expected token ids"),
        ([3], Sampling(1, stop="x"), r"stop=\('x',\) needs a tokenizer; give Engine\(tokenizer=\)"),
    ]:
        with pytest.raises(SchemaError, match=message):
            engine.submit(ids, sampling)
    with pytest.raises(SchemaError, match="n=0, expected at least 1"):
        engine.submit([3], Sampling(1), n=0)
    assert not engine.is_busy
    (fits,) = engine.submit(prompt_of(30), Sampling(20, ignore_eos=True))
    engine.run()
    assert len(fits.answer.tokens) == 20
    with pytest.raises(SchemaError, match="context=161, but the model's max_position_embeddings is 160"):
        Engine(made(), context=161)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temprature": 1}, "unknown key 'temprature'; expected some of max_tokens, temperature"),
        ({"temperature": -0.1}, "temperature=-0.1, expected a number from 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0}, "top_p=0, expected a number above 0"),
        ({"top_k": -1}, "top_k=-1, expected an integer of at least 0"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"seed": 2**63}, "seed="),
        ({"stop": [""]}, "strings that are not empty"),
        ({"stop_ids": [-1]}, "expected token ids"),
    ],
)
def test_settings_of_sampling_are_checked(given, message):
    with pytest.raises(SchemaError, match=message):
        Sampling.from_dict(given)
    assert Sampling.from_dict({"top_k": 3, "stop": "x"}) == Sampling(top_k=3, stop=("x",))


def test_dynamic_scaling_is_not_stretched_by_idle_slots():
    from sharpwave.llm.model import Rope

    model = made(max_position_embeddings=32, rope=Rope(10000.0, "dynamic", {"factor": 4.0}))
    engine = Engine(model, slots=3)
    (request,) = engine.submit(prompt_of(8), Sampling(max_tokens=24, ignore_eos=True))
    engine.run()
    assert np.allclose(request.answer.logprobs, scores_of(model, request), atol=1e-4)
