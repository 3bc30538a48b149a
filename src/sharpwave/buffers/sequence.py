"""SequenceBuffer: samples gain keys over time, and each consumer gets those that are complete for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import check_settable, number, one_of, truth, whole
from ..errors import NotReady, SchemaError
from ..sequences import insight
from ..sequences.commits import Commits
from ..sequences.dataflow import Dataflow
from ..sequences.gate import Gate
from ..sequences.incoming import Incoming
from ..sequences.index import Line
from ..sequences.leases import Claim, Lease
from ..sequences.sample import SequenceSample
from ..sequences.staleness import Admission, mark_fresh
from ..sequences.store import Change, Store
from ..sequences.turns import Turns
from ..sequences.waiting import CoroutineWaiter, ThreadWaiter, Waiter

__all__ = ["SequenceBuffer"]

_Handles = np.ndarray[Any, np.dtype[np.int64]]
_STALE = ("evict", "mask", "keep")
_WRITE: _Handles = np.empty(0, np.int64)


class SequenceBuffer:
    """A join buffer for sequences: producers ``put`` samples, consumers ``get`` what is complete for them and ``amend``
    it with what they made, until everybody is done with a sample and it leaves.

    Samples are held by reference. One object serves threads and coroutines of any event loop at once; plain verbs
    block, their ``*_async`` forms are awaited and do no disk work on the event loop. Every call costs O(batch),
    whatever the capacity. A forked child cannot use its parent's buffer: it gets ClosedError.

    Args:
        flow: Who reads and makes which keys.
        capacity: Most samples held; a put that does not fit waits or raises, nothing is thrown away for it.
        max_tokens: Most tokens held, None for no bound. Amended keys count but are never refused: they are what lets
            samples leave.
        max_bytes: Most bytes held, likewise.
        max_staleness: Most versions between the policy that made a sample and the present one. None for no bound.
        stale: What is too old: ``"evict"`` throws it away (not while it is leased), ``"mask"`` hands it out with the
            key ``fresh`` False on the tokens that are too old, ``"keep"`` hands it out and counts it.
        lease_timeout: Seconds after which a lease that was not acknowledged is given back; None for never.
        watchdog_timeout: Seconds without any put, amend, get or acknowledgement after which waiting calls raise.
        duplicate_ids: Whether an id may be put while a sample of that id is held.
        journal: A file in which everything survives the process; opened again, the buffer is what it was. One buffer
            at a time has it open. A last record that was not written whole is cut off, with a warning.
        sync: Whether each call waits for the disk: then the journal also survives a power cut.
        recover: Whether a damaged journal is opened with what is whole in it; what is lost is told by a warning and
            counted by ``stats()`` (``lost_records``, ``lost_bytes``).
        resume: The name of the ``checkpoint`` to take up from: what consumers without outputs acknowledged since is
            undone, since it is not in the model that you saved.
        epoch_size: How many ids make an epoch: ``used_ids`` forgets an epoch that is over.
        version: The policy's version to begin with, where no journal knows it.

    Raises:
        SchemaError: A setting makes no sense.
        StorageError: The journal cannot be opened, or is damaged.

    Example:
        >>> import numpy as np
        >>> import sharpwave as sw
        >>> flow = sw.Dataflow([sw.Consumer("train", inputs={"input_ids", "rewards"}, batch_size=2)])
        >>> seq = sw.SequenceBuffer(flow, capacity=1000)
        >>> handles = seq.put(sw.SequenceSample(["a", "b"], {"input_ids": [3, 2]}, {"input_ids": np.arange(5)}))
        >>> seq.amend(handles, sw.SequenceSample(["a", "b"], {"rewards": [1, 1]}, {"rewards": np.ones(2)}))
        >>> with seq.get("train") as lease:
        ...     print(lease.batch["rewards"])
        [1. 1.]
    """

    if not TYPE_CHECKING:  # to a type checker every name could be set

        def __setattr__(self, name: str, value: Any) -> None:
            check_settable(self, name, first=("flow", "capacity", "max_tokens", "max_bytes", "max_staleness"))
            object.__setattr__(self, name, value)

    def __init__(
        self,
        flow: Dataflow,
        capacity: int,
        *,
        max_tokens: int | None = None,
        max_bytes: int | None = None,
        max_staleness: int | None = None,
        stale: str = "evict",
        lease_timeout: float | None = None,
        watchdog_timeout: float | None = None,
        duplicate_ids: bool = False,
        journal: str | os.PathLike[str] | None = None,
        sync: bool = False,
        resume: str | None = None,
        recover: bool = False,
        epoch_size: int | None = None,
        version: int | None = None,
    ) -> None:
        where = "SequenceBuffer()"
        if not isinstance(flow, Dataflow):
            raise SchemaError(f"{where}: flow: expected a Dataflow, got {type(flow).__name__}")
        self.flow = flow
        self.capacity = whole(where, "capacity", capacity)
        self.max_tokens = None if max_tokens is None else whole(where, "max_tokens", max_tokens)
        self.max_bytes = None if max_bytes is None else whole(where, "max_bytes", max_bytes)
        self.max_staleness = None if max_staleness is None else whole(where, "max_staleness", max_staleness, 0)
        self._stale = one_of(where, "stale", stale, _STALE)
        lease_s = None if lease_timeout is None else number(where, "lease_timeout", lease_timeout, 1e-3, 1e9)
        self._watchdog_s = (
            None if watchdog_timeout is None else number(where, "watchdog_timeout", watchdog_timeout, 1e-3, 1e9)
        )
        sync, recover = truth(where, "sync", sync), truth(where, "recover", recover)
        if journal is None and (sync or recover or resume is not None):
            raise SchemaError(f"{where}: sync=, resume= and recover= need journal=")
        if journal is not None and not isinstance(journal, (str, os.PathLike)):
            raise SchemaError(f"{where}: journal: expected a path, got {journal!r}")
        if resume is not None and not isinstance(resume, str):
            raise SchemaError(f"{where}: resume: expected the name of a checkpoint, got {resume!r}")
        if journal is not None and version is not None:
            raise SchemaError(f"{where}: version= and journal= exclude each other: the journal knows the version")
        oldest = self.max_staleness if self._stale == "evict" else None
        self._store = Store(
            flow,
            self.capacity,
            self.max_tokens,
            self.max_bytes,
            oldest,
            lease_s,
            truth(where, "duplicate_ids", duplicate_ids),
            self.max_staleness is not None,
            None if epoch_size is None else whole(where, "epoch_size", epoch_size),
            0 if version is None else whole(where, "version", version, 0),
        )
        if journal is not None:
            self._store.open_journal(journal, sync, resume, recover, time.monotonic())
        self._lines = self._store.index.lines
        self._gate = Gate()
        self._turns = Turns(self._gate, self._lines.values())
        self._commits = Commits(self._gate, self._store, self._turns)

    # ---- put ---------------------------------------------------------------------------------------------------------

    def put(
        self,
        samples: SequenceSample | Sequence[SequenceSample],
        *,
        version: int | Sequence[int] | None = None,
        births: Sequence[int] | None = None,
        timeout: float | None = 0,
    ) -> _Handles:
        """Adds samples, all or none.

        Args:
            samples: One sample or several; each datum is held for itself.
            version: Of the policy that made them, one or one a datum. None takes the smallest of the key ``versions``,
                which has one a token.
            births: One a datum, whole numbers above 0; the smallest is handed out first. Unless told, the order of
                puts. Do not mix the two.
            timeout: Seconds to wait for room; None for ever, 0 not at all.

        Returns:
            A handle a datum, in order.

        Raises:
            BufferFull: There was no room, in time.
            SchemaError: An id is held already, or a key has another dtype or shape than before.
        """
        incoming = self._read(samples, version, births)
        waiter = ThreadWaiter(len(incoming.entries))
        deadline = _deadline("put()", timeout)
        try:
            while True:
                handles = self._try_put("put()", waiter, incoming, deadline)
                if handles is None:
                    waiter.wait(self._pause(None, deadline))
                    continue
                if handles is _WRITE:
                    handles = self._commits.commit("put()", lambda: self._plan_put(waiter, incoming), deadline)
                if handles is not None:
                    return handles
        finally:
            self._turns.leave(self._turns.putters, waiter)

    async def put_async(
        self,
        samples: SequenceSample | Sequence[SequenceSample],
        *,
        version: int | Sequence[int] | None = None,
        births: Sequence[int] | None = None,
        timeout: float | None = 0,
    ) -> _Handles:
        """``put`` that lets the event loop go on while it waits and while the journal is written.

        Cancelled while its record is being written, it has put the samples all the same.
        """
        incoming = self._read(samples, version, births)
        waiter = CoroutineWaiter(len(incoming.entries))
        deadline = _deadline("put_async()", timeout)
        try:
            while True:
                handles = self._try_put("put_async()", waiter, incoming, deadline)
                if handles is None:
                    await waiter.wait(self._pause(None, deadline))
                    continue
                if handles is _WRITE:
                    handles = await self._commits.commit_async("put_async()", lambda: self._plan_put(waiter, incoming))
                if handles is not None:
                    return handles
        finally:
            self._turns.leave(self._turns.putters, waiter)

    def _read(self, samples: Any, version: Any, births: Any) -> Incoming:
        return self._store.intake.read(samples, version, births, self._store.journal is not None)

    def _try_put(self, where: str, waiter: Waiter, incoming: Incoming, deadline: float | None) -> _Handles | None:
        """The handles where it is its turn and there is room, or ``_WRITE`` where there is a journal to be written
        first. Else None: it is in the list of those who wait."""
        with self._gate.locked(where, deadline):
            self._gate.check_open(where)
            waiter.arm()
            self._tick()
            if not incoming.entries:
                return np.empty(0, np.int64)
            if self._turns.is_next(waiter) and self._store.fits(incoming):
                return _WRITE if self._store.journal is not None else self._commits.make(self._store.admit(incoming))
            self._store.refuse_unfit(incoming)
            if waiter not in self._turns.putters:
                self._turns.putters.append(waiter)
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise self._store.full(incoming, len(self._turns.putters) - 1)
            self._check_moving("put()", now)
            return None

    def _plan_put(self, waiter: Waiter, incoming: Incoming) -> Change[_Handles] | None:
        return self._store.admit(incoming) if self._turns.is_next(waiter) and self._store.fits(incoming) else None

    # ---- amend -------------------------------------------------------------------------------------------------------

    def amend(self, handles: Any, samples: SequenceSample | Sequence[SequenceSample]) -> None:
        """Adds keys to samples that are held, or replaces them; all or none. Batches handed out stay as they are.

        Args:
            handles: Of ``put`` or of a lease, in any order.
            samples: With the same ids in the same order.

        Raises:
            StaleHandle: One of the samples has left.
            SchemaError: Ids differ, or a key has another dtype or shape than before.
        """
        self._commits.commit("amend()", self._plan_amend(handles, samples))

    async def amend_async(self, handles: Any, samples: SequenceSample | Sequence[SequenceSample]) -> None:
        """``amend`` that lets the event loop go on while the journal is written."""
        await self._commits.commit_async("amend_async()", self._plan_amend(handles, samples))

    def _plan_amend(self, handles: Any, samples: Any) -> Callable[[], Change[None]]:
        self._gate.check_process("amend()")
        serials = _read_handles("amend()", handles)
        parts = self._store.intake.unpack("amend()", samples)
        if len(parts) != len(serials):
            raise SchemaError(f"amend(): expected a sample a handle, got {len(parts)} for {len(serials)}")
        body = self._store.intake.body(parts) if self._store.journal is not None else None
        return lambda: self._store.amend(serials, parts, body)

    # ---- get ---------------------------------------------------------------------------------------------------------

    def get(
        self,
        consumer: str,
        *,
        batch_size: int | None = None,
        timeout: float | None = None,
        partial: bool = False,
        owner: str | None = None,
    ) -> Lease:
        """The oldest samples that are complete for a consumer, as a lease.

        Args:
            consumer: Its name.
            batch_size: How many; the consumer's own unless told.
            timeout: Seconds to wait; None for ever, 0 not at all.
            partial: Whether to take fewer, at least one, when the time is up.
            owner: Who gets them: ``release(owner)`` gives back whatever is still in their hands.

        Raises:
            NotReady: Not enough in time, or nothing moved for ``watchdog_timeout``; the message is ``explain()``'s.
        """
        self._gate.check_process("get()")
        _check_owner("get()", partial, owner)
        line, count = self._asked("get()", consumer, batch_size)
        waiter = ThreadWaiter(count)
        deadline = _deadline("get()", timeout)
        try:
            while (claim := self._try_get(waiter, line, partial, owner, deadline)) is None:
                waiter.wait(self._pause(line, deadline))
        finally:
            self._turns.leave(line.waiters, waiter)
        return self._lease(claim)

    async def get_async(
        self,
        consumer: str,
        *,
        batch_size: int | None = None,
        timeout: float | None = None,
        partial: bool = False,
        owner: str | None = None,
    ) -> Lease:
        """``get`` that lets the event loop go on while it waits."""
        self._gate.check_process("get_async()")
        _check_owner("get_async()", partial, owner)
        line, count = self._asked("get_async()", consumer, batch_size)
        waiter = CoroutineWaiter(count)
        deadline = _deadline("get_async()", timeout)
        try:
            while (claim := self._try_get(waiter, line, partial, owner, deadline)) is None:
                await waiter.wait(self._pause(line, deadline))
        finally:
            self._turns.leave(line.waiters, waiter)
        return self._lease(claim)

    def _asked(self, where: str, consumer: str, batch_size: int | None) -> tuple[Line, int]:
        line = self._lines.get(consumer) if isinstance(consumer, str) else None
        if line is None:
            names = ", ".join(self._lines)
            raise SchemaError(f"{where}: consumer: expected one of {names}, got {consumer!r}")
        if batch_size is None:
            return line, line.consumer.batch_size
        count = whole(where, "batch_size", batch_size, 1, line.consumer.window or 2**63 - 1)
        if line.consumer.group_size is not None and count % line.consumer.group_size:
            raise SchemaError(f"{where}: batch_size: expected a multiple of group_size={line.consumer.group_size}")
        return line, count

    def _try_get(
        self, waiter: Waiter, line: Line, partial: bool, owner: str | None, deadline: float | None
    ) -> Claim | None:
        with self._gate.locked("get()", deadline):
            self._gate.check_open("get()")
            waiter.arm()
            self._tick()
            count = waiter.need
            now = time.monotonic()
            if not line.has(count):
                if waiter not in line.waiters:
                    line.waiters.append(waiter)
                if deadline is None or now < deadline:
                    self._check_moving("get()", now, line)
                    return None
                count = line.ready
                if not partial or not count:
                    raise NotReady(f"get(): {self._explain(line, now)}")
            self._turns.moved_at = now
            return self._store.lease(line, count, owner, now)

    def _lease(self, claim: Claim) -> Lease:
        """What the caller gets. The samples are put together outside the lock: nothing changes them."""
        try:
            name = claim.line.consumer.name
            keys = sorted(claim.line.consumer.inputs)
            batch = self._store.intake.gather(claim.samples, keys)
            versions = [entry.version for entry in claim.entries]
            if self.max_staleness is not None and self._stale != "evict":
                batch = self._mark_stale(batch, versions)
            handles = np.array([entry.serial for entry in claim.entries], np.int64)
        except BaseException:
            self._end(claim, False)
            raise
        return Lease(
            batch,
            handles,
            name,
            versions,
            lambda done: self._end(claim, done),
            lambda: self._renew(claim),
            lambda: self._commits.commit_async("ack_async()", lambda: self._plan_ack(claim)),
        )

    def _mark_stale(self, batch: SequenceSample, versions: list[int | None]) -> SequenceSample:
        oldest = self._store.version - (self.max_staleness or 0)
        samples = sum(version is not None and version < oldest for version in versions)
        marked, tokens = mark_fresh(batch, versions, oldest)
        with self._gate.lock:
            self._store.counters["stale_samples"] += samples
            self._store.counters["stale_tokens"] += tokens
        return marked if self._stale == "mask" else batch

    # ---- leases ------------------------------------------------------------------------------------------------------

    def release(self, owner: str) -> int:
        """Gives back whatever an owner has leased: it is gone. Returns how many samples."""
        if not isinstance(owner, str):
            raise SchemaError(f"release(): owner: expected text, got {owner!r}")
        with self._gate.locked("release()"):
            self._gate.check_open("release()")
            now = time.monotonic()
            count = self._store.give_back_all(owner, now)
            self._turns.moved(now)
            return count

    def _end(self, claim: Claim, done: bool) -> None:
        if done:
            self._commits.commit("ack()", lambda: self._plan_ack(claim))
            return
        self._gate.check_process("release()")
        with self._gate.lock:
            if not self._gate.is_closed:  # a lease of a closed buffer was given back by close()
                self._tick()
                now = time.monotonic()
                self._store.give_back(claim, now)
                self._turns.moved(now)

    def _plan_ack(self, claim: Claim) -> Change[None]:
        self._tick()
        return self._store.finish(claim)

    def _renew(self, claim: Claim) -> None:
        with self._gate.locked("renew()"):
            self._gate.check_open("renew()")
            self._tick()
            self._store.renew(claim, time.monotonic())

    # ---- versions ----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The present policy's."""
        return self._store.version

    def set_version(self, version: int) -> None:
        """The policy is newer now; what has become too old leaves, unless it is leased or ``stale`` says otherwise.

        Raises:
            SchemaError: Smaller than before.
        """
        version = whole("set_version()", "version", version, 0)
        self._commits.commit("set_version()", lambda: self._store.set_version(version))

    async def set_version_async(self, version: int) -> None:
        """``set_version`` that lets the event loop go on while the journal is written."""
        version = whole("set_version_async()", "version", version, 0)
        await self._commits.commit_async("set_version_async()", lambda: self._store.set_version(version))

    def admission(self, batch_size: int, max_concurrent: int | None = None) -> Admission:
        """A gate for rollouts that are to start: see ``Admission``. Needs ``max_staleness``.

        Args:
            batch_size: Samples that one version trains on.
            max_concurrent: Most rollouts that run at once.
        """
        if self.max_staleness is None:
            raise SchemaError("admission(): needs SequenceBuffer(max_staleness=)")

        def progress() -> tuple[int, int]:
            with self._gate.locked("admission()"):
                return self._store.version - self._store.first_version, self._store.accepted

        return Admission(batch_size, self.max_staleness, max_concurrent, progress)

    # ---- recovery ----------------------------------------------------------------------------------------------------

    def checkpoint(self, name: str) -> None:
        """Names this moment in the journal, so that a restart can take up from it: write your own checkpoint next.

        The last two names can be resumed from: if you die between this call and your own checkpoint, the one before
        still fits.
        """
        if not isinstance(name, str):
            raise SchemaError(f"checkpoint(): name: expected text, got {name!r}")
        if self._commits.commit("checkpoint()", lambda: self._store.checkpoint(name)):
            self._commits.rewrite("checkpoint()")

    async def checkpoint_async(self, name: str) -> None:
        """``checkpoint`` that lets the event loop go on while the journal is written."""
        await self._commits.off_loop("checkpoint_async()", lambda: self.checkpoint(name))

    @property
    def used_ids(self) -> list[str]:
        """The ids that everybody is done with, in that order, of the epoch that is not over."""
        with self._gate.locked("used_ids"):
            return list(self._store.ledger.used)

    def take_up(self, used_ids: Iterable[Any]) -> None:
        """After a restart without a journal: these were used, as your checkpoint knows; ``wanted`` skips each once."""
        listed = _read_ids("take_up()", used_ids)
        with self._gate.locked("take_up()"):
            self._store.ledger.take_up(listed)

    def wanted(self, ids: Iterable[Any]) -> list[str]:
        """Which of these ids are still to be made, for a loader that begins its epoch anew after a restart.

        Left out are ids that are held, and, once each, those that were held or used already at the restart.
        """
        names = _read_ids("wanted()", ids)
        with self._gate.locked("wanted()"):
            return [
                one for one in names if not self._store.ledger.skips_now(one) and one not in self._store.index.by_id
            ]

    # ---- insight -----------------------------------------------------------------------------------------------------

    def explain(self, consumer: str) -> str:
        """Why a consumer's batch is or is not ready, in words."""
        self._gate.check_process("explain()")
        line, _ = self._asked("explain()", consumer, None)
        with self._gate.lock:
            return self._explain(line, time.monotonic())

    def _explain(self, line: Line, now: float) -> str:
        return insight.explain(self.flow, self._store.index, self._store.book, line.consumer.name, now)

    def stats(self) -> dict[str, Any]:
        """Sizes, tokens, bytes, ages, staleness, and counters of everything that ever happened here."""
        self._gate.check_process("stats()")
        with self._gate.lock:
            store = self._store
            counters = {**store.counters, "accepted": store.accepted, "waiting_puts": len(self._turns.putters)}
            for name in ("cut_bytes", "lost_records", "lost_bytes"):
                counters[name] = 0 if store.journal is None else getattr(store.journal, name)
            return insight.stats(store.index, store.book, counters, store.version, time.monotonic())

    def __len__(self) -> int:
        self._gate.check_process("len()")
        return len(self._store.index.entries)

    def __contains__(self, handle: object) -> bool:
        """Whether the sample of a handle is still here."""
        self._gate.check_process("in")
        return isinstance(handle, (int, np.integer)) and handle in self._store.index.entries

    def ids(self) -> list[str]:
        """Of the samples held, oldest put first."""
        self._gate.check_process("ids()")
        with self._gate.lock:
            return [entry.sample._ids[0] for entry in self._store.index.entries.values()]

    # ---- life --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Waiting calls raise, later ones too; leases count as given back. The journal has everything, on the disk.

        In a forked child this does nothing: the buffer is its parent's.
        """
        if self._gate.is_mine:
            self._commits.close()

    def __enter__(self) -> SequenceBuffer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a SequenceBuffer lives in one process; let others push into it: sharpwave.sequences.stream")

    # ---- waiting; the lock is held -----------------------------------------------------------------------------------

    def _tick(self) -> None:
        """What time alone brings: leases that expire, groups whose time is up."""
        if self._store.has_clock():
            now = time.monotonic()
            if self._store.tick(now):
                self._turns.moved(now)

    def _pause(self, line: Line | None, deadline: float | None) -> float | None:
        """Seconds until there is something to look at although nobody wakes us."""
        with self._gate.lock:
            times = [deadline, self._store.book.next_expiry(), None if line is None else line.next_deadline()]
            if self._watchdog_s is not None:
                times.append(self._turns.moved_at + self._watchdog_s)
        due = [moment for moment in times if moment is not None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _check_moving(self, where: str, now: float, line: Line | None = None) -> None:
        if self._watchdog_s is None or now - self._turns.moved_at < self._watchdog_s:
            return
        lines = [line] if line is not None else list(self._lines.values())
        why = "\n".join(self._explain(one, now) for one in lines)
        raise NotReady(f"{where}: nothing has moved for watchdog_timeout={self._watchdog_s:g} s\n{why}")


def _read_handles(where: str, handles: Any) -> list[int]:
    try:
        listed = np.asarray(handles).reshape(-1)
    except ValueError:
        listed = np.empty(1, object)
    if listed.size and listed.dtype.kind not in "iu":
        raise SchemaError(f"{where}: handles: expected whole numbers of put() or of a lease, got {handles!r:.100}")
    return [int(one) for one in listed]


def _read_ids(where: str, ids: Any) -> list[str]:
    if not isinstance(ids, Iterable):
        raise SchemaError(f"{where}: ids: expected a list, got {ids!r}")
    return [str(one) for one in ids]


def _check_owner(where: str, partial: Any, owner: Any) -> None:
    truth(where, "partial", partial)
    if owner is not None and not isinstance(owner, str):
        raise SchemaError(f"{where}: owner: expected text, got {owner!r}")


def _deadline(where: str, timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + number(where, "timeout", timeout, 0, 1e9)
