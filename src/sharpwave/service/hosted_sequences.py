"""HostedSequences: a SequenceBuffer for the clients of a server.

Calls that wait (for room, for samples, for the journal) are coroutines of the server's event loop and end with their
client. What a client has leased returns at once when it is gone. Calls that change samples carry an origin, so that one
that is sent again, also after a restart of the server, is made once.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import whole
from ..errors import ClosedError, NotReady, SchemaError, SharpwaveError, StaleHandle
from ..files.origin import Origin
from ..sequences.intake import read_handles
from ..sequences.leases import Claim
from ..sequences.local import LocalSequences
from ..sequences.sample import SequenceSample
from ..sequences.staleness import Admission
from .document import encode
from .guest import Guest, Request
from .hosted import Answer, HostedVerb, Later, origin_of
from .message import HEAD_BYTES
from .sample_frames import pack_batch, read_parts

if TYPE_CHECKING:
    from .server import Server

__all__ = ["HostedSequences"]

_MOST_LEASES = 1024  # of a client, before those that have expired are forgotten
_MOST_CANCELLED = 1024  # calls of a client that were cancelled before they came
_LARGE_BYTES = 1 << 20  # a larger batch is put together in a thread, beside the event loop
_WHERE = re.compile(r"[a-z_]{1,30}\(\)")


class Held:
    """What one client has of one buffer. ``key`` is the client's name for a call that waits, or for a lease."""

    def __init__(self) -> None:
        self.leases: dict[str, Claim] = {}
        self.running: dict[str, asyncio.Task[Any]] = {}
        self.cancelled: OrderedDict[str, None] = OrderedDict()
        self.rollouts: dict[str, tuple[tuple[int, int | None], int]] = {}  # by gate: its settings, rollouts that run


