"""`HostedController`: the calls of a run's controller as a server of the service hosts them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from ...errors import ClosedError, SchemaError
from ...service.guest import Guest, Request
from ...service.hosted import Answer, HostedVerb, Later

__all__ = ["HostedController"]

Call = Callable[..., Coroutine[Any, Any, Any]]


class HostedController:
    """Satisfies `Hosted`. Calls are tasks of the event loop in which this object is made, not of the server's threads.

    Every call names its owner, `role.process`. An owner is dead when its client has closed, or was silent for the
    server's `client_timeout`, or when another process of its role calls: a run has one process of a role.

    Args:
        calls: Coroutine functions by name; they take the owner and what the client gave.
        lose: Called with an owner that is dead, when its calls have ended.
    """

    face, kind = "Controller", "controller"

    def __init__(self, calls: Mapping[str, Call], lose: Callable[[str], None]) -> None:
        self._loop, self._lose = asyncio.get_running_loop(), lose
        self._owners: dict[Guest, str] = {}
        self._newest: dict[str, str] = {}  # owners by role
        self._replaced: set[str] = set()
        self._running: dict[str, set[asyncio.Task[Any]]] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._is_closed = False
        self.verbs = {name: HostedVerb("write", "parked", partial(self._begin, call)) for name, call in calls.items()}

    # ---- in the server's thread --------------------------------------------------------------------------------------

    def _begin(
        self, call: Call, guest: Guest, args: dict[str, Any], done: Callable[[Any], None]
    ) -> Callable[[], object]:
        owner = args.pop("owner", None)
        if not isinstance(owner, str) or not owner:
            raise SchemaError(f"owner: expected a name, got {owner!r:.100}")
        del args["timeout"]  # the client's calls have none
        running = asyncio.run_coroutine_threadsafe(self._run(call, guest, owner, args), self._loop)
        running.add_done_callback(lambda one: done(_outcome(one)))
        return running.cancel

    def left(self, guest: Guest) -> None:
        """The server has cancelled its calls."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and the process is about to
            self._loop.call_soon_threadsafe(self._leave, guest)

    def describe(self) -> dict[str, Any]:
        return {}

    def summary(self) -> dict[str, Any]:
        return {"size": len(self._owners), "capacity": None}

    def attach(self, desk: Any, number: int) -> None:
        """It has no rows."""

    def exchange(self, guest: Guest, request: Request) -> Answer | Later:
        raise SchemaError(f"a {self.face} has no rows; its verbs are {', '.join(self.verbs)}")

    def flush(self) -> None:
        """What was answered is in the journal."""

    # ---- in the event loop -------------------------------------------------------------------------------------------

    async def _run(self, call: Call, guest: Guest, owner: str, args: dict[str, Any]) -> Any:
        await self._meet(guest, owner)
        running, me = self._running.setdefault(owner, set()), asyncio.current_task()
        assert me is not None
        running.add(me)
        try:
            return await call(owner, **args)
        finally:
            running.discard(me)

    async def _meet(self, guest: Guest, owner: str) -> None:
        if owner in self._replaced:
            raise ClosedError(f"{owner} was replaced by another process of its role")
        self._owners[guest] = owner
        role = owner.rpartition(".")[0] or owner
        before, self._newest[role] = self._newest.get(role, owner), owner
        if before != owner:
            self._replaced.add(before)
            self._end(before)
        for ending in (before, owner):
            if ending in self._ending:
                await asyncio.shield(self._ending[ending])

    def _leave(self, guest: Guest) -> None:
        owner = self._owners.pop(guest, None)
        if self._is_closed or owner is None:
            return
        if owner not in self._owners.values() and owner not in self._replaced:
            self._end(owner)

    def _end(self, owner: str) -> None:
        if owner not in self._ending:
            self._ending[owner] = asyncio.ensure_future(self._end_calls(owner))

    async def _end_calls(self, owner: str) -> None:
        """A call that is ended too late could give the dead owner an item: it is lost after its last call."""
        try:
            await _cancel(self._running.pop(owner, set()))
            self._lose(owner)
        finally:
            del self._ending[owner]

    def stop(self) -> None:
        """The server is about to end. Its clients leave it then, but their owners are not dead."""
        self._is_closed = True

    async def close(self) -> None:
        """Ends all calls, after the end of the server."""
        await _cancel({*self._ending.values(), *(call for calls in self._running.values() for call in calls)})


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _outcome(call: concurrent.futures.Future[Any]) -> Any:
    """What the server takes: a result or an error."""
    if call.cancelled():
        return ClosedError("the call's owner is dead, or the controller is closing")
    return call.exception() or call.result()
