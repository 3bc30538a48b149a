"""From rows on the host to batches on a GPU: read by the GPU itself where it may, else by way of pinned memory."""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ..errors import NotReady
from ..schema import Field, Node
from ..views import Windows
from .protocol import BatchMap
from .ragged import spread
from .tensors import read_device, torch_converter

if TYPE_CHECKING:
    from .host import HostRows

__all__ = ["Arrived", "GpuFeed", "ahead"]

# What batches have once for each example, whatever the view; the other arrays also have the axis of places.
PER_EXAMPLE = ("weights", "probabilities", "relabelled", "indices")


def _registered(rows: HostRows) -> Any:
    """The memory of the rows, registered once for all GPUs."""
    from ..device.registered_memory import RegisteredMemory

    if rows.registered is None:
        place = rows.table.row_memory()
        is_file = (rows.address or "").startswith("file://")
        memory = RegisteredMemory(place.address, place.bytes, rows.table.path if is_file else None, place.file_offset)
        rows.registered = memory
        weakref.finalize(rows, memory.close)  # before the table's memory goes
    return rows.registered


class GpuFeed:
    """Batches of one table on one device."""

    def __init__(self, rows: HostRows, device: Any) -> None:
        spec = rows.spec
        self.torch, self.device = read_device("sample(): device", device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = self.torch.device("cuda", self.torch.cuda.current_device())
        self.rows = weakref.proxy(rows)
        self.convert = torch_converter(device, rows.dtypes)  # refuses dtypes that torch has not
        self.retries = 0
        self.streams: dict[int, Any] = {}
        self.pinned: dict[int, list[Any]] = {}
        self.lock = threading.Lock()  # around those
        view = spec.view
        self.window = view.places if isinstance(view, Windows) else 0
        self.extras = [
            *(["truncated"] if view.truncated else []),
            *(["discount"] if view.n_step > 1 else []),
            *(["weights", "probabilities"] if spec.is_prioritized else []),
            *(["relabelled"] if spec.hindsight is not None else []),
            *(["valid", "mask", "first"] if self.window else []),
            *(["place_indices"] if isinstance(view, Windows) and view.place_indices else []),
            "indices",
        ]
        # Names of a batch and keys of its tensors, where there is nothing to nest.
        nodes = spec.schema.fields
        keys = zip(nodes, itertools.count())
        is_flat = all(isinstance(node, Field) for node in nodes.values())
        self.flat = [*keys, *zip(self.extras, self.extras, strict=True)] if is_flat else []
        # Whether anybody wants to know what became of a batch.
        self.settles = spec.settles
        self.feed: Any = None
        self.reason = self._try_direct(rows)

    def _try_direct(self, rows: HostRows) -> str:
        """Why the GPU cannot read the rows itself; nothing where it can."""
        if rows.spec.schema.ragged:
            return "a field is ragged"
        if rows.spec.hindsight is not None:
            return "hindsight changes batches on the host"
        if self.device.type != "cuda":
            return f"{self.device.type} is no CUDA device"
        try:
            from ..device.registered_memory import Unregistered
            from ..device.row_reader import RowReader
        except ImportError as error:
            return f"Triton is not there ({error})"
        self.unregistered = Unregistered
        try:
            with self.torch.cuda.device(self.device):
                memory = _registered(rows)
                spec, extras = rows.spec, set(self.extras)
                self.feed = RowReader(rows.table, spec.schema, self.device, spec.n_step, self.window, extras, memory)
        except OSError as error:
            return str(error)
        return ""

    def close(self) -> None:
        self.feed, self.reason = None, "the buffer is closed"

    def describe(self) -> dict[str, Any]:
        """For ``stats()``."""
        if self.feed is None:
            return {"way": "staged", "reason": self.reason, "registered_bytes": 0, "retries": self.retries}
        return {
            "way": "direct",
            "reason": "",
            "registered_bytes": self.feed.registered_bytes,
            "retries": self.retries,
        }

    # ---- one batch --------------------------------------------------------------------------------------------

    def sample(self, size: int, timeout: float | None, deliver: bool, odds: Any = None) -> tuple[dict[str, Any], Any]:
        """Returns when the batch has arrived, or is on its way in the current stream: the batch, and what is to be
        settled, if anything."""
        with self.there():
            batch, _, _, serials = self.end(self.begin(size, timeout, self.stream_here(), odds))
        if deliver and self.settles:
            self.rows.settle(serials, True)
        return batch, serials if self.settles else None

    def stream_here(self) -> Any:
        """The current stream. torch makes a new object of it at every asking, which takes as long as a launch."""
        if self.device.type != "cuda":
            return None
        name = self.torch._C._cuda_getCurrentRawStream(self.device.index)
        known = self.streams.get(name)
        if known is None:
            if len(self.streams) > 16:
                self.streams.clear()
            known = self.streams[name] = self.torch.cuda.current_stream(self.device)
        return known

    def there(self) -> Any:
        """The device, where it is not the current one."""
        if self.torch._C._cuda_getDevice() == self.device.index:
            return contextlib.nullcontext()
        return self.torch.cuda.device(self.device)

    def begin(self, size: int, timeout: float | None, stream: Any, odds: Any = None) -> Any:
        """A batch on its way in the current stream, which is this one: a ticket of the feed, or what ``_stage``
        gives. ``odds`` as for ``HostRows.sample``."""
        if self.feed is None:
            return self._stage(size, timeout, odds)
        try:
            return self.feed.begin(size, timeout, False, stream, odds)
        except self.unregistered as error:
            # The memory filled further, and the driver takes no more of it.
            self.feed, self.reason = None, str(error)
            return self._stage(size, timeout, odds)

    def end(self, ticket: Any) -> tuple[dict[str, Any], tuple[Any, ...], Any, Any]:
        """The batch, the memory behind it, what to wait for before it is used in another stream, and its serials, which
        are to be settled."""
        if not isinstance(ticket, tuple):
            serials, size, blocks, odds = ticket.sent.arrays["indices"], ticket.size, ticket.blocks, ticket.odds
            serials = serials.copy() if self.settles else serials
            tensors = ticket.feed.end(ticket)
            if tensors is not None:
                return self._tree(tensors), blocks, None, serials
            self.retries += 1
            if self.settles:
                self.rows.settle(serials, False)
            ticket = self._stage(size, None, odds)
        batch, serials, blocks, event = ticket
        return batch, blocks, event, serials

    def _stage(self, size: int, timeout: float | None, odds: Any) -> tuple[dict[str, Any], Any, tuple[Any, ...], Any]:
        """Gathered by the engine into pinned memory, then sent in one piece: the batch, its serials, its memory, and
        the event of its arrival."""
        if self.torch.is_inference_mode_enabled():
            with self.torch.inference_mode(False):
                return self._stage(size, timeout, odds)
        if self.rows.spec.schema.ragged:
            arrays = self.rows.fill(size, None, timeout, False, odds)
            batch = self.convert(spread(self.rows.spec, arrays))
            return batch, arrays["indices"], tuple(_tensors(batch)), None
        from ..device.pinned_memory import views_of

        block = self._take_block(size)
        try:
            self.rows.fill(size, self._tree(block.arrays, is_split=False), timeout, False, odds)
            serials = block.arrays["indices"].copy()
            try:
                sent = block.send()
            except BaseException:  # the rows reach nobody
                if self.settles:
                    self.rows.settle(serials, False)
                raise
            block.event = self.torch.cuda.Event()
            block.event.record()
        finally:
            with self.lock:
                free = self.pinned.setdefault(size, [])
                if len(free) < 8:
                    free.append(block)
        return self._tree(views_of(sent, block.views)), serials, (sent,), block.event

    def _take_block(self, size: int) -> Any:
        """Pinned memory that nobody reads any more."""
        from ..device.pinned_memory import PinnedMemory

        with self.lock:
            free = self.pinned.get(size, [])
            for i, block in enumerate(free):
                if block.event is None or block.event.query():
                    return free.pop(i)
        return PinnedMemory(self._specs(size), self.device)

    def _specs(self, size: int) -> dict[Any, tuple[tuple[int, ...], np.dtype[Any]]]:
        lead = (size, self.window) if self.window else (size,)
        specs: dict[Any, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        for leaf, (_, field) in enumerate(self.rows.spec.schema.leaves):
            specs[leaf] = (*lead, *((field.stack,) if field.stack > 1 else ()), *field.shape), field.dtype
        dtypes = {"discount": "f4", "weights": "f4", "probabilities": "f8", "place_indices": "i8", "indices": "i8"}
        for name in self.extras:
            shape = (size,) if name in PER_EXAMPLE else lead
            if name == "discount":
                shape += self.rows.spec.schema.discount_shape(self.rows.spec.n_step) or ()
            specs[name] = shape, np.dtype(dtypes.get(name, "?"))
        return specs

    def _tree(self, leaves: dict[Any, Any], is_split: bool = True) -> dict[str, Any]:
        if self.flat:
            return {name: leaves[key] for name, key in self.flat}
        number = iter(range(len(self.rows.spec.schema.leaves)))

        def build(node: Node) -> Any:
            if isinstance(node, Field):
                return leaves[next(number)]
            if isinstance(node, tuple):
                return tuple(build(part) for part in node)
            return {name: build(part) for name, part in node.items()}

        batch = {name: build(node) for name, node in self.rows.spec.schema.fields.items()}
        batch |= {name: leaves[name] for name in self.extras}
        if is_split and "discount" in batch:
            batch["discount"] = self.rows.spec.schema.split_discounts(batch["discount"])
        return batch

    # ---- batch after batch ------------------------------------------------------------------------------------

    def stream(
        self, rows: HostRows, size: int, prefetch: int, timeout: float | None, change: BatchMap | None = None
    ) -> Iterator[dict[str, Any]]:
        """``rows``: the feed's own, kept alive by its stream. ``change`` runs in the caller's stream: it may use
        tensors that were computed there, and the memory that it allocates belongs to that stream."""
        return ahead(self, _Lane(self, rows, size, change), prefetch, timeout)

    def left(self, ticket: Any) -> Any:
        """The serials of a batch that was begun and will not be ended. Waits for its copy, which reads pinned memory of
        the ticket."""
        if not isinstance(ticket, tuple) and ticket.event is not None:
            ticket.event.synchronize()
        serials = ticket[1] if isinstance(ticket, tuple) else ticket.sent.arrays["indices"]
        return np.array(serials) if self.settles else None


class Arrived(NamedTuple):
    """A batch, or the parts of one, in the memory of the side stream."""

    batch: Any
    blocks: tuple[Any, ...]  # the memory behind it
    events: tuple[Any, ...]  # to wait for before it is used in another stream
    handles: Any  # to be settled


class Lane(Protocol):
    """Batches that ``ahead`` transfers."""

    def begin(self, timeout: float | None, side: Any) -> Any: ...  # a ticket; ``side`` is the current stream
    def end(self, ticket: Any) -> Arrived: ...
    def left(self, ticket: Any) -> Any: ...  # the handles of a ticket that was not ended
    def finish(self, batch: Any) -> dict[str, Any]: ...  # in the caller's stream
    def settle(self, handles: Any, delivered: bool) -> None: ...


class _Lane:
    """Batches of one size from one table."""

    def __init__(self, feed: GpuFeed, rows: HostRows, size: int, change: BatchMap | None) -> None:
        self.feed, self.rows, self.size, self.change = feed, rows, size, change
        self.left = feed.left

    def begin(self, timeout: float | None, side: Any) -> Any:
        return self.feed.begin(self.size, timeout, side)

    def end(self, ticket: Any) -> Arrived:
        batch, blocks, event, serials = self.feed.end(ticket)
        return Arrived(batch, blocks, () if event is None else (event,), serials if self.feed.settles else None)

    def finish(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch if self.change is None else self.change(batch)

    def settle(self, handles: Any, delivered: bool) -> None:
        if handles is not None and not self.rows.closed:
            self.rows.settle(handles, delivered)


def ahead(feed: GpuFeed, lane: Lane, prefetch: int, timeout: float | None) -> Iterator[dict[str, Any]]:
    """Batches that are transferred ahead, in a CUDA stream of their own on the device of ``feed``."""
    torch = feed.torch
    side = torch.cuda.Stream(feed.device)
    queue: collections.deque[Any] = collections.deque()
    arrived: Arrived | None = None  # the batch that is about to be returned

    def fill() -> None:
        while len(queue) < prefetch:
            try:
                queue.append(lane.begin(0, side))
            except NotReady:  # it is not our turn yet
                return

    try:
        while True:
            with feed.there():
                here = feed.stream_here()
                torch.cuda.set_stream(side)  # torch.cuda.stream() does the same by way of more objects
                try:
                    if not queue:
                        queue.append(lane.begin(timeout, side))
                        fill()
                    arrived = lane.end(queue[0])
                    queue.popleft()
                    if queue:  # else the next call waits as long as it may
                        fill()
                finally:
                    torch.cuda.set_stream(here)
            for event in arrived.events:  # what the GPU reads itself has been waited for
                here.wait_event(event)
            for block in arrived.blocks:  # the side stream's memory, used in another
                block.record_stream(here)
            batch = lane.finish(arrived.batch)
            handles, arrived = arrived.handles, None
            lane.settle(handles, True)
            yield batch
    finally:
        side.synchronize()
        if arrived is not None:
            lane.settle(arrived.handles, False)
        for ticket in queue:
            lane.settle(lane.left(ticket), False)


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in _tensors(part)]
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    return [value]
