"""`ControllerServer`: a controller for the other processes of a run, hosted by a server of the service."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...errors import StaleHandle
from ...sequences.dataflow import Dataflow
from ...sequences.leases import Lease
from ...service.sample_frames import pack_batch, read_batch
from ...service.server import Server
from ..clock import WallClock
from ..controller import STOPPED, Controller
from ..coroutines import Unbroken
from ..cut import Cut
from ..items import Items
from ..permits import Permit
from ..rules import Rules
from .hosted_controller import HostedController

__all__ = ["TABLE", "ControllerServer", "remove_address"]

TABLE = "controller"
"""Its name at the server."""

_LIMITS = {"message_bytes": 1 << 32, "kept_bytes": 1 << 33, "waiting_bytes": 1 << 33}


class ControllerServer:
    """Answers the calls of agent workers and of the learner.

    A learner that starts says from which checkpoint it goes on (`begin`). The controller is then made again from that
    checkpoint and the journal: what was trained since is trained again. Calls that wait go on with the new one.

    Args:
        items, rules, flow, journal, log: Of the controller.
        address: Of an earlier process, at which its clients wait for this one.
        client_timeout_s: Seconds of silence after which a client is dead. It sends heartbeats, also during a long step.
    """

    def __init__(
        self,
        items: Items,
        rules: Rules,
        *,
        flow: Dataflow | None = None,
        journal: str | Path,
        log: Callable[..., None] | None = None,
        address: str | None = None,
        client_timeout_s: float = 10.0,
    ) -> None:
        self._items, self._rules, self._flow, self._journal, self._log = items, rules, flow, journal, log
        self._address, self._client_timeout_s = address, client_timeout_s
        self._life = secrets.token_hex(4)  # numbers of leases are of this process
        self._controller: Controller | None = None
        self._changed = asyncio.Event()
        self._leases: dict[str, Lease] = {}
        self._lent_count = 0
        self._watch: asyncio.Future[None] | None = None
        self._hosted: HostedController | None = None
        self._server: Server | None = None
        self._beginning = asyncio.Lock()
        self._to_its_end = Unbroken()
        self._why_stopped: str | None = None

    @property
    def controller(self) -> Controller | None:
        """None while it is made again."""
        return self._controller

    async def start(self) -> str:
        """Begins to listen. Returns the address. Calls run in the event loop of this one."""
        self._renew(None, resume=False, version=0)
        self._hosted = HostedController(
            {
                "start": self._start, "finish": self._finish, "reject": self._reject, "take": self._take,
                "trained": self._trained, "confirm": self._confirm, "checkpoint": self._checkpoint,
                "lend": self._lend, "amend": self._amend,
                "begin": self._begin, "hear": self._hear, "stop": self._stop, "stats": self._stats,
            },
            self._lose,
        )  # fmt: skip
        address = _make_address(self._address)
        self._server = Server({TABLE: self._hosted}, address, client_timeout=self._client_timeout_s, limits=_LIMITS)
        return address

    async def close(self) -> None:
        if self._hosted is not None and self._server is not None:
            self._hosted.stop()
            await asyncio.to_thread(self._server.close)  # first: an ended call is then answered by the next server
            await self._hosted.close()
            remove_address(self._server.address)
        if self._watch is not None:
            self._watch.cancel()
        if self._controller is not None:
            self._controller.close()

    def stop(self, why: str = STOPPED) -> None:
        """No item starts any more, and no batch is handed out, also by a controller that is made again."""
        self._why_stopped = self._why_stopped or why
        if self._controller is not None:
            self._controller.stop(why)

    def _renew(self, cut: Cut | None, *, resume: bool, version: int) -> None:
        made = Controller(
            self._items, self._rules, WallClock(), flow=self._flow,
            journal=self._journal, cut=cut, resume=resume, version=version, log=self._log,
        )  # fmt: skip
        self._set(made)
        self._watch = asyncio.ensure_future(made.watch())
        if self._why_stopped is not None:
            made.stop(self._why_stopped)

    def _set(self, controller: Controller | None) -> None:
        self._controller = controller
        self._leases.clear()
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- calls -------------------------------------------------------------------------------------------------------

    async def _dispatch(self, call: Callable[[Controller], Any]) -> Any:
        """The result of a call at the controller, or at the next one where it is made again meanwhile."""
        while True:
            controller, changed = self._controller, self._changed
            if controller is None:
                await changed.wait()
                continue
            working = asyncio.ensure_future(call(controller))
            change = asyncio.ensure_future(changed.wait())
            try:
                await asyncio.wait([working, change], return_when=asyncio.FIRST_COMPLETED)
                if working.done() and self._controller is controller:
                    return working.result()
            finally:
                change.cancel()
                working.cancel()
                await asyncio.gather(working, change, return_exceptions=True)

    async def _start(self, owner: str) -> Any:
        permit = await self._dispatch(lambda controller: controller.start(owner))
        return None if permit is None else {**asdict(permit), "item": dict(permit.item)}

    async def _finish(self, owner: str, permit: dict[str, Any], sample: Any) -> Any:
        read = read_batch("finish()", sample)
        return await self._dispatch(lambda controller: controller.finish(Permit(**permit), read))

    async def _reject(self, owner: str, permit: dict[str, Any], why: str) -> Any:
        return await self._dispatch(lambda controller: controller.reject(Permit(**permit), why))

    async def _take(self, owner: str) -> Any:
        return self._lent(await self._dispatch(lambda controller: controller.take(owner)))

    async def _lend(self, owner: str, consumer: str) -> Any:
        return self._lent(await self._dispatch(lambda controller: controller.lend(consumer, owner)))

    def _lent(self, lease: Lease | None) -> Any:
        if lease is None:
            return None
        self._lent_count += 1
        number = f"{self._life}-{self._lent_count}"
        self._leases[number] = lease
        return {"number": number, "batch": pack_batch(lease.batch)}

    async def _amend(self, owner: str, number: str, sample: Any) -> Any:
        made, lease = read_batch("amend()", sample), self._lease("amend()", number)
        await self._dispatch(lambda controller: controller.amend(lease, made))
        self._leases.pop(number, None)

    async def _trained(self, owner: str, number: str, version: int, step: int | None) -> Any:
        lease = self._lease("trained()", number)
        await self._dispatch(lambda controller: controller.trained(lease, version, step))
        self._leases.pop(number, None)

    def _lease(self, where: str, number: str) -> Lease:
        if number not in self._leases:
            raise StaleHandle(f"{where}: the lease is over: the controller was made again, or it was said before")
        return self._leases[number]

    async def _confirm(self, owner: str, keys: list[str], version: int, step: int | None) -> Any:
        return await self._dispatch(lambda controller: controller.confirm(keys, owner, version, step))

    async def _checkpoint(self, owner: str, step: int | None) -> Any:
        return (await self._dispatch(lambda controller: controller.checkpoint(step))).to_json()

    async def _begin(self, owner: str, cut: dict[str, Any] | None, version: int) -> None:
        # To its end, also where the learner dies meanwhile: the other processes would have no controller.
        await self._to_its_end(self._make_again(owner, None if cut is None else Cut.from_json(cut), version))

    async def _make_again(self, owner: str, cut: Cut | None, version: int) -> None:
        async with self._beginning:
            old = self._controller
            self._set(None)
            if self._watch is not None:
                self._watch.cancel()
            await asyncio.sleep(0)  # calls that wait leave the old controller
            if old is not None:
                await asyncio.to_thread(old.halt)
            self._renew(cut, resume=True, version=version)
        if self._log is not None:
            self._log("begin", owner=owner, step=0 if cut is None else cut.step, version=version)

    def _lose(self, owner: str) -> None:
        if self._controller is not None:
            self._controller.lose(owner)

    async def _hear(self, owner: str) -> None:
        if self._controller is not None:
            self._controller.hear(owner)

    async def _stop(self, owner: str, why: str) -> None:
        self.stop(why)

    async def _stats(self, owner: str) -> Any:
        async def ask(controller: Controller) -> dict[str, Any]:
            said = controller.stats()
            del said["buffer"]
            return {**said, "explain": controller.explain(), "why": controller.why_over}

        return await self._dispatch(ask)


def _make_address(before: str | None) -> str:
    """In a folder of this user alone, and not in the run's: the path of a local socket has at most 100 bytes."""
    if before is None:
        return f"ipc://{tempfile.mkdtemp(prefix='sharpwave-')}/controller"
    os.makedirs(os.path.dirname(before.removeprefix("ipc://")), 0o700, exist_ok=True)
    return before


def remove_address(address: str) -> None:
    """The socket's file, where its server was killed, and the folder."""
    path = address.removeprefix("ipc://")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))
