"""`Ongoing`: an answer that another thread makes, awaited in an event loop as a whole or piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from .answer import Answer, Request

__all__ = ["Ongoing", "Piece"]


class Piece(NamedTuple):
    """The next tokens of an answer. The last piece has a `stop`, and may have no tokens."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    stop: str | None = None
    matched: int | str | None = None


class Ongoing:
    """One answer on its way. The thread of the engine calls `tell`, the event loop everything else.

    The thread only appends to the request's tokens, and `tell` says how many tokens are complete. So nothing is queued
    for a slow reader: its next piece is longer.
    """

    def __init__(self, request: Request, abort: Callable[[Ongoing], None]) -> None:
        self.request = request
        self.loop = asyncio.get_running_loop()
        self._abort = abort
        self._news = asyncio.Event()
        self._count = 0
        self._is_done = False
        self._is_told = False
        self._error: Exception | None = None

    async def answer(self) -> Answer:
        """The whole answer. If the task is cancelled, the answer is aborted."""
        try:
            while not self._is_done:
                await self._next_news()
        except asyncio.CancelledError:
            self.abort()
            raise
        return self._finished()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Pieces as they are made. If the iterator is closed before the last one, the answer is aborted.

        A failure is raised after the tokens that were made before it.
        """
        seen, request = 0, self.request
        try:
            while True:
                is_done, count = self._is_done, self._count  # in this order: the last count is set before the end
                if is_done and (self._error is None or count == seen):
                    answer = self._finished()
                    rest = answer.tokens[seen:], answer.logprobs[seen:], answer.versions[seen:]
                    yield Piece(*rest, answer.stop, answer.matched)
                    return
                if count > seen:
                    yield Piece(*request.part(seen, count))
                    seen = count
                else:
                    await self._next_news()
        finally:
            if not self._is_done:
                self.abort()

    def abort(self) -> None:
        """Ends the answer with the tokens it has."""
        self._abort(self)

    @property
    def has_news(self) -> bool:
        """Whether the request has tokens that were not told. For the thread."""
        return self.request.count > self._count

    def tell(self, error: Exception | None = None) -> bool:
        """Called after a step by the thread that made it. Returns whether `wake` must be called in the loop."""
        self._error = error
        self._count = self.request.count
        self._is_done = error is not None or self.request.answer is not None
        if self._is_told:  # its wake has not run yet, so the reader will see this too
            return False
        self._is_told = True
        return True

    def wake(self) -> None:
        self._is_told = False  # before the reader looks: news after this look wake it again
        self._news.set()

    async def _next_news(self) -> None:
        await self._news.wait()
        self._news.clear()

    def _finished(self) -> Answer:
        if self._error is not None:
            raise self._error
        assert self.request.answer is not None
        return self.request.answer
