"""What the engine draws and reports, where answers end, and what it refuses."""

import numpy as np
import pytest
import torch
from engine_references import SAMPLINGS, VOCABULARY, filtered, made, prompt_of, scores_of

from sharpwave.errors import SchemaError
from sharpwave.llm.generators import Engine, Sampling
from sharpwave.llm.generators.sampler import Sampler
from sharpwave.llm.model import Rope, save_model, small_model, small_tokenizer


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


def test_depth_adds_little_to_the_rounding_of_bfloat16():
    """Layers add to a sum in float32: with one in bfloat16 the mean difference is 0.006 here."""
    engine = Engine(made(initializer_range=0.1, num_hidden_layers=32).bfloat16(), slots=3, context=120, chunk=7)
    requests = [engine.submit(prompt_of(11 * n + 3, n), Sampling(max_tokens=60, ignore_eos=True))[0] for n in range(5)]
    engine.run()
    apart = [np.abs(np.array(one.answer.logprobs) - scores_of(engine.model, one)) for one in requests]
    assert np.concatenate(apart).mean() < 0.004


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
        tokens[:cut], *(part[:cut] for part in (free.answer.logprobs, free.answer.versions)), "stop", tokens[30]
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


def test_a_model_that_gives_nan_ends_the_answer_as_an_error():
    model = made()
    engine = Engine(model, slots=1)
    (request,) = engine.submit(prompt_of(4), Sampling(max_tokens=20, ignore_eos=True))
    engine.run(5)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    engine.run()
    assert (request.answer.stop, len(request.answer.tokens)) == ("error", 5)


def test_requests_that_cannot_be_answered_are_refused_with_the_numbers():
    engine = Engine(made(), slots=1, context=50)
    for ids, sampling, message in [
        (
            prompt_of(30),
            Sampling(21),
            "a prompt of 30 tokens and max_tokens=21 need 51 places, context=50; shorten the",
        ),
        (prompt_of(50), Sampling(1), r"shorten the prompt, lower max_tokens or raise Engine\(context=\)$"),
        ([3, VOCABULARY, 4], Sampling(1), r"ids\[1\]=40, expected 0 to 39; give ids of the model's tokenizer$"),
        ([3, -1], Sampling(1), r"ids\[1\]=-1, expected 0 to 39"),
        ([], Sampling(1), r"ids of shape \(0,\)"),
        ([1.5], Sampling(1), "dtype float64, expected token ids"),
        ([3], Sampling(1, stop_ids=(5, 2**31 - 1)), "stop_ids has 2147483647, expected token ids from 0 to 39"),
        ([3], {"max_tokens": 1}, r"sampling={'max_tokens': 1}, expected a Sampling; see Sampling.from_dict\(\)"),
        ([3], Sampling(1, stop="x"), r"stop=\('x',\) needs a tokenizer; give Engine\(tokenizer=\)"),
    ]:
        with pytest.raises(SchemaError, match=message):
            engine.submit(ids, sampling)
    for n in (0, 1.5, True):
        with pytest.raises(SchemaError, match=r"submit\(\): n: expected a whole number, at least 1, got"):
            engine.submit([3], Sampling(1), n=n)
    assert not engine.is_busy
    (fits,) = engine.submit(prompt_of(30), Sampling(20, ignore_eos=True))
    engine.run()
    assert len(fits.answer.tokens) == 20
    with pytest.raises(SchemaError, match="context=161, but the model's max_position_embeddings is 160"):
        Engine(made(), context=161)


