"""ReplayBuffer: transitions in, batches out."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from ..checks import check_settable, one_of, random_seed, seconds, told, truth, whole, whole_steps
from ..errors import ClosedError, SchemaError
from ..pace import Pace
from ..rows.batch_map import read_map
from ..rows.bell import sample_far, without_blocking
from ..rows.device import DeviceRows
from ..rows.host import HostRows, Writer
from ..rows.protocol import Rows
from ..rows.spec import RowSpec
from ..rows.tensors import read_device
from ..sampling import Linear, Sampler, Uniform
from ..schema import Node, from_space, single_frames, transitions
from ..views import Transitions, View

__all__ = ["ReplayBuffer", "spec_of"]


class ReplayBuffer:
    """A ring of transitions: written in order, drawn at random.

    Threads may add and sample at once. Batches are copies: they never change under you.

    Args:
        capacity: Rows kept; the oldest goes first. Rounded up to a multiple of ``num_envs``, with a ``UserWarning``;
            ``buf.capacity`` tells it.
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
            the GPU, where adding and sampling do not wait for the device.
        storage: None is memory of this process; ``"shm://name"`` and ``"file://path"`` make a file with the whole
            state in it, which ``sharpwave.open`` attaches to.
        exist: What to do if that file exists: ``"error"``, ``"replace"`` it, or ``"attach"`` to it.
        num_envs: Environments that step together. If given, an ``add`` has (steps, num_envs) rows in time order.
        writers: How many writers may be open at once. They share the whole capacity.
        seed: Of the draws; None takes one from the system (``stats()["seed"]`` tells it).

    Example:
        >>> import numpy as np, sharpwave as sw
        >>> buf = sw.ReplayBuffer(1000, obs_shape=(4,), action_shape=(2,), seed=0)
        >>> buf.add(np.zeros(4), np.ones(2), 1.0, np.zeros(4), False)
        >>> buf.sample(32)["obs"].shape
        (32, 4)
    """

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
        where = "ReplayBuffer()"
        spec = spec_of(
            capacity,
            schema=schema,
            obs_shape=obs_shape,
            obs_dtype=obs_dtype,
            action_shape=action_shape,
            action_dtype=action_dtype,
            next_obs=next_obs,
            sampler=sampler,
            view=view,
            pace=pace,
            num_envs=num_envs,
            writers=writers,
            seed=seed,
        )
        one_of(where, "exist", exist, ("error", "replace", "attach"))
        if device is None or read_device(f"{where}: device", device)[1].type == "cpu":
            rows: Rows = HostRows.make(where, spec, storage, exist)[0]
        else:
            rows, device = DeviceRows(where, spec, device, storage), None
        self._take(rows, device)

    def _take(self, rows: Rows, device: Any) -> None:
        """``device``: of batches for calls without ``device=``; None is the device of the rows."""
        self._rows, self._device = rows, device
        if device is None and type(self).sample is ReplayBuffer.sample:
            # ``buf.sample`` is the engine's function, or the method of the rows, which saves calls. A subclass that
            # overrides sample() keeps its own.
            self.__dict__["sample"] = rows.drawer()
        if rows.address is not None:
            _shared.add(self)

    @classmethod
    def _over(cls, rows: Rows, device: Any = None) -> ReplayBuffer:
        """A buffer over rows that exist."""
        buffer = cls.__new__(cls)
        buffer._take(rows, device)
        return buffer

    if not TYPE_CHECKING:  # to a type checker every name could be set

        def __setattr__(self, name: str, value: Any) -> None:
            check_settable(self, name)
            object.__setattr__(self, name, value)

    @classmethod
    def for_env(
        cls,
        env: Any,
        capacity: int,
        *,
        stack: int = 1,
        padding: Literal["repeat", "zero"] = "repeat",
        **options: Any,
    ) -> ReplayBuffer:
        """A buffer whose rows hold what a Gymnasium environment gives and takes.

        A vector environment sets ``num_envs``. Dtypes are the spaces' own.

        Args:
            env: A Gymnasium environment, single or vectorised.
            capacity: Rows kept, over all environments.
            stack: The environment stacks so many frames: they are the first axis of its observations. A row stores one
                frame, as ``Field(stack=)`` says.
            padding: What its stacks have before the first frame of an episode, as ``Field(padding=)`` says.
            **options: Passed on to the constructor.
        """
        if hasattr(env, "single_observation_space"):
            options.setdefault("num_envs", env.num_envs)
            spaces = env.single_observation_space, env.single_action_space
        elif hasattr(env, "observation_space"):
            spaces = env.observation_space, env.action_space
        else:
            raise SchemaError(f"for_env(): env: expected a Gymnasium environment, got {told(env)}")
        obs = from_space(spaces[0], "observation_space")
        if stack != 1 or padding != "repeat":
            if "obs" in options.get("schema", {}):
                raise SchemaError("for_env(): expected stack= or schema= with 'obs', got both; leave one out")
            obs = single_frames(obs, "observation_space", stack, padding)
        schema = {
            "obs": obs,
            "action": from_space(spaces[1], "action_space"),
        }
        return cls(capacity, schema={**schema, **options.pop("schema", {})}, **options)

    # ---- writing ------------------------------------------------------------------------------------------------

    def add(self, *args: Any, **kwargs: Any) -> Any:
        """Adds one row, or n rows with a leading axis; returns when they can be drawn.

        Values come in the order ``obs, action, reward, next_obs, done`` followed by further fields, or by name.
        ``terminated=`` is another name of ``done=``; ``truncated=True`` ends an episode without claiming termination.
        ``mask=`` (one truth value for each row) leaves out rows where it is False; their steps still take space.
        ``priority=`` (one number for each row) is the first priority of the rows, with ``Prioritized``; the absolute
        value is used. Rows without it get the priority of ``new_rows``.
        ``timeout=`` is how many seconds to wait for the pace, for a ``save`` that holds adds back and for other
        threads that add through the same buffer: None for ever, 0 not at all.
        ``return_indices=True`` returns the serials of the rows.

        Returns:
            None. With ``return_indices=True`` an int64 array of shape (rows,) like ``batch["indices"]``: the serials
            of the rows in the order in which they were given, -1 for rows that ``mask=`` leaves out. ``get`` and
            ``update_priorities`` take it. One row gives an array of one number. Rows on a GPU give a tensor there, and
            the call does not wait for the device.

        Raises:
            SchemaError: A value does not fit its field. Nothing was written.
            NotReady: The timeout passed. Nothing was written.
        """
        add = self._rows.adder()
        if type(self).add is ReplayBuffer.add:
            # From now on ``buf.add`` is the engine's function, which halves the time of a call. A subclass that
            # overrides add() keeps its own.
            self.__dict__["add"] = add
        return add(*args, **kwargs)

    def writer(self, *, window: int | None = None) -> Writer:
        """A new writer, for one thread. Threads that share a writer wait for each other, and their rows mix.

        Args:
            window: How many rows may be on their way to a server: ``add`` returns before the server has them, and
                ``flush()`` waits for all. None waits in every ``add``. A buffer of this machine has every row when
                ``add`` returns, whatever the window.

        Raises:
            BufferFull: All ``writers=`` are taken; the message names the processes that hold them.
        """
        writer: Writer = self._rows.writer(None if window is None else whole("writer()", "window", window))
        return writer

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
            timeout: Seconds to wait for the pace, and for another process that holds the index; None waits for ever,
                0 not at all. (The index is held for microseconds; 0 waits up to 0.05 s for that.)

        Returns:
            A dict with an array for each field, and under ``"indices"`` the serials of the rows drawn: numbers that
            name one row for ever. Also ``"discount"`` with n-step examples, ``"weights"`` and ``"probabilities"`` with
            priorities, ``"mask"``, ``"valid"`` and ``"first"`` with windows, ``"relabelled"`` with hindsight;
            ``"truncated"`` and ``"place_indices"`` if the view asks for them.

        Raises:
            NotReady: There is nothing to draw, or the pace or another process that holds the index kept the call
                waiting until the timeout; the message says which.
        """
        device = self._device if device is None else device
        return self._rows.sample(batch_size, out=out, device=device, timeout=timeout)

    async def sample_async(
        self,
        batch_size: int,
        *,
        out: dict[str, Any] | None = None,
        device: Any = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """``sample`` for an event loop, which continues while this call waits for the pace."""
        if self._rows.is_remote:
            limit, target = seconds("sample()", timeout), self._device if device is None else device
            return await sample_far(self._rows, batch_size, out, target, limit)
        if self.pace is None:
            limit = seconds("sample()", timeout)
            return await without_blocking(
                self._rows, lambda left: self.sample(batch_size, out=out, device=device, timeout=left), limit
            )
        return await self._rows.in_turn(lambda: self.sample(batch_size, out=out, device=device, timeout=0), timeout)

    async def add_async(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """``add`` for an event loop, which continues while this call waits for the pace."""
        if self._rows.is_remote:
            return await self._rows.in_thread(lambda: self.add(*args, timeout=timeout, **kwargs))
        if self.pace is None:
            return self.add(*args, **kwargs) if timeout is None else self.add(*args, timeout=timeout, **kwargs)
        return await self._rows.in_turn(lambda: self.add(*args, timeout=0, **kwargs), timeout)

    def batches(
        self,
        batch_size: int,
        *,
        prefetch: int = 1,
        device: Any = None,
        timeout: float | None = None,
        map: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """An endless iterator over batches. A thread draws the next ones while you learn from the last one.

        A batch counts as sampled when the iterator returns it. Leaving the loop gives back the batches that were drawn
        and not returned. An error ends the iterator; call ``batches`` again for another one.

        Args:
            batch_size: Examples in each.
            prefetch: Batches that are drawn ahead, at most.
            device: As in ``sample``.
            timeout: Seconds to wait for one; None waits for ever.
            map: A function that takes a batch and returns the dict that the iterator returns in its place, for example
                with augmented images. The thread calls it. It may change the batch in place and keep it: no later batch
                uses the same memory. If it raises, ``next`` raises the same error, and the batch is given back.
        """
        device = self._device if device is None else device
        size = whole("batches()", "batch_size", batch_size, self._rows.spec.least_batch, 2**31 - 1)
        self._rows.spec.check_batch("batches()", size)
        depth = whole("batches()", "prefetch", prefetch, 1)
        timeout = seconds("batches()", timeout)
        return self._rows.batches(size, depth, device, timeout, read_map("batches()", map))

    def stream(
        self,
        batch_size: int,
        *,
        device: Any = None,
        prefetch: int = 2,
        timeout: float | None = None,
        map: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """An endless iterator over batches on a GPU. The next ones are transferred while you learn from the last one.

        The GPU reads the rows from the host's memory in a CUDA stream of its own; no thread is needed. If it cannot,
        batches are copied through pinned memory: ``stats()["feeds"]`` says which and why.

        Args:
            batch_size: Examples in each.
            device: The GPU; without one this is ``batches``.
            prefetch: Batches that are transferred ahead, at most.
            timeout: Seconds to wait for one; None waits for ever.
            map: As in ``batches``. On a GPU it is called when the batch is returned, in the current CUDA stream: it may
                use any tensor of the learner.
        """
        device = self._device if device is None else device
        size = whole("stream()", "batch_size", batch_size, self._rows.spec.least_batch, 2**31 - 1)
        self._rows.spec.check_batch("stream()", size)
        depth = whole("stream()", "prefetch", prefetch, 1)
        timeout = seconds("stream()", timeout)
        return self._rows.stream(size, depth, device, timeout, read_map("stream()", map))

    def update_priorities(
        self, indices: Any, priorities: Any, mask: Any = None, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """Gives rows new priorities.

        Args:
            indices: The serials that ``sample`` gave, or ``add`` with ``return_indices=True``, as an array, a tensor
                or a list. -1 names no row and counts as stale.
            priorities: One number for each, shape (n,) or (n, 1); the absolute value is used, so TD errors may be
                passed as they are. If a serial comes twice the last one holds. With ``Windows`` also one for each
                place, shape (windows, places).
            mask: With one for each place: which places count, ``batch["mask"]``.
            timeout: Seconds to wait for another process that holds the index; None waits for ever.

        Returns:
            ``{"applied": n, "stale": m}``: n rows have new priorities; m rows are no longer in the buffer. On a GPU
            the counts are 0-d tensors there, so that the call does not wait for the device; ``int()`` reads one.

        Raises:
            SchemaError: A number is NaN or infinite, or the lengths differ. Nothing was changed.
            NotReady: Another process kept the index until the timeout; the message names it. Nothing was changed.
        """
        if not self._rows.spec.is_prioritized:
            raise SchemaError("update_priorities(): rows are drawn uniformly; give the buffer sampler=Prioritized()")
        return self._rows.update_priorities(indices, priorities, mask, timeout)

    async def update_priorities_async(
        self, indices: Any, priorities: Any, mask: Any = None, *, timeout: float | None = None
    ) -> dict[str, Any]:
        """``update_priorities`` for an event loop. If another process holds the index, a thread waits for it."""
        limit = seconds("update_priorities()", timeout)
        return await without_blocking(
            self._rows, lambda left: self.update_priorities(indices, priorities, mask, timeout=left), limit
        )

    def write(
        self, indices: Any, *, stale: Literal["error", "skip"] = "error", timeout: float | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Gives rows new values of fields that were declared with ``Field(..., mutable=True)``.

        A reader gets, for each row, all old values or all new ones, and so does the buffer after a crash. Fields that
        are not named keep their values.

        Args:
            indices: The serials that ``sample`` gave: an array of any shape, a tensor or a list. -1 names no row and is
                passed over. If a serial comes twice the last one holds.
            stale: What to do about rows that are no longer in the buffer: ``"error"`` raises, ``"skip"`` leaves them
                out.
            timeout: Seconds to wait for another thread or process that writes; None waits for ever, 0 not at all.
                (0 waits up to 0.05 s.)
            **fields: New values by name, nested as in ``add``, of shape (*indices.shape, *field.shape). They are
                checked as in ``add``. Of a dict some fields may be given.

        Returns:
            ``{"applied": n, "stale": m}``: n serials named rows that have new values; m named rows that are no longer
            in the buffer. On a GPU with ``stale="skip"`` the counts are 0-d tensors there, so that the call does not
            wait for the device.

        Raises:
            StaleHandle: A row is no longer in the buffer, and ``stale="error"``; nothing was written.
            SchemaError: A field is unknown or not mutable, or a value does not fit; nothing was written.
            NotReady: Another process wrote until the timeout; the message names it. Nothing was written.

        Example:
            >>> import numpy as np, sharpwave as sw
            >>> schema = {"obs": sw.Field((4,)), "action": sw.Field(), "state": sw.Field((8,), mutable=True)}
            >>> buf = sw.ReplayBuffer(1000, schema=schema, seed=0)
            >>> buf.add(np.zeros(4), 0.0, 1.0, np.zeros(4), False, np.zeros(8))
            >>> batch = buf.sample(2)
            >>> buf.write(batch["indices"], state=np.ones((2, 8)))
            {'applied': 2, 'stale': 0}
        """
        one_of("write()", "stale", stale, ("error", "skip"))
        return self._rows.write(indices, fields, stale == "skip", timeout)

    async def write_async(
        self, indices: Any, *, stale: Literal["error", "skip"] = "error", timeout: float | None = None, **fields: Any
    ) -> dict[str, Any]:
        """``write`` for an event loop. If another thread or process writes, a thread waits for it."""
        limit = seconds("write()", timeout)
        return await without_blocking(
            self._rows, lambda left: self.write(indices, stale=stale, timeout=left, **fields), limit
        )

    def tune(self, *, alpha: float | None = None, beta: float | Linear | None = None) -> None:
        """Changes the sampler's exponents for all processes that have the buffer open.

        A new alpha applies to all rows at once. The masses of all rows and the whole index are computed again, which
        takes time in proportion to the capacity, and other calls that need the index wait meanwhile. So change alpha
        seldom, not with every batch. A new beta costs nothing. A ``Linear`` beta counts all calls of ``sample`` since
        the buffer was made.
        """
        if not self._rows.spec.is_prioritized:
            raise SchemaError("tune(): rows are drawn uniformly; give the buffer sampler=Prioritized()")
        self._rows.tune(alpha, beta)

    def get(self, indices: Any) -> dict[str, Any]:
        """Reads rows by the serials that ``sample`` or ``add`` gave. The batch has ``"truncated"`` as well.

        Raises:
            StaleHandle: One of them is no longer in the buffer.
        """
        return self._rows.get(indices)

    def rows(self, batch_size: int = 4096, *, ids: bool = False) -> Iterator[dict[str, Any]]:
        """All rows, oldest first, in batches like those of ``get``. Rows overwritten meanwhile are left out.

        Args:
            batch_size: Rows in each; the last one may have fewer.
            ids: Adds ``"stream"`` and ``"episode"`` (int64) to each batch.

        A stream is one environment of one writer: ``writer * num_envs + environment``, where writers are numbered from
        0. A writer that is opened after another one was closed may get its number. The stream is -1 if it is no longer
        known: younger rows of the same stream are overwritten already, because another writer keeps this row's block.

        Two rows of one call have the same ``"episode"`` exactly if they are of the same episode. The number is the
        serial of the episode's first row. If that row is overwritten, it is the serial of the oldest row left. So it
        stays the same from call to call until the episode loses rows, and no other episode ever has it. The parts of an
        episode that has lost rows in its middle have different numbers. That happens only if several writers share the
        ring, or if rows are overwritten while the call runs.
        """
        return self._rows.rows(whole("rows()", "batch_size", batch_size, 1), truth("rows()", "ids", ids))

    def episodes(self, *, partial: bool = False, unfinished: bool = False) -> Iterator[dict[str, Any]]:
        """The episodes that are in the buffer at the call, oldest first row first, one at a time.

        Each is a dict like a batch of ``get``, whose first axis is time, with two numbers: ``"stream"`` and
        ``"episode"``, as in ``rows(ids=True)``. An episode of which rows are overwritten before it is given is left
        out. Only one episode is in memory at a time.

        Args:
            partial: Also gives episodes that have lost their first rows, from the oldest row left on. On a GPU, after
                rows were overwritten, an episode whose first row is the oldest one left of its environment counts as
                one of them: rows on a GPU do not say which of them start an episode.
            unfinished: Also gives episodes that have not ended, or have lost their last rows.

        Example:
            >>> import sharpwave as sw
            >>> buf = sw.ReplayBuffer(100, obs_shape=(1,), num_envs=1, seed=0)
            >>> buf.add([[0], [1], [2]], [0, 0, 0], [1, 2, 3], [[1], [2], [3]], [False, True, False])
            >>> [episode["reward"].tolist() for episode in buf.episodes()]
            [[1.0, 2.0]]
        """
        where = "episodes()"
        return self._rows.episodes(truth(where, "partial", partial), truth(where, "unfinished", unfinished))

    # ---- facts --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def capacity(self) -> int:
        """Rows kept at most."""
        return self._rows.spec.capacity

    @property
    def is_full(self) -> bool:
        """Whether ``len`` has reached the capacity. Steps that were masked out take space and do not count."""
        return len(self) == self.capacity

    @property
    def num_envs(self) -> int | None:
        """Environments that step together, or None."""
        return self._rows.spec.num_envs

    @property
    def sampler(self) -> Sampler:
        """Which rows are drawn, with the exponents that hold now."""
        return self._rows.sampler()

    @property
    def view(self) -> View:
        """What rows become."""
        return self._rows.spec.view

    @property
    def pace(self) -> Pace | None:
        """How adding and sampling wait for each other, or None."""
        return self._rows.spec.pace

    @property
    def schema(self) -> dict[str, Node]:
        """Fields by name, in the order of positional arguments."""
        return dict(self._rows.spec.schema.fields)

    def stats(self, *, huge_pages: bool = False) -> dict[str, Any]:
        """Counts and sizes as plain numbers, for a logger. ``"feeds"``: how batches are transferred to each GPU.

        Args:
            huge_pages: Adds ``"huge_page_bytes"``: how much of the storage is in huge pages now. The kernel takes
                milliseconds to count them.
        """
        truth("stats()", "huge_pages", huge_pages)
        return self._rows.stats() | ({"huge_page_bytes": self._rows.huge_page_bytes()} if huge_pages else {})

    @property
    def device(self) -> Any:
        """The device that holds the rows, or that batches go to; None for NumPy arrays."""
        return self._device if self._rows.device is None else self._rows.device

    def __repr__(self) -> str:
        rows = self._rows
        where = f"on {rows.where}" if rows.device is not None else rows.address or "in memory"
        if rows.closed:
            return f"<ReplayBuffer {where}: closed>"
        # How many rows a GPU holds is known only by waiting for it.
        state = f"{len(self)} of {self.capacity} rows" if rows.device is None else f"capacity {self.capacity}"
        return f"<ReplayBuffer {where}: {state}, fields {', '.join(rows.spec.schema.names)}>"

    # ---- life ---------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Removes all rows. Serials and the random stream continue."""
        self._rows.clear()

    def save(self, path: str | os.PathLike[str], *, incremental: bool = False) -> None:
        """Writes a snapshot (rows, priorities, counters, random stream) to a file: the whole file or none.

        ``sharpwave.open(path)`` loads it. Other threads and processes may add and sample meanwhile: the file has the
        state of one instant. An older snapshot at ``path`` is replaced; any other file is not.

        Args:
            path: Where to; folders are made.
            incremental: If ``path`` is a snapshot of this buffer, writes only the changes since then, to
                ``<path>.delta``, which ``open`` reads as well. Once half of the rows have changed, writes a whole
                snapshot again.

        Raises:
            StorageError: It cannot be written there. The older snapshot is unchanged.
            NotReady: Rows are overwritten faster than they can be copied.
        """
        truth("save()", "incremental", incremental)
        self._rows.save(path, incremental)

    async def save_async(self, path: str | os.PathLike[str], *, incremental: bool = False) -> None:
        """``save`` in a thread; the event loop continues meanwhile."""
        await self._rows.in_thread(lambda: self.save(path, incremental=incremental))

    def flush(self) -> None:
        """Returns when every row added so far is on the disk. Nothing to do for memory."""
        self._rows.flush()

    async def flush_async(self) -> None:
        """``flush`` in a thread; the event loop continues meanwhile."""
        await self._rows.in_thread(self._rows.flush)

    def close(self, unlink: bool = False) -> None:
        """Ends open episodes as truncated and closes the storage. A second call does nothing.

        Args:
            unlink: Also removes the file behind ``shm://`` or ``file://``, if that is still the one that was opened.
        """
        truth("close()", "unlink", unlink)
        self.__dict__.pop("add", None)
        self._rows.close(unlink)

    def __enter__(self) -> ReplayBuffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        rows = self._rows
        if rows.closed:
            raise ClosedError("pickle: the buffer is closed")
        if rows.address is None:
            where = "in memory" if rows.device is None else f"on {rows.where}"
            mend = "give storage='shm://name' to share it, or save() it" if rows.device is None else "save() it"
            raise TypeError(f"pickle: a buffer {where} belongs to one process; {mend}")
        from .open import open

        return functools.partial(open, view=rows.spec.view, **rows.open_options), (rows.address,)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplayBuffer:
        return self._again("deepcopy")

    def __copy__(self) -> ReplayBuffer:
        return self._again("copy")

    def _again(self, what: str) -> ReplayBuffer:
        """Another buffer over the same storage, as a pickle makes; rows in memory have no such thing."""
        rows = self._rows
        if rows.closed:
            raise ClosedError(f"{what}: the buffer is closed")
        if rows.address is None:
            where = "in memory" if rows.device is None else f"on {rows.where}"
            raise TypeError(
                f"{what}: a buffer {where} is not copied; save() it, and sharpwave.open() the file for a copy"
            )
        make, arguments = self.__reduce__()
        again: ReplayBuffer = make(*arguments)
        return again


def spec_of(
    capacity: int,
    *,
    schema: Any = None,
    obs_shape: Any = None,
    obs_dtype: Any = "float32",
    action_shape: Any = (),
    action_dtype: Any = "float32",
    next_obs: Any = "stored",
    sampler: Any = None,
    view: Any = None,
    pace: Any = None,
    num_envs: Any = None,
    writers: Any = 64,
    seed: Any = None,
) -> RowSpec:
    """The arguments of ``ReplayBuffer``, checked."""
    where = "ReplayBuffer()"
    rows = whole(where, "capacity", capacity, 1)
    width = None if num_envs is None else whole(where, "num_envs", num_envs, 1)
    spec = RowSpec(
        face="ReplayBuffer",
        capacity=whole_steps(where, rows, width),
        num_envs=width,
        writers=whole(where, "writers", writers, 1),
        seed=random_seed() if seed is None else whole(where, "seed", seed, 0, 2**63 - 1),
        sampler=Uniform() if sampler is None else sampler,
        view=Transitions() if view is None else view,
        pace=pace,
        schema=transitions(
            schema,
            obs_shape=obs_shape,
            obs_dtype=obs_dtype,
            action_shape=action_shape,
            action_dtype=action_dtype,
            next_obs=next_obs,
        ),
    )
    spec.check(where)
    return spec


_shared: weakref.WeakSet[ReplayBuffer] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked child the table belongs to the parent: the next add opens the file again."""
    for buffer in list(_shared):
        buffer.__dict__.pop("add", None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
