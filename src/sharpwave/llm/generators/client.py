"""`Client`: a generator whose servers are other processes. Subclasses know what goes over the wire."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...errors import ClosedError, NotReady, SchemaError, StorageError
from ..model.folder import check_folder
from .answer import Answer
from .launch import ServerProcess
from .partial import Partial
from .protocol import Health
from .remote import Failed, Gone, Refused, Remote
from .sampling import Sampling

__all__ = ["Client"]

_STARTS = 3  # of a program that ends before it answers


class _Call:
    """One answer on its way."""

    def __init__(self) -> None:
        self.server: Remote | None = None
        self.name = ""  # of the request at that server
        self.part = Partial()  # what that server has sent
        self.is_aborted = False
        self.ended = asyncio.Event()


class _Wanted(NamedTuple):
    """The weights that every server should have."""

    path: str
    version: int


class Client(ABC):
    """Answers from servers at one or several addresses.

    A request goes to the server with the fewest requests of this client. When a server dies, or ends an answer on its
    own (a pause that aborts), the request is sent again with the tokens so far appended to the prompt: to another one,
    or to the same one when it is back. A server that comes back with older weights gets the newest ones of `update`.

    Args:
        servers: Addresses ("http://host:port") of running servers, or `ServerProcess` for those to be started.
        key: The servers' API key.
        version: The version of the weights that the servers have been started with.
        patience_s: How long a request waits for a server to come back before it raises `NotReady`.
        vocabulary: Token ids from this number on are refused. None: what the server's model has, where that is known.
    """

    def __init__(
        self,
        servers: str | ServerProcess | Sequence[str | ServerProcess],
        *,
        key: str | None = None,
        version: int = 0,
        patience_s: float = 60.0,
        vocabulary: int | None = None,
    ) -> None:
        given = [servers] if isinstance(servers, (str, ServerProcess)) else list(servers)
        if not given:
            raise SchemaError(f"{type(self).__name__}: servers is empty, expected at least one address")
        self.servers = [Remote(where, key) for where in given]
        self.patience_s, self.vocabulary = patience_s, vocabulary
        self._first_version = version
        self._wanted: _Wanted | None = None
        self._calls: set[_Call] = set()
        self._names = itertools.count()
        self._prefix = secrets.token_hex(4)
        self._changed = asyncio.Event()  # a server is ready, or an answer was aborted
        self._weights = asyncio.Lock()
        self._loose: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    # What a subclass knows.

    @abstractmethod
    async def _meet(self, server: Remote) -> None:
        """Asks a server what it is: sets `kind` and `limit`."""

    @abstractmethod
    async def _ask(self, server: Remote, name: str, ids: list[int], sampling: Sampling, part: Partial) -> None:
        """Fills `part` while tokens come in. Returns with `part.stop` set; raises with the tokens so far in it."""

    @abstractmethod
    async def _score(self, server: Remote, ids: list[int]) -> list[float]: ...

    @abstractmethod
    async def _put(self, server: Remote, path: str, version: int, kv: str) -> None:
        """Puts weights in. Raises `Refused` or `StorageError` where the server could not read them."""

    @abstractmethod
    async def _abort(self, server: Remote, names: list[str]) -> None: ...

    @abstractmethod
    async def _version(self, server: Remote) -> int: ...

    # The generator.

    async def generate(self, ids: Sequence[int], sampling: Sampling | None = None) -> Answer:
        prompt, sampling = _checked(ids), Sampling() if sampling is None else sampling
        call = _Call()
        self._calls.add(call)
        answer = Partial()
        try:
            while True:
                left = answer.rest(sampling)
                if answer.tokens and left.max_tokens < 1:  # the server died with the last token sent
                    answer.stop = "length"
                    return answer.answer()
                server = await self._choose(call)
                if server is None:
                    answer.stop = "abort"
                    return answer.answer()
                self._check_fit(server, prompt, sampling)
                answer.extend(await self._part(server, call, [*prompt, *answer.tokens], left))
                if answer.stop is not None and (answer.stop != "abort" or call.is_aborted):
                    return answer.answer()
        finally:
            call.ended.set()
            self._calls.discard(call)

    async def _part(self, server: Remote, call: _Call, ids: list[int], sampling: Sampling) -> Partial:
        """What one server answers: the whole, or the tokens until it stopped."""
        part = call.part = Partial()
        call.server, call.name = server, f"{self._prefix}-{next(self._names)}"
        server.in_flight += 1
        try:
            await self._ask(server, call.name, ids, sampling, part)
        except Gone as error:
            self._lose(server, error)
        except asyncio.CancelledError:
            self._leave(self._abort(server, [call.name]))
            raise
        finally:
            server.in_flight -= 1
            call.server = None
        return part

    async def score(self, ids: Sequence[int]) -> list[float]:
        given = _checked(ids)
        if len(given) == 1:
            return []
        while True:
            server = await self._choose(None)
            assert server is not None
            self._check_fit(server, given, Sampling(max_tokens=1))
            try:
                return await self._score(server, given)
            except Gone as error:
                self._lose(server, error)

    async def update(self, path: str | Path, version: int, *, kv: Literal["keep", "recompute"] = "keep") -> None:
        if kv not in ("keep", "recompute"):
            raise SchemaError(f"update(): kv={kv!r}, expected 'keep' or 'recompute'")
        if isinstance(version, bool) or not isinstance(version, int) or version < 0:
            raise SchemaError(f"update(): version={version!r}, expected an integer of at least 0")
        # The servers' folder may not be visible here. Where it is, damage is found before anything changes.
        if os.path.isdir(path):
            await asyncio.to_thread(check_folder, path)
        await self._choose(None)
        async with self._weights:
            newest = self._first_version if self._wanted is None else self._wanted.version
            if version <= newest:
                raise SchemaError(f"update(): version={version}, but the servers have {newest}; versions only grow")
            ready = [server for server in self.servers if server.is_ready]
            where = os.path.abspath(path)
            results = await asyncio.gather(
                *(self._put(server, where, version, kv) for server in ready), return_exceptions=True
            )
            for server, result in zip(ready, results, strict=True):
                if isinstance(result, Gone):
                    self._lose(server, result)
                elif isinstance(result, Refused):
                    raise StorageError(f"update(): {result}; the old weights stay") from result
                elif isinstance(result, BaseException):
                    raise result
                else:
                    server.version, server.folder = version, where
            if not any(server.is_ready for server in ready):
                raise NotReady(f"update(): {_first_of(results)}")
            self._wanted = _Wanted(where, version)

    async def abort(self) -> int:
        calls = list(self._calls)
        for call in calls:
            call.is_aborted = True
        self._changed.set()
        waits = [asyncio.ensure_future(call.ended.wait()) for call in calls]
        while any(not call.ended.is_set() for call in calls):
            # Again and again: a request that had not reached its server yet was not there to be ended.
            for server in self.servers:
                names = [call.name for call in calls if call.server is server and not call.ended.is_set()]
                if names:
                    try:
                        await self._abort(server, names)
                    except Gone as error:
                        self._lose(server, error)
            await asyncio.wait(waits, timeout=0.1)
        return len(calls)

    async def health(self) -> Health:
        """`version` is the oldest of the servers that answer. Only requests of this client are counted: as running from
        their first token on."""
        await self._choose(None, patience_s=0.0 if self._is_met else self.patience_s)
        versions = []
        for server in [one for one in self.servers if one.is_ready]:
            try:
                versions.append(await self._version(server))
            except Gone as error:
                self._lose(server, error)
        if not versions:
            raise NotReady(f"health(): none of {len(self.servers)} servers answers: {self._troubles()}")
        running = sum(call.server is not None and bool(call.part.tokens) for call in self._calls)
        return Health(min(versions), running, len(self._calls) - running)

    async def close(self) -> None:
        self._is_closed = True
        self._changed.set()
        for task in list(self._loose):
            await asyncio.wait([task], timeout=1.0)
            task.cancel()
        for server in self.servers:
            await server.close()

    # Servers that come and go.

    @property
    def _is_met(self) -> bool:
        return any(server.return_task is not None for server in self.servers)

    async def _choose(self, call: _Call | None, patience_s: float | None = None) -> Remote | None:
        """The server that is ready with the fewest requests; None where the call was aborted."""
        patience_s = self.patience_s if patience_s is None else patience_s
        loop = asyncio.get_running_loop()
        began = loop.time()
        for server in self.servers:  # those that failed get another chance with each request
            if not server.is_ready and (server.return_task is None or server.return_task.done()):
                server.has_failed = False
                server.return_task = loop.create_task(self._return(server))
        while True:
            if self._is_closed:
                raise ClosedError(f"{type(self).__name__} was closed")
            if call is not None and call.is_aborted:
                return None
            ready = [server for server in self.servers if server.is_ready]
            if ready:
                return min(ready, key=lambda server: server.in_flight)
            trouble = self.servers[0].trouble
            if trouble is not None and all(server.has_failed for server in self.servers):
                raise type(trouble)(str(trouble)) from trouble
            left = began + self._patience(patience_s) - loop.time()
            if left <= 0:
                raise NotReady(
                    f"no server answered within {patience_s:g} s: {self._troubles()}; wait longer with patience_s="
                )
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except asyncio.TimeoutError:
                continue

    def _patience(self, patience_s: float) -> float:
        """A server that is being started gets the time that its start may take."""
        starting = [s.process.ready_s for s in self.servers if s.process is not None and not s.has_failed]
        return max([patience_s, *starting]) if patience_s > 0 else patience_s

    def _lose(self, server: Remote, error: Exception) -> None:
        server.is_ready, server.trouble = False, error
        if not self._is_closed and (server.return_task is None or server.return_task.done()):
            server.return_task = asyncio.get_running_loop().create_task(self._return(server))

    async def _return(self, server: Remote) -> None:
        """Tries until the server is back, with the newest weights in it. Gives up where trying again would not help."""
        delay, starts, process = 0.02, 0, server.process
        server.has_failed = False
        while not self._is_closed and not server.has_failed:
            try:
                if process is not None and not process.is_alive:
                    if starts == _STARTS:
                        raise Failed(f"{process.command[0]} ended {starts} times while it started{process.tail()}")
                    starts += 1
                    await asyncio.to_thread(process.start)
                await self._meet(server)
                server.version = await self._version(server)
                async with self._weights:
                    await self._catch_up(server)
                    server.is_ready, server.trouble = True, None
                    self._changed.set()
                return
            except (NotReady, SchemaError, StorageError) as error:
                server.trouble = error
                server.has_failed = isinstance(error, (Failed, Refused, StorageError))
            await asyncio.sleep(0 if server.has_failed else delay)
            delay = min(1.0, delay * 2)
        self._changed.set()

    async def _catch_up(self, server: Remote) -> None:
        wanted = self._wanted
        if wanted is None:
            return
        if server.version is None or server.version < wanted.version:
            await self._put(server, wanted.path, wanted.version, "keep")
        server.version, server.folder = wanted.version, wanted.path

    def _troubles(self) -> str:
        return "; ".join(f"{server.address}: {server.trouble or 'not reached yet'}" for server in self.servers)

    def _number(self, version: Any) -> int:
        """Servers call the weights that they were started with "default"."""
        try:
            return int(version)
        except (TypeError, ValueError):
            return self._first_version

    def _check_fit(self, server: Remote, ids: list[int], sampling: Sampling) -> None:
        vocabulary = server.vocabulary if self.vocabulary is None else self.vocabulary
        if vocabulary is not None and max(ids) >= vocabulary:
            raise SchemaError(f"generate(): ids[{ids.index(max(ids))}]={max(ids)}, expected 0 to {vocabulary - 1}")
        if server.limit is not None and len(ids) + sampling.max_tokens > server.limit:
            raise SchemaError(
                f"generate(): a prompt of {len(ids)} tokens and max_tokens={sampling.max_tokens} need "
                f"{len(ids) + sampling.max_tokens} places, {server.address} has {server.limit}; shorten the prompt or "
                "lower max_tokens"
            )

    def _leave(self, work: Any) -> None:
        """Lets something go on without a caller that waits for it."""

        async def quietly() -> None:
            with contextlib.suppress(Gone, Refused):
                await work

        task = asyncio.get_running_loop().create_task(quietly())
        self._loose.add(task)
        task.add_done_callback(self._loose.discard)


def _first_of(results: Sequence[Any]) -> Any:
    return next((one for one in results if isinstance(one, BaseException)), "no server is ready")


def _checked(ids: Sequence[int]) -> list[int]:
    import numpy as np

    given = np.asarray(ids)
    if given.ndim != 1 or not len(given) or given.dtype.kind not in "iu" or int(given.min()) < 0:
        raise SchemaError(f"ids of shape {given.shape} and dtype {given.dtype}, expected token ids of at least 0")
    return [int(one) for one in given]