def test_yarn_extends_the_context_of_a_model_whose_config_does_not_count_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    yarn = Rope(10000.0, "yarn", {"factor": 4.0, "original_max_position_embeddings": 32})
    model = made(max_position_embeddings=32, rope=yarn)
    save_model(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    engine = Engine(model, slots=1, context=128)
    (request,) = engine.submit(prompt_of(60), Sampling(max_tokens=68, ignore_eos=True))
    engine.run()
    ids = torch.tensor([[*request.prompt.tolist(), *request.answer.tokens]])
    with torch.no_grad():
        logs = theirs(ids).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
    assert np.allclose(request.answer.logprobs, logs[59:], atol=1e-4)
    assert np.allclose(engine.score(ids[0].tolist()), logs, atol=1e-4)
    assert Engine(model, slots=1).context == 32
    with pytest.raises(SchemaError, match="max_position_embeddings is 32, with its rope scaling 128"):
        Engine(model, slots=1, context=129)


@pytest.mark.parametrize(
    "rope",
    [
        Rope(10000.0, "linear", {"factor": 4.0}),
        Rope(10000.0, "dynamic", {"factor": 4.0}),
        Rope(10000.0, "yarn", {"factor": 4.0, "original_max_position_embeddings": 8}),  # 32 counts it
    ],
    ids=lambda rope: rope.scaling,
)
def test_other_scalings_keep_the_context_of_the_config(rope):
    with pytest.raises(SchemaError, match="max_position_embeddings is 32, with its rope scaling 32"):
        Engine(made(max_position_embeddings=32, rope=rope), slots=1, context=33)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"slots": 2.5}, r"Engine\(\): slots: expected a whole number, at least 1, got 2.5"),
        ({"chunk": 0}, r"Engine\(\): chunk: expected a whole number, at least 1, got 0"),
        ({"context": "9"}, r"Engine\(\): context: expected a whole number, at least 1, got '9'"),
        ({"seed": -1}, r"Engine\(\): seed: expected a whole number, at least 0, got -1"),
        (
            {"slots": 10**12},
            r"slots=1000000000000 and context=160 need \d+\.\d GiB .* cpu does not have; lower slots or",
        ),
    ],
)
def test_settings_of_an_engine_are_checked(given, message):
    with pytest.raises(SchemaError, match=message):
        Engine(made(), **given)


class Failing:
    """A tokenizer that cannot decode some token."""

    def __init__(self, bad):
        self._bad = bad

    def decode(self, ids, skip_special_tokens):
        if self._bad in ids:
            raise UnicodeDecodeError("utf-8", b"x", 0, 1, "no text")
        return "." * len(ids)


def test_text_that_cannot_be_decoded_ends_its_own_answer_only():
    engine = Engine(made(), slots=4)
    (free,) = engine.submit([5], Sampling(max_tokens=30, seed=1, ignore_eos=True))
    engine.run()
    bad = free.answer.tokens[7]
    at = free.answer.tokens.index(bad)
    engine = Engine(made(), slots=4, tokenizer=Failing(bad))
    (broken,) = engine.submit([5], Sampling(max_tokens=30, seed=1, ignore_eos=True, stop="x"))
    (good,) = engine.submit([5], Sampling(max_tokens=30, seed=1, ignore_eos=True))
    engine.run()
    assert (broken.answer.stop, broken.answer.tokens) == ("error", free.answer.tokens[: at + 1])
    assert (good.answer.stop, good.answer.tokens) == ("length", free.answer.tokens)


def test_a_step_that_raises_while_a_request_gets_its_slot_loses_no_request(monkeypatch):
    engine = Engine(made(), slots=2)
    requests = engine.submit([5], Sampling(max_tokens=3, ignore_eos=True), n=3)
    monkeypatch.setattr(engine._slots, "begin", lambda *given: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert set(engine.drop()) == set(requests)
    assert [request.answer.stop for request in requests] == ["error"] * 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temprature": 1}, "unknown key 'temprature'; expected some of max_tokens, temperature"),
        ({"temperature": -0.1}, "temperature=-0.1, expected a number from 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0}, "top_p=0, expected a number above 0"),
        (
            {"temperature": 1e-7},
            "to 1e6 and, unless it is 0, at least 1e-06; 0 takes the likeliest",
        ),
        ({"temperature": 1e-300}, "temperature=1e-300, expected"),
        ({"temperature": 10**400}, "temperature=1000"),
        ({"top_p": 10**5000}, "top_p=.*int.*, expected a number above 0"),
        ({"min_p": -(10**400)}, "min_p=-1000"),
        ({"max_tokens": 10**5000}, r"max_tokens=.*int.*, expected an integer of at least 1, below 2\*\*53"),
        ({"stop_ids": [2**70]}, "expected token ids"),
        ({"stop_ids": list(range(257))}, r"len\(stop_ids\)=257, expected at most 256 token ids"),
        ({"stop": ["a", "b\ud800"]}, "expected strings of Unicode text, without single surrogates"),
        ({"ignore_eos": "yes"}, "ignore_eos='yes', expected True or False"),
        ({"top_k": -1}, "top_k=-1, expected an integer from 0 to"),
        ({"top_k": 2**31}, "top_k=2147483648, expected an integer from 0 to"),
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
