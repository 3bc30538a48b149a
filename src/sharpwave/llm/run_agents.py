"""`KeptAgents`: agents of a run in a process that is started again when it dies."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

from ..errors import NotReady
from .channel import Door
from .controller import Controller
from .items import Items
from .log import RunLog
from .process_agents import ProcessAgents
from .run_folder import RunFolder

__all__ = ["KeptAgents"]

_START_S = 60.0
_MOST_REJECTED = 4  # items in a row that were rejected because they end their process, before the run ends


class KeptAgents:
    """Its first process starts at once, beside other parts of the run that take long to start.

    Args:
        name: Of the owner of permits.
        door: Of the engine that the agents ask.
        items: Those of the controller.
        log: Learns of deaths.
    """

    def __init__(self, folder: RunFolder, name: str, door: Door, items: Items, log: RunLog) -> None:
        self._folder, self._name, self._door, self._items, self._log = folder, name, door, items, log
        self._took_s = 0.0  # by the first start
        self._starting = asyncio.ensure_future(self._start())

    async def ready(self) -> None:
        """Waits for the process. Raises what `ProcessAgents.start` raises."""
        await asyncio.shield(self._starting)

    async def run(self, controller: Controller, timeout_s: float | None) -> None:
        """Works until the controller has no more items. A process that dies, or is silent for `timeout_s`, is replaced,
        and its items come back.

        Raises:
            NotReady: More processes than `max_losses` + 1 ended in a row, and none of them made a sample or had an item
                rejected; or four items were rejected so, and no sample was made in between. Or the engine has ended,
                or the controller says that the run cannot go on.
            SchemaError: As `ProcessAgents.start` and `ProcessAgents.run` raise it.
        """
        deaths, rejections, most = 0, 0, controller.rules.max_losses + 2
        while True:
            agents = None
            try:
                agents = await self._starting
                await agents.run(controller, self._items, timeout_s)
                return
            except NotReady as error:
                if agents is not None and not agents.has_ended:
                    raise  # the controller's own error, which agents have passed on
                lost = ", ".join(permit.key for permit in controller.permits(self._name))
                self._log("died", who=self._name, why=str(error), items=lost)
                if agents is not None and agents.finished:
                    deaths = rejections = 0
                deaths += 1
                if deaths == most:
                    raise NotReady(f"{error}; {deaths} ended in a row without a sample, the last with {lost}") from None
                why = error
            finally:
                if agents is not None:
                    await agents.close()
            rejected = controller.position.outcomes["rejected"]
            controller.lose(self._name)
            if controller.position.outcomes["rejected"] > rejected:
                deaths, rejections = 0, rejections + 1
                if rejections == _MOST_REJECTED:
                    raise NotReady(f"{why}; {rejections} items in a row end their process, the last of {lost}")
            self._starting = asyncio.ensure_future(self._start_again(self._door.open()))

    async def close(self) -> None:
        """Ends the process, or its start. A second call does nothing."""
        self._starting.cancel()  # does nothing where it has started
        made: Any = (await asyncio.gather(self._starting, return_exceptions=True))[0]
        if not isinstance(made, BaseException):
            await made.close()

    async def _start(self) -> ProcessAgents:
        began = time.monotonic()
        made = await ProcessAgents.start(self._folder, self._name, self._door.open())
        self._took_s = time.monotonic() - began
        return made

    async def _start_again(self, engine: socket.socket) -> ProcessAgents:
        """A start that hangs would hold up the run."""
        limit_s = _START_S + 4 * self._took_s
        try:
            return await asyncio.wait_for(ProcessAgents.start(self._folder, self._name, engine), limit_s)
        except NotReady:  # which is a TimeoutError, too
            raise
        except asyncio.TimeoutError:
            raise NotReady(f"the process of the agents {self._name!r} did not start in {limit_s:.0f} s") from None
