"""SequenceBuffer: samples gain keys over time, and each consumer gets those that are complete for it."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import check_settable
from ..sequences.dataflow import Dataflow
from ..sequences.history import check_journal
from ..sequences.leases import Lease
from ..sequences.local import LocalSequences
from ..sequences.options import Options
from ..sequences.protocol import Sequences
from ..sequences.sample import SequenceSample
from ..sequences.staleness import Admission

__all__ = ["SequenceBuffer"]

_Handles = np.ndarray[Any, np.dtype[np.int64]]


class SequenceBuffer:
    """A join buffer for sequences. Producers ``put`` samples; consumers ``get`` those that are complete for them and
    ``amend`` them with further keys. A sample leaves when every consumer has acknowledged it.

    Samples are held by reference. One object serves threads and coroutines of any event loop at once; plain verbs
    block, their ``*_async`` forms are awaited and do no disk work on the event loop. Every call costs O(batch),
    independent of the capacity. ``put`` and ``get`` wait, for room and for samples; the other verbs wait for the disk
    only, where there is a journal. A forked child cannot use its parent's buffer: it gets ClosedError.

    Args:
        capacity: Most samples held. A put that does not fit waits; no sample is thrown away for it.
        flow: The consumers, with the keys that each reads and makes.
        max_tokens: Most tokens held, None for no bound. Amended keys count but are never refused: they are what lets
            samples leave.
        max_bytes: Most bytes held, likewise.
        max_staleness: Most versions between the policy that made a sample and the present one. None for no bound.
        stale: What happens to samples that are too old: ``"evict"`` throws them away (not while they are leased),
            ``"mask"`` hands them out with the key ``fresh`` False on the tokens that are too old, and throws away those
            whose ``versions`` are all too old, ``"keep"`` hands them out and counts them.
        lease_timeout: Seconds after which a lease that was not acknowledged is given back; None for never.
        watchdog_timeout: Seconds without any put, amend, get or acknowledgement after which waiting calls raise.
        duplicate_ids: Whether an id may be put while a sample of that id is held.
        journal: A file in which everything survives the process; opened again, the buffer has the same samples. One
            buffer at a time has it open. A last record that was not written completely is cut off, with a warning.
            The file keeps the options; others than it has are written into it, which rewrites it.
        sync: Whether each call waits for the disk: then the journal also survives a power cut.
        recover: Whether a damaged journal is opened with its undamaged records; a warning and ``stats()``
            (``lost_records``, ``lost_bytes``) say what is lost.
        resume: The name of the ``checkpoint`` to continue from: what consumers without outputs acknowledged since is
            undone, since it is not in the model that you saved.
        epoch_size: How many ids make an epoch: ``used_ids`` forgets an epoch that is over.
        version: The policy's version to begin with, where no journal holds it.

    Raises:
        SchemaError: An option has a value that makes no sense.
        StorageError: The journal cannot be opened, or is damaged.

    Example:
        >>> import numpy as np
        >>> import sharpwave as sw
        >>> flow = sw.Dataflow([sw.Consumer("train", inputs={"input_ids", "rewards"}, batch_size=2)])
        >>> seq = sw.SequenceBuffer(1000, flow=flow)
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
        capacity: int,
        *,
        flow: Dataflow,
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
        options = Options.read(
            where, flow=flow, capacity=capacity, max_tokens=max_tokens, max_bytes=max_bytes,
            max_staleness=max_staleness, stale=stale, lease_timeout=lease_timeout, watchdog_timeout=watchdog_timeout,
            duplicate_ids=duplicate_ids, epoch_size=epoch_size, sync=sync,
        )  # fmt: skip
        check_journal(where, journal, sync, resume, recover, version)
        self._take(LocalSequences.create(where, options, journal, resume, recover, version))

    def _take(self, sequences: Sequences) -> None:
        options = sequences.options
        self.flow, self.capacity, self.max_staleness = options.flow, options.capacity, options.max_staleness
        self.max_tokens, self.max_bytes = options.max_tokens, options.max_bytes
        self._sequences = sequences
        if isinstance(sequences, LocalSequences):  # its parts, for tests that look inside
            self._store, self._gate = sequences.store, sequences.gate
            self._turns, self._commits = sequences.turns, sequences.commits

    @classmethod
    def _over(cls, sequences: Sequences) -> SequenceBuffer:
        made = cls.__new__(cls)
        made._take(sequences)
        return made

    # ---- put ---------------------------------------------------------------------------------------------------------

    def put(
        self,
        samples: SequenceSample | Sequence[SequenceSample],
        *,
        version: int | Sequence[int] | None = None,
        births: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> _Handles:
        """Adds samples, all or none.

        Args:
            samples: One sample or several; each datum is held for itself. Their arrays must not change while the
                call runs: with a journal they are written from where they are.
            version: Of the policy that made them, one or one a datum. None takes the smallest of the key ``versions``,
                which has one a token.
            births: One a datum, whole numbers above 0; the smallest is handed out first. None takes the order of
                puts. Do not mix the two.
            timeout: Seconds to wait for room; None waits for ever, 0 tries once.

        Returns:
            A handle a datum, in order.

        Raises:
            BufferFull: There was no room until the timeout.
            NotReady: Other calls wrote the journal until the timeout, or nothing moved for ``watchdog_timeout``.
            SchemaError: An id is held already, a key has another dtype or shape than before, or the samples would not
                fit into an empty buffer.
        """
        return self._sequences.put("put()", samples, version, births, timeout)

    async def put_async(
        self,
        samples: SequenceSample | Sequence[SequenceSample],
        *,
        version: int | Sequence[int] | None = None,
        births: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> _Handles:
        """``put`` that lets the event loop go on while it waits and while the journal is written.

        Cancelled while its record is being written, it has put the samples all the same.
        """
        return await self._sequences.put_async("put_async()", samples, version, births, timeout)

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
        self._sequences.amend("amend()", handles, samples)

    async def amend_async(self, handles: Any, samples: SequenceSample | Sequence[SequenceSample]) -> None:
        """``amend`` that lets the event loop go on while the journal is written."""
        await self._sequences.amend_async("amend_async()", handles, samples)

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
            batch_size: How many; None takes the consumer's own.
            timeout: Seconds to wait for them; None waits for ever, 0 tries once.
            partial: Whether to take fewer, at least one, at the timeout.
            owner: A name for the caller: ``release(owner)`` gives back all that it has leased.

        Raises:
            NotReady: Not enough until the timeout, or nothing moved for ``watchdog_timeout``; the message is that of
                ``explain()``.
            SchemaError: No such consumer, or the capacity is smaller than ``batch_size``.
        """
        return self._sequences.get("get()", consumer, batch_size, timeout, partial, owner)

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
        return await self._sequences.get_async("get_async()", consumer, batch_size, timeout, partial, owner)

    # ---- leases ------------------------------------------------------------------------------------------------------

    def release(self, owner: str) -> int:
        """Gives back all that an owner has leased, for instance because it died. Returns how many samples."""
        return self._sequences.release(owner)

    # ---- versions ----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The present policy's."""
        return self._sequences.version()

    def set_version(self, version: int) -> None:
        """The policy is newer now. Samples that are too old leave, unless they are leased or ``stale`` keeps them.

        Raises:
            SchemaError: Smaller than before.
        """
        self._sequences.set_version("set_version()", version)

    async def set_version_async(self, version: int) -> None:
        """``set_version`` that lets the event loop go on while the journal is written."""
        await self._sequences.set_version_async("set_version_async()", version)

    def admission(self, batch_size: int, max_concurrent: int | None = None) -> Admission:
        """A gate for rollouts that are to start: see ``Admission``. Needs ``max_staleness``.

        Args:
            batch_size: Samples that one version trains on.
            max_concurrent: Most rollouts that run at once.
        """
        return self._sequences.admission(batch_size, max_concurrent)

    # ---- recovery ----------------------------------------------------------------------------------------------------

    def checkpoint(self, name: str) -> None:
        """Names this moment in the journal, so that a restart can continue from it (``resume=``). Then write your own
        checkpoint.

        The last two names can be resumed from: if the process dies between this call and your own checkpoint, the one
        before still fits. A checkpoint is a mark in the journal and no copy: resuming from it undoes what trainers
        acknowledged since, and keeps what was put and amended since. ``save`` writes a copy of one instant.
        """
        self._sequences.checkpoint("checkpoint()", name)

    async def checkpoint_async(self, name: str) -> None:
        """``checkpoint`` that lets the event loop go on while the journal is written."""
        await self._sequences.checkpoint_async("checkpoint_async()", name)

    @property
    def used_ids(self) -> list[str]:
        """The ids that every consumer is done with, in that order, of the present epoch."""
        return self._sequences.used_ids()

    def mark_used(self, ids: Iterable[Any]) -> None:
        """For a restart without a journal: these ids were used, as your checkpoint says; ``wanted`` skips each once."""
        self._sequences.mark_used(ids)

    def wanted(self, ids: Iterable[Any]) -> list[str]:
        """Which of these ids are still to be made, for a loader that begins its epoch anew after a restart.

        Left out are ids that are held, and, once each, those that were held or used already at the restart.
        """
        return self._sequences.wanted(ids)

    # ---- insight -----------------------------------------------------------------------------------------------------

    def explain(self, consumer: str) -> str:
        """Why a consumer's batch is or is not ready, in words."""
        return self._sequences.explain(consumer)

    def stats(self) -> dict[str, Any]:
        """``size``, ``capacity``, ``tokens``, ``data_bytes`` of the samples held; ``added``, ``trained`` and further
        counters since the buffer was opened; ages, staleness, ``journal_bytes``; per consumer what is ready."""
        return self._sequences.stats()

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, handle: object) -> bool:
        """Whether the sample of a handle is still here."""
        return handle in self._sequences

    def ids(self) -> list[str]:
        """Of the samples held, oldest put first."""
        return self._sequences.ids()

    def __repr__(self) -> str:
        return f"<SequenceBuffer {self._sequences.about()}>"

    # ---- life --------------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drops all samples, in the journal too; waiting puts go on. The version and ``used_ids`` stay.

        Leases end: their ``ack`` and ``amend`` are a StaleHandle afterwards, their ``release`` does nothing. A restart
        that resumes from an earlier checkpoint does not bring the samples back.
        """
        self._sequences.clear("clear()")

    async def clear_async(self) -> None:
        """``clear`` that lets the event loop go on while the journal is written."""
        await self._sequences.clear_async("clear_async()")

    def flush(self) -> None:
        """Waits until the journal is on the disk, so that it survives a power cut. Does nothing without a journal."""
        self._sequences.flush("flush()")

    async def flush_async(self) -> None:
        """``flush`` that lets the event loop go on meanwhile."""
        await self._sequences.flush_async("flush_async()")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a copy of one instant to a file, completely or not at all: samples, keys, versions, how far each
        consumer is, ``used_ids`` and the options. Other calls go on meanwhile.

        ``sw.open(path)`` loads it into memory, ``sw.open("file://path")`` continues in place with the file as its
        journal. Leases count as given back in the copy. ``checkpoint`` marks a moment in the journal instead; the copy
        has no marks.

        Raises:
            StorageError: It cannot be written; a file that had the name before is unchanged.
            SchemaError: A sample has a dtype that safetensors lacks, or metadata that JSON cannot hold.
        """
        self._sequences.save("save()", path)

    async def save_async(self, path: str | os.PathLike[str]) -> None:
        """``save`` that lets the event loop go on meanwhile. Cancelled while it writes, it still writes the file."""
        await self._sequences.save_async("save_async()", path)

    def close(self) -> None:
        """Waiting calls raise, and all later calls; leases count as given back. The journal is on the disk.

        In a forked child this does nothing: the buffer belongs to its parent.
        """
        self._sequences.close()

    def __enter__(self) -> SequenceBuffer:
        self._sequences.check("with")
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __reduce__(self) -> Any:
        sequences = self._sequences
        if sequences.address is None:
            raise TypeError("a SequenceBuffer lives in one process; serve() it, and let others open it by its address")
        sequences.check("pickle")
        from .open import open

        return functools.partial(open, **sequences.open_options), (sequences.address,)
