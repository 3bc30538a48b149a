"""`FoundGenerators`: the generators of a run, wherever they are now."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ...errors import ClosedError, NotReady
from ..generators.answer import Answer
from ..generators.protocol import Health
from ..generators.sampling import Sampling
from ..generators.vllm import VLLMClient
from ..parts import TASK_MENDS
from ..run_folder import RunFolder

__all__ = ["FoundGenerators"]

_PATIENCE_S = 5.0


class FoundGenerators:
    """Looks for addresses in the run's folder. A generator that comes back elsewhere is met there.

    Args:
        names: Of the generators.
    """

    def __init__(self, folder: RunFolder, names: Sequence[str]) -> None:
        self._folder, self._names = folder, list(names)
        self._known: dict[str, str] = {}  # addresses by name; one that is being started again is expected where it was
        self._addresses: list[str] = []
        self._client: VLLMClient | None = None
        self._old: set[asyncio.Task[None]] = set()

    def _met(self) -> VLLMClient:
        found = {name: self._folder.find(name) for name in self._names}
        self._known |= {name: said["address"] for name, said in found.items() if said is not None}
        addresses = list(self._known.values())
        if addresses and addresses != self._addresses:
            if self._client is not None:
                task = asyncio.ensure_future(self._client.close())
                self._old.add(task)
                task.add_done_callback(self._old.discard)
            self._client, self._addresses = VLLMClient(addresses, patience_s=_PATIENCE_S), addresses
            self._client.mends = TASK_MENDS
        if self._client is None:
            raise NotReady("no generator has said where it is yet")
        return self._client

    async def generate(self, ids: Sequence[int], sampling: Sampling | None = None) -> Answer:
        try:
            return await self._met().generate(ids, sampling)
        except ClosedError as error:  # another address took its place
            raise NotReady(str(error)) from error

    async def score(self, ids: Sequence[int]) -> list[float]:
        return await self._met().score(ids)

    async def update(self, path: str | Path, version: int, *, kv: Literal["keep", "recompute"] = "keep") -> None:
        raise NotReady("update(): generators of a run follow the published weights by themselves")

    async def abort(self) -> int:
        return 0 if self._client is None else await self._client.abort()

    async def health(self) -> Health:
        try:
            return await self._met().health()
        except ClosedError as error:
            raise NotReady(str(error)) from error

    async def close(self) -> None:
        waiting: list[Any] = list(self._old)
        if self._client is not None:
            waiting.append(self._client.close())
        await asyncio.gather(*waiting, return_exceptions=True)
