"""RemoteRows: the rows of a table of a server. A third implementation of ``rows.protocol.Rows``."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from ..checks import seconds, whole
from ..errors import BufferFull, NotReady, SchemaError
from ..files.save_path import read_save_path
from ..rows.bell import batches as drawn_ahead
from ..rows.goals import put_drawn_goals
from ..rows.handles import as_handles
from ..rows.priorities import read_update
from ..rows.protocol import Batch, BatchMap, Drawn
from ..rows.ragged import spread
from ..rows.spec import RowSpec
from ..rows.tensors import as_host_arrays, torch_converter
from ..rows.write_back import fit_values
from ..sampling import Linear, Sampler, beta_numbers, read_alpha, read_beta, sampler_from_plain
from ..settings import copies_goals
from ..views import View
from .aside import Aside
from .batch_layout import BatchLayout
from .document import decode
from .message import HEAD_BYTES, SAMPLE_HOLDS, SAMPLE_TELLS_ODDS, Verb
from .pipeline import Pipeline
from .remote_writer import RemoteWriter
from .session import OpenTable, Session

__all__ = ["RemoteRows"]

Result = TypeVar("Result")
_PAUSES = 0.002, 0.05


class RemoteRows:
    """Rows at a server. Arrays of a batch are views of the message that brought them.

    A forked child makes a session of its own at its first call.
    """

    device: Any = None
    is_remote = True

    def __init__(self, session: Session, table: OpenTable, view: View | None, options: dict[str, Any]) -> None:
        facts = table.facts
        self.spec = RowSpec.of_description(
            facts["description"],
            facts["face"],
            view,
            facts["capacity"],
            facts["writers"],
            facts["seed"],
            facts["width"],
        )
        self.session, self.table, self._options = session, table, options
        self.address: str | None = f"{session.server}/{table.name}"
        self.where = self.address
        self._dtypes = tuple((name, field.dtype) for name, field in self.spec.schema.leaves)
        self._tree = self.spec.batch_tree(weights=self.spec.is_prioritized, relabelled=False)
        self.layout: BatchLayout | None = None
        if facts["batch"] is not None:
            self.layout = BatchLayout(self._tree.new_batch(1))
            if self.layout.describe() != facts["batch"]:
                raise SchemaError(
                    f"open(): {self.address}: the server's batches have other arrays than this version of sharpwave "
                    "makes of the same view; install the same version on both sides"
                )
        hindsight = self.spec.hindsight
        self._splits = self.spec.splits_discounts
        self._places_goals = hindsight is not None and copies_goals(self.spec.schema, hindsight)
        self.reservations = itertools.count(1)
        # Ends of reservations that the server is to be told, as SETTLE has them; the next request of a pipeline does.
        self.settled: dict[int, None] = {}
        self._aside = Aside()
        self._opening = threading.Lock()
        self._writer: RemoteWriter | None = None
        self._writers: weakref.WeakSet[RemoteWriter] = weakref.WeakSet()  # those with a window
        _all.add(self)

    @property
    def open_options(self) -> dict[str, Any]:
        return self._options

    @property
    def closed(self) -> bool:
        return self.session.closed

    def leave_to_parent(self) -> None:
        self._opening, self._writer, self._writers = threading.Lock(), None, weakref.WeakSet()

    # ---- writing ----------------------------------------------------------------------------------------------------

    def adder(self) -> Callable[..., Any]:
        """The ``add`` of a writer that all threads of this object share."""
        if self._writer is None:
            with self._opening:
                if self._writer is None:
                    self.session.check_open("add()")
                    self.table.check("add()")
                    self._writer = RemoteWriter(self.session, self.table, self.spec, None, opens=False)
        return self._writer.add

    def writer(self, window: int | None) -> RemoteWriter:
        self.session.check_open("writer()")
        self.table.check("writer()")
        with contextlib.suppress(BufferFull):
            return self._open_writer(window)
        # Perhaps all are taken by writers of this process that are garbage. They are collected in another thread: test
        # runners and debuggers keep errors of destructors with the frames below, and these would keep the next writer.
        collecting = threading.Thread(target=gc.collect, name="sharpwave-collect")
        collecting.start()
        collecting.join()
        self.session.dropped.close()
        return self._open_writer(window)

    def _open_writer(self, window: int | None) -> RemoteWriter:
        writer = RemoteWriter(self.session, self.table, self.spec, window)
        if window is not None:
            self._writers.add(writer)
        return writer

    # ---- reading ----------------------------------------------------------------------------------------------------

    def drawer(self) -> Callable[..., Batch]:
        return self.sample

    def sample(
        self,
        batch_size: int,
        *,
        out: Batch | None = None,
        device: Any = None,
        timeout: float | None = None,
        deliver: bool = True,
    ) -> Batch:
        """See ``ReplayBuffer.sample``."""
        if device is None and out is None and deliver and type(batch_size) is int and timeout is None:
            return self._fetch(batch_size, None, 0, 0)[0]
        return self._draw(batch_size, out, device, timeout, holds=not deliver, tells=False)[0]

    def _draw(
        self, batch_size: Any, out: Any, device: Any, timeout: Any, *, holds: bool, tells: bool
    ) -> tuple[Batch, int, Any]:
        where = "sample()"
        limit = seconds(where, timeout)
        count = whole(where, "batch_size", batch_size, self.spec.least_batch, 2**31 - 1)
        convert = None if device is None else torch_converter(device, self._dtypes)
        arrays = out
        if out is not None:
            if self.layout is None:
                raise SchemaError(
                    "sample(): out: this view's batches differ in size from one to the next; give no out="
                )
            arrays = out if device is None else as_host_arrays(out, device)
            self._tree.check_out(count, arrays)
        number = next(self.reservations) if holds and self.spec.settles else 0
        flags = (SAMPLE_HOLDS if number else 0) | (SAMPLE_TELLS_ODDS if tells else 0)
        batch, odds = self._fetch(count, limit, flags, number)
        if out is not None:
            _copy_into(arrays, batch)
            return out, number, odds
        return batch if convert is None else convert(batch), number, odds

    def _fetch(self, count: int, timeout: float | None, flags: int, number: int) -> tuple[Batch, Any]:
        if not 0 < count < 2**31:
            whole("sample()", "batch_size", count, self.spec.least_batch, 2**31 - 1)
        reply = self.session.exchange(
            "sample()", Verb.SAMPLE, None, self.table, stream=_Number(number) if number else None,
            argument=count, flags=flags, timeout=timeout,
        )  # fmt: skip
        return self.read_batch(reply, count, number, bool(flags & SAMPLE_TELLS_ODDS))

    def read_batch(self, reply: Any, count: int, number: int, tells: bool) -> tuple[Batch, Any]:
        """The batch in a reply to SAMPLE, and the two numbers behind it if they were asked for."""
        if self.layout is None:
            found = decode(reply.body)
            odds = found.pop("odds", None)
            if self.spec.hindsight is None:
                return found["batch"], odds
            try:
                put_drawn_goals(self.spec, self._places_goals, found)
            except BaseException:  # out of the user's functions: the caller does not get the batch
                if number:
                    self.settle(number, False)
                raise
            batch: Batch = spread(self.spec, found["batch"])
            return batch, odds
        batch = self.layout.over(reply, HEAD_BYTES, count)
        if self._splits:
            batch = spread(self.spec, batch)
        return batch, np.frombuffer(reply.body[-16:], np.float64) if tells else None

    def draw(
        self, batch_size: int, *, out: Batch | None = None, device: Any = None, timeout: float | None = None
    ) -> Drawn:
        batch, number, odds = self._draw(batch_size, out, device, timeout, holds=True, tells=True)
        return Drawn(batch, number or None, *odds.tolist())

    def settle(self, handles: Any, delivered: bool) -> None:
        if handles:
            message = bytearray(HEAD_BYTES) + (2 * handles + delivered).to_bytes(8, "little")
            self.session.exchange("sample()", Verb.SETTLE, message, self.table)

    def batches(
        self, batch_size: int, prefetch: int, device: Any, timeout: float | None, change: BatchMap | None = None
    ) -> Iterator[Batch]:
        convert = None if device is None else torch_converter(device, self._dtypes)
        pipeline = Pipeline(self, batch_size, prefetch)
        if convert is None and change is None:
            return pipeline.batches(timeout)

        def draw(left: float) -> tuple[Batch, Any]:
            batch, number = pipeline.take(left)
            return batch if convert is None else convert(batch), number

        return pipeline.closing(drawn_ahead(draw, pipeline.settle, prefetch, timeout, change))

    def stream(
        self, batch_size: int, prefetch: int, device: Any, timeout: float | None, change: BatchMap | None = None
    ) -> Iterator[Batch]:
        return self.batches(batch_size, prefetch, device, timeout, change)

    async def in_turn(self, attempt: Callable[[], Result], timeout: float | None) -> Result:
        is_over = threading.Event()

        def try_again() -> Result:
            deadline, (pause, longest) = None if timeout is None else time.monotonic() + timeout, _PAUSES
            while True:
                try:
                    return attempt()
                except NotReady:
                    if is_over.is_set() or (deadline is not None and time.monotonic() >= deadline):
                        raise
                is_over.wait(pause)
                pause = min(2 * pause, longest)

        try:
            return await self.in_thread(try_again)
        finally:
            is_over.set()

    async def in_thread(self, call: Callable[[], Result]) -> Result:
        """Cancelled, the call is given up within a second. An add is then there or not, as after a timeout."""
        is_over = threading.Event()

        def begin() -> Result:
            self.session.channel().is_over = is_over
            return call()

        try:
            return await self._aside.run(begin)
        finally:
            is_over.set()

    # ---- by handle --------------------------------------------------------------------------------------------------

    def call(self, verb: str, timeout: float | None = None, **args: Any) -> Any:
        return self.session.call(self.table, verb, args, timeout=timeout)

    def handles(self) -> Any:
        return self.call("handles")

    def positions(self, handles: Any) -> Any:
        return self.call("positions", handles=np.asarray(handles, np.int64))

    def get(self, handles: Any, device: Any = None) -> Batch:
        batch: Batch = self.call("get", handles=as_handles("get()", handles))
        return batch if device is None else torch_converter(device, self._dtypes)(batch)

    def rows(self, batch_size: int, ids: bool = False) -> Iterator[Batch]:
        return self._iterate(what="rows", batch_size=batch_size, ids=ids)

    def episodes(self, partial: bool, unfinished: bool) -> Iterator[Batch]:
        return self._iterate(what="episodes", partial=partial, unfinished=unfinished)

    def _iterate(self, **options: Any) -> Iterator[Batch]:
        number = self.call("iterate", **options)["iterator"]

        def given() -> Iterator[Batch]:
            is_over = False
            try:
                while (batch := self.call("next", iterator=number)) is not None:
                    yield batch
                is_over = True
            finally:
                if not is_over and not self.closed:
                    self.call("next", timeout=0, iterator=number, ends=True)

        return given()

    def update_priorities(self, handles: Any, priorities: Any, mask: Any, timeout: float | None) -> dict[str, Any]:
        serials, values = read_update(self.spec.view, handles, priorities, mask)
        message = bytearray(HEAD_BYTES) + serials.tobytes() + values.tobytes()
        limit = seconds("update_priorities()", timeout)
        reply = self.session.exchange(
            "update_priorities()", Verb.UPDATE, message, self.table, argument=len(serials), timeout=limit
        )
        applied, stale = np.frombuffer(reply.body, np.uint64).tolist()
        return {"applied": applied, "stale": stale}

    def write(self, handles: Any, fields: dict[str, Any], skips_stale: bool, timeout: float | None) -> dict[str, Any]:
        serials, leaves, values = fit_values(self.spec.schema, handles, fields)
        done: dict[str, Any] = self.call(
            "write", seconds("write()", timeout), handles=serials, leaves=leaves, values=values, skips_stale=skips_stale
        )
        return done

    def tune(self, alpha: float | None, beta: float | Linear | None) -> None:
        new_alpha = None if alpha is None else read_alpha("tune()", alpha)
        new_beta = None if beta is None else list(beta_numbers(read_beta("tune()", beta)))
        self.call("tune", alpha=new_alpha, beta=new_beta)

    # ---- facts and life ---------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        size: int = self.call("len")
        return size

    def sampler(self) -> Sampler:
        return sampler_from_plain(self.call("sampler"))

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.call("stats")
        return stats | {"storage": self.address, "server": self.session.stats()}

    def huge_page_bytes(self) -> int:
        size: int = self.call("huge_page_bytes")
        return size

    def clear(self) -> None:
        self.call("clear")

    def save(self, path: Any, incremental: bool) -> None:
        self.call("save", path=read_save_path(path), incremental=incremental)

    def flush(self) -> None:
        self.call("flush")

    def close(self, unlink: bool) -> None:
        if self.closed:
            return
        try:
            for writer in list(self._writers):  # rows that are on their way arrive
                writer.__exit__(*sys.exc_info())  # but an error that leaves the buffer's block is not kept waiting
            if sys.exc_info()[0] is None:
                self.session.dropped.close()
            if unlink:
                self.call("remove")
        finally:
            self.session.close()


class _Number:
    """The number of a reservation, in the place of a stream's."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def _copy_into(out: Any, batch: Any) -> None:
    for key in batch if isinstance(batch, dict) else range(len(batch)):
        if isinstance(batch[key], (dict, tuple)):
            _copy_into(out[key], batch[key])
        else:
            np.copyto(out[key], batch[key])


_all: weakref.WeakSet[RemoteRows] = weakref.WeakSet()


def _after_fork() -> None:
    for rows in list(_all):
        rows.leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
