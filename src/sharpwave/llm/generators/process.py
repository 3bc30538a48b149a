"""`ProcessGenerator`: our engine in a child process of its own."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ..channel import Channel, Door
from ..child import Child
from .answer import Answer
from .engine_frames import pack_ids, unpack_answers
from .engine_process import ABORT, ANSWERS, GENERATE, HEALTH, SCORE, UPDATE
from .protocol import Health
from .sampling import Sampling

__all__ = ["ProcessGenerator"]


class ProcessGenerator:
    """An engine whose steps do not wait for this process's interpreter, which agents keep busy.

    For one event loop and for runs on one machine. The child ends with its parent, however that ends. Other processes
    may have channels of their own to it; for them it is not a child.

    Example:
        `await ProcessGenerator.start("sharpwave.llm.parts:run_engine", run="runs/sort", slots=64, who="generator-0")`
    """

    def __init__(self) -> None:
        self._channel: Channel
        self._answers: set[int] = set()  # numbers of calls that wait for an answer of the model

    @classmethod
    async def start(cls, maker: str, *, door: Door | None = None, **arguments: Any) -> ProcessGenerator:
        """Starts the child.

        Args:
            maker: "module:function" that returns an `Engine` and a function that is called now and then, in the child.
            door: What it opens is for `meet`, in this process or in others.
            arguments: Arguments of the function, as JSON has them.

        Raises:
            SchemaError, StorageError, NotReady: What the function raised.
        """
        made = cls()
        module = f"{__package__}.engine_process"
        said = [maker, json.dumps(arguments)]
        ends = [] if door is None else [door.inside]
        made._channel = await Child.start(module, said, "the engine", made._take, ends=ends)
        return made

    @classmethod
    def meet(cls, end: socket.socket) -> ProcessGenerator:
        """The same engine over another channel, which may be in another process than its parent."""
        made = cls()
        made._channel = Channel(end, "the engine", made._take)
        return made

    @property
    def pid(self) -> int | None:
        """Of the child; None where this process is not its parent."""
        return self._channel.pid if isinstance(self._channel, Child) else None

    async def generate(self, ids: Sequence[int], sampling: Sampling | None = None) -> Answer:
        """One answer; see `Generator.generate`."""
        asked = pack_ids(ids, Sampling() if sampling is None else sampling, "generate()")
        number, call = self._channel.call(GENERATE, asked)
        self._answers.add(number)
        try:
            answer: Answer = await call
            return answer
        except asyncio.CancelledError:
            self._channel.send(ABORT, number)
            raise
        finally:
            self._answers.discard(number)
            self._channel.forget(number)

    async def score(self, ids: Sequence[int]) -> list[float]:
        """See `Generator.score`."""
        made: list[float] = await self._channel.call(SCORE, pack_ids(ids, Sampling(), "score()"))[1]
        return made

    async def update(self, path: str | Path, version: int, *, kv: Literal["keep", "recompute"] = "keep") -> None:
        """New weights from a folder; see `Generator.update`."""
        said = {"path": str(path), "version": version, "kv": kv}
        await self._channel.call(UPDATE, json.dumps(said).encode())[1]

    async def abort(self) -> int:
        """Ends every answer on its way with the tokens it has. Returns how many."""
        numbers = list(self._answers)
        for number in numbers:
            self._channel.send(ABORT, number)
        return len(numbers)

    async def health(self) -> Health:
        """See `Generator.health`."""
        return Health(*await self._channel.call(HEALTH)[1])

    async def join(self) -> None:
        """Waits until the child has ended.

        Raises:
            NotReady: It ended by itself.
        """
        await self._channel.join()

    async def close(self) -> None:
        """Ends the child, or the channel. Answers on their way fail with ClosedError. A second call does nothing."""
        await self._channel.close()

    def _take(self, kind: int, number: int, body: bytes) -> None:
        if kind == ANSWERS:
            for its, answer in unpack_answers(body):
                self._channel.answer(its, answer)
