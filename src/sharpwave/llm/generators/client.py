"""`Client`: a generator whose servers are other processes. Subclasses know what goes over the wire."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...errors import ClosedError, NotReady, SchemaError, StorageError
from ..model.folder import check_folder
from ..weights import check_version
from .answer import Answer
from .launch import ServerProcess
from .likelihood import as_tokens
from .mends import Mends
from .partial import Partial
from .protocol import Health
from .remote import Behind, Failed, Gone, Refused, Remote
from .sampling import Sampling

__all__ = ["Client"]

_STARTS = 3  # of a program that ends before it answers
_RETRY_S = 60.0  # at most until a server is given the weights again that it refused
_TRIES = 5  # of a request that fails at servers which are ready


class _Call:
    """One answer on its way."""

    def __init__(self) -> None:
        self.server: Remote | None = None
        self.name = ""  # of the request at that server
        self.part = Partial()  # what that server has sent
        self.error: Gone | None = None  # by which the last one broke off
        self.is_aborted = False
        self.ended = asyncio.Event()


class _Failures:
    """Of one request at servers that are ready, one after the other, without a token in between."""

    def __init__(self) -> None:
        self.count, self._began = 0, 0.0

    def add(self, error: Gone | None, patience_s: float) -> float:
        """Returns how long to wait before the next try: a server that fails this request only is ready again at once.

        Raises:
            NotReady: It has failed several times, and for longer than `patience_s`.
        """
        now = time.monotonic()
        if self.count == 0:
            self._began = now
        self.count += 1
        if self.count >= _TRIES and now - self._began > patience_s:
            raise NotReady(
                f"a request failed {self.count} times in {now - self._began:.0f} s, the last time by: {error}; try "
                "longer with patience_s="
            )
        return 0.0 if self.count == 1 else min(1.0, 0.01 * 2**self.count)


class _Wanted(NamedTuple):
    """The weights that every server should have."""

    path: str
    version: int
    kv: str


class Client(ABC):
    """Answers from servers at one or several addresses.

    A request goes to the server with the fewest requests of this client. When a server dies, or ends an answer on its
    own (a pause that aborts), the request is sent again with the tokens so far appended to the prompt: to another one,
    or to the same one when it is back. A server that comes back with older weights gets the newest ones of `update`;
    until it has them, it is given no work.

    Args:
        servers: Addresses ("http://host:port") of running servers, or `ServerProcess` for those to be started.
        key: The servers' API key.
        version: The version of the weights that the servers have been started with.
        patience_s: How long a request waits for a server to come back before it raises `NotReady`. A request that
            servers fail again and again, without a token, is tried for as long.
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
        self.mends: Mends | None = None  # where users change the limits of the servers, where that is known
        self._first_version = check_version(f"{type(self).__name__}()", version, -1)
        self._newest = version  # that `update` has told its caller to be accepted
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
        prompt, sampling = _checked(ids, "generate()"), Sampling() if sampling is None else sampling
        call, failures = _Call(), _Failures()
        self._calls.add(call)
        answer = Partial()
        try:
            while True:
                if answer.end_where_due(sampling):  # the server died with the last token sent
                    return answer.answer()
                left = answer.rest(sampling)
                server = await self._choose(call)
                if server is None:
                    answer.stop = "abort"
                    return answer.answer()
                self._check_fit("generate()", server, prompt, sampling.max_tokens)
                part = await self._part(server, call, [*prompt, *answer.tokens], left)
                answer.extend(part)
                if answer.stop is not None and (answer.stop != "abort" or call.is_aborted):
                    return answer.answer()
                if part.tokens:
                    failures = _Failures()
                elif part.stop is None:
                    await asyncio.sleep(failures.add(call.error, self.patience_s))
        finally:
            call.ended.set()
            self._calls.discard(call)

    async def _part(self, server: Remote, call: _Call, ids: list[int], sampling: Sampling) -> Partial:
        """What one server answers: the whole, or the tokens until it stopped."""
        part = call.part = Partial()
        call.server, call.name = server, f"{self._prefix}-{next(self._names)}"
        server.in_flight += 1
        had = server.version
        try:
            await self._ask(server, call.name, ids, sampling, part)
            if part.versions and had is not None and part.versions[-1] < had:
                raise Gone(f"{server.address} was started again: it has version {part.versions[-1]}, it had {had}")
        except Gone as error:
            call.error = error
            self._lose(server, error)
        except asyncio.CancelledError:
            self._leave(self._abort(server, [call.name]))
            raise
        finally:
            server.in_flight -= 1
            call.server = None
        return part

    async def score(self, ids: Sequence[int]) -> list[float]:
        given = _checked(ids, "score()")
        if len(given) == 1:
            return []
        failures = _Failures()
        while True:
            server = await self._choose(None)
            assert server is not None
            self._check_fit("score()", server, given, 1)  # servers make a token to give a score
            try:
                return await self._score(server, given)
            except Gone as error:
                self._lose(server, error)
                wait_s = failures.add(error, self.patience_s)
            await asyncio.sleep(wait_s)

    async def update(self, path: str | Path, version: int, *, kv: Literal["keep", "recompute"] = "keep") -> None:
        """Puts the weights of a folder into all servers. See `Generator.update`.

        They are accepted when one server has them. A server that refuses them is given no work until it takes them at a
        later try, or takes those of the next update. If all servers refuse them, the old weights stay, and the version
        may be given again. While no server is ready the call waits, for at most `patience_s`.

        Raises:
            SchemaError: The version does not grow. The old weights stay.
            StorageError: No server can read the weights, or they do not fit. The old weights stay.
            NotReady: No server was ready in time. One that comes back gets these weights first. The call may be
                repeated.
        """
        if kv not in ("keep", "recompute"):
            raise SchemaError(f"update(): kv={kv!r}, expected 'keep' or 'recompute'")
        version = check_version("update()", version)
        # The servers' folder may not be visible here. Where it is, damage is found before anything changes.
        if os.path.isdir(path):
            await asyncio.to_thread(check_folder, path)
        wanted = _Wanted(os.path.abspath(path), version, kv)
        async with self._weights:
            if version <= self._newest:
                raise SchemaError(
                    f"update(): version={version}, but the servers have {self._newest}; versions only grow"
                )
            # Before any server is asked: those of the last update may be gone when a server comes back.
            before, self._wanted = self._wanted, wanted
            refusal = await self._put_all(wanted)
            if refusal is not None:
                self._wanted = before
        try:
            if refusal is None:
                await self._choose(None, wanted=wanted)
        except Behind as error:
            refusal = error
            if self._wanted is wanted:
                self._wanted = before
        if refusal is not None:
            raise StorageError(f"update(): {refusal}; the old weights stay") from refusal
        self._newest = max(self._newest, version)

    async def _put_all(self, wanted: _Wanted) -> Behind | None:
        """Puts weights into the servers that are ready. Returns a refusal where no server took them."""
        ready = [server for server in self.servers if server.is_ready]
        try:
            results = await asyncio.gather(*(self._bring(one, wanted) for one in ready), return_exceptions=True)
        except asyncio.CancelledError:
            for server in ready:  # which of them have the weights is not known
                self._lose(server, Gone(f"{server.address}: an update was cancelled"))
            raise
        refusals = [one for one in results if isinstance(one, Behind)]
        is_refused = bool(refusals) and None not in results
        for server, result in zip(ready, results, strict=True):
            if isinstance(result, Behind) and is_refused:
                continue  # it goes on with the old weights
            if isinstance(result, NotReady):
                self._lose(server, result)
            elif result is not None:
                raise result
        return refusals[0] if is_refused else None

    async def _bring(self, server: Remote, wanted: _Wanted) -> None:
        """Puts weights into a server that lacks them."""
        if (server.version, server.folder) != (wanted.version, wanted.path):
            before, server.asked = server.asked, (wanted.path, wanted.version)
            try:
                await self._put(server, *wanted)
            except (Refused, StorageError) as error:
                server.asked = before
                had = server.behind
                wait_s = 1.0 if had is None or had.wanted is not wanted else min(_RETRY_S, 2 * had.wait_s)
                server.behind = Behind(f"{server.address} refuses version {wanted.version}: {error}", wanted, wait_s)
                raise server.behind from error
        server.version, server.folder, server.behind = wanted.version, wanted.path, None

    async def abort(self) -> int:
        calls = list(self._calls)
        for call in calls:
            call.is_aborted = True
        self._tell_change()
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
        self._tell_change()
        for task in list(self._loose):
            await asyncio.wait([task], timeout=1.0)
            task.cancel()
        for server in self.servers:
            await server.close()

    # Servers that come and go.

    @property
    def _is_met(self) -> bool:
        return any(server.return_task is not None for server in self.servers)

    async def _choose(
        self, call: _Call | None, patience_s: float | None = None, wanted: _Wanted | None = None
    ) -> Remote | None:
        """The server that is ready with the fewest requests; None where the call was aborted.

        Raises `Behind` where every server refuses the weights `wanted`.
        """
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
            refusal = self._refusal(wanted)
            if refusal is not None:
                raise refusal
            trouble = self.servers[0].trouble
            if trouble is not None and all(server.has_failed for server in self.servers):
                raise type(trouble)(str(trouble)) from trouble
            most_s = self._patience(patience_s)
            left = began + most_s - loop.time()
            if left <= 0:
                mend = "patience_s=" if most_s == patience_s else "ServerProcess(ready_s=)"
                raise NotReady(f"no server answered within {most_s:g} s: {self._troubles()}; wait longer with {mend}")
            # Not wait_for: before Python 3.12 it loses a cancellation that comes together with the event.
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait([changed], timeout=left)
            finally:
                changed.cancel()

    def _tell_change(self) -> None:
        """Wakes all requests that wait. Later ones wait for the next change: an event that they cleared would take
        this one from a request that has not begun to wait for it."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

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
                    await server.start()
                if process is not None and server.is_overdue:  # it may hang; the next request starts it again
                    log = process.tail()
                    await server.stop()
                    raise Failed(
                        f"{process.command[0]} did not answer within {process.ready_s:g} s of its start and was ended"
                        f"{log}\nraise ServerProcess(ready_s=) if it needs longer"
                    )
                await self._meet(server)
                server.note_answer()
                server.version = await self._version(server)
                async with self._weights:
                    await self._catch_up(server)
                    server.is_ready, server.trouble = True, None
                    self._tell_change()
                return
            except (NotReady, SchemaError, StorageError) as error:
                server.trouble = error
                server.has_failed = isinstance(error, (Failed, Refused, StorageError))
                if isinstance(error, Behind):
                    self._tell_change()  # an update may wait for it
            await asyncio.sleep(0 if server.has_failed else delay)
            delay = min(1.0, delay * 2)
        self._tell_change()

    async def _catch_up(self, server: Remote) -> None:
        wanted, behind = self._wanted, server.behind
        if wanted is None:
            return
        # A version that was refused may be given again with other weights, and this server may have taken the first.
        is_other = server.asked is not None and server.asked[1] == wanted.version and server.asked[0] != wanted.path
        if server.version == wanted.version and not is_other:  # only the connection was lost
            server.folder = wanted.path
        elif behind is not None and behind.wanted is wanted and time.monotonic() < behind.again_at:
            raise behind.with_traceback(None)
        await self._bring(server, wanted)

    def _refusal(self, wanted: _Wanted | None) -> Behind | None:
        """Of weights that no server takes: each has refused them or does not start."""
        found = [one.behind for one in self.servers if one.behind is not None and one.behind.wanted is wanted]
        is_all = all(one.has_failed or one.behind in found for one in self.servers)
        return found[0] if found and is_all else None

    def _troubles(self) -> str:
        return "; ".join(f"{server.address}: {server.trouble or 'not reached yet'}" for server in self.servers)

    def _number(self, version: Any) -> int:
        """Servers call the weights that they were started with "default"."""
        try:
            return int(version)
        except (TypeError, ValueError):
            return self._first_version

    def _check_fit(self, where: str, server: Remote, ids: list[int], room: int) -> None:
        vocabulary = server.vocabulary if self.vocabulary is None else self.vocabulary
        if vocabulary is not None and max(ids) >= vocabulary:
            raise SchemaError(f"{where}: ids[{ids.index(max(ids))}]={max(ids)}, expected 0 to {vocabulary - 1}")
        if server.limit is not None and len(ids) + room > server.limit:
            mend = "shorten the prompt or lower max_tokens" if where == "generate()" else "shorten the sequence"
            if self.mends is not None:
                mend += f", or {self.mends.context}"
            raise SchemaError(
                f"{where}: {len(ids)} tokens and {room} more need {len(ids) + room} places, {server.address} has "
                f"{server.limit}; {mend}"
            )

    def _leave(self, work: Any) -> None:
        """Lets something go on without a caller that waits for it."""

        async def quietly() -> None:
            with contextlib.suppress(Gone, Refused):
                await work

        task = asyncio.get_running_loop().create_task(quietly())
        self._loose.add(task)
        task.add_done_callback(self._loose.discard)


def _checked(ids: Sequence[int], where: str) -> list[int]:
    given = [int(one) for one in as_tokens(ids, where)]
    if min(given) < 0:
        at = given.index(min(given))
        raise SchemaError(f"{where}: ids[{at}]={given[at]}, expected at least 0")
    return given
