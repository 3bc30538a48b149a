"""RemoteSequences: the samples of a SequenceBuffer that a server has. Satisfies ``Sequences``."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..checks import seconds, whole
from ..errors import SchemaError, SharpwaveError
from ..files.save_path import read_save_path
from ..sequences.intake import read_handles, read_ids
from ..sequences.leases import Lease
from ..sequences.options import Options
from ..sequences.protocol import Handles
from ..sequences.staleness import Admission
from .aside import Aside
from .channel import NoAnswer
from .sample_frames import pack_given, read_batch
from .session import OpenTable, Session

__all__ = ["RemoteSequences"]

_CANCEL_S = 5.0
_REPR_S = 1.0


class RemoteSequences:
    """For threads and coroutines at once. A forked child is a client of its own.

    Each call that changes samples has an origin: after a lost answer or a restart of the server it is sent again and
    made once. A lease ends with the server: its ``ack`` and ``renew`` are a StaleHandle after a restart.
    """

    def __init__(self, session: Session, table: OpenTable, open_options: dict[str, Any]) -> None:
        self._session, self._table, self.open_options = session, table, open_options
        self.address: str | None = f"{session.server}/{table.name}"
        self.options = Options.from_json(table.facts["options"])
        self._aside = Aside()
        self._life = secrets.token_hex(8)
        self._keys = itertools.count()

    def about(self) -> str:
        if self._session.closed:
            return f"{self.address}: closed"
        try:
            held = self._session.call(self._table, "len", {}, timeout=_REPR_S)
        except Exception:  # it is silent, closed there, or this client has no right to read
            held = "?"
        names = ", ".join(consumer.name for consumer in self.options.flow)
        return f"{self.address}: {held} of {self.options.capacity} samples, consumers {names}"

    def check(self, where: str) -> None:
        self._session.check_open(where)

    def _new_key(self) -> str:
        """This client's name for a call that may wait, or for a lease. No other object of this process has the same."""
        return f"{self._life}-{next(self._keys)}"

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _call(self, where: str, verb: str, args: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        self.check(where)
        return self._session.call(self._table, verb, args or {}, timeout=timeout)

    def _once(self, where: str, verb: str, args: dict[str, Any], timeout: float | None = None) -> Any:
        """A call that is made once, however often it is sent."""
        number, oldest = self._session.next_origin()
        try:
            return self._call(where, verb, {**args, "where": where, "origin": (number, oldest)}, timeout)
        finally:
            self._session.done(number)

    def _waiting(self, key: str, verb: str, call: Callable[[], Any]) -> Any:
        """A call that may wait at the server. Given up here, it ends there too."""
        try:
            return call()
        except NoAnswer:
            self._cancel(key, verb)
            raise
        except SharpwaveError:
            raise  # the server's answer
        except BaseException:
            self._cancel(key, verb)
            raise

    def _cancel(self, key: str, verb: str) -> None:
        """In another thread: this one's channel is behind the call that is to end."""

        def cancel() -> None:
            with contextlib.suppress(SharpwaveError):
                self._session.call(self._table, f"cancel_{verb}", {"key": key}, timeout=_CANCEL_S)

        if not self._session.closed:
            self._aside.begin(cancel)

    async def _awaited(self, call: Callable[[], Any], key: str = "", verb: str = "") -> Any:
        try:
            return await self._aside.run(call)
        except asyncio.CancelledError:
            if key:
                self._cancel(key, verb)
            raise

    # ---- put and amend ----------------------------------------------------------------------------------------------

    def put(self, where: str, samples: Any, version: Any, births: Any, timeout: float | None) -> Handles:
        return self._put(self._new_key(), where, samples, version, births, timeout)

    async def put_async(self, where: str, samples: Any, version: Any, births: Any, timeout: float | None) -> Handles:
        key = self._new_key()
        made: Handles = await self._awaited(
            lambda: self._put(key, where, samples, version, births, timeout), key, "put"
        )
        return made

    def _put(self, key: str, where: str, samples: Any, version: Any, births: Any, timeout: Any) -> Handles:
        self.check(where)
        _, packed = pack_given("put()", samples)
        wait = seconds(where, timeout)
        if packed is None:
            return np.empty(0, np.int64)
        args = {"samples": packed, "version": version, "births": births, "key": key}
        made: Handles = self._waiting(key, "put", lambda: self._once(where, "put", args, wait))
        return made

    def amend(self, where: str, handles: Any, samples: Any) -> None:
        self.check(where)
        serials = read_handles("amend()", handles)
        count, packed = pack_given("amend()", samples)
        if count != len(serials):
            raise SchemaError(f"amend(): expected a sample a handle, got {count} for {len(serials)}")
        if packed is not None:
            self._once(where, "amend", {"handles": np.array(serials, np.int64), "samples": packed})

    async def amend_async(self, where: str, handles: Any, samples: Any) -> None:
        await self._awaited(lambda: self.amend(where, handles, samples))

    # ---- get and leases ---------------------------------------------------------------------------------------------

    def get(
        self, where: str, consumer: str, batch_size: int | None, timeout: float | None, partial: bool, owner: str | None
    ) -> Lease:
        return self._get(self._new_key(), where, consumer, batch_size, timeout, partial, owner)

    async def get_async(
        self, where: str, consumer: str, batch_size: int | None, timeout: float | None, partial: bool, owner: str | None
    ) -> Lease:
        key = self._new_key()
        made: Lease = await self._awaited(
            lambda: self._get(key, where, consumer, batch_size, timeout, partial, owner), key, "get"
        )
        return made

    def _get(
        self, key: str, where: str, consumer: str, batch_size: Any, timeout: Any, partial: Any, owner: Any
    ) -> Lease:
        wait = seconds(where, timeout)
        args = {
            "key": key, "where": where, "consumer": consumer, "batch_size": batch_size, "partial": partial,
            "owner": owner,
        }  # fmt: skip
        said = self._waiting(key, "get", lambda: self._call(where, "get", args, wait))
        try:
            batch = read_batch(where, said["batch"])
            return Lease(batch, said["versions"], said["handles"], consumer, key, self)
        except BaseException:
            self._cancel(key, "get")
            raise

    def release(self, owner: str) -> int:
        if not isinstance(owner, str):
            raise SchemaError(f"release(): owner: expected text, got {owner!r}")
        count: int = self._call("release()", "release", {"owner": owner})
        return count

    # What ends the leases; ``claim`` is the key.

    def ack(self, claim: str, samples: Any) -> None:
        self._ack("ack()", claim, samples)

    async def ack_async(self, claim: str, samples: Any) -> None:
        await self._awaited(lambda: self._ack("ack_async()", claim, samples))

    def _ack(self, where: str, claim: str, samples: Any) -> None:
        if samples is None:
            self._once(where, "ack", {"key": claim})
            return
        self.check(where)
        _, packed = pack_given("ack()", samples)
        if packed is None:
            raise SchemaError("ack(): samples: expected one for each of those leased, got none")
        self._once(where, "complete", {"key": claim, "samples": packed})

    def give_back(self, claim: str) -> None:
        if not self._session.closed:  # close() gave the leases back
            self._call("release()", "give_back", {"key": claim})

    async def give_back_async(self, claim: str) -> None:
        await self._awaited(lambda: self.give_back(claim))

    def renew(self, claim: str) -> None:
        self._call("renew()", "renew", {"key": claim})

    # ---- versions ---------------------------------------------------------------------------------------------------

    def version(self) -> int:
        found: int = self._call("version", "version")
        return found

    def set_version(self, where: str, version: int) -> None:
        self._once(where, "set_version", {"version": whole(where, "version", version, 0)})

    async def set_version_async(self, where: str, version: int) -> None:
        await self._awaited(lambda: self.set_version(where, version))

    def admission(self, batch_size: int, max_concurrent: int | None) -> Admission:
        self.check("admission()")
        if self.options.max_staleness is None:
            raise SchemaError("admission(): needs SequenceBuffer(max_staleness=)")
        return RemoteAdmission(batch_size, self.options.max_staleness, max_concurrent, self, self._new_key())

    # ---- recovery ---------------------------------------------------------------------------------------------------

    def checkpoint(self, where: str, name: str) -> None:
        if not isinstance(name, str):
            raise SchemaError(f"checkpoint(): name: expected text, got {name!r}")
        self._once(where, "checkpoint", {"name": name})

    async def checkpoint_async(self, where: str, name: str) -> None:
        await self._awaited(lambda: self.checkpoint(where, name))

    def used_ids(self) -> list[str]:
        found: list[str] = self._call("used_ids", "used_ids")
        return found

    def mark_used(self, ids: Iterable[Any]) -> None:
        self._call("mark_used()", "mark_used", {"ids": read_ids("mark_used()", ids)})

    def wanted(self, ids: Iterable[Any]) -> list[str]:
        found: list[str] = self._call("wanted()", "wanted", {"ids": read_ids("wanted()", ids)})
        return found

    # ---- facts and life ---------------------------------------------------------------------------------------------

    def explain(self, consumer: str) -> str:
        found: str = self._call("explain()", "explain", {"consumer": consumer})
        return found

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self._call("stats()", "stats")
        return {**found, "server": self._session.stats()}

    def __len__(self) -> int:
        found: int = self._call("len()", "len")
        return found

    def __contains__(self, handle: object) -> bool:
        self.check("in")
        return isinstance(handle, (int, np.integer)) and bool(self._call("in", "contains", {"handle": int(handle)}))

    def ids(self) -> list[str]:
        found: list[str] = self._call("ids()", "ids")
        return found

    def clear(self, where: str) -> None:
        self._once(where, "clear", {})

    async def clear_async(self, where: str) -> None:
        await self._awaited(lambda: self.clear(where))

    def flush(self, where: str) -> None:
        self._call(where, "flush")

    async def flush_async(self, where: str) -> None:
        await self._awaited(lambda: self.flush(where))

    def save(self, where: str, path: Any) -> None:
        """On the server's machine."""
        self._call(where, "save", {"path": read_save_path(path), "where": where})

    async def save_async(self, where: str, path: Any) -> None:
        await self._awaited(lambda: self.save(where, path))

    def close(self) -> None:
        """Its leases return. The server and its buffer go on."""
        self._session.close()


class RemoteAdmission(Admission):
    """A gate that counts at the server, with the gates of all clients that gave the same numbers. Rollouts of a client
    that died do not run any more. After a restart of the server a client's rollouts count again from its next call on.
    """

    def __init__(
        self, batch_size: int, max_staleness: int, max_concurrent: int | None, sequences: RemoteSequences, key: str
    ) -> None:
        super().__init__(batch_size, max_staleness, max_concurrent, lambda: (0, 0))
        self._sequences, self._key = sequences, key

    def capacity(self) -> int:
        with self._locked("capacity()"):
            return self._ask("capacity()", 0)[0]

    def start(self, count: int = 1) -> bool:
        count = whole("start()", "count", count)
        with self._locked("start()"):
            has_started = self._ask("start()", count)[1]
            if has_started:
                self._running += count
            return has_started

    def finish(self, count: int = 1) -> None:
        super().finish(count)
        self.capacity()  # tells the server

    def _ask(self, where: str, count: int) -> tuple[int, bool]:
        args = {"key": self._key, "batch_size": self.batch_size, "max_concurrent": self.max_concurrent}
        told = {**args, "running": self._running, "count": count}
        found: tuple[int, bool] = self._sequences._call(where, "admit", told)
        return found
