"""`Job`: the answers that one HTTP request asks for, as a whole or as pieces; `Backend`: what makes them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from starlette.requests import Request as HttpRequest

from ..answer import Answer
from ..ongoing import Piece
from ..sampling import Sampling
from .refusal import Refusal

__all__ = ["Asked", "Backend", "Job", "Running", "until_gone"]

T = TypeVar("T")


class Running(Protocol):
    """An answer on its way, such as `Ongoing`."""

    async def answer(self) -> Answer: ...

    def pieces(self) -> AsyncIterator[Piece]: ...

    def abort(self) -> None: ...


@dataclass(frozen=True)
class Asked:
    """One prompt with its settings."""

    prompt: list[int]
    sampling: Sampling
    messages: list[Any] | None = None  # where the prompt is a conversation
    tools: list[Any] | None = None

    def times(self, n: int) -> list[Asked]:
        """The same prompt n times. With a seed, answer i has seed + i."""
        seed = self.sampling.seed
        if seed is None:
            return [self] * n
        seeds = [(seed + member) % 2**63 for member in range(n)]
        return [replace(self, sampling=replace(self.sampling, seed=one)) for one in seeds]


@dataclass
class Backend:
    """What the routes need. `begin` begins the answer to what a request asks for, also in pieces where the last
    argument is true; `score` is that of a generator."""

    begin: Callable[[HttpRequest, Asked, bool], Running]
    score: Callable[[Sequence[int]], Any]
    tokenizer: Any = None
    context: int | None = None
    name: str = "sharpwave"
    takes_any_name: bool = False  # of a model
    # Called once for each answer, before the client sees its end.
    record: Callable[[HttpRequest, Asked, Answer], None] | None = None
    max_body_bytes: int = 16 << 20
    max_tokens: int = Sampling.max_tokens  # of chat answers whose request does not say it, where there is no context
    running: dict[str, list[Job]] = field(default_factory=dict)  # by request id
    tasks: set[asyncio.Task[Answer]] = field(default_factory=set)

    def check_name(self, given: str | None) -> None:
        """Refuses a request for another model."""
        if given not in (None, self.name) and not self.takes_any_name:
            raise Refusal(f"model: {given!r} is not served here, expected {self.name!r}", status=404, param="model")


class Job:
    """Answers side by side: one for each element of `asked`. All are begun here or none."""

    def __init__(
        self, backend: Backend, request: HttpRequest, number: str, asked: Sequence[Asked], *, has_pieces: bool
    ) -> None:
        self.number, self.asked = number, asked
        self._backend, self._request = backend, request
        self._running: list[Running] = []
        self._left = 0
        try:
            for one in asked:
                self._running.append(backend.begin(request, one, has_pieces))
        except BaseException:
            self.abort()
            raise
        self._tasks = [asyncio.create_task(self._finish(at)) for at in range(len(asked))]
        self._left = len(asked)
        backend.running.setdefault(number, []).append(self)
        for task in self._tasks:
            backend.tasks.add(task)  # the loop alone would not keep it
            task.add_done_callback(self._forget)

    async def _finish(self, at: int) -> Answer:
        answer = await self._running[at].answer()
        if self._backend.record is not None:
            self._backend.record(self._request, self.asked[at], answer)
        return answer

    def _forget(self, task: asyncio.Task[Answer]) -> None:
        self._backend.tasks.discard(task)
        if not task.cancelled():
            task.exception()  # told by whoever awaits the answers; nobody does after a disconnect
        self._left -= 1
        if not self._left:
            self._backend.running[self.number].remove(self)
            if not self._backend.running[self.number]:
                del self._backend.running[self.number]

    def abort(self) -> int:
        """Ends all answers with the tokens they have. Returns how many had not ended."""
        for one in self._running:
            one.abort()
        return self._left

    async def answers(self) -> list[Answer]:
        """All answers. A task that is cancelled meanwhile aborts them, and they are still recorded."""
        try:
            return [await asyncio.shield(task) for task in self._tasks]
        finally:
            self.abort()  # those that have ended are left

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of all answers as they are made, each with the number of its answer."""
        # One place: while the client reads slowly, the tokens that are made meanwhile join the next piece.
        queue: asyncio.Queue[tuple[int, Piece | BaseException]] = asyncio.Queue(1)
        pumps = [asyncio.create_task(self._pump(at, queue)) for at in range(len(self._running))]
        left = len(pumps)
        try:
            while left:
                at, piece = await queue.get()
                if isinstance(piece, BaseException):
                    raise piece
                left -= piece.stop is not None
                yield at, piece
        finally:
            self.abort()
            for pump in pumps:
                pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, at: int, queue: asyncio.Queue[tuple[int, Piece | BaseException]]) -> None:
        try:
            async for piece in self._running[at].pieces():
                if piece.stop is not None:
                    await asyncio.shield(self._tasks[at])  # recorded before the client sees the end
                await queue.put((at, piece))
        except Exception as error:
            await queue.put((at, error))


async def until_gone(request: HttpRequest, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of some work; None where the client has left before, and the work was cancelled."""
    working, gone = asyncio.create_task(work), asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnect(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
