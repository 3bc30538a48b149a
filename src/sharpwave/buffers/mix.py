"""Mix: one batch from several replay buffers."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from ..arrays import priorities as read_priorities
from ..arrays import refuse_masked
from ..checks import check_settable, number, one_of, seconds, told, whole
from ..errors import ClosedError, NotReady, SchemaError, SharpwaveError, StaleHandle
from ..rows.batch_map import read_map
from ..rows.bell import without_blocking
from ..rows.handles import MOST_SOURCES, as_handles, mark_source, serials_of, sources_of
from ..rows.mixture import Mixture, named_error
from ..rows.parts import join, leaves, pick
from ..rows.priorities import window_priorities
from ..sampling import Prioritized
from ..views import Windows
from .replay import ReplayBuffer

__all__ = ["Mix"]


class Mix:
    """Draws one batch from several replay buffers at fixed shares: online data and demonstrations.

    Rows are added to the buffers themselves. They may differ in sampler, pace, storage and capacity. Their batches must
    have the same fields. A mixed batch has the rows of the first buffer, then those of the second, and so on, and
    ``batch["source"]`` has the number of each row's buffer. Rounding is carried from batch to batch, so that the shares
    are exact in the long run.

    Weights correct for the priorities inside each buffer, not for the shares: these are what you ask for. The target
    is to draw a buffer by its share, then one of its N rows uniformly; row i is drawn with share * P(i); so its weight
    is (N * P(i)) ** -beta, and 1 for the rows of a buffer without priorities. ``normalize=`` of the samplers then
    applies to the batch as a whole. ``batch["probabilities"]`` is share * P(i).

    Threads may use it at once.

    Args:
        buffers: The share of each buffer: numbers above 0 that sum to 1. Pairs of buffer and share are taken too.

    Example:
        >>> import numpy as np, sharpwave as sw
        >>> online, demos = (sw.ReplayBuffer(100, obs_shape=(2,), seed=seed) for seed in (0, 1))
        >>> for buf in (online, demos):
        ...     buf.add(np.zeros((8, 2)), np.zeros(8), np.ones(8), np.zeros((8, 2)), np.zeros(8, bool))
        >>> mix = sw.Mix({online: 0.75, demos: 0.25})
        >>> mix.sample(4)["source"].tolist()
        [0, 0, 0, 1]
    """

    def __init__(self, buffers: Mapping[ReplayBuffer, float] | Iterable[tuple[ReplayBuffer, float]]) -> None:
        pairs = _read_pairs(buffers)
        self._buffers = tuple(buffer for buffer, _ in pairs)
        self._shares = _read_shares([share for _, share in pairs])
        for i, buffer in enumerate(self._buffers):
            if buffer._rows.closed:
                raise ClosedError(f"Mix(): buffer {i} is closed")
        _check_alike(self._buffers)
        self._device = _read_device(self._buffers)
        self._mixture = Mixture([buffer._rows for buffer in self._buffers], self._shares)
        self._is_closed = False

    def __setattr__(self, name: str, value: Any) -> None:
        check_settable(self, name)
        object.__setattr__(self, name, value)

    # ---- reading ------------------------------------------------------------------------------------------------

    def sample(
        self,
        batch_size: int,
        *,
        out: dict[str, Any] | None = None,
        device: Any = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Draws examples from every buffer as its sampler and view say.

        Waits until every buffer that takes part may be sampled. While it waits for one, nothing is reserved in the
        others; if one raises, nothing counts as sampled in the others.

        Args:
            batch_size: How many, from all buffers together.
            out: A mixed batch of the same size to fill instead of new arrays; it is also what is returned. If the call
                raises, its content is undefined.
            device: As in ``ReplayBuffer.sample``.
            timeout: Seconds to wait for the paces, and for other processes that hold an index; None waits for ever, 0
                not at all.

        Returns:
            A batch as of ``ReplayBuffer.sample`` with ``"source"``, the position of each row's buffer. ``"indices"``
            are handles of this mix: its own ``update_priorities``, ``get`` and ``write`` take them.

        Raises:
            NotReady: A buffer has nothing to draw, or it kept the call waiting until the timeout; the message names it.
        """
        self._check_open()
        size = self._read_size("sample()", batch_size)
        batch, token = self._mixture.draw(size, out, self._target(device), seconds("sample()", timeout))
        self._mixture.settle(token, True)
        return batch

    async def sample_async(
        self,
        batch_size: int,
        *,
        out: dict[str, Any] | None = None,
        device: Any = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """``sample`` for an event loop, which continues while this call waits for a pace."""
        limit = seconds("sample()", timeout)
        ends = None if limit is None else time.monotonic() + limit

        def draw(left: float | None) -> dict[str, Any]:
            return self.sample(batch_size, out=out, device=device, timeout=left)

        for buffer in self._buffers:
            if buffer._rows.is_remote:  # every draw waits for a server
                return await buffer._rows.in_thread(lambda: draw(limit))
        while True:
            try:
                return draw(0)
            except NotReady as error:
                first = error
            left = None if ends is None else ends - time.monotonic()
            if left is not None and left <= 0:
                raise first
            which: int = first.buffer_number  # type: ignore[attr-defined]
            rows = self._buffers[which]._rows
            if rows.spec.pace is None:  # empty, or another process holds its index
                return await rows.in_thread(lambda left=left: draw(left))  # type: ignore[misc]

            def attempt(which: int = which) -> Any:
                """Again after each add and sample of that buffer, until another one is in the way."""
                try:
                    return draw(0)
                except NotReady as error:
                    if error.buffer_number == which:  # type: ignore[attr-defined]
                        raise
                    return error

            outcome = await rows.in_turn(attempt, left)
            if not isinstance(outcome, NotReady):
                batch: dict[str, Any] = outcome
                return batch

    def batches(
        self,
        batch_size: int,
        *,
        prefetch: int = 1,
        device: Any = None,
        timeout: float | None = None,
        map: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """An endless iterator over mixed batches, see ``ReplayBuffer.batches``.

        If the rows of a buffer are on a GPU, there is no thread: each batch is drawn when you take it.
        """
        self._check_open()
        size = self._read_size("batches()", batch_size)
        depth = whole("batches()", "prefetch", prefetch, 1)
        limit, change = seconds("batches()", timeout), read_map("batches()", map)
        return self._mixture.batches(size, depth, self._target(device), limit, change)

    def stream(
        self,
        batch_size: int,
        *,
        device: Any = None,
        prefetch: int = 2,
        timeout: float | None = None,
        map: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """An endless iterator over mixed batches on a GPU, see ``ReplayBuffer.stream``.

        Parts of buffers on the host are transferred ahead. Parts of buffers on the GPU are drawn when you take the
        batch, in the current CUDA stream. The parts are joined there.
        """
        self._check_open()
        size = self._read_size("stream()", batch_size)
        depth = whole("stream()", "prefetch", prefetch, 1)
        limit, change = seconds("stream()", timeout), read_map("stream()", map)
        return self._mixture.stream(size, depth, self._target(device), limit, change)

    def get(self, indices: Any) -> dict[str, Any]:
        """Reads rows by the handles of a mixed batch, in their order. The batch has ``"truncated"`` and ``"source"``.

        Raises:
            StaleHandle: One of them is no longer in its buffer, or is not of a mix.
        """
        where = "get()"
        self._check_open()
        handles, sources = self._split(where, indices)
        strange = np.flatnonzero(sources < 0)
        if len(strange):
            raise StaleHandle(f"{where}: {int(handles[strange[0]])} is no handle of this mix")
        device = self._device if any(buffer._rows.device is not None for buffer in self._buffers) else None
        parts, orders = [], []
        for i, buffer in enumerate(self._buffers):
            order = np.flatnonzero(sources == i)
            if not len(order) and (i or len(handles)):
                continue
            try:
                batch = buffer._rows.get(serials_of(handles[order]), device)
            except SharpwaveError as error:
                raise named_error(where, f"buffer {i} ({buffer._rows.where})", error) from None
            mark_source(batch["indices"], i)
            batch["source"] = batch["indices"] * 0 + i
            parts.append(batch)
            orders.append(order)
        fields = self._mixture.fields
        placed = np.argsort(np.concatenate(orders), kind="stable")
        return pick(fields, join(fields, parts), placed)

    # ---- writing back -------------------------------------------------------------------------------------------

    def update_priorities(
        self, indices: Any, priorities: Any, mask: Any = None, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """Gives rows new priorities, each in its buffer.

        Args:
            indices: The handles that ``sample`` gave, as an array, a tensor or a list.
            priorities, mask: As in ``ReplayBuffer.update_priorities``.
            timeout: Seconds to wait for other processes that hold an index; None waits for ever.

        Returns:
            ``{"applied": n, "stale": m, "skipped": k}``: n rows have new priorities; m rows are no longer there; k rows
            are of buffers without priorities.

        Raises:
            SchemaError: A number is NaN or infinite, or the lengths differ. Nothing was changed.
            NotReady: Another process kept an index until the timeout; the message names the buffer. Those before it
                have their new priorities.
        """
        where = "update_priorities()"
        self._check_open()
        if not any(self._mixture.is_prioritized):
            raise SchemaError(f"{where}: no buffer has priorities; give one of them sampler=Prioritized()")
        limit = seconds(where, timeout)
        handles, sources = self._split(where, indices)
        refuse_masked(f"{where}: priorities", priorities)
        values, learnt = _to_host(priorities), None if mask is None else np.asarray(_to_host(mask))
        if np.ndim(values) == 2:
            values = np.asarray(values)
            if len(values) != len(handles):
                raise SchemaError(f"{where}: priorities: expected {len(handles)} windows, got {len(values)}")
        else:
            values = read_priorities(where, "priorities", values, (len(handles),))
            if learnt is not None:
                raise SchemaError(
                    f"{where}: mask: expected with Windows() and one error a place, shape (windows, places)"
                )
        ready = []
        result: dict[str, Any] = {"applied": 0, "stale": int((sources < 0).sum()), "skipped": 0}
        for i, buffer in enumerate(self._buffers):
            mine = np.flatnonzero(sources == i)
            if not self._mixture.is_prioritized[i]:
                result["skipped"] += len(mine)
                continue
            if not len(mine):
                continue
            given = values[mine]
            if given.ndim == 2:
                view = buffer.view
                if not isinstance(view, Windows):
                    raise SchemaError(f"{where}: priorities: expected one number per row, got shape {values.shape}")
                given = window_priorities(where, view, given, None if learnt is None else learnt[mine])
                given = read_priorities(where, "priorities", given, (len(mine),))
            ready.append((i, buffer, serials_of(handles[mine]), given))
        # All are checked: from here on nothing is refused.
        ends = None if limit is None else time.monotonic() + limit
        for i, buffer, serials, given in ready:
            left = None if ends is None else max(0.0, ends - time.monotonic())
            try:
                done = buffer._rows.update_priorities(serials, given, None, left)
            except SharpwaveError as error:
                raise named_error(where, f"buffer {i} ({buffer._rows.where})", error) from None
            result = {name: value + done.get(name, 0) for name, value in result.items()}
        return result

    async def update_priorities_async(
        self, indices: Any, priorities: Any, mask: Any = None, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """``update_priorities`` for an event loop. If another process holds an index, a thread waits for it."""
        limit = seconds("update_priorities()", timeout)
        return await without_blocking(
            self._buffers[0]._rows,
            lambda left: self.update_priorities(indices, priorities, mask, timeout=left),
            limit,
        )

    def write(
        self, indices: Any, *, stale: Literal["error", "skip"] = "error", timeout: float | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Writes fields of rows back, each in its buffer: ``ReplayBuffer.write`` with the handles of a mixed batch.

        Args:
            indices: Handles of a mixed batch, of any shape; -1 names no row and is passed over.
            stale: What to do about rows that are no longer there, and about handles that are not of a mix: ``"error"``
                raises before anything is written, ``"skip"`` leaves them out. (A row that another process overwrites
                while the call runs may be noticed after rows of other buffers were written.)
            timeout: Seconds to wait for other threads and processes that write; None waits for ever.
            **fields: New values by name, of shape (*indices.shape, *field.shape).

        Returns:
            ``{"applied": n, "stale": m}``, over all buffers.
        """
        where = "write()"
        self._check_open()
        one_of(where, "stale", stale, ("error", "skip"))
        limit = seconds(where, timeout)
        shaped = as_handles(where, indices, any_shape=True)
        handles, sources = self._split(where, shaped.reshape(-1))
        strange = int(((sources < 0) & (handles != -1)).sum())
        for name, value in leaves(fields):
            if np.shape(value)[: shaped.ndim] != shaped.shape:
                raise SchemaError(
                    f"{where}: field {name!r}: expected a value for each of the indices, whose shape is "
                    f"{shaped.shape}, got shape {np.shape(value)}"
                )
        parts = [(i, np.flatnonzero(sources == i)) for i in range(len(self._buffers)) if (sources == i).any()]
        if stale == "error":
            if strange:
                raise StaleHandle(f"{where}: {strange} of the indices are not handles of a mixed batch")
            for i, mine in parts:  # before anything is written
                self._named(where, i, functools.partial(self._buffers[i].get, serials_of(handles[mine])))
        ends = None if limit is None else time.monotonic() + limit
        result = {"applied": 0, "stale": strange}
        for i, mine in parts:
            left = None if ends is None else max(0.0, ends - time.monotonic())
            values = _rows_of(fields, mine, shaped.ndim)
            write = functools.partial(self._buffers[i].write, stale=stale, timeout=left, **values)
            done = self._named(where, i, functools.partial(write, serials_of(handles[mine])))
            result = {name: count + int(done[name]) for name, count in result.items()}
        return result

    async def write_async(
        self, indices: Any, *, stale: Literal["error", "skip"] = "error", timeout: float | None = None, **fields: Any
    ) -> dict[str, Any]:
        """``write`` for an event loop. If another process writes, a thread waits for it."""
        limit = seconds("write()", timeout)
        return await without_blocking(
            self._buffers[0]._rows, lambda left: self.write(indices, stale=stale, timeout=left, **fields), limit
        )

    def _named(self, where: str, number: int, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A call on one of the buffers; errors name it."""
        try:
            return call()
        except SharpwaveError as error:
            raise named_error(where, f"buffer {number} ({self._buffers[number]._rows.where})", error) from None

    def _split(self, where: str, indices: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Handles on the host, and the number of the buffer of each; -1 for those that are not of this mix."""
        handles = as_handles(where, indices)
        sources = sources_of(handles)
        sources[sources >= len(self._buffers)] = -1
        return handles, np.maximum(sources, -1)

    # ---- facts --------------------------------------------------------------------------------------------------

    def _read_size(self, where: str, batch_size: Any) -> int:
        size = whole(where, "batch_size", batch_size, 1, 2**31 - 1)
        self._mixture.check_size(where, size)
        return size

    def _target(self, device: Any) -> Any:
        return self._device if device is None else device

    def __len__(self) -> int:
        self._check_open()
        return sum(len(buffer) for buffer in self._buffers)

    @property
    def capacity(self) -> int:
        """Rows that the buffers together keep at most."""
        return sum(buffer.capacity for buffer in self._buffers)

    @property
    def buffers(self) -> tuple[ReplayBuffer, ...]:
        """The buffers; ``batch["source"]`` has positions in this tuple."""
        return self._buffers

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of each buffer."""
        return self._shares

    @property
    def device(self) -> Any:
        """The device of batches; None for NumPy arrays."""
        return self._device

    def stats(self) -> dict[str, Any]:
        """Counts of this mix: ``rows_by_buffer`` are the rows that it drew from each buffer; ``buffers`` are their own
        ``stats()``."""
        self._check_open()
        each = [buffer.stats() for buffer in self._buffers]
        drawn = list(self._mixture.drawn)
        return {
            "size": sum(stats["size"] for stats in each),
            "capacity": self.capacity,
            "sample_calls": self._mixture.calls,
            "rows_sampled": sum(drawn),
            "rows_by_buffer": drawn,
            "shares": list(self._shares),
            "buffers": each,
        }

    def __repr__(self) -> str:
        if self._is_closed:
            return "<Mix: closed>"
        parts = ", ".join(f"{share:g} of {buffer!r}" for share, buffer in zip(self._shares, self._buffers, strict=True))
        return f"<Mix: {parts}>"

    # ---- life ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the use of the mix. The buffers stay open: they belong to those who made them."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the mix is closed")

    def __enter__(self) -> Mix:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_open()
        return Mix, (list(zip(self._buffers, self._shares, strict=True)),)


def _read_pairs(buffers: Any) -> list[tuple[ReplayBuffer, Any]]:
    where = "Mix(): buffers"
    pairs: list[Any] = []
    if isinstance(buffers, (Mapping, Iterable)) and not isinstance(buffers, (str, bytes)):
        pairs = list(buffers.items() if isinstance(buffers, Mapping) else buffers)
    if not pairs:
        raise SchemaError(f"{where}: expected a dict of buffers and their shares, got {told(buffers)}")
    if len(pairs) > MOST_SOURCES:
        raise SchemaError(f"{where}: expected at most {MOST_SOURCES}, got {len(pairs)}")
    for i, pair in enumerate(pairs):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], ReplayBuffer):
            got = type(pair[0]).__name__ if isinstance(pair, (tuple, list)) and len(pair) == 2 else told(pair)
            raise SchemaError(f"{where}: expected ReplayBuffers with their shares, got {got} as number {i}")
        if any(pair[0] is other[0] for other in pairs[:i]):
            raise SchemaError(f"{where}: number {i} is there already; give it one share")
    return [(pair[0], pair[1]) for pair in pairs]


def _read_shares(given: list[Any]) -> tuple[float, ...]:
    where = "Mix()"
    shares = [number(where, f"share of buffer {i}", share, 0, 1e15) for i, share in enumerate(given)]
    for i, share in enumerate(shares):
        if share == 0:
            raise SchemaError(f"{where}: share of buffer {i}: expected a number above 0, got 0; leave the buffer out")
    total = sum(shares)
    if abs(total - 1) > 1e-6:
        mended = ", ".join(f"{share / total:.6g}" for share in shares)
        raise SchemaError(f"{where}: shares: expected numbers that sum to 1, got a sum of {total:g}; give {mended}")
    return tuple(share / total for share in shares)


def _check_alike(buffers: tuple[ReplayBuffer, ...]) -> None:
    """Refuses buffers whose batches cannot be one."""

    def shapes(buffer: ReplayBuffer) -> dict[str, str]:
        spec = buffer._rows.spec
        empty = spec.batch_tree(weights=False, relabelled=False).new_batch(0)
        empty.pop("lengths", None)
        ragged = {spec.schema.leaves[leaf][0]: spec.schema.leaves[leaf][1].ragged for leaf in spec.schema.ragged}
        kinds = {name: f", ragged={ragged[name]!r}" if name in ragged else "" for name, _ in leaves(empty)}
        return {name: f"{array.dtype} of shape {array.shape[1:]}{kinds[name]}" for name, array in leaves(empty)}

    first = shapes(buffers[0])
    if "source" in buffers[0].schema:
        raise SchemaError("Mix(): field 'source': batches have the numbers of the buffers there; rename the field")
    for i, buffer in enumerate(buffers[1:], 1):
        other = shapes(buffer)
        for name in [*first, *other]:
            one, two = first.get(name, "no such field"), other.get(name, "no such field")
            if one != two:
                same = "schema=" if name.partition("/")[0] in {**buffers[0].schema, **buffer.schema} else "view="
                raise SchemaError(
                    f"Mix(): field {name!r}: buffer 0 has {one}, buffer {i} has {two}; give both the same {same}"
                )
    samplers = [(i, buffer._rows.spec.sampler) for i, buffer in enumerate(buffers)]
    prioritized = [(i, sampler) for i, sampler in samplers if isinstance(sampler, Prioritized)]
    for i, sampler in prioritized[1:]:
        if sampler.normalize != prioritized[0][1].normalize:
            raise SchemaError(
                f"Mix(): sampler: weights are normalised over the whole batch, but buffer {prioritized[0][0]} has "
                f"normalize={prioritized[0][1].normalize!r} and buffer {i} {sampler.normalize!r}; give both the same"
            )


def _read_device(buffers: tuple[ReplayBuffer, ...]) -> Any:
    """Where batches go without ``device=``: buffers with NumPy arrays follow those with tensors."""
    devices = [(i, buffer.device) for i, buffer in enumerate(buffers) if buffer.device is not None]
    for i, device in devices[1:]:
        if str(device) != str(devices[0][1]):
            raise SchemaError(
                f"Mix(): device: buffer {devices[0][0]} is for {devices[0][1]}, buffer {i} for {device}; give both the "
                "same"
            )
    return devices[0][1] if devices else None


def _to_host(value: Any) -> Any:
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def _rows_of(value: Any, which: np.ndarray[Any, Any], axes: int) -> Any:
    """Some rows of nested values, whose first axes count rows."""
    if isinstance(value, Mapping):
        return {name: _rows_of(part, which, axes) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_rows_of(part, which, axes) for part in value)
    array = value if hasattr(value, "dtype") else np.asarray(value)
    return array.reshape(-1, *array.shape[axes:])[which]
