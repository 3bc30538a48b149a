"""What the conformance suite is run with: a generator, versions that only grow, whole forward passes, a killer."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_references import filtered
from generator_backends import BackEnd, Weights, tokens_of_vllm
from patience import HANG_S

from sharpwave.llm.generators import Answer, Generator, Sampling
from sharpwave.llm.generators.client import Client

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
        self.run(self.generator.health())  # a server's start takes longer than any step of a test

    async def _open(self, count: int) -> Generator:
        made = self.back_end.open(self.weights, self.place, count)
        return await made if inspect.isawaitable(made) else made

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


async def until(holds: Callable[[], Any]) -> None:
    deadline = time.monotonic() + HANG_S
    while not (await found if asyncio.iscoroutine(found := holds()) else found):
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        await asyncio.sleep(0.005)


async def until_hit(attempt: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    """Repeats what is up to chance, as in mid-answer: beside a load answers may be complete before the test goes on."""
    for _ in range(10):
        if await attempt():
            return
    raise AssertionError("it never happened")


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


async def until_idle(generator: Generator) -> None:
    async def is_idle() -> bool:
        health = await generator.health()
        return health.running == health.waiting == 0

    await until(is_idle)


class Kill:
    """Kills the server of the client's next request as soon as three of its tokens have come in."""

    def __init__(self, client: Client) -> None:
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


async def killed(client: Client) -> tuple[Kill, Answer]:
    """An answer whose server died before it was complete. The last tokens may have been on their way already."""
    for _ in range(10):
        await until(lambda: all(server.is_ready for server in client.servers))
        kill = Kill(client)
        answer = await client.generate(PROMPT, LONG)
        client._ask = kill._ask  # type: ignore[method-assign]
        if len(kill.asked) == 2 and kill.pid is None:
            return kill, answer
    raise AssertionError("every answer was complete before its server was dead")
