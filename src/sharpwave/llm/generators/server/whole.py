"""`WholeAnswers`: any `Responder` for the routes, which also want answers in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from ....errors import ClosedError
from ..answer import Answer
from ..ongoing import Piece
from ..protocol import Responder
from ..sampling import Sampling

__all__ = ["WholeAnswers"]


class WholeAnswers:
    """An answer is one piece. A client that leaves does not end it: its tokens would be lost to the record."""

    def __init__(self, generator: Responder) -> None:
        self._generator = generator
        self._tasks: set[asyncio.Task[Answer]] = set()

    def begin(self, ids: Sequence[int], sampling: Sampling | None = None, *, has_pieces: bool = False) -> _Whole:
        task = asyncio.create_task(self._generator.generate(ids, sampling))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return _Whole(task)

    def cancel(self) -> None:
        """Ends all answers without their tokens."""
        for task in list(self._tasks):
            task.cancel()


class _Whole:
    def __init__(self, task: asyncio.Task[Answer]) -> None:
        self._task = task

    async def answer(self) -> Answer:
        """Raises:
        ClosedError: The answer was ended by `cancel`.
        """
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if self._task.cancelled():
                raise ClosedError("the session was closed before the answer was complete") from None
            raise

    async def pieces(self) -> AsyncIterator[Piece]:
        answer = await self.answer()
        yield Piece(answer.tokens, answer.logprobs, answer.versions, answer.stop, answer.matched)

    def abort(self) -> None:
        pass
