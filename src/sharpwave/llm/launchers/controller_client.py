"""`ControllerClient`: the controller of a run as agent workers and the learner in other processes see it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import NotReady
from ...sequences.sample import SequenceSample
from ...service.sample_frames import pack_batch, read_batch
from ..cut import Cut
from ..permits import Permit
from ..run_folder import RunFolder
from .frames import read_frame, to_error, write_frame

__all__ = ["ControllerClient", "LeasedBatch"]

_RETRY_S = 0.02


@dataclass(frozen=True)
class LeasedBatch:
    """A batch that the learner has, and the name of its lease at the controller."""

    number: str
    batch: SequenceSample

    def __len__(self) -> int:
        return len(self.batch)


class ControllerClient:
    """Has the calls of `Controller`. A call whose answer a dead controller owes is sent again to the next one.

    Args:
        folder: Says where the controller is.
        owner: This process's name, different from that of every other one and of its predecessors.
        patience_s: How long calls wait for a controller to come back before they raise `NotReady`.
    """

    def __init__(self, folder: RunFolder, owner: str, *, patience_s: float = 300.0) -> None:
        self._folder, self.owner, self._patience_s = folder, owner, patience_s
        self._numbers = itertools.count()
        self._open: dict[int, tuple[dict[str, Any], asyncio.Future[Any]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Future[None] | None = None

    # ---- what agents and learners call -------------------------------------------------------------------------------

    async def start(self, owner: str) -> Permit | None:
        said = await self._call("start")
        return None if said is None else Permit(**said)

    async def finish(self, permit: Permit, sample: SequenceSample) -> str:
        return str(await self._call("finish", permit=_plain(permit), sample=pack_batch(sample)))

    async def reject(self, permit: Permit, why: str) -> None:
        await self._call("reject", permit=_plain(permit), why=why)

    async def take(self, owner: str) -> LeasedBatch | None:
        said = await self._call("take")
        return None if said is None else LeasedBatch(said["number"], read_batch("take()", said["batch"]))

    async def trained(self, lease: LeasedBatch, version: int, step: int | None = None) -> None:
        await self._call("trained", number=lease.number, version=version, step=step)

    async def confirm(self, keys: Sequence[str], owner: str, version: int, step: int | None = None) -> None:
        await self._call("confirm", keys=list(keys), version=version, step=step)

    async def checkpoint(self) -> Cut:
        return Cut.from_json(await self._call("checkpoint"))

    def hear(self, owner: str) -> None:
        if self._writer is not None:
            write_frame(self._writer, {"id": -1, "call": "hear", "args": {}})

    # ---- what a run's processes call ---------------------------------------------------------------------------------

    async def begin(self, cut: Cut | None, version: int) -> None:
        """The learner has started, from this checkpoint; its weights are published as `version`."""
        await self._call("begin", cut=None if cut is None else cut.to_json(), version=version)

    async def stop(self) -> None:
        await self._call("stop")

    async def stats(self) -> dict[str, Any]:
        """Counts, and the sentence of `explain`."""
        found: dict[str, Any] = await self._call("stats")
        return found

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._drop()

    # ---- the connection ----------------------------------------------------------------------------------------------

    async def _call(self, name: str, **args: Any) -> Any:
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        message = {"id": number, "call": name, "args": args}
        self._open[number] = (message, answer)
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._read())
        elif self._writer is not None:
            write_frame(self._writer, message)
        try:
            return await answer
        finally:
            self._open.pop(number, None)

    async def _read(self) -> None:
        """Connects, sends what has no answer yet, reads answers; again and again."""
        while True:
            try:
                reader = await self._connect()
            except NotReady as error:
                for _, answer in list(self._open.values()):
                    if not answer.done():
                        answer.set_exception(NotReady(str(error)))
                return
            try:
                while True:
                    said = await read_frame(reader)
                    asked = self._open.get(said["id"])  # None: the caller has given up
                    if asked is not None and not asked[1].done():
                        if "error" in said:
                            asked[1].set_exception(to_error(said["error"]))
                        else:
                            asked[1].set_result(said["value"])
            except (asyncio.IncompleteReadError, ConnectionError):
                self._drop()

    async def _connect(self) -> asyncio.StreamReader:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        while True:
            found = self._folder.find("controller")
            if found is not None:
                with contextlib.suppress(OSError):
                    reader, self._writer = await asyncio.open_unix_connection(found["address"])
                    write_frame(self._writer, {"owner": self.owner})
                    for message, _ in sorted(self._open.values(), key=lambda one: int(one[0]["id"])):
                        write_frame(self._writer, message)
                    return reader
            if loop.time() > deadline:
                raise NotReady(f"no controller answered within {self._patience_s:g} s; is the run stopped?")
            await asyncio.sleep(_RETRY_S)

    def _drop(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _plain(permit: Permit) -> dict[str, Any]:
    return {**asdict(permit), "item": dict(permit.item)}
