"""LocalSequences: the samples of a SequenceBuffer in this process, with or without a journal.

The verbs that change samples take an ``origin``, which the network gives: the client's token, the number of the call
and the smallest number that the client may still ask again. A call whose origin is known does nothing and has the
result of the first one (``Origins``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..checks import truth, whole
from ..errors import SchemaError
from ..files.origin import Origin
from .change import Change
from .commits import Commits
from .gate import Gate, to_deadline
from .history import read_options
from .incoming import Incoming
from .intake import read_handles, read_ids, unpack
from .leases import Claim, Lease, Lender
from .lines import Line
from .options import Options
from .protocol import Handles
from .staleness import Admission
from .store import Store
from .turns import WRITE, Turns
from .waiter import CoroutineWaiter, ThreadWaiter
from .worker import Task, Worker, outcome

__all__ = ["LocalSequences"]


class LocalSequences:
    """For threads and coroutines of any event loop at once. A forked child cannot use it: it gets ClosedError."""

    address: str | None = None

    def __init__(self, store: Store) -> None:
        self.open_options: dict[str, Any] = {}
        self.options = store.options
        self.store = store
        self.gate = Gate()
        self.turns = Turns(self.gate, store)
        self.commits = Commits(self.gate, store, self.turns)
        self.lender = Lender(self.gate, store, self.turns, self.commits)

    @classmethod
    def create(
        cls,
        where: str,
        options: Options,
        journal: str | os.PathLike[str] | None,
        resume: str | None,
        recover: bool,
        version: int | None,
    ) -> LocalSequences:
        store = Store(options, 0 if version is None else whole(where, "version", version, 0))
        if journal is not None:
            store.open_journal(f"{where}: journal", journal, resume, recover, time.monotonic())
        return cls(store)

    @classmethod
    def open(cls, path: str, in_place: bool, recover: bool) -> LocalSequences:
        """What ``save`` wrote, or a journal: a copy in memory, or in place with the file as the journal."""
        store = Store(read_options(path, "open()", recover))
        if in_place:
            store.open_journal("open()", path, None, recover, time.monotonic())
        else:
            store.load("open()", path, recover, time.monotonic())
        return cls(store)

    def about(self) -> str:
        store = self.store
        place = "in memory" if store.journal is None else f"journal {store.journal.path}"
        if self.gate.is_closed:
            return f"{place}: closed"
        held = f"{len(store.index.entries)} of {self.options.capacity} samples"
        return f"{place}: {held}, consumers {', '.join(store.index.lines)}"

    def check(self, where: str) -> None:
        self.gate.check(where)

    # ---- put and amend -----------------------------------------------------------------------------------------------

    def put(
        self, where: str, samples: Any, version: Any, births: Any, timeout: float | None, origin: Origin | None = None
    ) -> Handles:
        incoming = self._read(where, samples, version, births, origin)
        waiter = ThreadWaiter(len(incoming))
        deadline = to_deadline(where, timeout)
        try:
            try:
                while True:
                    handles = self.turns.try_put(where, waiter, incoming, deadline)
                    if handles is None:
                        waiter.wait(self.turns.pause(None, deadline))
                        continue
                    if handles is WRITE:
                        handles = self.commits.commit(
                            where,
                            lambda: self.turns.plan_put(waiter, incoming),
                            deadline,
                            lambda: self.store.intake.prepare(incoming),
                        )
                    if handles is not None:
                        return handles
            finally:
                self.turns.leave(None, waiter)
        finally:
            self.turns.leave(None, waiter)  # an interrupt may have ended the first one

    async def put_async(
        self, where: str, samples: Any, version: Any, births: Any, timeout: float | None, origin: Origin | None = None
    ) -> Handles:
        incoming = self._read(where, samples, version, births, origin)
        waiter = CoroutineWaiter(len(incoming))
        deadline = to_deadline(where, timeout)
        try:
            while True:
                handles = self.turns.try_put(where, waiter, incoming, deadline)
                if handles is None:
                    await waiter.wait(self.turns.pause(None, deadline))
                    continue
                if handles is WRITE:
                    handles = await self.commits.commit_async(
                        where, lambda: self.turns.plan_put(waiter, incoming), deadline
                    )
                if handles is not None:
                    return handles
        finally:
            self.turns.leave(None, waiter)

    def _read(self, where: str, samples: Any, version: Any, births: Any, origin: Origin | None) -> Incoming:
        self.gate.check(where)
        incoming = self.store.intake.read(samples, version, births, self.store.journal is not None)
        incoming.origin = origin
        return incoming

    def has_made(self, origin: Origin) -> bool:
        """Whether the call of this origin was made.

        Raises:
            StaleHandle: Its sender has said that it does not ask for it again.
        """
        with self.gate.locked("put()"):
            return self.store.origins.knows(origin)

    def amend(self, where: str, handles: Any, samples: Any, origin: Origin | None = None) -> None:
        self.commits.commit(where, self._plan_amend(handles, samples, origin))

    async def amend_async(self, where: str, handles: Any, samples: Any, origin: Origin | None = None) -> None:
        await self.commits.commit_async(where, self._plan_amend(handles, samples, origin))

    def _plan_amend(self, handles: Any, samples: Any, origin: Origin | None) -> Callable[[], Change[None]]:
        self.gate.check("amend()")
        serials = read_handles("amend()", handles)
        parts = unpack("amend()", samples)
        if len(parts) != len(serials):
            raise SchemaError(f"amend(): expected a sample a handle, got {len(parts)} for {len(serials)}")
        body = self.store.intake.body(samples, parts) if self.store.journal is not None else None
        return lambda: self.store.origins.once(origin, lambda: self.store.amend(serials, parts, body))

    # ---- get and leases ----------------------------------------------------------------------------------------------

    def get(
        self, where: str, consumer: str, batch_size: int | None, timeout: float | None, partial: bool, owner: str | None
    ) -> Lease:
        line, count = self._asked(where, consumer, batch_size, owner, partial)
        waiter = ThreadWaiter(count)
        deadline = to_deadline(where, timeout)
        try:
            try:
                while (claim := self.turns.try_get(waiter, line, partial, owner, deadline)) is None:
                    waiter.wait(self.turns.pause(line, deadline))
            finally:
                self.turns.leave(line, waiter)
        finally:
            self.turns.leave(line, waiter)  # an interrupt may have ended the first one
        return self.lender.lend(claim)

    async def get_async(
        self, where: str, consumer: str, batch_size: int | None, timeout: float | None, partial: bool, owner: str | None
    ) -> Lease:
        return self.lender.lend(await self.claim_async(where, consumer, batch_size, timeout, partial, owner))

    async def claim_async(
        self, where: str, consumer: str, batch_size: int | None, timeout: float | None, partial: bool, owner: str | None
    ) -> Claim:
        """The samples of a ``get``, taken, and not yet put together as a batch."""
        line, count = self._asked(where, consumer, batch_size, owner, partial)
        waiter = CoroutineWaiter(count)
        deadline = to_deadline(where, timeout)
        try:
            while (claim := self.turns.try_get(waiter, line, partial, owner, deadline)) is None:
                await waiter.wait(self.turns.pause(line, deadline))
        finally:
            self.turns.leave(line, waiter)
        return claim

    def _asked(self, where: str, consumer: str, batch_size: int | None, owner: Any, partial: Any) -> tuple[Line, int]:
        self.gate.check(where)
        truth(where, "partial", partial)
        if owner is not None and not isinstance(owner, str):
            raise SchemaError(f"{where}: owner: expected text, got {owner!r}")
        line = self.store.index.line(where, consumer)
        return line, line.count(where, batch_size, self.options.capacity)

    def release(self, owner: str) -> int:
        return self.lender.give_back_all(owner)

    # ---- versions ----------------------------------------------------------------------------------------------------

    def version(self) -> int:
        self.gate.check("version")
        return self.store.version

    def set_version(self, where: str, version: int, origin: Origin | None = None) -> None:
        self.commits.commit(where, self._plan_version(where, version, origin))

    async def set_version_async(self, where: str, version: int, origin: Origin | None = None) -> None:
        await self.commits.commit_async(where, self._plan_version(where, version, origin))

    def _plan_version(self, where: str, version: int, origin: Origin | None) -> Callable[[], Change[None]]:
        version = whole(where, "version", version, 0)
        return lambda: self.store.origins.once(origin, lambda: self.store.set_version(version))

    def admission(self, batch_size: int, max_concurrent: int | None) -> Admission:
        self.gate.check("admission()")
        if self.options.max_staleness is None:
            raise SchemaError("admission(): needs SequenceBuffer(max_staleness=)")
        return Admission(batch_size, self.options.max_staleness, max_concurrent, self._progress)

    def _progress(self) -> tuple[int, int]:
        with self.gate.locked("admission()"):
            return self.store.version - self.store.first_version, self.store.accepted

    # ---- recovery ----------------------------------------------------------------------------------------------------

    def checkpoint(self, where: str, name: str, origin: Origin | None = None) -> None:
        if self.commits.commit(where, self._plan_checkpoint(name, origin)):
            self.commits.rewrite(where)

    async def checkpoint_async(self, where: str, name: str, origin: Origin | None = None) -> None:
        if await self.commits.commit_async(where, self._plan_checkpoint(name, origin)):
            await self.commits.rewrite_async(where)

    def _plan_checkpoint(self, name: str, origin: Origin | None) -> Callable[[], Change[bool]]:
        if not isinstance(name, str):
            raise SchemaError(f"checkpoint(): name: expected text, got {name!r}")
        return lambda: self.store.origins.once(origin, lambda: self.store.checkpoint(name))

    def used_ids(self) -> list[str]:
        with self.gate.locked("used_ids"):
            return list(self.store.ledger.used)

    def mark_used(self, ids: Iterable[Any]) -> None:
        listed = read_ids("mark_used()", ids)
        with self.gate.locked("mark_used()"):
            self.store.ledger.mark_used(listed)

    def wanted(self, ids: Iterable[Any]) -> list[str]:
        names = read_ids("wanted()", ids)
        with self.gate.locked("wanted()"):
            return self.store.wanted(names)

    # ---- facts -------------------------------------------------------------------------------------------------------

    def explain(self, consumer: str) -> str:
        with self.gate.locked("explain()"):
            return self.store.explain(self.store.index.line("explain()", consumer), time.monotonic())

    def stats(self) -> dict[str, Any]:
        with self.gate.locked("stats()"):
            return self.store.stats(len(self.turns.putters), time.monotonic())

    def __len__(self) -> int:
        self.gate.check("len()")
        return len(self.store.index.entries)

    def __contains__(self, handle: object) -> bool:
        self.gate.check("in")
        return isinstance(handle, (int, np.integer)) and handle in self.store.index.entries

    def ids(self) -> list[str]:
        with self.gate.locked("ids()"):
            return [entry.sample._ids[0] for entry in self.store.index.entries.values()]

    # ---- life --------------------------------------------------------------------------------------------------------

    def clear(self, where: str, origin: Origin | None = None) -> None:
        self.commits.commit(where, lambda: self.store.origins.once(origin, self.store.clear))

    async def clear_async(self, where: str, origin: Origin | None = None) -> None:
        await self.commits.commit_async(where, lambda: self.store.origins.once(origin, self.store.clear))

    def flush(self, where: str) -> None:
        self.commits.flush(where)

    async def flush_async(self, where: str) -> None:
        await self.commits.flush_async(where)

    def save(self, where: str, path: Any) -> None:
        with self.gate.locked(where):
            instant = self.store.instant()
        instant.write(where, path)

    async def save_async(self, where: str, path: Any) -> None:
        self.gate.check(where)
        worker = Worker()
        await outcome(lambda tell: Task(lambda: self.save(where, path), tell), worker.hand_over, None)

    def close(self) -> None:
        if self.gate.is_mine:
            self.commits.close()
