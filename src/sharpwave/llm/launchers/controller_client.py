"""`ControllerClient`: the controller of a run as agent workers and the learner in other processes see it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import NotReady, SharpwaveError
from ...sequences.sample import SequenceSample
from ...service.aside import Aside
from ...service.sample_frames import pack_batch, read_batch
from ...service.session import OpenTable, Session
from ..controller import STOPPED
from ..cut import Cut
from ..permits import Permit
from ..run_folder import RunFolder
from .controller_server import TABLE

__all__ = ["ControllerClient", "LeasedBatch"]

_RETRY_S = 0.02
_CALLS = 16  # at once; each has a thread and a socket


@dataclass(frozen=True)
class LeasedBatch:
    """Samples that the learner or a stage has, and the name of their lease at the controller."""

    number: str
    batch: SequenceSample

    def __len__(self) -> int:
        return len(self.batch)


class ControllerClient:
    """Has the calls of `Controller`. A call whose answer a dead controller owes is sent again to the next one.

    Args:
        folder: Says where the controller is.
        owner: This process: its role, a dot, and what its predecessors in that role do not have, as its process id.
        patience_s: How long the first call waits for a controller before it raises `NotReady`. Later ones wait for as
            long as it takes.
    """

    def __init__(self, folder: RunFolder, owner: str, *, patience_s: float = 300.0) -> None:
        self._folder, self.owner, self._patience_s = folder, owner, patience_s
        self._aside = Aside()
        self._opening: asyncio.Future[tuple[Session, OpenTable]] | None = None
        self._session: Session | None = None
        self._free = asyncio.Semaphore(_CALLS)
        self._starting = asyncio.Lock()
        self._hearing: asyncio.Future[None] | None = None

    # ---- what agents and learners call -------------------------------------------------------------------------------

    async def start(self, owner: str) -> Permit | None:
        async with self._starting:  # one call waits for a permit, not a thread for each of many agents
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

    async def lend(self, consumer: str, owner: str) -> LeasedBatch | None:
        said = await self._call("lend", consumer=consumer)
        return None if said is None else LeasedBatch(said["number"], read_batch("lend()", said["batch"]))

    async def amend(self, lease: LeasedBatch, made: SequenceSample) -> None:
        await self._call("amend", number=lease.number, sample=pack_batch(made))

    async def checkpoint(self, step: int | None = None) -> Cut:
        return Cut.from_json(await self._call("checkpoint", step=step))

    def hear(self, owner: str) -> None:
        if self._hearing is None or self._hearing.done():  # else the last one waits for a controller
            self._hearing = asyncio.ensure_future(self._hear())

    async def _hear(self) -> None:
        with contextlib.suppress(SharpwaveError):  # the next call meets the same error
            await self._call("hear")

    # ---- what a run's processes call ---------------------------------------------------------------------------------

    async def begin(self, cut: Cut | None, version: int) -> None:
        """The learner has started, from this checkpoint; its weights are published as `version`."""
        await self._call("begin", cut=None if cut is None else cut.to_json(), version=version)

    async def stop(self, why: str = STOPPED) -> None:
        await self._call("stop", why=why)

    async def stats(self) -> dict[str, Any]:
        """Counts, the sentence of `explain`, and `why` the run is over."""
        found: dict[str, Any] = await self._call("stats")
        return found

    async def close(self) -> None:
        """Says goodbye: permits and leases of this owner come back at once."""
        for task in (self._opening, self._hearing):
            if task is not None:
                task.cancel()
        if self._session is not None:
            await self._aside.run(self._session.close)

    # ---- the connection ----------------------------------------------------------------------------------------------

    async def _call(self, name: str, **args: Any) -> Any:
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        session, table = await asyncio.shield(self._opening)
        async with self._free:
            return await self._aside.run(lambda: session.call(table, name, {**args, "owner": self.owner}))

    async def _open(self) -> tuple[Session, OpenTable]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        while (found := self._folder.find("controller")) is None and loop.time() < deadline:
            await asyncio.sleep(_RETRY_S)
        if found is not None:
            session = self._session = Session(found["address"], name=self.owner)
            left = max(0.0, deadline - loop.time())
            with contextlib.suppress(NotReady):
                return session, await self._aside.run(lambda: session.open_table(TABLE, left, waits=True))
            session.close()
        self._opening = None  # the next call tries again
        raise NotReady(f"no controller answered within {self._patience_s:g} s; is the run stopped?")


def _plain(permit: Permit) -> dict[str, Any]:
    return {**asdict(permit), "item": dict(permit.item)}
