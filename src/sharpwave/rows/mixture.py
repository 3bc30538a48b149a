"""Mixture: one batch drawn from several tables at fixed shares."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import NotReady, SchemaError, SharpwaveError
from ..sampling import Prioritized
from .bell import batches
from .device import DeviceRows
from .feed import Arrived, GpuFeed, ahead
from .handles import mark_source
from .host import HostRows
from .parts import join, leaves, part
from .protocol import Batch, BatchMap, Drawn, Rows
from .shares import Shares
from .tensors import as_host_arrays, read_device, torch_converter

__all__ = ["Mixture", "named_error"]

_HANDLES = ("indices", "place_indices")  # names under which a batch has handles


class Token(NamedTuple):
    """What is to be settled of a mixed batch."""

    handles: list[tuple[int, Any]]  # with the numbers of the tables
    counts: list[int]
    changes: list[float]  # of the shares


class Mixture:
    """Draws from every table straight into its part of the batch. Threads may call at once.

    A batch holds the rows of the first table, then those of the second, and so on. All of them are drawn or none: while
    one table is not ready, nothing is reserved in the others.
    """

    def __init__(self, rows: Sequence[Rows], shares: tuple[float, ...]) -> None:
        self.rows, self.shares = list(rows), shares
        self.drawn = [0] * len(self.rows)  # rows of delivered batches, by table
        self.calls = 0
        self._split = Shares(shares)
        self._lock = threading.Lock()  # around the counts
        specs = [each.spec for each in rows]
        self.fields = specs[0].schema.fields
        self.is_prioritized = [spec.is_prioritized for spec in specs]
        self._newest = [getattr(spec.sampler, "newest", 0) for spec in specs]
        self._has_weights = any(self.is_prioritized)
        self._is_normalised = any(isinstance(s.sampler, Prioritized) and s.sampler.normalize != "none" for s in specs)
        self._has_relabelled = any(spec.hindsight is not None for spec in specs)
        self._is_paced = any(spec.pace is not None for spec in specs)
        self._tree = specs[0].batch_tree(weights=self._has_weights, relabelled=self._has_relabelled)
        self._keys = [name for name in self._tree.new_batch(0) if name != "lengths"]  # without those of ragged fields
        self._is_ragged = bool(specs[0].schema.ragged)
        self._are_hosts = all(isinstance(each, HostRows) for each in rows)
        self._known_size = 0  # the last one that was checked

    def check_size(self, where: str, size: int) -> None:
        """Refuses a batch size of which a table could get too few or too many rows, in this call or in a later one."""
        if size == self._known_size:
            return
        loose = 0 if len(self.rows) <= 2 else 1  # with more tables a count may be one further from its share
        for number, (rows, share) in enumerate(zip(self.rows, self.shares, strict=True)):
            exact = size * share
            least, most = math.floor(exact + 1e-9) - loose, math.ceil(exact - 1e-9) + loose
            if least < rows.spec.least_batch and rows.spec.least_batch > 1:
                raise SchemaError(
                    f"{where}: batch_size: {self._name(number)} has newest={rows.spec.least_batch}, and its share of "
                    f"{size} rows may be {max(least, 0)}; give a larger batch_size"
                )
            try:
                rows.spec.check_batch(where, most)
            except SchemaError as error:
                raise named_error(where, self._name(number), error) from None
        self._known_size = size

    def _name(self, number: int) -> str:
        return f"buffer {number} ({self.rows[number].where})"

    # ---- one batch --------------------------------------------------------------------------------------------

    def draw(self, size: int, out: Batch | None, device: Any, timeout: float | None) -> tuple[Batch, Token]:
        """A batch whose rows stay reserved until ``settle``."""
        is_on_host = device is None or read_device("sample(): device", device)[1].type == "cpu"
        if self._are_hosts and is_on_host and not self._is_ragged:
            return self._draw_in_place(size, out, device, timeout)
        if out is not None and self._is_ragged:
            raise SchemaError("sample(): out: the lengths of a ragged field differ from batch to batch; give no out=")
        counts, changes = self._split.take(size)
        parts: list[Drawn | None] = []
        try:
            parts = self._take_all(
                counts,
                timeout,
                lambda i, limit: self.rows[i].draw(counts[i], device=device, timeout=limit),
                lambda i, drawn: self._give_back(i, drawn.handles),
            )
            batch = self._join(parts, counts)
            if out is not None:
                batch = _put_into(out, batch)
        except BaseException:
            self.settle(self._token(parts, counts, changes), False)
            raise
        return batch, self._token(parts, counts, changes)

    def _draw_in_place(self, size: int, out: Batch | None, device: Any, timeout: float | None) -> tuple[Batch, Token]:
        # Refuses dtypes that torch has not, before anything is drawn.
        convert = None if device is None else torch_converter(device, self._host(0).dtypes)
        if out is None:
            batch = self._tree.new_batch(size)
            batch["source"] = np.empty(size, np.int64)
        else:
            batch = out if device is None else as_host_arrays(out, device)
            self._tree.check_out(size, batch)
            _check_source(batch.get("source"), size)
        counts, changes = self._split.take(size)
        parts: list[Drawn | None] = []
        starts = [sum(counts[:i]) for i in range(len(counts))]
        places = [part(batch, at, at + count) for at, count in zip(starts, counts, strict=True)]
        try:
            parts = self._take_all(
                counts,
                timeout,
                lambda i, limit: self.rows[i].draw(counts[i], out=places[i], timeout=limit),
                lambda i, drawn: self._give_back(i, drawn.handles),
            )
            for number, drawn in enumerate(parts):
                if drawn is not None:
                    self._complete(number, places[number], drawn)
            self._normalise(places, parts)
        except BaseException:
            self.settle(self._token(parts, counts, changes), False)
            raise
        token = self._token(parts, counts, changes)
        if out is not None:
            return out, token
        return batch if convert is None else convert(batch), token

    def _host(self, number: int) -> HostRows:
        rows = self.rows[number]
        assert isinstance(rows, HostRows)
        return rows

    def _take_all(
        self,
        counts: list[int],
        timeout: float | None,
        take: Callable[[int, float | None], Any],
        give_back: Callable[[int, Any], None],
    ) -> list[Any]:
        """The parts of all tables, None where the count is 0. While it waits for one table, nothing is reserved in the
        others: two mixtures of the same tables would wait for each other otherwise."""
        deadline = None if timeout is None else time.monotonic() + timeout
        waits_for: int | None = None
        while True:
            parts: list[Any] = [None] * len(counts)
            order = [i for i, count in enumerate(counts) if count]
            order.sort(key=lambda i: i != waits_for)
            missed: int | None = None
            for i in order:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                waits = i == waits_for or not self._is_paced
                limit = left if waits else 0
                try:
                    parts[i] = take(i, limit)
                except BaseException as error:
                    for other, taken in enumerate(parts):
                        if taken is not None:
                            give_back(other, taken)
                    if not isinstance(error, SharpwaveError):  # of the user's functions
                        raise
                    if not isinstance(error, NotReady) or waits or left == 0:
                        text = str(error)
                        if timeout is not None:  # as the caller gave it, not what was left of it
                            text = text.replace(f"timeout={limit!r}", f"timeout={timeout:g}")
                        raise named_error("sample()", self._name(i), type(error)(text), i) from None
                    missed = i
                    break
            if missed is None:
                return parts
            waits_for = missed

    def _complete(self, number: int, batch: Batch, drawn: Drawn) -> None:
        """Adds to a table's part what only mixed batches have: the number of the table, in ``source`` and in the
        handles; weights before normalisation over the whole batch; probabilities of the whole mixture."""
        batch["source"][...] = number
        for name in _HANDLES:
            if name in batch:
                mark_source(batch[name], number)
        spec, share, newest = self.rows[number].spec, self.shares[number], self._newest[number]
        if self._has_relabelled and spec.hindsight is None:
            batch["relabelled"][...] = False
        if not self._has_weights:
            return
        if spec.is_prioritized:
            batch["probabilities"] *= share
        else:
            batch["weights"][...] = 1
            batch["probabilities"][...] = share / drawn.rows
            batch["probabilities"][:newest] = share

    def _normalise(self, places: list[Batch], parts: list[Drawn | None]) -> None:
        """Weights so far are relative to the largest of their table; those of ``newest`` rows are 1 and stay."""
        if not self._has_weights or not self._is_normalised:
            return
        scales = {
            i: drawn.scale
            for i, drawn in enumerate(parts)
            if drawn is not None and len(places[i]["weights"]) > self._newest[i]
        }
        if not scales:
            return
        tensors = [scale for scale in scales.values() if hasattr(scale, "device")]
        if tensors:
            import torch

            largest: Any = torch.stack([torch.as_tensor(s, device=tensors[0].device) for s in scales.values()]).max()
        else:
            largest = max(scales.values())
        for i, scale in scales.items():
            places[i]["weights"][self._newest[i] :] *= scale / largest

    def _join(self, parts: Sequence[Drawn | None], counts: list[int]) -> Batch:
        """One batch of the tables' own. For ragged fields, and on a device: kernels write to whole tensors."""
        ready: list[Batch] = []
        for number, drawn in enumerate(parts):
            if drawn is None:
                ready.append({})
                continue
            batch = dict(drawn.batch)
            new = functools.partial(_new, batch["indices"], counts[number])
            batch["source"] = new("int64")
            if self._has_weights and not self.is_prioritized[number]:
                batch["weights"], batch["probabilities"] = new("float32"), new("float64")
            if self._has_relabelled and "relabelled" not in batch:
                batch["relabelled"] = new("bool")
            self._complete(number, batch, drawn)
            ready.append({name: batch[name] for name in [*self._keys, "source"]})
        self._normalise(ready, list(parts))
        return join(self.fields, [batch for batch in ready if batch])

    def _token(self, parts: Sequence[Drawn | None], counts: list[int], changes: list[float]) -> Token:
        handles = [(i, drawn.handles) for i, drawn in enumerate(parts) if drawn is not None]
        return Token([(i, named) for i, named in handles if named is not None], counts, changes)

    def _give_back(self, number: int, handles: Any) -> None:
        if handles is not None:
            self.rows[number].settle(handles, False)

    def settle(self, token: Token, delivered: bool) -> None:
        for number, handles in token.handles:
            if not self.rows[number].closed:
                self.rows[number].settle(handles, delivered)
        if not delivered:
            return self._split.give_back(token.changes)
        with self._lock:
            self.calls += 1
            for i, count in enumerate(token.counts):
                self.drawn[i] += count

    # ---- batch after batch ------------------------------------------------------------------------------------

    def batches(
        self, size: int, prefetch: int, device: Any, timeout: float | None, change: BatchMap | None
    ) -> Iterator[Batch]:
        if not self._are_hosts:  # calls on a device are ordered by the caller's stream, and no call waits for it
            return self._one_by_one(size, device, timeout, change)

        def draw(left: float) -> tuple[Batch, Token]:
            batch, token = self.draw(size, None, device, left)
            if getattr(batch["indices"], "is_cuda", False):
                import torch

                torch.cuda.current_stream(batch["indices"].device).synchronize()  # the caller may use another stream
            return batch, token

        return batches(draw, self.settle, prefetch, timeout, change)

    def _one_by_one(self, size: int, device: Any, timeout: float | None, change: BatchMap | None) -> Iterator[Batch]:
        while True:
            batch, token = self.draw(size, None, device, timeout)
            is_done = False
            try:
                batch = batch if change is None else change(batch)
                is_done = True
            finally:
                self.settle(token, is_done)
            yield batch

    def stream(
        self, size: int, prefetch: int, device: Any, timeout: float | None, change: BatchMap | None
    ) -> Iterator[Batch]:
        hosts = [each if isinstance(each, HostRows) and device is not None else None for each in self.rows]
        feeds = [None if each is None else each.feed(device) for each in hosts]
        first = next((feed for feed in feeds if feed is not None), None)
        if first is None:
            return self.batches(size, prefetch, device, timeout, change)
        return ahead(first, _Lane(self, feeds, size, change), prefetch, timeout)


