"""Rows in a table of the engine: in memory of this process, in shared memory or in a file."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from .. import _core
from ..address import identity, to_address, to_path
from ..arrays import prepare, read_leaf
from ..checks import whole
from ..errors import SchemaError, StorageError
from ..files.save_path import save_path
from ..sampling import (
    Linear,
    Prioritized,
    Sampler,
    beta_numbers,
    read_alpha,
    read_beta,
    sampler_from_plain,
    sampler_to_plain,
)
from ..settings import achieved_leaf, copies_goals, engine_settings, index_setup
from ..views import View
from .bell import Bell, batches
from .feed import GpuFeed
from .goals import put_drawn_goals
from .handles import as_handles, lap_positions
from .priorities import read_update
from .protocol import Batch, BatchMap, Drawn
from .ragged import spread
from .spec import RowSpec, damaged
from .tensors import as_host_arrays, read_device, torch_converter
from .write_back import fit_values, leaf_values

__all__ = ["HostRows", "Writer"]

Result = TypeVar("Result")


class HostRows:
    """Rows in a table of the engine. Threads may call anything at once; so may processes that share a file.

    A forked child does not use its parent's table: it opens the file again at its first call.
    """

    device: Any = None
    is_remote = False

    def __init__(self, table: _core.Table, face: str, address: str | None, view: View | None = None) -> None:
        spec = RowSpec.of_table(table, face, view)
        schema, hindsight = spec.schema, spec.hindsight
        try:
            tree = spec.batch_tree(weights=spec.is_prioritized, relabelled=hindsight is not None)
            table.bind(tree, engine_settings(schema, spec.sampler, spec.view, spec.pace))
        except SchemaError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise damaged(face) from None
        self.spec, self.address = spec, address
        self.where = address or "memory"
        if hindsight is not None:
            leaf = achieved_leaf(schema, hindsight)
            field = schema.leaves[leaf][1]
            shape = (field.stack, *field.shape) if field.stack > 1 else field.shape
            self._goals = shape, field.dtype, copies_goals(schema, hindsight), leaf
        self._splits = spec.splits_discounts
        # Whether the engine's own sample() does all that a draw takes.
        self._is_plain = spec.pace is None and hindsight is None and not schema.ragged and not self._splits
        self.dtypes = tuple((name, field.dtype) for name, field in schema.leaves)
        self._feeds: dict[str, GpuFeed | None] = {}
        self._to_tensors: dict[str, Callable[[Batch], Batch]] = {}  # by the names of the CPU that were given so far
        self.registered: Any = None  # the rows' memory, where a GPU reads it
        self.served_at: str | None = None  # the address under which it was opened, if a server has it open too
        path = None if address is None else to_path(address, "open()")
        self._identity = None if path is None else identity(path)  # the file that close(unlink=True) may remove
        self._opening = threading.RLock()  # around the first writer, and a forked child's own table
        self._writer: _core.Writer | None = None
        self._bell = Bell(table)
        self.table = table
        if address is not None:
            _shared.add(self)

    @classmethod
    def make(cls, where: str, spec: RowSpec, storage: str | None, exist: str) -> tuple[HostRows, bool]:
        """Rows in memory, or in a file that is created, replaced or attached to, and whether they are new."""
        path = None if storage is None else to_path(storage, f"{where}: storage")
        if storage is not None and path is None:
            raise StorageError(f"{where}: storage: expected 'shm://name' or 'file://path', got {storage!r}")
        address = None if storage is None else to_address(storage, where)
        # Not Path.exists(), which raises where we may not enter the folder.
        if path is not None and exist == "error" and os.path.exists(path):
            raise StorageError(
                f"{where}: {storage!r} exists; open it with sharpwave.open(), remove it with 'sharpwave rm {storage}', "
                "or give exist='replace' or exist='attach'"
            )

        def create() -> _core.Table:
            return _core.Table.create(
                fields=spec.schema.engine_fields(),
                capacity=spec.capacity,
                width=spec.num_envs or 1,
                writers=spec.writers,
                seed=spec.seed,
                checksums=address is not None and address.startswith("file://"),
                index=index_setup(spec.sampler, spec.view),
                description=spec.to_json(),
                path="" if path is None else str(path),
                replace=exist == "replace",
            )

        try:
            if path is not None and exist == "attach":
                table, is_new = _attach_or_create(path, create)
            else:
                table, is_new = create(), True
            if is_new:
                return cls(table, spec.face, address, spec.view), True
        except SchemaError as error:
            raise SchemaError(f"{where}: {error}") from None
        try:
            rows = cls(table, spec.face, address, spec.view)
        except SchemaError:
            raise SchemaError(f"{where}: exist='attach': {storage!r} has another view") from None
        there = rows.spec
        is_alike = (there.schema, there.capacity, there.num_envs) == (spec.schema, spec.capacity, spec.num_envs)
        is_drawn_alike = (sampler_to_plain(there.sampler), there.pace) == (sampler_to_plain(spec.sampler), spec.pace)
        if not is_alike or not is_drawn_alike:
            rows.close(False)
            what = "sampler or pace" if is_alike else "schema, capacity or num_envs"
            raise SchemaError(f"{where}: exist='attach': {storage!r} has another {what}")
        return rows, False

    @property
    def open_options(self) -> dict[str, Any]:
        return {}

    @property
    def closed(self) -> bool:
        return self.table.closed

    # ---- forked children --------------------------------------------------------------------------------------

    def _leave_to_parent(self) -> None:
        if not self.table.closed:
            for name in ("table", "_writer", "_bell"):
                self.__dict__.pop(name, None)
            self._opening = threading.RLock()  # another thread of the parent may have held it

    if not TYPE_CHECKING:  # to a type checker every name would be one

        def __getattr__(self, name: str) -> Any:
            if name not in ("table", "_writer", "_bell") or self.__dict__.get("address") is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            with self._opening:
                if name not in self.__dict__:
                    path = to_path(self.address, "open()")
                    self.__init__(_core.Table.attach(str(path)), self.spec.face, self.address, self.spec.view)
            return self.__dict__[name]

    # ---- writing ----------------------------------------------------------------------------------------------

    def adder(self) -> Callable[..., Any]:
        """The ``add`` of a writer that all threads of this object share."""
        if self._writer is None:
            with self._opening:
                if self._writer is None:
                    self._writer = self.new_writer()
        return self._writer.add

    def write_with(self, writer: _core.Writer) -> _core.Writer:
        """Makes it the writer of ``adder``, which ``close`` closes."""
        self._writer = writer
        return writer

    def writer(self, window: int | None) -> Writer:
        return Writer(self.new_writer())

    def new_writer(self, client: bytes | None = None) -> _core.Writer:
        """``client``: the token of a stream of a server's client, whose rows are numbered."""
        return _core.Writer(self.table, *reading_of(self.spec), client)

    # ---- reading ----------------------------------------------------------------------------------------------

    def drawer(self) -> Callable[..., Batch]:
        """``sample`` without a step in Python where one table and its batches are all that it needs."""
        return cast(Callable[..., Batch], _core.Draw(self.table, self.sample).sample) if self._is_plain else self.sample

    def sample(
        self,
        batch_size: int,
        *,
        out: Batch | None = None,
        device: Any = None,
        timeout: float | None = None,
        deliver: bool = True,
        odds: Any = None,
    ) -> Batch:
        """See ``ReplayBuffer.sample``. ``odds``: an array of two float64, for the last two numbers of a ``Drawn``."""
        if timeout is None and self._is_plain and deliver:
            if device is None:
                return self.table.sample(batch_size, out)
            # Tensors over the batch's own memory need only their conversion.
            to_tensors = self._to_tensors.get(device if type(device) is str else str(device))
            if to_tensors is not None:
                if out is None:
                    return to_tensors(self.table.sample(batch_size))
                if self.table.sample_tensors(batch_size, out):
                    return out
        if out is not None and self.spec.schema.ragged:
            raise SchemaError("sample(): out: the lengths of a ragged field differ from batch to batch; give no out=")
        if out is not None and self._splits:
            raise SchemaError(
                "sample(): out: the discounts of agents by name are parts of one new array; give no out=, or one array "
                "for all agents: reward=Field((agents,)), done=Field((agents,), 'bool')"
            )
        if device is not None and out is None and (feed := self.feed(device)) is not None:
            size = whole("sample()", "batch_size", batch_size, self.spec.least_batch, 2**31 - 1)
            self.spec.check_batch("sample()", size)
            return feed.sample(size, timeout, deliver, odds)[0]
        convert = None if device is None else torch_converter(device, self.dtypes)  # before anything is drawn
        if convert is not None and convert.is_host:
            self._to_tensors[str(device)] = convert
        arrays = out if out is None or device is None else as_host_arrays(out, device)
        batch = self.fill(batch_size, arrays, timeout, deliver, odds)
        if out is not None:
            return out
        batch = spread(self.spec, batch)
        return batch if convert is None else convert(batch)

    def draw(
        self, batch_size: int, *, out: Batch | None = None, device: Any = None, timeout: float | None = None
    ) -> Drawn:
        odds = np.empty(2)
        feed = None if device is None or out is not None else self.feed(device)
        if feed is not None:
            batch, serials = feed.sample(batch_size, timeout, False, odds)
        else:
            batch = self.sample(batch_size, out=out, device=device, timeout=timeout, deliver=False, odds=odds)
            serials = _copied(batch["indices"]) if self.spec.settles else None
        return Drawn(batch, serials, *odds.tolist())

    def fill(self, batch_size: int, arrays: Any, timeout: float | None, deliver: bool, odds: Any = None) -> Batch:
        """A draw into these arrays, or into new ones; ragged fields are padded until ``spread``."""
        if self.spec.hindsight is None:
            return self.table.sample_in_turn(batch_size, arrays, timeout, deliver, odds)
        return self._fill_goals(batch_size, arrays, timeout, deliver, odds)

    def _fill_goals(self, batch_size: int, arrays: Any, timeout: float | None, deliver: bool, odds: Any) -> Batch:
        drawn = self.draw_goals(whole("sample()", "batch_size", batch_size), arrays, timeout, odds)
        try:
            put_drawn_goals(self.spec, self._goals[2], drawn)
        except BaseException:  # out of the user's functions: the caller does not get the batch
            self.settle(drawn["batch"]["indices"], False)
            raise
        if deliver:
            self.settle(drawn["batch"]["indices"], True)
        batch: Batch = drawn["batch"]
        return batch

    def draw_goals(self, count: int, arrays: Any, timeout: float | None, odds: Any) -> dict[str, Any]:
        """A batch for hindsight, with what its functions need. Its rows stay reserved until ``settle``."""
        shape, dtype, _, leaf = self._goals
        n_step = self.spec.n_step
        goals = np.empty((count, *shape), dtype)
        after = np.empty((count, n_step, *shape), dtype) if n_step > 1 else None
        steps = np.empty(count, np.uint32) if n_step > 1 else None
        batch, rows, desired, achieved = self.table.sample_goals(
            count, arrays, timeout, goals, after, steps, leaf, odds
        )
        return {
            "batch": batch, "rows": rows, "desired": desired, "achieved": achieved, "after": after, "steps": steps,
        }  # fmt: skip

    def settle(self, handles: Any, delivered: bool) -> None:
        self.table.settle(handles, delivered)

    def batches(
        self, batch_size: int, prefetch: int, device: Any, timeout: float | None, change: BatchMap | None = None
    ) -> Iterator[Batch]:
        def draw(left: float) -> tuple[Batch, Any]:
            batch = self.sample(batch_size, device=device, timeout=left, deliver=False)
            return batch, _copied(batch["indices"])

        return batches(draw, self.settle, prefetch, timeout, change)

    def stream(
        self, batch_size: int, prefetch: int, device: Any, timeout: float | None, change: BatchMap | None = None
    ) -> Iterator[Batch]:
        feed = None if device is None else self.feed(device)
        if feed is None:
            return self.batches(batch_size, prefetch, device, timeout, change)
        return feed.stream(self, batch_size, prefetch, timeout, change)

    async def in_turn(self, attempt: Callable[[], Result], timeout: float | None) -> Result:
        return await self._bell.in_turn(attempt, timeout)

    async def in_thread(self, call: Callable[[], Result]) -> Result:
        import asyncio

        return await asyncio.to_thread(call)

    def feed(self, device: Any) -> GpuFeed | None:
        """The transfer of batches to a GPU; None if the device is no GPU."""
        key = str(device)
        if key not in self._feeds:
            _, target = read_device("sample(): device", device)
            with _making_feeds:
                if key not in self._feeds:
                    self._feeds[key] = GpuFeed(self, device) if target.type == "cuda" else None
        return self._feeds[key]

    # ---- by handle --------------------------------------------------------------------------------------------

    def handles(self) -> Any:
        return self.table.live_serials()

    def positions(self, handles: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        stats = self.table.stats()
        return lap_positions(handles, int(stats["blocks"] * stats["block_rows"]), self.spec.capacity)

    def get(self, handles: Any, device: Any = None) -> Batch:
        batch = spread(self.spec, self.table.read(as_handles("get()", handles), False))
        return batch if device is None else torch_converter(device, self.dtypes)(batch)

    def rows(self, batch_size: int, ids: bool = False) -> Iterator[Batch]:
        handles = self.handles()
        streams = _core.Streams(self.table) if ids else None
        parts = (handles[start : start + batch_size] for start in range(0, len(handles), batch_size))
        read = (spread(self.spec, self.table.read(part, True, streams)) for part in parts)
        return (batch for batch in read if len(batch["indices"]))

    def episodes(self, partial: bool, unfinished: bool) -> Iterator[Batch]:
        found = _core.Episodes(self.table)

        def given() -> Iterator[Batch]:
            while (episode := found.next(partial, unfinished)) is not None:
                handles, stream, first = episode
                batch = spread(self.spec, self.table.read(handles, True))
                if len(batch["indices"]) == len(handles):  # else rows were overwritten during the copy
                    yield batch | {"stream": stream, "episode": first}

        return given()

    def update_priorities(self, handles: Any, priorities: Any, mask: Any, timeout: float | None) -> dict[str, Any]:
        done = None if mask is not None else self.table.update_at_once(handles, priorities, timeout)
        if done is not None:
            return done
        serials, values = read_update(self.spec.view, handles, priorities, mask)
        applied, stale = self.table.update_priorities(serials, values, timeout)
        return {"applied": applied, "stale": stale}

    def write(self, handles: Any, fields: dict[str, Any], skips_stale: bool, timeout: float | None) -> dict[str, Any]:
        leaves, values = leaf_values(self.spec.schema, fields)
        done = self.table.write(handles, leaves, values, skips_stale, timeout)
        if done is not None:
            return done
        done = self.table.write(*fit_values(self.spec.schema, handles, fields), skips_stale, timeout)
        assert done is not None
        return done

    def tune(self, alpha: float | None, beta: float | Linear | None) -> None:
        new_alpha = None if alpha is None else read_alpha("tune()", alpha)
        new_beta = None if beta is None else read_beta("tune()", beta)
        if new_alpha is not None:
            self.table.set_alpha(new_alpha)
        if new_beta is not None:
            self.table.set_beta(*beta_numbers(new_beta))

    # ---- facts and life ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.table.size()

    def sampler(self) -> Sampler:
        built = self.spec.sampler
        if not isinstance(built, Prioritized):
            return built
        exponents = self.table.exponents()
        steps, end = int(exponents.beta_steps), exponents.beta_end
        beta = [exponents.beta_start, end, steps] if steps else end
        return sampler_from_plain(sampler_to_plain(built) | {"alpha": exponents.alpha, "beta": beta})

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = {"storage": self.where, **self.table.stats()}
        if self.served_at is not None:
            stats["server"] = {"address": self.served_at, "is_direct": True}
        feeds = {name: feed.describe() for name, feed in self._feeds.items() if feed is not None}
        return stats | {"feeds": feeds} if feeds else stats

    def huge_page_bytes(self) -> int:
        return self.table.huge_page_bytes()

    def clear(self) -> None:
        self.table.clear()

    def save(self, path: Any, incremental: bool) -> None:
        self.table.save(str(save_path(path)), incremental)

    def flush(self) -> None:
        self.table.flush()

    def close(self, unlink: bool) -> None:
        path = None if self.address is None else to_path(self.address, "close()")
        # Before the table is closed: until then no other file can have the same inode number.
        if unlink and path is not None and self._identity is not None and identity(path) == self._identity:
            path.unlink(missing_ok=True)
            self._identity = None
        for feed in self._feeds.values():
            if feed is not None:
                feed.close()
        if self.registered is not None:
            self.registered.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self.table.close()


def reading_of(spec: RowSpec) -> tuple[Any, Any, bool, bool]:
    """How the engine reads the arguments of ``add``: who words its errors, who reads the rarest values, whether rows
    may come as (steps, num_envs), and whether only one at a time."""
    one_row = None if spec.num_envs is not None else spec.order_reason
    careful = functools.partial(prepare, spec.schema, spec.capacity, spec.num_envs, one_row, spec.is_prioritized)
    return careful, functools.partial(read_leaf, spec.schema), spec.num_envs is not None, one_row is not None


class Writer:
    """A stream of rows of its own into a buffer; ``add`` is the buffer's. Made by ``buf.writer()``."""

    add: Callable[..., Any]

    def __init__(self, writer: _core.Writer) -> None:
        self._writer = writer
        self.add = writer.add

    def flush(self, timeout: float | None = None) -> None:
        """Returns when every row that was added through this writer is in the buffer: at once, unless a server has
        it."""

    def close(self) -> None:
        """Ends open episodes as truncated; another writer may then be opened. A second call does nothing."""
        self._writer.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_shared: weakref.WeakSet[HostRows] = weakref.WeakSet()
_making_feeds = threading.Lock()  # memory is registered once


def _after_fork() -> None:
    for rows in list(_shared):
        rows._leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _attach_or_create(path: Path, create: Callable[[], _core.Table]) -> tuple[_core.Table, bool]:
    """The table under a name, and whether it was made here. Several processes may call it at once: files appear
    complete, so a process that finds another one's file attaches to it."""
    while True:
        if path.exists():
            try:
                return _core.Table.attach(str(path)), False
            except StorageError:
                if path.exists():
                    raise
        try:
            return create(), True
        except StorageError:
            if not path.exists():
                raise


def _copied(serials: Any) -> np.ndarray[Any, Any]:
    """On the host, for ``settle``: the caller may write to those of the batch."""
    copy: np.ndarray[Any, Any] = serials.cpu().numpy().copy() if hasattr(serials, "cpu") else serials.copy()
    return copy
