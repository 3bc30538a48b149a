"""New weights in mid-answer: nothing is lost, and each token has the log-probability of the weights that made it."""

import json
import threading
from contextlib import contextmanager
from itertools import chain

import numpy as np
import pytest
import torch
from engine_references import made, prompt_of, replayed, scores_of, states_of
from patience import HANG_S

from sharpwave.errors import SchemaError, StorageError
from sharpwave.llm.generators import Engine, Sampling
from sharpwave.llm.generators.held_tokens import HeldTokens
from sharpwave.llm.model import Rope, load_state, save_model, write_state
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


class Noted(HeldTokens):
    """Notes the version that made each place."""

    def __init__(self, slots, context):
        super().__init__(slots, context)
        self.versions = np.full((slots, context), -1)

    def put(self, slot, start, tokens, version):
        super().put(slot, start, tokens, version)
        self.versions[slot, start : start + len(tokens)] = version

    def put_each(self, slots, places, tokens, version):
        super().put_each(slots, places, tokens, version)
        self.versions[slots, places] = version


@pytest.mark.parametrize("seed", range(4))
def test_swaps_that_keep_old_keys_give_the_log_probabilities_of_new_weights_over_them(seed):
    """Swaps also come while prompts are half computed, so a prompt may have keys of several versions."""
    source, model = np.random.default_rng(seed), made(num_hidden_layers=2)
    states, version, slots, ended = states_of(model, 3), 0, {}, []
    engine = Engine(model, slots=3, context=64, chunk=4)
    engine._held = Noted(3, 64)
    for round in range(8):
        settings = Sampling(max_tokens=int(source.integers(4, 20)), ignore_eos=True)
        engine.submit(prompt_of(int(source.integers(10, 30)), round), settings, n=int(source.integers(1, 4)))
    while engine.is_busy:
        for request in engine.step():
            row = engine._held.versions[slots[request]]
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


def between_turns(engine, act):
    """Calls `act` after each turn that a score takes."""
    turn, is_acting = engine._turn, False

    @contextmanager
    def followed():
        nonlocal is_acting
        with turn():
            yield
        if not is_acting:
            is_acting = True
            act()
            is_acting = False

    engine._turn = followed


@torch.no_grad()
def plain_scores(model, ids):
    logs = model(torch.tensor([ids]))[0, :-1].float().log_softmax(-1)
    return logs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("chunk", [1, 7, 500])
def test_a_score_is_made_in_pieces_between_which_answers_go_on(model_type, chunk):
    engine = Engine(made(model_type=model_type), slots=2, context=140, chunk=chunk)
    alone = Engine(made(model_type=model_type), slots=2, context=140, chunk=chunk)
    answers = [
        one.submit(prompt_of(5), Sampling(max_tokens=130, seed=1, ignore_eos=True))[0] for one in (alone, engine)
    ]
    ids, steps = prompt_of(100, 1), []
    between_turns(engine, lambda: steps.append(engine.step()))
    assert np.allclose(engine.score(ids), plain_scores(engine.model, ids), atol=1e-4)
    assert len(steps) == len(engine.timeline) == -(-99 // chunk)
    assert engine.score(ids[:1]) == []
    for one in (alone, engine):
        one.run()
    assert answers[0].answer.tokens == answers[1].answer.tokens
    assert np.allclose(answers[0].answer.logprobs, answers[1].answer.logprobs, atol=1e-4)


@pytest.mark.parametrize("swaps", [1, 2, 100])
def test_a_score_is_of_one_version_and_ends_however_often_weights_change(swaps):
    model = made()
    states = states_of(model, 3)
    engine = Engine(model, slots=1, context=140, chunk=8)
    ids = prompt_of(100, 1)

    def update():
        if engine.version < swaps:
            engine.update(states[(engine.version + 1) % 3], engine.version + 1)

    between_turns(engine, update)
    found = engine.score(ids)
    assert engine.version == min(swaps, 3)
    load_state(model, states[min(swaps, 2) % 3])  # of the weights in its last turn
    assert np.allclose(found, plain_scores(model, ids), atol=1e-4)


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
        (before, None, SchemaError, r"update\(\): version: expected a whole number, 0 to 999999999999, got None"),
        (before, 10**30, SchemaError, "version: expected a whole number"),
        (before, 4.5, SchemaError, "version: expected a whole number"),
        (before, "4", SchemaError, "version: expected a whole number"),
        (before, True, SchemaError, "version: expected a whole number"),
        (nan, 4, SchemaError, r"model\.norm\.weight has values that are NaN or infinite; the old weights stay"),
        ({"a": torch.zeros(1)}, 4, SchemaError, "missing; the model has"),
        (5, 4, SchemaError, "expected tensors by name, got 5"),
        ({**before, 5: torch.zeros(1)}, 4, SchemaError, "expected tensors by name, got"),
        (
            {**before, "model.norm.weight": [1.0] * 32},
            4,
            SchemaError,
            r"model\.norm\.weight is list, expected a tensor",
        ),
        (tmp_path / "nothing", 4, StorageError, "has neither model.safetensors nor"),
    ]:
        with pytest.raises(error, match=message):
            engine.update(state, version)
    with pytest.raises(SchemaError, match="kv='flush', expected 'keep' or 'recompute'"):
        engine.update(before, 4, kv="flush")
    for version in (2**63, "1", -3, None):
        with pytest.raises(SchemaError, match=r"Engine\(\): version: expected a whole number, -1 to 999999999999, got"):
            Engine(model, slots=1, version=version)
    assert Engine(model, slots=1, version=-1).version == -1  # the engines of a run before the first publish
    assert engine.version == 3
    assert all(torch.equal(before[name], tensor) for name, tensor in model.weights())


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 1e6), (torch.bfloat16, 3.4e38)])
def test_a_number_too_large_for_the_models_dtype_leaves_the_old_weights(dtype, value):
    model = made().to(dtype)
    engine = Engine(model, slots=1)
    state = {name: tensor.float() for name, tensor in model.weights()}
    state["model.norm.weight"][3] = value
    with pytest.raises(
        SchemaError, match=r"model\.norm\.weight has values that are NaN or infinite; the old weights stay"
    ):
        engine.update(state, 1)
    assert (engine.version, model.model.norm.weight.isfinite().all()) == (0, True)


