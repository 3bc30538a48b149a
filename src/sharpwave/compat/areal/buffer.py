"""``AsyncIOSequenceBuffer``: upstream's buffer by slots, over ``sharpwave.SequenceBuffer``."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from heapq import heappop, heappush
from typing import Any, TypeVar

import numpy as np

import sharpwave as sw
from sharpwave.errors import BufferFull, SchemaError, StaleHandle
from sharpwave.sequences.intake import OtherId
from sharpwave.sequences.leases import Lease

from .data import SequenceSample
from .graph import MFCDef, to_consumer

__all__ = ["AsyncIOSequenceBuffer", "BufferFull"]

_Result = TypeVar("_Result")
_Indices = np.ndarray[Any, np.dtype[np.int64]]
STATES = ("_is_being_put", "_is_being_amended", "_is_being_read", "_is_idle", "_is_empty")


class AsyncIOSequenceBuffer:
    """Upstream's calls and numbers: indices are slots, the lowest free ones first; a get acknowledges at once.

    ``buffer.inner`` is the SequenceBuffer, for leases, staleness, a journal, ``explain`` and the rest.

    Args:
        rpcs: The model function calls, at least one, names unlike each other.
        max_size: Most samples held. Nothing of that size is allocated or looked at.
        options: Of ``sharpwave.SequenceBuffer``.
    """

    def __init__(self, rpcs: Sequence[MFCDef], max_size: int, **options: Any) -> None:
        self.rpcs = list(rpcs)
        flow = sw.Dataflow([to_consumer(rpc) for rpc in self.rpcs])
        self.inner = sw.SequenceBuffer(max_size, flow=flow, **{"duplicate_ids": True, **options})
        self._writer = None if options.get("journal") is None else ThreadPoolExecutor(1, "sharpwave-areal")
        self._lock = asyncio.Condition()
        self._slots = threading.Lock()  # around what follows
        self._free: list[int] = []  # a heap of slots that were used before; those from _unused on never were
        self._unused = 0
        self._handle: dict[int, int] = {}
        self._slot: dict[int, int] = {}

    @property
    def max_size(self) -> int:
        return self.inner.capacity

    @property
    def size(self) -> int:
        return len(self.inner)

    @property
    def lock(self) -> asyncio.Condition:
        """Notified after each put, amend and get, which also wait for it. ``put_batch_synced`` does neither."""
        return self._lock

    @property
    def n_rpcs(self) -> int:
        return len(self.rpcs)

    async def put_batch(self, samples: Sequence[SequenceSample], birth_times: Any = None) -> _Indices:
        """Adds samples, all or none.

        Raises:
            BufferFull: Not all fit now, or ever. Nothing was changed.
        """
        async with self._lock:
            slots = await self._off_loop(self._put, samples, birth_times)
            self._lock.notify_all()
            return slots

    def put_batch_synced(self, samples: Sequence[SequenceSample]) -> _Indices:
        """``put_batch`` for callers outside of an event loop; waiting getters are woken all the same."""
        return self._put(samples, None)

    def _put(self, samples: Sequence[SequenceSample], birth_times: Any) -> _Indices:
        listed = list(samples)
        if any(len(sample) != 1 for sample in listed):
            raise SchemaError("put_batch(): expected samples of one datum each; unpack() them")
        births = None
        if birth_times is not None:
            births = [int(birth) for birth in np.asarray(birth_times).reshape(-1)]
            births = births * len(listed) if len(births) == 1 else births
        with self._slots:
            if len(self._slot) != self.size:
                self._sweep()
            if len(listed) > self.max_size:  # ours is a SchemaError, since no wait would help
                raise BufferFull(f"put_batch(): {len(listed)} samples never fit max_size={self.max_size}")
            handles = self.inner.put(listed, births=births, timeout=0)
            return np.array([self._take_slot(int(handle)) for handle in handles], np.int64)

    async def amend_batch(self, indices: Any, samples: Sequence[SequenceSample]) -> None:
        """Adds or replaces keys of held samples; indices and samples come in the same order, any order.

        Raises:
            StaleHandle: A slot is empty, or has another sample now.
        """
        async with self._lock:
            await self._off_loop(self._amend, indices, samples)
            self._lock.notify_all()

    def _amend(self, indices: Any, samples: Sequence[SequenceSample]) -> None:
        slots = np.asarray(indices).reshape(-1)
        if slots.size and slots.dtype.kind not in "iu":
            raise SchemaError(f"amend_batch(): indices: expected whole numbers of put_batch(), got {indices!r:.100}")
        with self._slots:
            handles = [self._handle.get(int(slot), -1) for slot in slots]
        try:
            self.inner.amend(handles, list(samples))
        except OtherId as error:
            raise _OtherTenant(f"amend_batch(): {error}") from None

    async def get_batch_for_rpc(self, rpc: MFCDef) -> tuple[_Indices, SequenceSample]:
        """The ``n_seqs`` oldest samples that are complete for the call; waits until there are so many.

        Raises:
            ValueError: No call of that name.
        """
        lease = await self.inner.get_async(rpc.name, batch_size=rpc.n_seqs)
        try:
            async with self._lock:
                slots = await self._off_loop(self._finish, lease)
                self._lock.notify_all()
        except BaseException:
            lease.release()  # nothing where it was acknowledged
            raise
        batch = lease.batch
        return slots, SequenceSample._make(batch._ids, batch._columns, batch._metadata)  # type: ignore[return-value]

    def _finish(self, lease: Lease) -> _Indices:
        with self._slots:
            slots = np.array([self._slot[int(handle)] for handle in lease.handles], np.int64)
            lease.ack()
            for handle in lease.handles.tolist():
                if handle not in self.inner:
                    self._free_slot(handle)
            return slots

    async def _off_loop(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """On a thread of its own where there is a journal: disk work never runs on an event loop."""
        if self._writer is None:
            return work(*arguments)
        return await asyncio.wrap_future(self._writer.submit(work, *arguments))

    def close(self) -> None:
        """Upstream has no such thing; a journal wants it."""
        if self._writer is not None:
            self._writer.shutdown()
        self.inner.close()

    def _take_slot(self, handle: int) -> int:
        if self._free:
            slot = heappop(self._free)
        else:
            slot, self._unused = self._unused, self._unused + 1
        self._handle[slot], self._slot[handle] = handle, slot
        return slot

    def _free_slot(self, handle: int) -> None:
        slot = self._slot.pop(handle)
        del self._handle[slot]
        heappush(self._free, slot)

    def _sweep(self) -> None:
        """Some left by another way than a get: too old, or acknowledged through ``inner``."""
        for handle in [handle for handle in self._slot if handle not in self.inner]:
            self._free_slot(handle)

    # ---- the debug view ----------------------------------------------------------------------------------------------

    def states(self) -> dict[str, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Upstream's five states, a truth value a slot; made when asked for, since it is as long as ``max_size``.

        A call here is one transition: no slot is ever seen being put or amended, and a get reads at once.
        """
        with self._slots:
            self._sweep()
            view = {name: np.zeros(self.max_size, bool) for name in STATES}
            held = np.fromiter(self._handle, np.int64, len(self._handle))
        view["_is_idle"][held] = True
        view["_is_empty"] = ~view["_is_idle"]
        return view

    def _assert_valid_indicator(self) -> None:
        """Upstream's checks.

        Raises:
            AssertionError: Not exactly one state a slot, or not as many slots as samples.
        """
        view = self.states()
        if not (np.sum([view[name] for name in STATES], axis=0) == 1).all():
            raise AssertionError("a slot is in several states, or in none")
        if int((~view["_is_empty"]).sum()) != self.size:
            raise AssertionError(f"{int((~view['_is_empty']).sum())} slots are taken, {self.size} samples are held")
        if any(handle not in self.inner for handle in self._handle.values()):
            raise AssertionError("a slot names a sample that has left")


class _OtherTenant(StaleHandle, SchemaError):
    """The slot has another sample than the one that is amended."""
