"""`AgentWorker`: runs an agent on the items that a controller admits, many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain
from typing import Protocol

from ..checks import whole
from ..errors import NotReady, SchemaError
from ..sequences.sample import SequenceSample
from .agent import Agent, Generate, describe_error, play
from .characters import Tokenizer
from .clock import Clock
from .coroutines import is_cancelled, together
from .episode import Episode, to_sample
from .generators.protocol import Generator
from .generators.sampling import Sampling
from .permits import Permit, derive_seed

__all__ = ["AgentWorker", "Gate"]

_POLL_S = 0.001
_RETRY_S = 0.1


class Gate(Protocol):
    """What a worker needs of a controller; `Controller` says what the calls do."""

    async def start(self, owner: str) -> Permit | None: ...

    async def finish(self, permit: Permit, sample: SequenceSample) -> str: ...

    async def reject(self, permit: Permit, why: str) -> None: ...

    def hear(self, owner: str) -> None: ...


class AgentWorker:
    """A process, or a part of one, in which agents run. A name of its own tells the controller whose permits are whose.

    Args:
        name: Different from that of every other owner.
        controller: Whom it asks for items.
        generator: Whom agents ask for answers.
        agent: What runs.
        tokenizer: Of the model.
        clock: Time.
        group: Answers to each item.
        concurrent: Items at once.
        tries: How often an episode may fail, by an error of the agent or its reward, before its item is rejected.
        sampling: Of answers, where the agent says nothing else.
        beat_s: How often the controller hears that this worker is alive.
    """

    def __init__(
        self,
        name: str,
        controller: Gate,
        generator: Generator,
        agent: Agent,
        *,
        tokenizer: Tokenizer,
        clock: Clock,
        group: int = 8,
        concurrent: int = 16,
        tries: int = 3,
        sampling: Sampling | None = None,
        beat_s: float = 5.0,
    ) -> None:
        where = "AgentWorker()"
        self.name, self._controller, self._generator, self._agent = name, controller, generator, agent
        self._tokenizer, self._clock, self._sampling, self._beat_s = tokenizer, clock, sampling, beat_s
        self._group, self._concurrent = whole(where, "group", group), whole(where, "concurrent", concurrent)
        self._tries = whole(where, "tries", tries)
        self._seen = -1  # the version that the generator had when it was asked
        self._asking: asyncio.Future[None] | None = None
        self.failures = 0
        """Episodes that raised."""

    async def run(self) -> None:
        """Works until the controller has no more items."""
        beats = asyncio.ensure_future(self._beat())
        try:
            await together([self._lane() for _ in range(self._concurrent)])
        finally:
            beats.cancel()
            if self._asking is not None:
                self._asking.cancel()

    async def _beat(self) -> None:
        while True:
            await self._clock.sleep(self._beat_s)
            self._controller.hear(self.name)

    async def _lane(self) -> None:
        while (permit := await self._controller.start(self.name)) is not None:
            try:
                sample = await self._sample(permit)
                await self._controller.finish(permit, sample)
            except (Rejected, SchemaError) as error:
                await self._controller.reject(permit, str(error))

    async def _sample(self, permit: Permit) -> SequenceSample:
        await self._wait_for_version(permit.version)
        made = await together([self._play(permit, member) for member in range(self._group)])
        return to_sample(permit.key, list(chain.from_iterable(made)))

    async def _wait_for_version(self, version: int) -> None:
        """A generator that follows the weights has this version, or will soon have it."""
        while self._seen < version:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.ensure_future(self._ask(version))
            await asyncio.shield(self._asking)  # one asks for all lanes, which go on at the same moment

    async def _ask(self, version: int) -> None:
        while True:
            try:
                self._seen = (await self._generator.health()).version
                if self._seen >= version:
                    return
                await self._clock.sleep(_POLL_S)
            except NotReady:
                await self._clock.sleep(_RETRY_S)

    async def _play(self, permit: Permit, member: int) -> Sequence[Episode]:
        attempt = 0
        while attempt < self._tries:
            seed = derive_seed(permit.seed, member, attempt)
            generate = Generate(self._generator, self._tokenizer, self._sampling, seed)
            try:
                return await play(self._agent, permit.item, generate, repr(permit.key))
            except NotReady:  # the generator is gone, which is no fault of the item
                await self._clock.sleep(_RETRY_S)
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and is_cancelled():
                    raise
                self.failures += 1
                attempt += 1
                why = describe_error(error)
        raise Rejected(f"{self._tries} tries failed, the last by {why}")


class Rejected(Exception):
    """Every try at an item failed."""
