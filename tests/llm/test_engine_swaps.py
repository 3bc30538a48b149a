"""New weights in mid-answer: nothing is lost, and each token has the log-probability of the weights that made it."""

import threading
from itertools import chain

import numpy as np
import pytest
import torch
from engine_references import made, prompt_of, replayed, scores_of, states_of
from patience import HANG_S

from sharpwave.errors import SchemaError, StorageError
from sharpwave.llm.generators import Engine, Sampling
from sharpwave.llm.model import load_state, save_model
from sharpwave.llm.weights import Weights


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
    assert {one for request in [*first, *later] for one in request.answer.versions} >= set(range(1000))
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
