"""`HttpServer`: an application on a socket, within the event loop that starts it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn

from ....errors import StorageError

__all__ = ["HttpServer"]

_KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so a client does not meet one that closes
_END_S = 5.0  # for aborted answers to reach their clients


class HttpServer:
    """Listens from the constructor on, so the port is known; requests are answered after `start`.

    Args:
        app: An ASGI application.
        host, port: Where to listen. Port 0: any free one.
        abort: Called when the time for running requests has passed at `close`.

    Raises:
        StorageError: The address cannot be used.
    """

    def __init__(self, app: Any, host: str, port: int, abort: Callable[[], Awaitable[Any]]) -> None:
        self._abort = abort
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(2048)
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise StorageError(f"cannot listen on {host}:{port}: {error}") from error
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        ready = asyncio.create_task(self._server.ready.wait())
        begun = asyncio.ensure_future(asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED))
        try:
            await asyncio.shield(begun)
        except asyncio.CancelledError:  # its caller has nothing that could be closed
            await begun
            await self.close(_END_S)
            raise
        if self._task.done():
            ready.cancel()
            self._task.result()

    async def close(self, drain_s: float = 0.0) -> None:
        """Takes no new request, waits so long for running ones, then aborts them and sends what they have."""
        if self._task is None:
            self._socket.close()
            return
        self._server.should_exit = True
        done, _ = await asyncio.wait({self._task}, timeout=drain_s)
        if not done:
            await self._abort()
            done, _ = await asyncio.wait({self._task}, timeout=_END_S)
        if not done:  # a client that does not read, or one that keeps its connection
            self._server.force_exit = True
            for task in list(self._server.server_state.tasks):
                task.cancel()
            await asyncio.wait({self._task})
        self._socket.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the program's own affair."""
        yield
