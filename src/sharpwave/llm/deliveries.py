"""`Deliveries`: samples on their way from agents into the buffer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ..buffers.sequence import SequenceBuffer
from ..sequences.sample import SequenceSample
from .clock import Clock

__all__ = ["Deliveries"]


@dataclass(frozen=True)
class _Put:
    sample: SequenceSample
    birth: int
    handle: asyncio.Future[int]


class Deliveries:
    """Puts samples into the buffer and its journal, outside of the event loop.

    Samples that are handed in while others are written are written together, next: going to a thread and back takes
    longer than writing a sample. For one event loop.
    """

    def __init__(self, buffer: SequenceBuffer, clock: Clock) -> None:
        self._buffer, self._clock = buffer, clock
        self._waiting: list[_Put] = []
        self._writer: asyncio.Future[None] | None = None

    async def put(self, sample: SequenceSample, birth: int) -> int:
        """Returns the sample's handle when it is in the journal. Raises what `SequenceBuffer.put` raises for it."""
        mine = _Put(sample, birth, asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        if self._writer is None or self._writer.done():
            self._writer = asyncio.ensure_future(self._write())
        return await mine.handle

    async def _write(self) -> None:
        while self._waiting:
            puts, self._waiting = [put for put in self._waiting if not put.handle.cancelled()], []
            try:
                made = await self._clock.outside(lambda these=puts: self._put(these))  # type: ignore[misc]
            except asyncio.CancelledError:
                for put in [*puts, *self._waiting]:
                    put.handle.cancel()
                self._waiting.clear()
                raise
            except Exception as error:
                made = [error] * len(puts)
            for put, one in zip(puts, made, strict=True):
                if put.handle.cancelled():
                    continue
                if isinstance(one, Exception):
                    put.handle.set_exception(one)
                else:
                    put.handle.set_result(one)

    def _put(self, puts: list[_Put]) -> list[int | Exception]:
        made: list[int | Exception] = []
        for put in puts:
            try:
                made.append(int(self._buffer.put(put.sample, births=[put.birth], timeout=0)[0]))
            except Exception as error:  # of this sample
                made.append(error)
        return made