class _Ticket(NamedTuple):
    counts: list[int]
    changes: list[float]
    tickets: list[Any]  # of the feeds; None for tables on the device, and where the count is 0
    odds: list[Any]


class _Lane:
    """Mixed batches for ``ahead``: parts of tables on the host are transferred ahead; those of tables on the device are
    drawn in the caller's stream, where their other calls are."""

    def __init__(self, mixture: Mixture, feeds: list[GpuFeed | None], size: int, change: BatchMap | None) -> None:
        self.mixture, self.feeds, self.size, self.change = mixture, feeds, size, change

    def begin(self, timeout: float | None, side: Any) -> _Ticket:
        counts, changes = self.mixture._split.take(self.size)
        odds = [np.empty(2) for _ in counts]
        from_host = [0 if feed is None else count for feed, count in zip(self.feeds, counts, strict=True)]

        def take(i: int, limit: float | None) -> Any:
            return self._feed(i).begin(counts[i], limit, side, odds[i])

        def give_back(i: int, ticket: Any) -> None:
            self.mixture._give_back(i, self._feed(i).left(ticket))

        try:
            return _Ticket(counts, changes, self.mixture._take_all(from_host, timeout, take, give_back), odds)
        except BaseException:
            self.mixture._split.give_back(changes)
            raise

    def _feed(self, number: int) -> GpuFeed:
        feed = self.feeds[number]
        assert feed is not None
        return feed

    def end(self, ticket: _Ticket) -> Arrived:
        parts: list[Drawn | None] = [None] * len(ticket.counts)
        blocks: list[Any] = []
        events: list[Any] = []
        for i, begun in enumerate(ticket.tickets):
            if begun is not None:
                batch, memory, event, serials = self._feed(i).end(begun)
                parts[i] = Drawn(batch, serials if self._feed(i).settles else None, *ticket.odds[i].tolist())
                blocks += memory
                events += [] if event is None else [event]
        token = self.mixture._token(parts, ticket.counts, ticket.changes)
        return Arrived((parts, ticket.counts), tuple(blocks), tuple(events), token)

    def left(self, ticket: _Ticket) -> Token:
        handles = [(i, self._feed(i).left(begun)) for i, begun in enumerate(ticket.tickets) if begun is not None]
        return Token([(i, named) for i, named in handles if named is not None], ticket.counts, ticket.changes)

    def finish(self, arrived: Any) -> Batch:
        parts, counts = arrived
        for i, rows in enumerate(self.mixture.rows):
            if isinstance(rows, DeviceRows) and counts[i]:
                try:
                    parts[i] = rows.draw(counts[i])
                except SharpwaveError as error:
                    raise named_error("stream()", self.mixture._name(i), error) from None
        batch = self.mixture._join(parts, counts)
        return batch if self.change is None else self.change(batch)

    def settle(self, token: Token, delivered: bool) -> None:
        self.mixture.settle(token, delivered)


