"""ReplayBuffer: transitions in, batches out."""

from __future__ import annotations

import functools
import json
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .. import _core
from ..address import identity, to_address, to_path
from ..arrays import prepare, refuse_masked
from ..arrays import priorities as read_priorities
from ..checks import check_settable, seconds, told, truth, whole
from ..errors import ClosedError, SchemaError, StorageError
from ..pace import Pace
from ..sampling import (
    KINDS,
    Linear,
    Prioritized,
    Sampler,
    Uniform,
    beta_numbers,
    read_alpha,
    read_beta,
    sampler_from_plain,
)
from ..schema import Node, Schema, from_space, transitions
from ..settings import check_together, engine_settings, index_setup
from ..views import Hindsight, Transitions, View, Windows, view_from_plain
from . import waiting
from .gpu_feed import GpuFeed
from .torch_batch import as_host_arrays, read_device, torch_converter

__all__ = ["ReplayBuffer", "Writer", "as_serials"]


class ReplayBuffer:
    """A ring of transitions: written in order, drawn at random.

    Threads may add and sample at once. Batches are copies: they never change under you.

    Args:
        capacity: Rows kept; the oldest goes first.
        schema: Fields of a row by name: ``Field``s, or dicts and tuples of them. ``reward`` (float32) and ``done``
            (bool) are added where it lacks them, ``next_obs`` as ``next_obs=`` says.
        obs_shape, obs_dtype, action_shape, action_dtype: The short form of a schema.
        next_obs: ``"stored"`` keeps a copy in the row; ``"derived"`` takes it from the row after: half the
            memory, the same batches; None has none.
        sampler: Which rows are drawn: ``Uniform()``, the default, ``Prioritized()``, ``Recent(n)``, ``Shuffle()``,
            ``Fifo()`` or ``Lifo()``.
        view: What rows become; ``Transitions()`` by default, ``Transitions(n_step=3)`` for n-step returns,
            ``Windows(length)`` for sequences.
        pace: Lets adding and sampling wait for each other; None, the default, never waits.
        device: None keeps rows on the host and gives NumPy arrays; ``"cpu"`` gives tensors; ``"cuda"`` keeps rows on
            the GPU, where adding, drawing and gathering wait for nothing.
        storage: None is memory of this process; ``"shm://name"`` and ``"file://path"`` make a file with the whole
            state in it, which ``sharpwave.open`` attaches to.
        exist: What to do where that file exists: ``"error"``, ``"replace"`` it, or ``"attach"`` to it.
        num_envs: Environments that step together. Given, an ``add`` brings (steps, num_envs) rows in time order.
        writers: How many writers may be open at once; never divides the capacity.
        seed: Of the draws; None takes one from the system (``stats()["seed"]`` tells it).

    Example:
        >>> import numpy as np, sharpwave as sw
        >>> buf = sw.ReplayBuffer(1000, obs_shape=(4,), action_shape=(2,), seed=0)
        >>> buf.add(np.zeros(4), np.ones(2), 1.0, np.zeros(4), False)
        >>> buf.sample(32)["obs"].shape
        (32, 4)
    """

    _face = "ReplayBuffer"  # whose rows a file holds
    _device: Any = None  # where batches go that are asked for without a device

    if not TYPE_CHECKING:  # to a type checker the arguments are those of __init__

        def __new__(cls, *args: Any, device: Any = None, **options: Any) -> ReplayBuffer:
            if (
                cls is ReplayBuffer
                and device is not None
                and read_device(f"{cls._face}(): device", device)[1].type != "cpu"
            ):
                from .device_replay import DeviceReplayBuffer

                return object.__new__(DeviceReplayBuffer)
            return object.__new__(cls)

    def __init__(
        self,
        capacity: int,
        *,
        device: Any = None,
        schema: Mapping[str, Node] | None = None,
        obs_shape: tuple[int, ...] | int | None = None,
        obs_dtype: Any = "float32",
        action_shape: tuple[int, ...] | int = (),
        action_dtype: Any = "float32",
        next_obs: Literal["stored", "derived"] | None = "stored",
        sampler: Sampler | None = None,
        view: View | None = None,
        pace: Pace | None = None,
        storage: str | None = None,
        exist: Literal["error", "replace", "attach"] = "error",
        num_envs: int | None = None,
        writers: int = 64,
        seed: int | None = None,
    ) -> None:
        where = f"{self._face}()"
        capacity = whole(where, "capacity", capacity, 1)
        num_envs = None if num_envs is None else whole(where, "num_envs", num_envs, 1)
        writers = whole(where, "writers", writers, 1)
        seed = secrets.randbits(63) if seed is None else whole(where, "seed", seed, 0, 2**63 - 1)
        sampler = Uniform() if sampler is None else sampler
        if not isinstance(sampler, tuple(KINDS.values())):
            raise SchemaError(f"{where}: sampler: expected {', '.join(f'{kind}()' for kind in KINDS)}, got {sampler!r}")
        view = Transitions() if view is None else view
        if not isinstance(view, (Transitions, Windows)):
            raise SchemaError(f"{where}: view: expected Transitions() or Windows(), got {view!r}")
        check_together(where, sampler, view)
        if pace is not None and not isinstance(pace, Pace):
            raise SchemaError(f"{where}: pace: expected Pace() or None, got {pace!r}")
        if pace is not None:
            pace.check(where, capacity)
        self._device = device
        if not isinstance(exist, str) or exist not in ("error", "replace", "attach"):
            raise SchemaError(f"{where}: exist: expected 'error', 'replace' or 'attach', got {told(exist)}")
        built = self._build_schema(
            schema,
            obs_shape=obs_shape,
            obs_dtype=obs_dtype,
            action_shape=action_shape,
            action_dtype=action_dtype,
            next_obs=next_obs,
        )
        path = None if storage is None else to_path(storage, f"{where}: storage")
        if storage is not None and path is None:
            raise StorageError(f"{where}: storage: expected 'shm://name' or 'file://path', got {storage!r}")
        given, storage = storage, None if storage is None else to_address(storage, where)
        if path is not None and exist == "error" and path.exists():
            raise StorageError(
                f"{where}: {given!r} exists; open it with sharpwave.open(), remove it with 'sharpwave rm {given}', "
                "or give exist='replace' or exist='attach'"
            )
        description = {
            "face": self._face,
            "schema": built.to_plain(),
            "num_envs": num_envs,
            "sampler": sampler.to_plain(),
            "view": view.to_plain(),
            "pace": None if pace is None else pace.to_plain(),
        }
        if isinstance(view, Transitions) and view.hindsight is not None:
            view.hindsight.leaf(built)  # before anything is made

        def create() -> _core.Table:
            return _core.Table.create(
                fields=built.engine_fields(),
                capacity=capacity,
                width=num_envs or 1,
                writers=writers,
                seed=seed,
                checksums=storage is not None and storage.startswith("file://"),
                index=index_setup(sampler, view),
                description=json.dumps(description),
                path="" if path is None else str(path),
                replace=exist == "replace",
            )

        try:
            if path is not None and exist == "attach":
                table, is_new = _attach_or_create(path, create)
            else:
                table, is_new = create(), True
            if is_new:
                self._adopt(table, storage, view)
        except SchemaError as error:
            raise SchemaError(f"{where}: {error}") from None
        self._is_creator = is_new
        if is_new:
            return
        try:
            self._adopt(table, storage, view)
        except SchemaError:
            raise SchemaError(f"{where}: exist='attach': {given!r} has another view") from None
        same = self._schema == built and (self.capacity, self.num_envs) == (capacity, num_envs)
        built_alike = (self._sampler.to_plain(), self._pace) == (sampler.to_plain(), pace)
        if not same or not built_alike:
            self.close()
            what = "schema, capacity or num_envs" if not same else "sampler or pace"
            raise SchemaError(f"{where}: exist='attach': {given!r} has another {what}")

    def _build_schema(self, fields: Any, **options: Any) -> Schema:
        return transitions(fields, **options)

    def _adopt(self, table: _core.Table, address: str | None, view: View | None) -> None:
        """Takes a table as it is; everything about the buffer but the functions of its view is read from it."""
        try:
            description = json.loads(table.description)
            self._schema = Schema.from_plain(description["schema"])
            self._num_envs: int | None = description["num_envs"]
            self._sampler = sampler_from_plain(description["sampler"])
            self._pace = None if description["pace"] is None else Pace(*description["pace"])
            self._view = view_from_plain(description["view"], view)
            windows = self._view if isinstance(self._view, Windows) else None
            steps = self._view if isinstance(self._view, Transitions) else Transitions()
            tree = self._schema.tree(
                discount=steps.n_step > 1,
                weights=isinstance(self._sampler, Prioritized),
                relabelled=steps.hindsight is not None,
                window=windows.places if windows else 0,
            )
            settings = engine_settings(self._schema, self._sampler, self._view, self._pace)
            if [field.name for field in self._schema.engine_fields()] != table.field_names:
                raise ValueError  # the names stand in the fields' records too
        except SchemaError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise StorageError(f"open(): the description is damaged, or not of a {self._face}") from None
        try:
            table.bind(tree, settings)
        except ValueError as error:
            if isinstance(error, SchemaError):
                raise
            raise StorageError(f"open(): the description is damaged, or not of a {self._face}") from None
        # What the engine's own sample() does not do alone.
        self._hindsight = steps.hindsight
        if steps.hindsight is not None:
            field = self._schema.leaves[steps.hindsight.leaf(self._schema)][1]
            shape = (field.stack, *field.shape) if field.stack > 1 else field.shape
            placed = steps.hindsight.puts_as_is(self._schema)
            self._goals = shape, field.dtype, steps.n_step, steps.gamma, placed
        self._is_plain = self._pace is None and self._hindsight is None and not self._schema.ragged
        self._bell = waiting.Bell(table)
        self._feeds: dict[str, GpuFeed | None] = {}
        self._registered: Any = None  # the rows' memory, where a GPU reads it
        if description.get("face") != self._face or (self._num_envs or 1) != table.width:
            raise StorageError(f"open(): the table was not written by a {self._face} of the Python package")
        self._dtypes = tuple((name, field.dtype) for name, field in self._schema.leaves)
        self._capacity: int = table.capacity
        self._address = address
        path = None if address is None else to_path(address, "open()")
        self._identity = None if path is None else identity(path)  # the file that close(unlink=True) may remove
        self._opening = threading.RLock()  # around the first writer, and a forked child's own table
        self._writer: _core.Writer | None = None
        self._table = table
        if address is not None:
            _shared.add(self)

    def _leave_to_parent(self) -> None:
        """In a forked child: the table is the parent's. The child opens its own when it is first asked for."""
        if not self._table.closed:
            for name in ("_table", "_writer", "_bell", "add"):
                self.__dict__.pop(name, None)
            self._opening = threading.RLock()  # another thread of the parent may have held it

    if not TYPE_CHECKING:  # to a type checker every name could be set

        def __setattr__(self, name: str, value: Any) -> None:
            check_settable(self, name)
            object.__setattr__(self, name, value)

    if not TYPE_CHECKING:  # to a type checker every name would be one

        def __getattr__(self, name: str) -> Any:
            if name not in ("_table", "_writer", "_bell") or self.__dict__.get("_address") is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            with self._opening:
                if name not in self.__dict__:
                    path = to_path(self._address, "open()")
                    self._adopt(_core.Table.attach(str(path)), self._address, self._view)
            return self.__dict__[name]

    @classmethod
    def _from_table(cls, table: _core.Table, address: str | None, view: View | None = None) -> ReplayBuffer:
        buffer = cls.__new__(cls)
        buffer._adopt(table, address, view)
        return buffer

    @classmethod
    def for_env(cls, env: Any, capacity: int, **options: Any) -> ReplayBuffer:
        """A buffer whose rows hold what a Gymnasium environment gives and takes.

        A vector environment sets ``num_envs``. Dtypes are the spaces' own.

        Args:
            env: A Gymnasium environment, single or vectorised.
            capacity: Rows kept, over all environments.
            **options: Passed on to the constructor.
        """
        if hasattr(env, "single_observation_space"):
            options.setdefault("num_envs", env.num_envs)
            spaces = env.single_observation_space, env.single_action_space
        elif hasattr(env, "observation_space"):
            spaces = env.observation_space, env.action_space
        else:
            raise SchemaError(f"for_env(): env: expected a Gymnasium environment, got {told(env)}")
        schema = {
            "obs": from_space(spaces[0], "observation_space"),
            "action": from_space(spaces[1], "action_space"),
        }
        return cls(capacity, schema={**schema, **options.pop("schema", {})}, **options)

    # ---- writing ------------------------------------------------------------------------------------------------

    def add(self, *args: Any, **kwargs: Any) -> None:
        """Adds one row, or n rows with a leading axis; returns when they can be drawn.

        Values come in the order ``obs, action, reward, next_obs, done`` followed by further fields, or by name.
        ``terminated=`` is another name of ``done=``; ``truncated=True`` ends an episode without claiming termination.
        ``mask=`` (one truth value a row) leaves out rows where it is False; their step keeps its place.
        ``timeout=`` is how many seconds to wait where the pace says so, for a ``save`` that holds adds back and for
        other threads that add through the same buffer: None for ever, 0 not at all.

        Raises:
            SchemaError: A value does not fit its field. Nothing was written.
            NotReady: It did not become its turn in time. Nothing was written.
        """
        writer = self._own_writer()
        if type(self).add is ReplayBuffer.add:
            # From now on ``buf.add`` is the writer's own method: the call goes straight into the engine, which saves
            # half of its time. A subclass that overrides add() keeps its own.
            self.__dict__["add"] = writer.add
        writer.add(*args, **kwargs)

    def _own_writer(self) -> _core.Writer:
        if self._writer is None:
            with self._opening:
                if self._writer is None:
                    self._writer = self._new_writer()
        return self._writer

    def _new_writer(self) -> _core.Writer:
        one_row = None if self._num_envs is not None else self._reason_for_order()
        by_priority = isinstance(self._sampler, Prioritized)
        careful = functools.partial(prepare, self._schema, self._capacity, self._num_envs, one_row, by_priority)
        return _core.Writer(self._table, careful, self._num_envs is not None, one_row is not None)

    def _reason_for_order(self) -> str | None:
        """Why it matters which row follows which; None where it does not."""
        if self._schema.derives_next:
            return "next_obs='derived'"
        if self._schema.needs_order:
            return "stack"
        if isinstance(self._view, Windows):
            return "a window"
        if self._view.n_step > 1:
            return "n_step"
        return None if self._hindsight is None else "hindsight"

    def writer(self) -> Writer:
        """A writer of its own for a thread: threads that share one take turns, and their rows mix.

        Raises:
            BufferFull: All ``writers=`` are taken; the message names the processes that hold them.
        """
        return Writer(self._new_writer())

    # ---- reading ------------------------------------------------------------------------------------------------

    def sample(
        self,
        batch_size: int,
        *,
        out: dict[str, Any] | None = None,
        device: Any = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Draws examples as the buffer's sampler and view say.

        Args:
            batch_size: How many.
            out: A batch of the same size to fill instead of new arrays; it is also what is returned.
            device: None gives NumPy arrays; ``"cpu"`` torch tensors over the same memory; another device a copy there.
            timeout: Seconds to wait where the pace says so, and for another process that holds the index; None waits
                for ever, 0 not at all. (The index is held for microseconds; 0 waits up to 0.05 s for that.)

        Returns:
            A dict with an array for each field, and under ``"indices"`` the serials of the rows drawn: numbers that
            name one row for ever. ``"discount"`` besides with n-step examples, ``"weights"`` and ``"probabilities"``
            with priorities, ``"mask"``, ``"valid"`` and ``"first"`` with windows, ``"relabelled"`` with hindsight.

        Raises:
            NotReady: There is nothing to draw, or it did not become its turn in time, or another process kept the
                index until the timeout; the message names it.
        """
        device = self._device if device is None else device
        if device is None and timeout is None and self._is_plain:
            return self._table.sample(batch_size, out)
        return self._draw(batch_size, out, device, timeout, True)

    def _draw(
        self, batch_size: int, out: dict[str, Any] | None, device: Any, timeout: float | None, deliver: bool
    ) -> dict[str, Any]:
        if out is not None and self._schema.ragged:
            raise SchemaError("sample(): out: the lengths of a ragged field differ from batch to batch; give no out=")
        if device is not None and out is None and (feed := self._feed(device)) is not None:
            size = whole("sample()", "batch_size", batch_size, max(1, getattr(self._sampler, "newest", 0)), 2**31 - 1)
            return feed.sample(size, timeout, deliver)
        convert = None if device is None else torch_converter(device, self._dtypes)  # before anything is drawn
        arrays = out if out is None or device is None else as_host_arrays(out, device)
        batch = self._fill(batch_size, arrays, timeout, deliver)
        if out is not None:
            return out
        batch = self._spread(batch)
        return batch if convert is None else convert(batch)

    def _fill(self, batch_size: int, arrays: Any, timeout: float | None, deliver: bool) -> dict[str, Any]:
        if self._hindsight is None:
            return self._table.sample_in_turn(batch_size, arrays, timeout, deliver)
        return self._draw_goals(self._hindsight, batch_size, arrays, timeout, deliver)

    def _feed(self, device: Any) -> GpuFeed | None:
        """What brings batches to a GPU; None where the device is none."""
        key = str(device)
        if key not in self._feeds:
            _, target = read_device("sample(): device", device)
            with _making_feeds:
                if key not in self._feeds:
                    self._feeds[key] = GpuFeed(self, device) if target.type == "cuda" else None
        return self._feeds[key]

    def _draw_goals(
        self, hindsight: Hindsight, batch_size: int, arrays: Any, timeout: float | None, deliver: bool
    ) -> dict[str, Any]:
        rows = whole("sample()", "batch_size", batch_size, 1)
        shape, dtype, n_step, gamma, placed = self._goals
        goals = np.empty((rows, *shape), dtype)
        after = np.empty((rows, n_step, *shape), dtype) if n_step > 1 else None
        steps = np.empty(rows, np.uint32) if n_step > 1 else None
        batch = self._table.sample_in_turn(rows, arrays, timeout, False, (goals, after, steps))
        try:
            hindsight.relabel(batch, n_step, gamma, goals, after, steps, placed)
        except BaseException:  # out of the user's functions: the batch reaches nobody
            self._table.settle(batch["indices"], False)
            raise
        if deliver:
            self._table.settle(batch["indices"], True)
        return batch

    async def sample_async(
        self,
        batch_size: int,
        *,
        out: dict[str, Any] | None = None,
        device: Any = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """``sample`` for an event loop, which goes on while the pace lets this call wait."""
        if self._pace is None:
            return self.sample(batch_size, out=out, device=device, timeout=timeout)
        return await self._bell.in_turn(lambda: self._draw(batch_size, out, device, 0, True), timeout)

    async def add_async(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> None:
        """``add`` for an event loop, which goes on while the pace lets this call wait."""
        if self._pace is None:
            return self.add(*args, **kwargs) if timeout is None else self.add(*args, timeout=timeout, **kwargs)
        return await self._bell.in_turn(lambda: self.add(*args, timeout=0, **kwargs), timeout)

    def batches(
        self, batch_size: int, *, prefetch: int = 1, device: Any = None, timeout: float | None = None
    ) -> Iterator[dict[str, Any]]:
        """Batches without end, drawn ahead by a thread while you learn from the last one.

        A batch counts as sampled when it is handed out. Leaving the loop gives back what was drawn and not handed out.

        Args:
            batch_size: Examples in each.
            prefetch: How many may be ready.
            device: As in ``sample``.
            timeout: Seconds to wait for one; None waits for ever.
        """
        device = self._device if device is None else device
        size = whole("batches()", "batch_size", batch_size, 1)
        depth = whole("batches()", "prefetch", prefetch, 1)
        timeout = seconds("batches()", timeout)
        return waiting.batches(
            lambda left: self._draw(size, None, device, left, False),
            lambda serials, delivered: self._table.settle(serials, delivered),
            depth,
            timeout,
        )

    def stream(
        self, batch_size: int, *, device: Any = None, prefetch: int = 2, timeout: float | None = None
    ) -> Iterator[dict[str, Any]]:
        """Batches without end on a GPU, each on its way while you learn from the one before.

        The GPU reads the rows out of the host's memory, in a stream of its own beside yours; no thread is needed. Where
        it may not, they go by way of pinned memory: ``stats()["feeds"]`` says which and why.

        Args:
            batch_size: Examples in each.
            device: The GPU; without one this is ``batches``.
            prefetch: How many may be on their way.
            timeout: Seconds to wait for one; None waits for ever.
        """
        device = self._device if device is None else device
        size = whole("stream()", "batch_size", batch_size, max(1, getattr(self._sampler, "newest", 0)), 2**31 - 1)
        depth = whole("stream()", "prefetch", prefetch, 1)
        timeout = seconds("stream()", timeout)
        feed = None if device is None else self._feed(device)
        if feed is None:
            return self.batches(size, prefetch=depth, device=device, timeout=timeout)
        return feed.stream(self, size, depth, timeout)

    def _spread(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Values of different lengths as the user asked for them: behind each other, or padded with a mask."""
        if not self._schema.ragged:
            return batch
        for leaf, lengths in zip(self._schema.ragged, batch.pop("lengths"), strict=True):
            path, field = self._schema.leaves[leaf]
            *nest, last = path.split("/")
            holder: Any = batch
            for key in nest:
                holder = holder[int(key)] if isinstance(holder, tuple) else holder[key]
            values = holder[last]
            lead = values.shape[: values.ndim - len(field.shape)]  # examples, or examples and places
            mask = (np.arange(field.shape[0]) < lengths[:, None]).reshape(*lead, field.shape[0])
            if field.ragged == "padded":
                holder[last] = {"values": values, "mask": mask}
            else:
                offsets = np.zeros(len(lengths) + 1, np.int64)
                np.cumsum(lengths, out=offsets[1:])
                holder[last] = {"values": values[mask], "offsets": offsets}
        return batch

    def update_priorities(
        self, indices: Any, priorities: Any, mask: Any = None, *, timeout: float | None = None
    ) -> dict[str, int]:
        """Gives rows new priorities.

        Args:
            indices: The serials that ``sample`` gave, as an array, a tensor or a list.
            priorities: One number each; signs do not count, so TD errors may be passed as they are. Where a serial
                comes twice the last one holds. With ``Windows`` also one a place, shape (windows, places).
            mask: With one a place: which of them were learnt from, ``batch["mask"]``.
            timeout: Seconds to wait for another process that holds the index; None waits for ever.

        Returns:
            ``{"applied": n, "stale": m}``: m rows had left the buffer since and were passed over.

        Raises:
            SchemaError: A number is NaN or infinite, or the lengths differ. Nothing was changed.
            NotReady: Another process kept the index until the timeout; the message names it. Nothing was changed.
        """
        if not isinstance(self._sampler, Prioritized):
            raise SchemaError("update_priorities(): rows are drawn uniformly; give the buffer sampler=Prioritized()")
        where = "update_priorities()"
        if type(indices) is not _ARRAY or type(priorities) is not _ARRAY:
            refuse_masked(f"{where}: indices", indices)
            refuse_masked(f"{where}: priorities", priorities)
        done = None if mask is not None else self._table.update_at_once(indices, priorities, timeout)
        if done is not None:
            return done
        if isinstance(self._view, Windows) and np.ndim(priorities) == 2:
            priorities = self._view.mix(where, priorities, mask)
        elif mask is not None:
            raise SchemaError(f"{where}: mask: expected with Windows() and one error a place, shape (windows, places)")
        serials = as_serials(where, indices)
        values = read_priorities(where, "priorities", priorities, (len(serials),))
        applied, stale = self._table.update_priorities(serials, values, timeout)
        return {"applied": applied, "stale": stale}

    def tune(self, *, alpha: float | None = None, beta: float | Linear | None = None) -> None:
        """Changes the sampler's exponents from now on, for everybody who has the buffer open.

        A new alpha holds for every row at once, as if the buffer had been built with it. A ``Linear`` beta counts all
        calls of ``sample``, from the first.
        """
        if not isinstance(self._sampler, Prioritized):
            raise SchemaError("tune(): rows are drawn uniformly; give the buffer sampler=Prioritized()")
        new_alpha = None if alpha is None else read_alpha("tune()", alpha)
        new_beta = None if beta is None else read_beta("tune()", beta)
        if new_alpha is not None:
            self._table.set_alpha(new_alpha)
        if new_beta is not None:
            self._table.set_beta(*beta_numbers(new_beta))

    def get(self, indices: Any) -> dict[str, Any]:
        """Reads rows by the serials that ``sample`` gave, with ``"truncated"`` besides.

        Raises:
            StaleHandle: One of them is no longer in the buffer.
        """
        return self._spread(self._table.read(as_serials("get()", indices), False))

    def rows(self, batch_size: int = 4096) -> Iterator[dict[str, Any]]:
        """All rows, oldest first, in batches like those of ``get``. Rows overwritten meanwhile are left out."""
        batch_size = whole("rows()", "batch_size", batch_size, 1)
        serials = self._table.live_serials()
        parts = (serials[start : start + batch_size] for start in range(0, len(serials), batch_size))
        batches = (self._spread(self._table.read(part, True)) for part in parts)
        return (batch for batch in batches if len(batch["indices"]))

    # ---- facts --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._table.size()

    @property
    def capacity(self) -> int:
        """Rows kept at most."""
        return self._capacity

    @property
    def is_full(self) -> bool:
        """Whether ``len`` has reached the capacity. Steps that were masked out keep their places and do not count."""
        return len(self) == self._capacity

    @property
    def num_envs(self) -> int | None:
        """Environments that step together, or None."""
        return self._num_envs

    @property
    def sampler(self) -> Sampler:
        """Which rows are drawn, with the exponents that hold now."""
        if not isinstance(self._sampler, Prioritized):
            return self._sampler
        exponents = self._table.exponents()
        steps, end = int(exponents.beta_steps), exponents.beta_end
        beta = [exponents.beta_start, end, steps] if steps else end
        now = self._sampler.to_plain() | {"alpha": exponents.alpha, "beta": beta}
        return sampler_from_plain(now)

    @property
    def view(self) -> View:
        """What rows become."""
        return self._view

    @property
    def pace(self) -> Pace | None:
        """How adding and sampling wait for each other, or None."""
        return self._pace

    @property
    def schema(self) -> dict[str, Node]:
        """Fields by name, in the order of positional arguments."""
        return dict(self._schema.fields)

    def stats(self) -> dict[str, Any]:
        """Counts and sizes, as plain numbers: what a logger wants. ``"feeds"``: how batches reach each GPU.

        ``"huge_page_bytes"`` may be up to a minute old: the kernel takes milliseconds to count them.
        """
        stats = {"storage": self._address or "memory", **self._table.stats()}
        feeds = {name: feed.describe() for name, feed in self._feeds.items() if feed is not None}
        return stats | {"feeds": feeds} if feeds else stats

    def __repr__(self) -> str:
        state = "closed" if self._table.closed else f"{len(self)} of {self._capacity} rows"
        return f"<ReplayBuffer {self._address or 'in memory'}: {state}, fields {', '.join(self._schema.names)}>"

    # ---- life ---------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forgets every row. Serials go on; the seed's stream goes on."""
        self._table.clear()

    def save(self, path: str | os.PathLike[str], *, incremental: bool = False) -> None:
        """Writes a snapshot (rows, priorities, counters, random stream) to a file, whole or not at all.

        ``sharpwave.open(path)`` loads it. Others may add and sample meanwhile: what is saved is one instant of theirs.
        An older snapshot at ``path`` is replaced; anything else is not.

        Args:
            path: Where to; folders are made.
            incremental: Where there is a snapshot of this buffer already, writes only what has changed since, to
                ``<path>.delta``, which ``open`` takes as well. Once half of the rows have changed, a whole one again.

        Raises:
            StorageError: It cannot be written there. The older snapshot is as it was.
            NotReady: Rows are written over faster than they can be copied.
        """
        target = Path(os.fspath(path))
        if to_path(str(path), "save()") is not None:
            raise StorageError(f"save(): expected a path, got {str(path)!r}; leave out the 'file://'")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"save(): cannot make the folder {str(target.parent)!r}: {error.strerror}") from None
        self._table.save(str(target), truth("save()", "incremental", incremental))

    def flush(self) -> None:
        """Returns when every row added so far is on the disk. Nothing to do for memory."""
        self._table.flush()

    def close(self, unlink: bool = False) -> None:
        """Ends open episodes as truncated and lets go of the storage. A second call does nothing.

        Args:
            unlink: Also removes the file behind ``shm://`` or ``file://``, if that is still the one that was opened.
        """
        truth("close()", "unlink", unlink)
        path = None if self._address is None else to_path(self._address, "close()")
        # Before the table is let go of: until then no other file can have the same number.
        if unlink and path is not None and self._identity is not None and identity(path) == self._identity:
            path.unlink(missing_ok=True)
            self._identity = None
        for feed in self._feeds.values():
            if feed is not None:
                feed.close()
        if self._registered is not None:
            self._registered.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self.__dict__.pop("add", None)
        self._table.close()

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._table.closed:
            raise ClosedError("pickle: the buffer is closed")
        if self._address is None:
            raise TypeError(
                "pickle: a buffer in memory belongs to one process; give storage='shm://name' to share it, or save() it"
            )
        from .opening import open

        return functools.partial(open, view=self._view), (self._address,)


