"""`ControllerServer`: a controller for the other processes of a run, over a local socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...errors import SchemaError, StaleHandle
from ...sequences.leases import Lease
from ...service.sample_frames import pack_batch, read_batch
from ..clock import WallClock
from ..controller import Controller
from ..cut import Cut
from ..items import Items
from ..permits import Permit
from ..rules import Rules
from .frames import from_error, read_frame, write_frame

__all__ = ["ControllerServer"]


class ControllerServer:
    """Answers the calls of agent workers and of the learner.

    A connection belongs to one owner. When it ends, its process is dead: a local socket breaks for no other reason. The
    owner's permits and leases come back at once.

    A learner that starts says from which checkpoint it goes on (`begin`). The controller is then made again from that
    checkpoint and the journal: what was trained since is trained again. Calls that wait go on with the new one.

    Args:
        items, rules, journal, log: Of the controller.
        cut: The newest checkpoint, where this process was started again.
        place: A path of an earlier process; clients look for the same one.
    """

    def __init__(
        self,
        items: Items,
        rules: Rules,
        *,
        journal: str | Path,
        cut: Cut | None = None,
        log: Callable[..., None] | None = None,
        place: str | None = None,
    ) -> None:
        self._items, self._rules, self._journal, self._log = items, rules, journal, log
        self._first = cut
        self._place = place
        self._life = secrets.token_hex(4)  # numbers of leases are of this process
        self._controller: Controller | None = None
        self._changed = asyncio.Event()
        self._leases: dict[str, Lease] = {}
        self._watch: asyncio.Future[None] | None = None
        self._server: asyncio.AbstractServer | None = None
        self._connections: set[asyncio.Task[Any]] = set()
        self._is_stopped = False

    @property
    def controller(self) -> Controller | None:
        """None while it is made again."""
        return self._controller

    async def start(self) -> str:
        """Begins to listen. Returns the address, a path."""
        self._renew(self._first, resume=False, version=0)
        if self._place is None or not Path(self._place).parent.is_dir():
            # Not in the run's folder: the path of a socket has at most 107 bytes.
            self._place = os.path.join(tempfile.mkdtemp(prefix="sharpwave-"), "controller")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._place)
        self._server = await asyncio.start_unix_server(self._serve, self._place)
        return self._place

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._watch is not None:
            self._watch.cancel()
        if self._controller is not None:
            self._controller.close()
        if self._place is not None:
            shutil.rmtree(Path(self._place).parent, ignore_errors=True)

    def stop(self) -> None:
        """No item starts any more, and no batch is handed out."""
        self._is_stopped = True
        if self._controller is not None:
            self._controller.stop()

    def _renew(self, cut: Cut | None, *, resume: bool, version: int) -> None:
        made = Controller(
            self._items, self._rules, WallClock(),
            journal=self._journal, cut=cut, resume=resume, version=version, log=self._log,
        )  # fmt: skip
        self._set(made)
        self._watch = asyncio.ensure_future(made.watch())
        if self._is_stopped:
            made.stop()

    def _set(self, controller: Controller | None) -> None:
        self._controller = controller
        self._leases.clear()
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- connections -------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        me = asyncio.current_task()
        assert me is not None
        self._connections.add(me)
        calls: set[asyncio.Task[None]] = set()
        owner = ""
        try:
            owner = str((await read_frame(reader))["owner"])
            while True:
                said = await read_frame(reader)
                task = asyncio.ensure_future(self._answer(owner, said, writer))
                calls.add(task)
                task.add_done_callback(calls.discard)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            for call in list(calls):
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            if owner and self._controller is not None:
                self._controller.lose(owner)
            writer.close()
            self._connections.discard(me)

    async def _answer(self, owner: str, said: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        try:
            answer = {"id": said["id"], "value": await self._call(owner, said["call"], said["args"])}
        except asyncio.CancelledError:
            raise
        except Exception as error:
            answer = {"id": said["id"], "error": from_error(error)}
        if said["id"] >= 0:
            write_frame(writer, answer)

    # ---- calls -------------------------------------------------------------------------------------------------------

    async def _call(self, owner: str, name: str, args: dict[str, Any]) -> Any:
        known: dict[str, Callable[..., Any]] = {
            "start": self._start, "finish": self._finish, "reject": self._reject, "take": self._take,
            "trained": self._trained, "confirm": self._confirm, "checkpoint": self._checkpoint,
            "begin": self._begin, "hear": self._hear, "stop": self._stop, "stats": self._stats,
        }  # fmt: skip
        if name not in known:
            raise SchemaError(f"the controller has no call {name!r}")
        return await known[name](owner, **args)

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
        lease = await self._dispatch(lambda controller: controller.take(owner))
        if lease is None:
            return None
        number = f"{self._life}-{id(lease)}"
        self._leases[number] = lease
        return {"number": number, "batch": pack_batch(lease.batch)}

    async def _trained(self, owner: str, number: str, version: int, step: int | None) -> Any:
        lease = self._leases.pop(number, None)
        if lease is None:
            raise StaleHandle("trained(): the lease is over: the controller was made again")
        return await self._dispatch(lambda controller: controller.trained(lease, version, step))

    async def _confirm(self, owner: str, keys: list[str], version: int, step: int | None) -> Any:
        return await self._dispatch(lambda controller: controller.confirm(keys, owner, version, step))

    async def _checkpoint(self, owner: str) -> Any:
        return (await self._dispatch(lambda controller: controller.checkpoint())).to_json()

    async def _begin(self, owner: str, cut: dict[str, Any] | None, version: int) -> None:
        old = self._controller
        self._set(None)
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.sleep(0)  # calls that wait leave the old controller
        if old is not None:
            await asyncio.to_thread(old.buffer.close)
        self._renew(None if cut is None else Cut.from_json(cut), resume=True, version=version)
        if self._log is not None:
            self._log("begin", owner=owner, step=0 if cut is None else cut["step"], version=version)

    async def _hear(self, owner: str) -> None:
        if self._controller is not None:
            self._controller.hear(owner)

    async def _stop(self, owner: str) -> None:
        self.stop()

    async def _stats(self, owner: str) -> Any:
        async def ask(controller: Controller) -> dict[str, Any]:
            said = controller.stats()
            del said["buffer"]
            return {**said, "explain": controller.explain()}

        return await self._dispatch(ask)
