"""When slots work, what they compute and what they take over from each other."""

import heapq
from itertools import chain

import numpy as np
import pytest
from engine_references import made, prompt_of, scores_of

from sharpwave.llm.generators import Engine, Request, Sampling
from sharpwave.llm.generators.graph_decode import GraphDecode
from sharpwave.llm.kernels import plain


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


def test_aborts_of_many_waiting_requests_leave_the_others_in_their_order(monkeypatch):
    compared = 0

    def is_same(one, other):
        nonlocal compared
        compared += 1
        return one is other

    monkeypatch.setattr(Request, "__eq__", is_same)
    monkeypatch.setattr(Request, "__hash__", object.__hash__)
    engine = Engine(made(num_hidden_layers=1), slots=2, context=16)
    requests = engine.submit(prompt_of(3), Sampling(max_tokens=2, ignore_eos=True), n=2000)
    engine.step()
    kept = requests[500::500]
    for request in reversed(requests):
        if request.number % 500:
            engine.abort(request)
    engine.step()
    assert [request for request in requests if request.answer is None] == kept
    assert list(engine._intake.waiting) == kept[1:]
    engine.run()
    assert [request.answer.stop for request in kept] == ["length"] * 3
    assert [request.answer.stop for request in requests].count("abort") == 2000 - 4
    assert compared < 20_000, "each abort searched the queue"


def test_a_request_that_is_done_when_a_step_raises_is_handed_out_by_the_next():
    engine = Engine(made(), slots=2)
    first, second = (engine.submit(prompt_of(3, n), Sampling(max_tokens=50, ignore_eos=True))[0] for n in range(2))
    engine.run(4)
    engine.abort(first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._decode, "step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    assert engine.drop() == [second]
    assert engine.is_busy
    assert engine.step() == [first]
    assert (first.answer.stop, second.answer.stop) == ("abort", "error")
    assert not engine.is_busy


@pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
def test_a_step_does_other_work_of_its_caller_once_and_the_next_one_begins_with_it(is_graph):
    """Whether the step has nothing to do, computes a prompt only, or decodes."""
    engine = Engine(made(num_hidden_layers=1), slots=2, context=40, chunk=8)
    if is_graph:
        engine._decode = GraphDecode(engine.model, engine._cache, engine._sampler, engine.chunk, plain)
    requests = []

    def ask():
        requests.extend(engine.submit(prompt_of(12, len(requests)), Sampling(max_tokens=3, ignore_eos=True)))

    for count in range(1, 4):
        engine.step(ask)
        assert len(requests) == count
    kinds = [(step.prefilled, step.decoding) for step in engine.timeline]
    assert kinds == [(0, 0), (8, 0), (8, 1)]
    assert len(requests[0].tokens) == 1
    engine.step(lambda: engine.abort(requests[0]))
    assert requests[0].answer is None
    assert requests[0] in engine.step()
    assert (requests[0].answer.stop, len(requests[0].answer.tokens)) == ("abort", 2)
    engine.run()
    assert [len(request.answer.tokens) for request in requests[1:]] == [3, 3]


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


def test_dynamic_scaling_is_not_stretched_by_idle_slots():
    from sharpwave.llm.model import Rope

    model = made(max_position_embeddings=32, rope=Rope(10000.0, "dynamic", {"factor": 4.0}))
    engine = Engine(model, slots=3)
    (request,) = engine.submit(prompt_of(8), Sampling(max_tokens=24, ignore_eos=True))
    engine.run()
    assert np.allclose(request.answer.logprobs, scores_of(model, request), atol=1e-4)