class Writer:
    """A stream of rows of its own into a buffer; ``add`` is the buffer's. Made by ``buf.writer()``."""

    def __init__(self, writer: _core.Writer) -> None:
        self._writer = writer
        self.add = writer.add

    def close(self) -> None:
        """Ends open episodes as truncated and gives the place back. A second call does nothing."""
        self._writer.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


_ARRAY = np.ndarray
_shared: weakref.WeakSet[ReplayBuffer] = weakref.WeakSet()
_making_feeds = threading.Lock()  # memory is registered once


def _after_fork() -> None:
    for buffer in list(_shared):
        buffer._leave_to_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _attach_or_create(path: Path, create: Callable[[], _core.Table]) -> tuple[_core.Table, bool]:
    """The table under a name, and whether it was made here. Any number of processes may ask at once: files appear
    whole, so one that could not be made because another process was first can be attached to."""
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


def as_serials(where: str, indices: Any) -> np.ndarray[Any, Any]:
    refuse_masked(f"{where}: indices", indices)
    try:
        array = np.asarray(indices.detach().cpu() if hasattr(indices, "detach") else indices)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SchemaError(
            f"{where}: indices: expected a list of whole numbers, got {type(indices).__name__} ({error})"
        ) from None
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise SchemaError(f"{where}: indices: expected a list of whole numbers, got {array.dtype} of {array.shape}")
    return np.ascontiguousarray(array, np.int64)
