"""One suite for every generator: what a trainer may rely on, whoever makes the tokens.

`point` is the line of the table in docs/how-to/use-vllm-or-sglang.md, which `make backends` writes from a run.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_references import filtered
from generator_backends import BACK_ENDS, CONTEXT, BackEnd, Weights, paused, tokens_of_vllm
from patience import HANG_S

from sharpwave.errors import SchemaError, StorageError
from sharpwave.llm.generators import Answer, Generator, Sampling
from sharpwave.llm.generators.vllm import VLLMClient

CLOSE = 1e-3
PROMPT = [5, 60, 7, 200, 90, 11]
LONG = Sampling(max_tokens=400, ignore_eos=True)


def point(number: int) -> Callable[[Any], Any]:
    def mark(function: Any) -> Any:
        function.point = number
        return function

    return mark


class Bench:
    """A generator of the back end under test, in an event loop of its own, with versions that only grow."""

    def __init__(self, back_end: BackEnd, weights: Weights, place: Path) -> None:
        self.back_end, self.weights, self.place = back_end, weights, place
        self.loop = asyncio.new_event_loop()
        self._versions = itertools.count(1)
        self.generator = self.run(self._open(1))

    async def _open(self, count: int) -> Generator:
        return self.back_end.open(self.weights, self.place, count)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 9 * HANG_S))

    def needs(self, ability: str) -> None:
        if ability in self.back_end.lacks:
            pytest.skip(self.back_end.lacks[ability])

    async def swap(self, kv: str = "keep", generator: Generator | None = None) -> int:
        version = next(self._versions)
        await (generator or self.generator).update(self.weights.folder(version), version, kv=kv)
        return version

    async def count_tokens(self) -> float:
        """Those that vLLM says it has made. Others do not count them."""
        return await tokens_of_vllm(self.generator) if self.back_end.name == "vLLM" else 0

    def close(self) -> None:
        self.run(self.generator.close())
        self.loop.close()

    def reference(self, prompt: list[int], answer: Answer, sampling: Sampling, start: int = 0) -> list[float]:
        """From token `start` on, by a whole forward pass of the version that made each."""
        whole = torch.tensor([[*prompt, *answer.tokens]])
        found = []
        with torch.no_grad():
            rows = {one: self.weights.model(one)(whole)[0].float() for one in set(answer.versions)}
        for place in range(start, len(answer.tokens)):
            logits = rows[answer.versions[place]][len(prompt) + place - 1].numpy()
            plain = sampling if sampling.temperature > 0 else Sampling()
            found.append(filtered(logits, plain)[answer.tokens[place]])
        return found

    def check(self, prompt: list[int], answer: Answer, sampling: Sampling, start: int = 0) -> None:
        expected = self.reference(prompt, answer, sampling, start)
        np.testing.assert_allclose(answer.logprobs[start:], expected, atol=CLOSE)


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


async def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + HANG_S
    while not (await found if asyncio.iscoroutine(found := holds()) else found):
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        await asyncio.sleep(0.005)


async def until_hit(attempt: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    """Repeats what has to happen in mid-answer: on a loaded machine answers may be complete before the test goes on."""
    for _ in range(10):
        if await attempt():
            return
    raise AssertionError("it never happened in mid-answer")


async def until_running(generator: Generator, *tasks: asyncio.Future[Answer]) -> None:
    """Until an answer has a token, or all of them are complete."""

    async def runs() -> bool:
        return (await generator.health()).running >= 1 or all(task.done() for task in tasks)

    await until(runs)


async def swaps_during(bench: Bench, kv: str, count: int = 4) -> list[Answer]:
    """Answers that saw at least one swap, all of them complete."""
    tasks = [asyncio.ensure_future(bench.generator.generate(PROMPT, LONG)) for _ in range(count)]
    await until_running(bench.generator, *tasks)
    await swap_until_done(bench, kv, tasks)
    return [await task for task in tasks]


async def swap_until_done(bench: Bench, kv: str, tasks: list[asyncio.Future[Answer]]) -> None:
    """Not many swaps: each of those that recompute costs as much as the tokens so far."""
    for _ in range(5):
        if not all(task.done() for task in tasks):
            await bench.swap(kv)


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


@point(3)
def test_max_tokens_stop_ids_and_the_likeliest_token(bench: Bench) -> None:
    async def main() -> None:
        greedy = Sampling(max_tokens=30, temperature=0.0, ignore_eos=True)
        whole = await bench.generator.generate(PROMPT, greedy)
        assert (len(whole.tokens), whole.stop, whole.matched) == (30, "length", None)
        model = bench.weights.model(whole.versions[0])
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *whole.tokens]]))[0, len(PROMPT) - 1 : -1]
        assert whole.tokens == logits.argmax(-1).tolist()

        stop = whole.tokens[7]
        cut = await bench.generator.generate(
            PROMPT, Sampling(max_tokens=30, temperature=0.0, ignore_eos=True, stop_ids=(stop,))
        )
        assert cut.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
        assert (cut.stop, cut.matched) == ("stop", stop)

    bench.run(main())


@point(3)
def test_the_end_of_text_ends_an_answer_unless_it_is_ignored(bench: Bench) -> None:
    async def main() -> None:
        ends = 2
        many = [bench.generator.generate([3 + i, 4], Sampling(max_tokens=200)) for i in range(8)]
        ended = [answer for answer in await asyncio.gather(*many) if answer.stop == "stop"]
        assert ended
        for answer in ended:
            assert answer.tokens[-1] == answer.matched == ends
            assert ends not in answer.tokens[:-1]
        ignored = await bench.generator.generate(PROMPT, Sampling(max_tokens=300, ignore_eos=True))
        assert ends in ignored.tokens
        assert len(ignored.tokens) == 300

    bench.run(main())


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

    async def attempt() -> bool:
        task = asyncio.ensure_future(bench.generator.generate(PROMPT, LONG))
        await until_running(bench.generator, task)
        async with paused(bench.generator, "abort"):
            await bench.generator.health()
            was_ended = not task.done()
        answer = await task
        assert (answer.stop, len(answer.tokens)) == ("length", LONG.max_tokens)
        bench.check(PROMPT, answer, LONG)
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


async def until_idle(generator: Generator) -> None:
    async def is_idle() -> bool:
        health = await generator.health()
        return health.running == health.waiting == 0

    await until(is_idle)


@point(6)
def test_weights_that_cannot_be_read_leave_the_old_ones(bench: Bench, tmp_path: Path) -> None:
    empty, damaged = tmp_path / "empty", tmp_path / "damaged"
    empty.mkdir()
    damaged.mkdir()
    for file in bench.weights.folder(0).iterdir():
        whole = file.read_bytes()
        (damaged / file.name).write_bytes(whole[: len(whole) // 2] if file.suffix == ".safetensors" else whole)

    async def main() -> None:
        version = await bench.swap()
        task = asyncio.ensure_future(bench.generator.generate(PROMPT, LONG))
        await until_running(bench.generator, task)
        for bad in (tmp_path / "missing", empty, damaged):
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
def test_requests_that_are_wrong_are_refused_and_others_go_on(bench: Bench) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(bench.generator.generate(PROMPT, LONG))
        for ids, sampling in (
            ([], Sampling()),
            ([5, 100_000], Sampling(max_tokens=4)),
            ([5, -1], Sampling(max_tokens=4)),
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


class Kill:
    """Kills the server of the client's next request as soon as three of its tokens have come in."""

    def __init__(self, client: VLLMClient) -> None:
        self.asked: list[tuple[Any, int, Any]] = []  # server, length of the prompt, what it sent
        self._ask = client._ask
        client._ask = self.note  # type: ignore[method-assign]

    async def note(self, server: Any, name: str, ids: list[int], sampling: Sampling, part: Any) -> None:
        add = part.add

        def add_and_kill(*given: Any) -> None:
            add(*given)
            if server is self.asked[0][0] and len(part.tokens) >= 3 and self.pid is not None:
                os.kill(self.pid, signal.SIGKILL)
                self.pid = None

        self.asked.append((server, len(ids), part))
        if len(self.asked) == 1:
            self.pid, part.add = server.process.pid, add_and_kill
        await self._ask(server, name, ids, sampling, part)


async def killed(client: VLLMClient) -> tuple[Kill, Answer]:
    """An answer whose server died before it was complete. The last tokens may have been on their way already."""
    for _ in range(10):
        await until(lambda: all(server.is_ready for server in client.servers))
        kill = Kill(client)
        answer = await client.generate(PROMPT, LONG)
        client._ask = kill._ask  # type: ignore[method-assign]
        if len(kill.asked) > 1:
            return kill, answer
    raise AssertionError("every answer was complete before its server was dead")


@point(8)
@pytest.mark.parametrize("count", [pytest.param(1, id="restart"), pytest.param(2, id="elsewhere")])
def test_a_killed_server_costs_no_token(bench: Bench, count: int) -> None:
    bench.needs("processes")

    async def main() -> None:
        client = bench.generator if count == 1 else bench.back_end.open(bench.weights, bench.place, count)
        assert isinstance(client, VLLMClient)
        try:
            await client.health()
            version = await bench.swap(generator=client)
            kill, answer = await killed(client)
            assert kill.pid is None
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
