"""The engine behind its thread: answers, pieces, aborts, pauses, new weights and steps that fail."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from itertools import chain

import numpy as np
import pytest
import torch
from engine_references import made, prompt_of
from patience import HANG_S, seconds_of_other_threads, until_thread_waits

from sharpwave.errors import ClosedError, NotReady, SchemaError, StorageError
from sharpwave.llm.generators import Answer, Engine, LocalGenerator, Sampling
from sharpwave.llm.generators.likelihood import log_probabilities
from sharpwave.llm.model import save_model

LONG = Sampling(max_tokens=120, ignore_eos=True)
ENDLESS = Sampling(max_tokens=8000, ignore_eos=True)  # no test waits for its end
ROOM = {"context": 8100}


def run(main, **engine):
    """Runs main(generator) with a bound that only ends a hang."""

    async def bounded():
        async with LocalGenerator(
            Engine(made(max_position_embeddings=8192), **{"slots": 4, "context": 140, **engine})
        ) as generator:
            return await asyncio.wait_for(main(generator), HANG_S)

    return asyncio.run(bounded())


def test_answers_equal_those_of_the_engine_stepped_by_hand():
    settings = [Sampling(max_tokens=20, seed=seed, ignore_eos=True) for seed in range(9)]
    engine = Engine(made(), slots=4, context=140)
    requests = [engine.submit(prompt_of(9), one)[0] for one in settings]
    engine.run()

    async def main(generator):
        return await asyncio.gather(*(generator.generate(prompt_of(9), one) for one in settings))

    answers = run(main)
    assert [answer.tokens for answer in answers] == [request.answer.tokens for request in requests]
    assert all(len(one.tokens) == len(one.logprobs) == len(one.versions) == 20 for one in answers)


def test_pieces_make_the_answer():
    async def main(generator):
        sampling = Sampling(max_tokens=50, seed=3, ignore_eos=True)
        whole = await generator.generate(prompt_of(5), sampling)
        pieces = [piece async for piece in generator.stream(prompt_of(5), sampling)]
        assert [token for piece in pieces for token in piece.tokens] == whole.tokens
        assert [score for piece in pieces for score in piece.logprobs] == pytest.approx(whole.logprobs, abs=1e-4)
        assert [one for piece in pieces for one in piece.versions] == whole.versions
        assert [piece.stop for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
        assert len(pieces) > 1

    run(main)


def test_the_loop_goes_on_while_answers_are_made():
    """A piece is seen before the answer has ended, and other tasks run in between."""

    async def main(generator):
        turns = 0

        async def count():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        seen = [turns async for _ in generator.stream(prompt_of(5), LONG)]
        counting.cancel()
        assert len(set(seen)) > 3

    run(main)


def test_a_cancelled_task_frees_its_slot():
    async def main(generator):
        task = asyncio.create_task(generator.generate(prompt_of(5), ENDLESS))
        async for _ in generator.stream(prompt_of(5), Sampling(max_tokens=3, ignore_eos=True)):
            pass  # the engine has stepped
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        after = await generator.generate(prompt_of(7), Sampling(max_tokens=1, ignore_eos=True))
        assert len(after.tokens) == 1
        assert (await generator.health())[1:] == (0, 0)

    run(main, slots=2, **ROOM)


def test_a_stream_that_is_closed_frees_its_slot():
    async def main(generator):
        async with aclosing(generator.stream(prompt_of(5), ENDLESS)) as pieces:
            async for _ in pieces:
                break
        assert len((await generator.generate(prompt_of(7), Sampling(max_tokens=1, ignore_eos=True))).tokens) == 1
        assert len(generator.engine.timeline) < 8000

    run(main, slots=1, **ROOM)


def test_abort_gives_the_tokens_so_far():
    async def main(generator):
        ongoing = [generator.begin(prompt_of(5), ENDLESS, has_pieces=True) for _ in range(3)]  # one has no slot
        pieces = ongoing[0].pieces()
        await anext(pieces)
        assert await generator.abort() == 3
        answers = [await one.answer() for one in ongoing]
        assert [one.stop for one in answers] == ["abort"] * 3
        assert 1 <= len(answers[0].tokens) < 8000
        assert len(answers[0].tokens) == len(answers[0].logprobs) == len(answers[0].versions)
        assert answers[2].tokens == []
        assert await generator.abort() == 0

    run(main, slots=2, **ROOM)


@pytest.mark.parametrize("clear_cache", [False, True])
def test_a_pause_keeps_answers_where_they_are_and_new_requests_wait(clear_cache):
    async def main(generator):
        sampling = Sampling(max_tokens=300, seed=1, ignore_eos=True)
        whole = await generator.generate(prompt_of(5), sampling)
        ongoing = generator.begin(prompt_of(5), sampling, has_pieces=True)
        pieces = ongoing.pieces()
        first = await anext(pieces)
        await generator.pause("keep", clear_cache=clear_cache)
        await generator.pause("keep")
        steps, have = len(generator.engine.timeline), len(ongoing.request.tokens)
        late = asyncio.create_task(generator.generate(prompt_of(3), Sampling(max_tokens=2, ignore_eos=True)))
        await asyncio.to_thread(until_thread_waits, generator._thread)
        assert generator.is_paused
        assert not late.done()
        assert len(generator.engine.timeline) == steps
        assert len(ongoing.request.tokens) == have < 300
        assert (await generator.health())[1:] == (1, 1)
        await generator.resume()
        await generator.resume()
        rest = [piece async for piece in pieces]
        assert first.tokens + [one for piece in rest for one in piece.tokens] == whole.tokens
        assert len((await late).tokens) == 2
        assert not generator.is_paused

    run(main, **ROOM)


def test_a_pause_that_aborts_returns_when_the_answers_have_ended():
    async def main(generator):
        running = generator.begin(prompt_of(5), ENDLESS, has_pieces=True)
        pieces = running.pieces()
        await anext(pieces)
        await generator.pause("abort")
        assert running.request.answer.stop == "abort"
        late = generator.begin(prompt_of(5), Sampling(max_tokens=2, ignore_eos=True))
        dropped = generator.begin(prompt_of(5), LONG)
        dropped.abort()
        assert (await dropped.answer()).tokens == []
        await generator.pause("abort")  # requests that wait for the resume are left
        await generator.resume()
        assert len((await late.answer()).tokens) == 2

    run(main, **ROOM)


def test_a_pause_that_waits_completes_answers_and_begins_none():
    async def main(generator):
        running = [generator.begin(prompt_of(5), Sampling(max_tokens=30, ignore_eos=True)) for _ in range(6)]
        pause = asyncio.create_task(generator.pause("wait"))
        await asyncio.sleep(0)
        late = generator.begin(prompt_of(5), Sampling(max_tokens=2, ignore_eos=True))
        await pause
        assert [len((await one.answer()).tokens) for one in running] == [30] * 6
        assert late.request.answer is None
        await generator.resume()
        assert len((await late.answer()).tokens) == 2

    run(main)


def test_pauses_that_wait_keep_no_update_and_no_score_out(tmp_path):
    """They block no thread: else a few of them would take every thread that updates and scores could run in."""
    save_model(made(seed=1, max_position_embeddings=8192), tmp_path)

    async def main(generator):
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        running = generator.begin(prompt_of(5), ENDLESS)
        pauses = [asyncio.create_task(generator.pause("wait")) for _ in range(3)]
        await asyncio.sleep(0)
        await generator.update(tmp_path, 4)
        assert len(await generator.score(prompt_of(6))) == 5
        assert not any(pause.done() for pause in pauses)
        assert running.request.answer is None
        pauses[0].cancel()
        running.abort()
        assert await asyncio.gather(*pauses[1:]) == [None, None]
        assert pauses[0].cancelled()
        await generator.resume()

    run(main, **ROOM)


def test_a_resume_ends_pauses_that_wait_for_answers():
    async def main(generator):
        running = generator.begin(prompt_of(5), ENDLESS)
        pauses = [asyncio.create_task(generator.pause("wait")) for _ in range(2)]
        await asyncio.sleep(0)
        late = generator.begin(prompt_of(5), Sampling(max_tokens=2, ignore_eos=True))
        await generator.resume()
        assert await asyncio.wait_for(asyncio.gather(*pauses), HANG_S) == [None, None]
        assert not generator.is_paused
        assert len((await late.answer()).tokens) == 2
        assert running.request.answer is None
        again = asyncio.create_task(generator.pause("wait"))  # a later pause is one of its own
        await asyncio.sleep(0)
        running.abort()
        await again
        assert generator.is_paused
        assert running.request.answer.stop == "abort"

    run(main, **ROOM)


def test_a_generator_that_is_closed_ends_pauses_that_wait():
    async def main(generator):
        answer = asyncio.create_task(generator.generate(prompt_of(5), ENDLESS))
        await asyncio.sleep(0)
        pause = asyncio.create_task(generator.pause("wait"))
        await asyncio.sleep(0)
        await generator.close()
        await pause
        with pytest.raises(ClosedError, match="closed before the answer ended"):
            await answer

    run(main, **ROOM)


def test_an_answer_can_be_aborted_in_a_pause():
    async def main(generator):
        ongoing = generator.begin(prompt_of(5), ENDLESS, has_pieces=True)
        pieces = ongoing.pieces()
        await anext(pieces)
        await generator.pause("keep")
        assert await generator.abort() == 1
        assert (await ongoing.answer()).stop == "abort"
        assert generator.is_paused

    run(main, **ROOM)


def test_new_weights_go_in_meanwhile(tmp_path):
    save_model(made(seed=1), tmp_path / "new")

    async def main(generator):
        ongoing = [generator.begin(prompt_of(5), ENDLESS, has_pieces=True) for _ in range(3)]
        streams = [one.pieces() for one in ongoing]
        for pieces in streams:
            await anext(pieces)
        await generator.update(tmp_path / "new", 4)
        for pieces in streams:
            while 4 not in (await anext(pieces)).versions:
                pass
        await generator.abort()
        for one in ongoing:
            answer = await one.answer()
            assert len(answer.tokens) == len(answer.versions)
            assert answer.versions == sorted(answer.versions)
            assert set(answer.versions) == {0, 4}
        assert (await generator.health()).version == 4

    run(main, **ROOM)


def test_a_refused_update_leaves_the_old_weights(tmp_path):
    model = made()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    save_model(model, tmp_path / "bad")

    async def main(generator):
        before = await generator.score(prompt_of(6))
        with pytest.raises(SchemaError, match="NaN or infinite; the old weights stay"):
            await generator.update(tmp_path / "bad", 1)
        with pytest.raises(StorageError, match="has neither"):
            await generator.update(tmp_path, 1)
        save_model(made(), tmp_path / "good")
        with pytest.raises(SchemaError, match="versions only grow"):
            await generator.update(tmp_path / "good", 0)
        assert await generator.score(prompt_of(6)) == before
        assert (await generator.health()).version == 0

    run(main)


def test_scores_equal_what_generation_reported():
    async def main(generator):
        answer = await generator.generate(prompt_of(5), Sampling(max_tokens=30, ignore_eos=True))
        scores = await generator.score(prompt_of(5) + answer.tokens)
        assert len(scores) == 34
        assert np.allclose(scores[4:], answer.logprobs, atol=1e-4)

    run(main)


def test_wrong_requests_are_refused_before_anything_begins():
    async def main(generator):
        for ids, sampling, words in [
            ([], None, "expected token ids"),
            ([40], Sampling(max_tokens=1), r"ids\[0\]=40, expected 0 to 39"),
            ([1] * 100, Sampling(max_tokens=50), "need 150 places, context=140"),
        ]:
            with pytest.raises(SchemaError, match=words):
                await generator.generate(ids, sampling)
        with pytest.raises(SchemaError, match="141 tokens, context=140"):
            await generator.score([1] * 141)
        with pytest.raises(SchemaError, match=r"score\(\): ids\[1\]=-1"):
            await generator.score([1, -1])
        with pytest.raises(SchemaError, match="mode='later'"):
            await generator.pause("later")
        assert (await generator.health())[1:] == (0, 0)
        assert not generator.engine.timeline

    run(main)


def test_a_step_that_fails_fails_its_answers_and_no_others():
    async def main(generator):
        engine = generator.engine
        logits, is_wrong = engine.model.logits, True

        def failing(hidden):
            if is_wrong:
                raise RuntimeError("the device is full")
            return logits(hidden)

        engine.model.logits = failing
        tasks = [asyncio.create_task(generator.generate(prompt_of(5), LONG)) for _ in range(6)]
        for task in tasks:
            with pytest.raises(NotReady, match="the device is full"):
                await task
        is_wrong = False
        assert len((await generator.generate(prompt_of(5), LONG)).tokens) == 120
        assert (await generator.health())[1:] == (0, 0)

    run(main)


def test_five_steps_that_fail_in_a_row_end_the_generator():
    async def main(generator):
        logits = generator.engine.model.logits

        def failing(hidden):
            raise RuntimeError("the device is gone")

        for failures in (4, 5):  # a step that succeeds in between begins the count again
            generator.engine.model.logits = failing
            for _ in range(failures):
                with pytest.raises(NotReady, match=r"a step of the engine failed: .*the device is gone"):
                    await generator.generate(prompt_of(5), LONG)
            if failures == 4:
                generator.engine.model.logits = logits
                assert len((await generator.generate(prompt_of(5), LONG)).tokens) == 120
        with pytest.raises(NotReady, match=r"join\(\): the engine failed and cannot go on: .*the device is gone"):
            await generator.join()
        with pytest.raises(NotReady, match=r"generate\(\): the engine failed and cannot go on"):
            await generator.generate(prompt_of(5), LONG)

    run(main)


def test_an_engine_that_cannot_be_emptied_ends_the_generator():
    async def main(generator):
        def failing(*given):
            raise RuntimeError("the device is gone")

        generator.engine.model.logits = generator.engine.drop = failing
        with pytest.raises(NotReady, match="the device is gone"):
            await generator.generate(prompt_of(5), LONG)
        with pytest.raises(NotReady, match="cannot go on"):
            await generator.generate(prompt_of(5), LONG)
        with pytest.raises(NotReady, match="cannot go on"):
            await generator.health()

    run(main)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_calls_loses_no_answer_and_no_slot(seed, tmp_path):
    """Each answer ends as it was asked to, and has the log-probabilities of the versions that made it."""
    source = np.random.default_rng(seed)
    models = [made(max_position_embeddings=8192, seed=number) for number in range(3)]
    for number, model in enumerate(models):
        save_model(model, tmp_path / str(number))

    async def read(generator, ids, sampling, kind):
        if kind == "whole":
            return await generator.generate(ids, sampling)
        pieces = [piece async for piece in generator.stream(ids, sampling)]
        lists = [[one for piece in pieces for one in piece[at]] for at in range(3)]
        return Answer(*lists, pieces[-1].stop, pieces[-1].matched)

    async def main(generator):
        tasks, version = [], 0
        for _ in range(60):
            act = source.choice(["ask", "ask", "ask", "cancel", "abort", "pause", "resume", "update", "look"])
            if act == "ask":
                ids, count = (
                    prompt_of(int(source.integers(1, 20)), int(source.integers(3))),
                    int(source.integers(1, 60)),
                )
                sampling = Sampling(max_tokens=count, ignore_eos=True)
                kind = str(source.choice(["whole", "pieces"]))
                tasks.append((ids, sampling, asyncio.create_task(read(generator, ids, sampling, kind))))
            elif act == "cancel" and tasks:
                tasks[source.integers(len(tasks))][2].cancel()
            elif act == "abort":
                await generator.abort()
            elif act == "pause":
                mode = str(source.choice(["keep", "abort", "wait"]))
                await generator.pause(mode, clear_cache=bool(source.integers(2)))
            elif act == "resume":
                await generator.resume()
            elif act == "update":
                version += 1
                await generator.update(tmp_path / str(version % 3), version, kv="recompute")
            await asyncio.sleep(float(source.choice([0, 0, 0.005])))
        await generator.resume()
        ended = await asyncio.gather(*(task for *_, task in tasks), return_exceptions=True)
        for (ids, sampling, _), answer in zip(tasks, ended, strict=True):
            if isinstance(answer, asyncio.CancelledError):
                continue
            assert answer.stop == "abort" or len(answer.tokens) == sampling.max_tokens
            assert len(answer.tokens) == len(answer.logprobs) == len(answer.versions)
            assert answer.versions == sorted(answer.versions)
            for one in set(answer.versions):
                pieces = log_probabilities(models[one % 3], np.array([*ids, *answer.tokens]))
                scores = list(chain.from_iterable(pieces))[len(ids) - 1 :]
                at = [place for place, made_by in enumerate(answer.versions) if made_by == one]
                assert np.allclose(np.array(scores)[at], np.array(answer.logprobs)[at], atol=1e-4)
        assert any(not isinstance(answer, BaseException) and answer.stop == "length" for answer in ended)
        assert (await generator.health())[1:] == (0, 0)
        assert not generator._ongoing
        assert not generator._streams

    run(main, slots=3)


def test_close_fails_answers_on_their_way_and_later_calls():
    async def main(generator):
        running = generator.begin(prompt_of(5), ENDLESS)
        await generator.close()
        await generator.close()
        with pytest.raises(ClosedError, match="closed before the answer ended"):
            await running.answer()
        with pytest.raises(ClosedError, match="was closed"):
            await generator.generate(prompt_of(5))
        assert not generator.engine.is_busy

    run(main, **ROOM)


def test_calls_that_wait_for_the_end_take_none_of_asyncio_s_threads():
    """A run on a computer of few cores would have none left for its journal and its learner."""

    async def main(generator):
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        joined = [asyncio.ensure_future(generator.join()) for _ in range(3)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(asyncio.to_thread(int), HANG_S / 2) == 0
        joined[0].cancel()
        await generator.close()
        await asyncio.gather(*joined[1:])
        await generator.join()
        assert joined[0].cancelled()

    run(main)


def test_an_idle_thread_uses_no_processor_time():
    async def main(generator):
        await generator.generate(prompt_of(5), Sampling(max_tokens=3, ignore_eos=True))
        await asyncio.to_thread(until_thread_waits, generator._thread)
        assert seconds_of_other_threads(0.3) < 0.1

    run(main)