def named_error(where: str, name: str, error: SharpwaveError, number: int | None = None) -> SharpwaveError:
    """The same error with the buffer that raised it."""
    text = str(error)
    head, colon, rest = text.partition("(): ")
    made = type(error)(f"{where}: {name}: {rest if colon and head.isidentifier() else text}")
    if number is not None:
        made.buffer_number = number  # type: ignore[attr-defined]  # which of them is waited for
    return made


def _new(like: Any, count: int, dtype: str) -> Any:
    """An array of the same kind, on the same device."""
    if isinstance(like, np.ndarray):
        return np.empty(count, dtype)
    import torch

    return torch.empty(count, dtype=getattr(torch, dtype), device=like.device)


def _check_source(value: Any, size: int) -> None:
    fits = isinstance(value, np.ndarray) and value.dtype == np.int64 and value.shape == (size,)
    if not fits or not value.flags.writeable:
        got = f"{value.dtype} array of shape {value.shape}" if hasattr(value, "shape") else type(value).__name__
        raise SchemaError(
            f"sample(): out['source']: expected int64 array of shape ({size},), got {got}; pass a batch of the same "
            "size"
        )


def _put_into(out: Any, batch: Batch) -> Any:
    """The batch in the caller's arrays or tensors."""
    given = dict(leaves(out)) if isinstance(out, dict) else {}
    for name, value in leaves(batch):
        to: Any = given.get(name)
        is_alike = type(to) is type(value) and to.shape == value.shape and to.dtype == value.dtype
        if not is_alike or getattr(to, "device", None) != getattr(value, "device", None):
            got = type(to).__name__ if not hasattr(to, "dtype") else f"{to.dtype} of {tuple(to.shape)}"
            at = f" on {value.device}" if hasattr(value, "device") else ""
            raise SchemaError(
                f"sample(): out: {name!r}: expected {value.dtype} of {tuple(value.shape)}{at}, got {got}; pass a batch "
                "of the same size"
            )
    for name, value in leaves(batch):
        given[name][...] = value
    return out
