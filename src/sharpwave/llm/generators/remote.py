"""`Remote`: one generation server, met at an address, and what its client knows of it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from ...errors import NotReady, SchemaError
from .launch import ServerProcess

__all__ = ["Behind", "Failed", "Gone", "Refused", "Remote"]

# A machine that loses its power sends nothing. The kernel probes it, and breaks the connection after a minute.
_KEEPALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
for _name, _value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
    if hasattr(socket, _name):
        _KEEPALIVE.append((socket.IPPROTO_TCP, getattr(socket, _name), _value))


class Gone(NotReady):
    """The server cannot be reached, broke off, or failed (`status` is its code). Another one may answer."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class Failed(NotReady):
    """The server's program does not start."""


class Refused(SchemaError):
    """The server answered that a request is wrong. Another one would say the same."""


class Behind(NotReady):
    """The server refused the newest weights. It is given no work until it takes them at another try, or later ones."""

    def __init__(self, text: str, wanted: object, wait_s: float) -> None:
        super().__init__(text)
        self.wanted, self.wait_s = wanted, wait_s
        self.again_at = time.monotonic() + wait_s


class Remote:
    """The connection to one server.

    `is_ready` says that it may be given work: it was reached, and has the newest weights. `version` is that of its
    weights as far as the client knows; `limit` is the longest sequence that it takes, None where it does not say.
    """

    def __init__(self, where: str | ServerProcess, key: str | None) -> None:
        self.process = where if isinstance(where, ServerProcess) else None
        self._fixed = None if isinstance(where, ServerProcess) else where.rstrip("/")
        if self._fixed is not None and not self._fixed.startswith(("http://", "https://")):
            raise SchemaError(f"address {where!r}, expected http://host:port")
        self.is_ready = False
        self.in_flight = 0
        self.is_held = False  # by a pause of ours that was not ended yet
        self.version: int | None = None
        self.kind = ""
        self.limit: int | None = None
        self.vocabulary: int | None = None
        self.has_seeds = True
        self.folder: str | None = None  # the last one that it has read its weights from
        self.asked: tuple[str, int] | None = None  # folder and version of the last weights that it did not refuse
        self.behind: Behind | None = None  # the last weights that it refused
        self.trouble: Exception | None = None  # why it is not ready
        self.has_failed = False  # and will not be ready by itself
        self.return_task: asyncio.Task[None] | None = None
        self._ready_by: float | None = None  # when a start has failed that is still under way
        self._working: asyncio.Future[None] | None = None  # a start or a stop of its process
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(
            # Any number at a time: a request that waits here for another's answer is one that the server cannot batch.
            # None is used twice: servers close idle ones after seconds, and after an error of their own.
            transport=httpx.AsyncHTTPTransport(
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0), socket_options=_KEEPALIVE
            ),
            headers=headers,
            timeout=httpx.Timeout(None, connect=10.0),
            trust_env=False,
        )

    @property
    def address(self) -> str:
        return self._fixed if self._fixed is not None else self.process.address  # type: ignore[union-attr]

    async def start(self) -> None:
        """Starts its process. A start that is cancelled goes on, and `close` waits for it."""
        assert self.process is not None
        self._ready_by = time.monotonic() + self.process.ready_s
        self._working = asyncio.ensure_future(asyncio.to_thread(self.process.start))
        await asyncio.shield(self._working)

    @property
    def is_overdue(self) -> bool:
        """Whether its process was started, and has not answered for longer than a start may take."""
        return self._ready_by is not None and time.monotonic() > self._ready_by

    def note_answer(self) -> None:
        """Its process has started."""
        self._ready_by = None

    async def stop(self) -> None:
        """Stops its process. A stop that is cancelled goes on, and `close` waits for it."""
        assert self.process is not None
        self._ready_by = None
        self._working = asyncio.ensure_future(asyncio.to_thread(self.process.stop))
        await asyncio.shield(self._working)

    async def ask(
        self, method: str, path: str, body: Any = None, *, query: dict[str, Any] | None = None, within_s: float = 60.0
    ) -> Any:
        """One call with a whole answer: its JSON, its text where it is none, or None where it is empty."""
        try:
            url, timeout = self.address + path, httpx.Timeout(within_s)
            answer = await self._http.request(method, url, json=body, params=query, timeout=timeout)
        except httpx.HTTPError as error:
            raise Gone(f"{self.address}{path}: {type(error).__name__} {error}") from error
        self._check(path, answer.status_code, answer.text)
        if not answer.content:
            return None
        try:
            return answer.json()
        except ValueError:
            return answer.text

    async def chunks(self, path: str, body: Any) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed answer as they come."""
        try:
            async with self._http.stream("POST", self.address + path, json=body) as answer:
                if answer.status_code != 200:
                    self._check(path, answer.status_code, (await answer.aread()).decode(errors="replace"))
                async for line in answer.aiter_lines():
                    if line.startswith("data:") and line[5:].strip() != "[DONE]":
                        yield self._read(path, line[5:])
        except httpx.HTTPError as error:
            raise Gone(f"{self.address}{path}: {type(error).__name__} {error}") from error

    def _read(self, path: str, text: str) -> dict[str, Any]:
        try:
            event = json.loads(text)
        except ValueError as error:
            raise Gone(f"{self.address}{path}: an event that is no JSON: {text[:200]!r}") from error
        if "error" in event:
            given = event["error"]
            code = given.get("code") if isinstance(given, dict) else None
            self._check(path, code if isinstance(code, int) else 500, text)
        return dict(event)

    def _check(self, path: str, status: int, text: str) -> None:
        if status < 300:
            return
        said = f"{self.address}{path}: {status}: {_message(text)}"
        if status in (401, 403):
            raise Refused(f"{said}; is the key= of the client right, and is this call enabled at the server?")
        if status >= 500 or status in (408, 429):
            raise Gone(said, status)
        raise Refused(said)

    async def close(self) -> None:
        if self.return_task is not None:
            self.return_task.cancel()
        await self._http.aclose()
        if self._working is not None:
            await asyncio.wait([self._working])
        if self.process is not None:
            await asyncio.to_thread(self.process.stop)


def _message(text: str) -> str:
    """What an error object says: vLLM's and SGLang's have it at different places."""
    try:
        found = json.loads(text)
        found = found.get("error", found)
        found = found.get("message", found) if isinstance(found, dict) else found
    except (ValueError, AttributeError):
        found = text
    return str(found)[:500]