class HostedSequences:
    """Satisfies ``Hosted``."""

    kind = "sequences"

    def __init__(self, face: str, sequences: LocalSequences, server: Server) -> None:
        self.face, self._sequences, self._server = face, sequences, server
        self._lock = threading.Lock()  # around what clients have: calls run in two threads of the server
        self._held: dict[Guest, Held] = {}
        # Serials of a journal are never given twice. Without one they begin anew with the process, so clients get them
        # behind a random number: a handle of a former server names no sample.
        self._base = 0 if sequences.store.journal is not None else secrets.randbits(62)
        self.verbs = {
            "put": HostedVerb("write", "async", self._put),
            "amend": HostedVerb("write", "async", self._amend),
            "get": HostedVerb("read", "async", self._get),
            "ack": HostedVerb("read", "async", self._ack),
            "complete": HostedVerb("write", "async", self._complete),
            "give_back": HostedVerb("read", "inline", self._give_back),
            "renew": HostedVerb("read", "inline", self._renew),
            "cancel_put": HostedVerb("write", "inline", self._cancel),
            "cancel_get": HostedVerb("read", "inline", self._cancel),
            "release": HostedVerb("write", "inline", lambda guest, args: self._sequences.release(args["owner"])),
            "version": HostedVerb("read", "inline", lambda guest, args: self._sequences.version()),
            "set_version": HostedVerb("write", "async", self._set_version),
            "admit": HostedVerb("write", "inline", self._admit),
            "checkpoint": HostedVerb("write", "async", self._checkpoint),
            "used_ids": HostedVerb("read", "thread", lambda guest, args: self._sequences.used_ids()),
            "mark_used": HostedVerb("write", "inline", lambda guest, args: self._sequences.mark_used(args["ids"])),
            "wanted": HostedVerb("write", "inline", lambda guest, args: self._sequences.wanted(args["ids"])),
            "explain": HostedVerb("read", "thread", lambda guest, args: self._sequences.explain(args["consumer"])),
            "stats": HostedVerb("read", "thread", lambda guest, args: self._sequences.stats()),
            "len": HostedVerb("read", "inline", lambda guest, args: len(self._sequences)),
            "contains": HostedVerb("read", "inline", self._contains),
            "ids": HostedVerb("read", "thread", lambda guest, args: self._sequences.ids()),
            "clear": HostedVerb("admin", "async", self._clear),
            "flush": HostedVerb("write", "async", lambda guest, args: self._sequences.flush_async("flush()")),
            "save": HostedVerb("admin", "async", self._save),
        }

    def describe(self) -> dict[str, Any]:
        return {"options": self._sequences.options.to_json()}

    def summary(self) -> dict[str, Any]:
        return {"size": len(self._sequences.store.index.entries), "capacity": self._sequences.options.capacity}

    def attach(self, desk: Any, number: int) -> None:
        """It has no rows."""

    def exchange(self, guest: Guest, request: Request) -> Answer | Later:
        raise SchemaError(f"a {self.face} has no rows; its verbs are {', '.join(self.verbs)}")

    def left(self, guest: Guest) -> None:
        """Its calls that wait are cancelled by the server; what it has leased returns."""
        with self._lock:
            held = self._held.pop(guest, None)
        for claim in () if held is None else held.leases.values():
            with contextlib.suppress(SharpwaveError):
                self._sequences.lender.give_back(claim)

    def flush(self) -> None:
        with contextlib.suppress(ClosedError):
            self._sequences.flush("flush()")

    # ---- in ---------------------------------------------------------------------------------------------------------

    async def _put(self, guest: Guest, args: dict[str, Any]) -> Any:
        where = _where(args, "put()")
        parts = read_parts(where, args["samples"])
        origin = origin_of(guest, args)
        told = args["version"], args["births"], args["timeout"]
        with self._running(guest, args):
            handles = await self._finished(origin, self._sequences.put_async(where, parts, *told, origin))
        return handles + self._base

    async def _finished(self, origin: Origin, call: Awaitable[Any]) -> Any:
        """The result of a call. One that is cancelled while its record is written is made all the same, and its
        client is told so: a server that closes in order cancels the calls that run."""
        try:
            return await call
        except asyncio.CancelledError:
            with self._sequences.gate.lock:
                if not self._sequences.store.origins.knows(origin):
                    raise
                return self._sequences.store.origins.result(origin)

    async def _amend(self, guest: Guest, args: dict[str, Any]) -> None:
        where = _where(args, "amend()")
        parts = read_parts(where, args["samples"])
        serials = [handle - self._base for handle in read_handles(where, args["handles"])]
        origin = origin_of(guest, args)
        try:
            call = self._sequences.amend_async(where, np.array(serials, np.int64), parts, origin)
            await self._finished(origin, call)
        except (StaleHandle, SchemaError) as error:
            raise type(error)(re.sub(r"handle (-?\d+)", self._to_handle, str(error))) from None

    def _to_handle(self, found: re.Match[str]) -> str:
        return f"handle {int(found[1]) + self._base}"

    def _contains(self, guest: Guest, args: dict[str, Any]) -> bool:
        return args["handle"] - self._base in self._sequences

    # ---- out --------------------------------------------------------------------------------------------------------

    async def _get(self, guest: Guest, args: dict[str, Any]) -> Answer:
        where, key = _where(args, "get()"), _key(args)
        sequences = self._sequences
        with self._running(guest, args):
            claim = await sequences.claim_async(
                where, args["consumer"], args["batch_size"], args["timeout"], args["partial"], args["owner"]
            )
        try:
            self._keep(guest, key, claim)
            if sum(entry.bytes for entry in claim.entries) > _LARGE_BYTES:
                return await asyncio.to_thread(self._pack, where, claim)
            return self._pack(where, claim)
        except BaseException:
            self._forget(guest, key)
            sequences.lender.give_back(claim)
            raise

    def _keep(self, guest: Guest, key: str, claim: Claim) -> None:
        with self._lock:
            held = self._of(guest)
            if key in held.cancelled:
                raise NotReady("get(): the client does not wait any more")
            if len(held.leases) >= _MOST_LEASES:
                out = self._sequences.store.book.out
                held.leases = {name: one for name, one in held.leases.items() if one.number in out}
            held.leases[key] = claim

    def _pack(self, where: str, claim: Claim) -> Answer:
        lease = self._sequences.lender.lend(claim)
        said = {"batch": pack_batch(lease.batch), "versions": lease.versions, "handles": lease.handles + self._base}
        memory = encode(said, HEAD_BYTES)
        if len(memory) > self._server.message_bytes:
            raise SchemaError(
                f"{where}: the batch of {len(lease)} samples has {len(memory)} bytes, above the server's "
                f"limits['message_bytes']={self._server.message_bytes}; give a smaller batch_size=, or serve() a "
                "larger limit"
            )
        return Answer(memory)

    async def _ack(self, guest: Guest, args: dict[str, Any]) -> None:
        await self._end_lease(guest, args, None)

    async def _complete(self, guest: Guest, args: dict[str, Any]) -> None:
        await self._end_lease(guest, args, read_parts("ack()", args["samples"]))

    async def _end_lease(self, guest: Guest, args: dict[str, Any], made: list[SequenceSample] | None) -> None:
        key, origin = _key(args), origin_of(guest, args)
        await self._finished(origin, self._sequences.lender.ack_async(self._lease(guest, key), made, origin))
        self._forget(guest, key)

    def _give_back(self, guest: Guest, args: dict[str, Any]) -> None:
        claim = self._forget(guest, _key(args))
        if claim is not None:
            self._sequences.lender.give_back(claim)

    def _renew(self, guest: Guest, args: dict[str, Any]) -> None:
        claim = self._lease(guest, _key(args))
        if claim is None:
            raise StaleHandle("renew(): the lease is over: the server was restarted, or took this client for dead")
        self._sequences.lender.renew(claim)

    def _lease(self, guest: Guest, key: str) -> Claim | None:
        with self._lock:
            return self._of(guest).leases.get(key)

    def _forget(self, guest: Guest, key: str) -> Claim | None:
        with self._lock:
            held = self._held.get(guest)
            return None if held is None else held.leases.pop(key, None)

    # ---- calls that wait --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _running(self, guest: Guest, args: dict[str, Any]) -> Iterator[None]:
        """Around a call that may wait: its client can end it by its key."""
        key, task = _key(args), asyncio.current_task()
        assert task is not None
        with self._lock:
            held = self._of(guest)
            if key in held.cancelled:
                raise NotReady("the client does not wait any more")
            if key in held.running or key in held.leases:
                raise SchemaError(f"key: expected one of its own for each call, got {key!r} again")
            held.running[key] = task
        try:
            yield
        finally:
            with self._lock:
                held.running.pop(key, None)

    def _cancel(self, guest: Guest, args: dict[str, Any]) -> None:
        """The client does not wait for a call any more: it ends, and what it has leased returns."""
        key = _key(args)
        with self._lock:
            held = self._of(guest)
            held.cancelled[key] = None
            if len(held.cancelled) > _MOST_CANCELLED:
                held.cancelled.popitem(last=False)
            task = held.running.get(key)
        if task is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)
        self._give_back(guest, args)

    def _of(self, guest: Guest) -> Held:
        """With the lock. A client that is gone gets nothing any more."""
        if guest.is_gone:
            raise ClosedError("the client is gone")
        return self._held.setdefault(guest, Held())

    # ---- versions and life ------------------------------------------------------------------------------------------

    async def _set_version(self, guest: Guest, args: dict[str, Any]) -> None:
        where = _where(args, "set_version()")
        origin = origin_of(guest, args)
        await self._finished(origin, self._sequences.set_version_async(where, args["version"], origin))

    def _admit(self, guest: Guest, args: dict[str, Any]) -> tuple[int, bool]:
        """How many rollouts may start, and whether ``count`` have: of all clients together that gave the same settings.

        A client tells how many of its own run, so that a call that is sent again counts nothing twice, and a server
        that was restarted knows them after each client's next call.
        """
        gate, mine, count = _key(args), args["running"], args["count"]
        local = self._sequences.admission(args["batch_size"], args["max_concurrent"])
        settings = local.batch_size, local.max_concurrent
        whole("start()", "running", mine, 0)
        whole("start()", "count", count, 0)
        with self._lock:
            own = self._of(guest).rollouts
            own[gate] = settings, mine
            everyone = sum(
                run for held in self._held.values() for other, run in held.rollouts.values() if other == settings
            )
            capacity = _capacity(local, everyone)
            has_started = 0 < count <= capacity
            own[gate] = settings, mine + count if has_started else mine
        return capacity, has_started

    async def _checkpoint(self, guest: Guest, args: dict[str, Any]) -> None:
        where, origin = _where(args, "checkpoint()"), origin_of(guest, args)
        await self._finished(origin, self._sequences.checkpoint_async(where, args["name"], origin))

    async def _clear(self, guest: Guest, args: dict[str, Any]) -> None:
        where, origin = _where(args, "clear()"), origin_of(guest, args)
        await self._finished(origin, self._sequences.clear_async(where, origin))

    async def _save(self, guest: Guest, args: dict[str, Any]) -> None:
        await self._sequences.save_async(_where(args, "save()"), self._server.save_place(args["path"]))


def _capacity(gate: Admission, running: int) -> int:
    with gate._lock:
        gate._running = running
        return gate._capacity()


def _key(args: dict[str, Any]) -> str:
    key = args["key"]
    if not isinstance(key, str) or len(key) > 64:
        raise SchemaError(f"key: expected text of at most 64 characters, got {key!r:.100}")
    return key


def _where(args: dict[str, Any], default: str) -> str:
    """The call as the client's caller wrote it: ``put()`` or ``put_async()``."""
    where = args.get("where")
    return where if isinstance(where, str) and _WHERE.fullmatch(where) else default
