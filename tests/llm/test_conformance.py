"""One suite for every generator: what a trainer may rely on, whoever makes the tokens.

`point` is the line of the table in docs/how-to/use-vllm-or-sglang.md, which `make backends` writes from a run.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conformance_bench import (
    CLOSE,
    LONG,
    PROMPT,
    Bench,
    killed,
    point,
    swap_until_done,
    swaps_during,
    until_hit,
    until_idle,
    until_running,
)
from generator_backends import BACK_ENDS, CONTEXT, Weights, paused
from safetensors.torch import load_file, save_file
from torch import Tensor

from sharpwave.errors import SchemaError, StorageError
from sharpwave.llm.generators import Answer, Sampling
from sharpwave.llm.generators.client import Client


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("conformance"))


@pytest.fixture(
    scope="module", params=BACK_ENDS, ids=lambda back_end: back_end.name.replace(", ", "-").replace(" ", "-")
)
def bench(
    request: pytest.FixtureRequest, weights: Weights, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    if request.param.missing:
        pytest.skip(request.param.missing)
    made = Bench(request.param, weights, tmp_path_factory.mktemp("servers"))
    yield made
    made.close()


@point(1)
def test_tokens_logprobs_and_versions_have_equal_length_and_versions_never_fall(bench: Bench) -> None:
    for answer in bench.run(swaps_during(bench, "keep")):
        assert len(answer.tokens) == len(answer.logprobs) == len(answer.versions) == LONG.max_tokens
        assert answer.versions == sorted(answer.versions)
        assert all(np.isfinite(answer.logprobs))


@point(2)
@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(max_tokens=40, ignore_eos=True), id="plain"),
        pytest.param(Sampling(max_tokens=40, ignore_eos=True, temperature=0.6), id="temperature"),
        pytest.param(Sampling(max_tokens=40, ignore_eos=True, top_k=5), id="top-k"),
        pytest.param(Sampling(max_tokens=40, ignore_eos=True, temperature=1.4, top_p=0.8), id="top-p"),
        pytest.param(Sampling(max_tokens=40, ignore_eos=True, temperature=0.0), id="greedy"),
    ],
)
def test_logprobs_are_those_of_a_forward_pass_of_the_version(bench: Bench, sampling: Sampling) -> None:
    if sampling.is_filtered:
        bench.needs("filters")

    async def main() -> list[Answer]:
        # The same prompt before and after: keys and values of the old weights must not serve the new ones.
        await bench.generator.generate(PROMPT, sampling)
        version = await bench.swap()
        answers = await asyncio.gather(*(bench.generator.generate(PROMPT, sampling) for _ in range(3)))
        assert all(set(answer.versions) == {version} for answer in answers)
        return answers

    for answer in bench.run(main()):
        bench.check(PROMPT, answer, sampling)


@point(2)
def test_logprobs_after_a_swap_that_recomputes_are_those_of_the_new_version_over_the_whole_sequence(
    bench: Bench,
) -> None:
    async def attempt() -> bool:
        answers = await swaps_during(bench, "recompute")
        for answer in answers:
            bench.check(PROMPT, answer, LONG)
        return any(len(set(answer.versions)) > 1 for answer in answers)

    bench.run(until_hit(attempt))


GREEDY = Sampling(max_tokens=30, temperature=0.0, ignore_eos=True)


@point(3)
def test_max_tokens_and_the_likeliest_token(bench: Bench) -> None:
    whole = bench.run(bench.generator.generate(PROMPT, GREEDY))
    assert (len(whole.tokens), whole.stop, whole.matched) == (30, "length", None)
    with torch.no_grad():
        logits = bench.weights.model(whole.versions[0])(torch.tensor([[*PROMPT, *whole.tokens]]))
    assert whole.tokens == logits[0, len(PROMPT) - 1 : -1].argmax(-1).tolist()


@point(3)
def test_a_stop_id_ends_an_answer_and_is_its_last_token(bench: Bench) -> None:
    bench.needs("both ends")

    async def main() -> None:
        whole = await bench.generator.generate(PROMPT, GREEDY)
        stop = whole.tokens[7]
        cut = await bench.generator.generate(PROMPT, replace(GREEDY, stop_ids=(stop,)))
        assert cut.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
        assert (cut.stop, cut.matched) == ("stop", stop)

    bench.run(main())


@point(3)
def test_the_end_of_text_ends_an_answer_unless_it_is_ignored(bench: Bench) -> None:
    async def attempt() -> bool:
        ends = 2
        many = [bench.generator.generate([3 + i, 4], Sampling(max_tokens=100)) for i in range(8)]
        ended = [answer for answer in await asyncio.gather(*many) if answer.stop == "stop"]
        for answer in ended:
            assert answer.tokens[-1] == answer.matched == ends
            assert ends not in answer.tokens[:-1]
        many = [bench.generator.generate([3 + i, 4], Sampling(max_tokens=100, ignore_eos=True)) for i in range(8)]
        ignored = await asyncio.gather(*many)
        assert all(len(answer.tokens) == 100 for answer in ignored)
        return bool(ended) and any(ends in answer.tokens for answer in ignored)

    bench.run(until_hit(attempt))


@point(3)
def test_a_seed_draws_the_same_answer_again(bench: Bench) -> None:
    bench.needs("seed")

    async def main() -> None:
        seeded = [Sampling(max_tokens=30, seed=seed, ignore_eos=True) for seed in (7, 7, 8)]
        one, two, other = await asyncio.gather(*(bench.generator.generate(PROMPT, one) for one in seeded))
        assert one.tokens == two.tokens != other.tokens

    bench.run(main())


@point(3)
def test_a_stop_string_ends_an_answer(bench: Bench) -> None:
    bench.needs("stop strings")

    async def main() -> None:
        greedy = Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)
        whole = await bench.generator.generate(PROMPT, greedy)
        # Tokens from 3 on are bytes; one that is a printable character, and does not come earlier.
        place = next(
            at for at, token in enumerate(whole.tokens) if at > 3 and _is_text(token) and token not in whole.tokens[:at]
        )
        text = _text(bench.weights, whole.tokens[place])
        cut = await bench.generator.generate(
            PROMPT, Sampling(max_tokens=60, temperature=0.0, ignore_eos=True, stop=(text,))
        )
        assert cut.tokens == whole.tokens[: place + 1]
        assert (cut.stop, cut.matched) == ("stop", text)

    bench.run(main())


def _text(weights: Weights, token: int) -> str:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(weights.folder(0) / "tokenizer.json")).decode([token])


def _is_text(token: int) -> bool:
    return 3 <= token < 3 + 94  # the alphabet of bytes begins with the printable ones


@point(4)
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_swaps_lose_and_repeat_no_request(bench: Bench, kv: str) -> None:
    async def attempt() -> bool:
        tasks = [asyncio.ensure_future(bench.generator.generate([3 + i, 9], LONG)) for i in range(6)]
        await until_running(bench.generator, *tasks)
        await swap_until_done(bench, kv, tasks)
        answers = [await task for task in tasks]
        for i, answer in enumerate(answers):
            assert isinstance(answer, Answer)
            assert (answer.stop, len(answer.tokens)) == ("length", LONG.max_tokens)
            # A token of another request's answer, or one sent twice, would not fit to the tokens before it.
            begun = answer.versions[0]
            old = sum(version == begun for version in answer.versions)
            part = Answer(answer.tokens[:old], answer.logprobs[:old], answer.versions[:old], "abort")
            bench.check([3 + i, 9], part, LONG)
        assert (await bench.generator.health()).running == 0
        return any(len(set(answer.versions)) > 1 for answer in answers)

    bench.run(until_hit(attempt))


@point(4)
def test_an_answer_that_a_server_gives_up_in_a_pause_is_completed(bench: Bench) -> None:
    bench.needs("processes")

    whole = replace(LONG, max_tokens=600)  # beside a load its tokens come in bursts, and a pause after the last one

    async def attempt() -> bool:
        task = asyncio.ensure_future(bench.generator.generate(PROMPT, whole))
        await until_running(bench.generator, task)
        async with paused(bench.generator, "abort"):
            await bench.generator.health()
            was_ended = not task.done()
        answer = await task
        assert (answer.stop, len(answer.tokens)) == ("length", whole.max_tokens)
        bench.check(PROMPT, answer, whole)
        return was_ended

    bench.run(until_hit(attempt))


@point(5)
def test_abort_returns_what_there_is_and_frees_the_places(bench: Bench) -> None:
    async def attempt() -> bool:
        assert await bench.generator.abort() == 0
        tasks = [asyncio.ensure_future(bench.generator.generate(PROMPT, LONG)) for _ in range(4)]
        await until_running(bench.generator, *tasks)
        assert await bench.generator.abort() <= 4
        answers = [await task for task in tasks]
        for answer in answers:
            assert answer.stop == "abort" or len(answer.tokens) == LONG.max_tokens
            bench.check(PROMPT, answer, LONG)
        await until_idle(bench.generator)
        assert len((await bench.generator.generate(PROMPT, Sampling(max_tokens=5, ignore_eos=True))).tokens) == 5
        return any(answer.stop == "abort" for answer in answers)

    bench.run(until_hit(attempt))


@point(5)
def test_a_task_that_is_cancelled_frees_its_place(bench: Bench) -> None:
    async def attempt() -> bool:
        before = await bench.count_tokens()
        task = asyncio.ensure_future(bench.generator.generate(PROMPT, Sampling(max_tokens=600, ignore_eos=True)))
        await until_running(bench.generator, task)
        if not task.cancel():
            return False
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(bench.generator)
        await bench.generator.generate(PROMPT, Sampling(max_tokens=5, ignore_eos=True))
        return await bench.count_tokens() - before < 600

    bench.run(until_hit(attempt))


@point(6)
def test_weights_that_cannot_be_read_leave_the_old_ones(bench: Bench, tmp_path: Path) -> None:
    empty, damaged = tmp_path / "empty", tmp_path / "damaged"
    outside = tmp_path / "outside"
    for folder in (empty, damaged, outside):
        folder.mkdir()
    (outside / "config.json").write_bytes((bench.weights.folder(0) / "config.json").read_bytes())
    right = os.path.relpath(bench.weights.folder(0) / "model.safetensors", outside)
    names = load_file(outside / right)
    (outside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, right)}))
    for file in bench.weights.folder(0).iterdir():
        whole = file.read_bytes()
        (damaged / file.name).write_bytes(whole[: len(whole) // 2] if file.suffix == ".safetensors" else whole)

    async def main() -> None:
        version = await bench.swap()
        task = asyncio.ensure_future(bench.generator.generate(PROMPT, LONG))
        await until_running(bench.generator, task)
        for bad in (tmp_path / "missing", empty, damaged, outside):
            with pytest.raises(StorageError):
                await bench.generator.update(bad, version + 1000)
        with pytest.raises(SchemaError, match="versions only grow"):
            await bench.generator.update(bench.weights.folder(0), version)
        assert (await bench.generator.health()).version == version
        for answer in (await task, await bench.generator.generate(PROMPT, Sampling(max_tokens=9, ignore_eos=True))):
            assert set(answer.versions) == {version}
            bench.check(PROMPT, answer, LONG)

    bench.run(main())


@point(6)
def test_weights_that_are_wrong_leave_the_old_ones(bench: Bench, tmp_path: Path) -> None:
    bench.needs("checks of weights")
    name = "model.layers.0.mlp.gate_proj.weight"
    changes: dict[str, Callable[[Tensor], Tensor | None]] = {
        "NaN": lambda right: right * torch.nan,
        "infinite": lambda right: right * torch.inf,
        "shape": lambda right: right[1:].contiguous(),
        "dtype": lambda right: right.to(torch.int8),
        "missing": lambda right: None,
        "unknown": lambda right: right.clone(),
    }

    async def main() -> None:
        version = await bench.swap()
        for what, change in changes.items():
            folder = shutil.copytree(bench.weights.folder(0), tmp_path / what)
            state = load_file(folder / "model.safetensors")
            made = change(state[name] if what == "unknown" else state.pop(name))
            if made is not None:
                state["other" if what == "unknown" else name] = made
            save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
            with pytest.raises((SchemaError, StorageError), match="other" if what == "unknown" else name):
                await bench.generator.update(folder, version + 1000)
        for wrong in (-1, True, "7", 1.5, 10**30):
            with pytest.raises(SchemaError, match="version: expected a whole number"):
                await bench.generator.update(bench.weights.folder(0), wrong)  # type: ignore[arg-type]
        answer = await bench.generator.generate(PROMPT, Sampling(max_tokens=9, ignore_eos=True))
        assert set(answer.versions) == {version}
        bench.check(PROMPT, answer, LONG)

    bench.run(main())


@point(6)
def test_requests_that_are_wrong_are_refused_and_others_go_on(bench: Bench) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(bench.generator.generate(PROMPT, LONG))
        for ids, sampling in (
            ([], Sampling()),
            ([5, 100_000], Sampling(max_tokens=4)),
            ([5, -1], Sampling(max_tokens=4)),
            ([5, 2**63], Sampling(max_tokens=4)),
            ([[1], [2, 3]], Sampling(max_tokens=4)),
            ([True], Sampling(max_tokens=4)),
            ([None], Sampling(max_tokens=4)),
            (["5"], Sampling(max_tokens=4)),
            (None, Sampling(max_tokens=4)),
            ([5] * (CONTEXT - 3), Sampling(max_tokens=4)),
        ):
            with pytest.raises(SchemaError):
                await bench.generator.generate(ids, sampling)
        assert len((await task).tokens) == LONG.max_tokens

    bench.run(main())


@point(7)
def test_pauses_may_be_repeated_and_requests_wait(bench: Bench) -> None:
    bench.needs("pause")

    async def main() -> None:
        begun = asyncio.ensure_future(bench.generator.generate(PROMPT, LONG))
        await until_running(bench.generator, begun)
        async with paused(bench.generator), paused(bench.generator):
            late = asyncio.ensure_future(bench.generator.generate(PROMPT, Sampling(max_tokens=5, ignore_eos=True)))
            # It is refused at once or never; several looks later it would have been answered.
            for _ in range(20):
                await bench.generator.health()
                await asyncio.sleep(0.005)
            assert not late.done()
        async with paused(bench.generator):
            pass
        assert len((await late).tokens) == 5
        assert len((await begun).tokens) == LONG.max_tokens

    bench.run(main())


@point(7)
def test_a_pause_during_prefill_loses_nothing(bench: Bench) -> None:
    bench.needs("pause")

    async def main() -> None:
        prompts = [[3 + (7 * i + j) % 250 for j in range(500)] for i in range(6)]
        short = Sampling(max_tokens=6, ignore_eos=True)
        tasks = [asyncio.ensure_future(bench.generator.generate(prompt, short)) for prompt in prompts]
        while not all(task.done() for task in tasks):
            async with paused(bench.generator):
                pass
            await asyncio.sleep(0.02)
        for prompt, task in zip(prompts, tasks, strict=True):
            answer = await task
            assert len(answer.tokens) == 6
            bench.check(prompt, answer, short)

    bench.run(main())


@point(8)
@pytest.mark.parametrize("count", [pytest.param(1, id="restart"), pytest.param(2, id="elsewhere")])
def test_a_killed_server_costs_no_token(bench: Bench, count: int) -> None:
    bench.needs("processes")

    async def main() -> None:
        client = bench.generator if count == 1 else bench.back_end.open(bench.weights, bench.place, count)
        assert isinstance(client, Client)
        try:
            await client.health()
            version = await bench.swap(generator=client)
            kill, answer = await killed(client)
            assert (answer.stop, len(answer.tokens)) == ("length", LONG.max_tokens)
            # Sent again with the tokens so far, to another server or to the one that was started again.
            (first, _, part), (second, length, _) = kill.asked
            assert length == len(PROMPT) + len(part.tokens)
            assert (second is first) == (count == 1)
            # A server that was started again has the newest weights before it is given work.
            assert set(answer.versions) == {version}
            bench.check(PROMPT, answer, LONG)
        finally:
            if client is not bench.generator:
                await client.close()

    bench.run(main())


@point(9)
def test_scores_of_an_answer_are_its_logprobs(bench: Bench) -> None:
    async def main() -> None:
        await bench.swap()
        answer = await bench.generator.generate(PROMPT, Sampling(max_tokens=50, ignore_eos=True))
        scores = await bench.generator.score([*PROMPT, *answer.tokens])
        assert len(scores) == len(PROMPT) + len(answer.tokens) - 1
        np.testing.assert_allclose(scores[len(PROMPT) - 1 :], answer.logprobs, atol=CLOSE)
        assert await bench.generator.score([5]) == []

    bench.run(main())