def test_a_damaged_version_leaves_the_old_weights_by_its_path_too(tmp_path):
    engine = Engine(made(), slots=1)
    one = Weights(tmp_path).publish(made(seed=9), 7)
    before = [tensor.clone() for _, tensor in engine.model.weights()]
    whole = (one.path / "model.safetensors").read_bytes()
    (one.path / "model.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for given in (one, one.path, str(one.path)):
        with pytest.raises(StorageError, match=r"model\.safetensors is damaged: its checksum is not the published one"):
            engine.update(given, 7)
    assert engine.version == 0
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, engine.model.weights(), strict=True))


OTHERS = {
    "num_attention_heads=4, the model has 8": {"num_attention_heads": 4, "head_dim": 16, "num_key_value_heads": 2},
    "model_type='llama', the model has 'qwen2'": {"model_type": "llama"},
    "rms_norm_eps=0.001, the model has 1e-06": {"rms_norm_eps": 1e-3},
    r"rope=Rope\(theta=500000.0,": {"rope": Rope(5e5)},
    "tie_word_embeddings=False, the model has True": {"tie_word_embeddings": False},
}


@pytest.mark.parametrize("message", OTHERS)
def test_a_folder_of_a_model_with_other_settings_leaves_the_old_weights(message, tmp_path):
    ours = {"num_attention_heads": 8, "head_dim": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
    engine = Engine(made(model_type="qwen2", **ours), slots=1)
    save_model(made(model_type="qwen2", **ours), tmp_path / "same")
    engine.update(tmp_path / "same", 1)
    state = {name: tensor.clone() for name, tensor in engine.model.weights()}
    config = engine.model.config.replace(**OTHERS[message], max_position_embeddings=999, dtype="bfloat16")
    write_state(state, tmp_path)
    for text, words in [(json.dumps(config.to_json()), message), ("{", "no JSON")]:
        (tmp_path / "config.json").write_text(text)
        for update in (lambda: engine.update(tmp_path, 2), lambda: engine.update(str(tmp_path), 2)):
            with pytest.raises(SchemaError, match=words):
                update()
    (tmp_path / "config.json").write_text(json.dumps({**config.to_json(), "model_type": "mistral"}))
    with pytest.raises(SchemaError, match="model_type 'mistral'"):
        engine.update(tmp_path, 2)
    assert engine.version == 1
    (tmp_path / "config.json").unlink()  # tensors alone say nothing of the model
    engine.update(tmp_path, 2)


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
