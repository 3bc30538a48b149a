"""`session_agent`: an agent made of a program for the `openai` client, which knows nothing of training."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ..errors import NotReady, SchemaError
from .agent import Agent, Generate
from .episode import Episode
from .generators.answer import Answer
from .generators.protocol import Health, Responder
from .generators.sampling import Sampling
from .items import Item
from .session import Call, Session, SessionServer

__all__ = ["Program", "session_agent"]

_MOST_TOKENS = 2**53 - 1  # of a call that does not say it: as many as the run says

Program = Callable[[Item, str, str], Awaitable[float]]
"""From an item, an address (`base_url`) and a key (`api_key`) to the reward."""


def session_agent(program: Program, tokenizer: Any) -> Agent:
    """An agent whose program asks the model through a `Session`; every answer that it was given is trained on.

    Answers are drawn as the run says, because the learner has to know the distribution: of a call's own settings,
    `max_tokens` (at most that of the run) and `stop` count. A call whose prompt begins with the tokens of an earlier
    call and its answer goes on in the same sequence. Others begin a sequence of their own: calls side by side, and
    turns that the chat template writes in other tokens than were generated. All of them have the program's reward.

    Args:
        program: An async function. Code that blocks (`openai.OpenAI`) runs in `asyncio.to_thread`.
        tokenizer: A `ChatTokenizer`, or one of transformers, with a chat template if the program chats.
    """
    shared = _SharedServer(tokenizer)

    async def agent(item: Item, generate: Generate) -> list[Episode]:
        drawn = _Drawn(generate)
        async with shared.session(drawn) as session:
            try:
                reward = await program(item, session.base_url, session.api_key)
            except Exception as error:
                if drawn.gone is not None:  # a program's client has an error of its own for it
                    raise NotReady(str(drawn.gone)) from error
                raise
        episodes = join(session.calls)
        if not episodes:
            raise SchemaError("session_agent(): program: expected at least one call that was answered, got none")
        for episode in episodes:
            episode.reward = reward
        return episodes

    return agent


def join(calls: Sequence[Call]) -> list[Episode]:
    """The sequences that these calls make. A call whose client has left before its end is not part of any."""
    made: list[Episode] = []
    for call in calls:
        if call.answer.stop in ("abort", "error"):
            continue
        episode = next((one for one in reversed(made) if call.prompt[: len(one.tokens)] == one.tokens), None)
        if episode is None:
            episode = Episode()
            made.append(episode)
        episode.tell(call.prompt[len(episode.tokens) :])
        episode.take(call.answer)
    return made


class _Drawn:
    """Answers to the calls of one program, drawn as the run says.

    Attributes:
        gone: Why a call had no answer, where the generator was gone.
    """

    def __init__(self, generate: Generate) -> None:
        self._generate, self._numbers = generate, itertools.count()
        self.gone: NotReady | None = None

    async def generate(self, ids: Sequence[int], sampling: Sampling | None = None) -> Answer:
        asked, ours = Sampling() if sampling is None else sampling, self._generate.sampling
        changes: dict[str, Any] = {"max_tokens": min(asked.max_tokens, ours.max_tokens)}
        if asked.stop:
            changes["stop"] = (*ours.stop, *asked.stop)
        try:
            return await self._generate.answer(ids, next(self._numbers), **changes)
        except NotReady as error:
            self.gone = error
            raise

    async def score(self, ids: Sequence[int]) -> list[float]:
        return await self._generate.generator.score(ids)

    async def health(self) -> Health:
        return await self._generate.generator.health()


class _SharedServer:
    """One server for the sessions of all episodes that run at the same time."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._running: tuple[SessionServer, asyncio.Future[SessionServer]] | None = None
        self._users = 0

    @asynccontextmanager
    async def session(self, generator: Responder) -> AsyncIterator[Session]:
        if self._running is None:
            server = SessionServer(generator, self._tokenizer, max_tokens=_MOST_TOKENS)
            self._running = server, asyncio.ensure_future(server.start())
        server, started = self._running
        self._users += 1
        try:
            await asyncio.shield(started)
            async with server.open(generator) as session:
                yield session
        finally:
            self._users -= 1
            if not self._users:
                self._running = None
                await server.close()
