"""DistillationBuffer: a teacher's actions in, batches for a student out."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..address import to_address, to_path
from ..arrays import as_array, prepare
from ..checks import check_settable, one_of, random_seed, seconds, truth, whole, whole_steps
from ..errors import ClosedError, NotReady, SchemaError, StorageError
from ..rows.batch_map import read_map
from ..rows.bell import without_blocking
from ..rows.columns import Torch, place_of, read_names, read_node
from ..rows.device import DeviceRows
from ..rows.host import HostRows
from ..rows.protocol import Batch, Rows
from ..rows.spec import RowSpec
from ..rows.tensors import read_device
from ..sampling import Uniform
from ..schema import Field, Node, Schema
from ..views import Transitions

__all__ = ["DistillationBuffer"]


class DistillationBuffer:
    """A ring of observations with an expert's action for each.

    On the CPU the rows are in a table of the engine: in memory, in shared memory or in a file. On a GPU they are
    tensors there. Batches are copies.

    Args:
        capacity: Rows kept; the oldest are overwritten first. Rounded up to a multiple of ``num_envs``, with a
            ``UserWarning``.
        obs_shape: Of one observation: a shape (float32), a ``Field``, or a dict of them, such as the student's and the
            teacher's observation.
        device: None gives NumPy arrays; ``"cpu"`` gives tensors; ``"cuda"`` keeps the rows on the GPU.
        action_shape, action_dtype: Of one action; without them the first ``add`` decides.
        teacher: Further outputs of the teacher by name (mean, std, logits): shapes or ``Field``s. ``add`` takes them by
            that name, and batches have them.
        num_envs: Environments that step together: each ``add`` has one step of all, or (steps, num_envs) rows. Needed
            for ``steps``.
        storage: None is memory of this process; ``"shm://name"`` and ``"file://path"`` make a file that
            ``sharpwave.open`` attaches to.
        exist: What to do if that file exists: ``"error"``, ``"replace"`` it, or ``"attach"`` to it.
        seed: Of the draws; None takes one from the system (``stats()["seed"]`` tells it).

    Example:
        >>> import numpy as np, sharpwave as sw
        >>> dist = sw.DistillationBuffer(1000, obs_shape=(48,), seed=0)
        >>> dist.add(np.zeros((64, 48)), np.ones((64, 12), np.float32))
        >>> batch = dist.sample(32)
        >>> batch["obs"].shape, batch["action"].shape
        ((32, 48), (32, 12))
    """

    def __init__(
        self,
        capacity: int,
        *,
        obs_shape: Any,
        device: Any = None,
        action_shape: Any = None,
        action_dtype: Any = None,
        teacher: Mapping[str, Any] | None = None,
        num_envs: int | None = None,
        storage: str | None = None,
        exist: Literal["error", "replace", "attach"] = "error",
        seed: int | None = None,
    ) -> None:
        where = "DistillationBuffer()"
        self._num_envs = None if num_envs is None else whole(where, "num_envs", num_envs)
        self._capacity = whole_steps(where, whole(where, "capacity", capacity), self._num_envs)
        self._seed = random_seed() if seed is None else whole(where, "seed", seed, 0, 2**63 - 1)
        self._place = place_of(where, device, self._seed)
        self._exist = one_of(where, "exist", exist, ("error", "replace", "attach"))
        if storage is not None and to_path(storage, f"{where}: storage") is None:
            raise StorageError(f"{where}: storage: expected 'shm://name' or 'file://path', got {storage!r}")
        self._storage = None if storage is None else to_address(storage, where)
        if storage is not None and self._is_on_gpu:
            raise SchemaError(f"{where}: storage: rows on {self.device} belong to one process; give device='cpu'")
        if action_dtype is not None and action_shape is None:
            raise SchemaError(
                f"{where}: action_dtype: needs action_shape= as well; without both, the first add decides"
            )
        self._nodes: dict[str, Node] = {"obs": read_node(where, "obs_shape", obs_shape)}
        if action_shape is not None:
            dtype = "float32" if action_dtype is None else action_dtype
            self._nodes["action"] = read_node(where, "action_shape", action_shape, dtype)
        teacher = read_names(where, "teacher", teacher)
        self._extras = list(teacher)
        for name, node in teacher.items():
            if name in ("obs", "action", "done"):
                raise SchemaError(f"{where}: teacher: the name {name!r} is taken; give another")
            self._nodes[name] = read_node(where, f"teacher[{name!r}]", node)
        # Refuses, on every device, names that a file cannot hold.
        Schema({"action": Field(), **self._nodes, "done": Field((), "bool")})
        self._rows: Rows | None = None
        self._is_creator = False
        self._is_closed = False
        self._first_add = threading.Lock()
        if "action" in self._nodes:
            self._rows = self._make()

    if not TYPE_CHECKING:  # to a type checker every name could be set

        def __setattr__(self, name: str, value: Any) -> None:
            check_settable(self, name)
            object.__setattr__(self, name, value)

    @property
    def device(self) -> Any:
        """The device of the batches; None for NumPy arrays."""
        return self._place.device if isinstance(self._place, Torch) else None

    @property
    def _is_on_gpu(self) -> bool:
        return isinstance(self._place, Torch) and self._place.device.type != "cpu"

    def _row_schema(self) -> Schema:
        nodes = {name: self._nodes[name] for name in ("obs", "action", *self._extras)}
        return Schema({**nodes, "done": Field((), "bool")})

    def _make(self) -> Rows:
        where = "DistillationBuffer()"
        spec = RowSpec(
            face="DistillationBuffer",
            schema=self._row_schema(),
            capacity=self._capacity,
            num_envs=self._num_envs,
            writers=64,
            seed=self._seed,
            sampler=Uniform(),
            view=Transitions(),
            pace=None,
        )
        if self._is_on_gpu:
            return DeviceRows(where, spec, self.device)
        rows, self._is_creator = HostRows.make(where, spec, self._storage, self._exist)
        return rows

    # ---- writing ----------------------------------------------------------------------------------------------

    def add(self, obs: Any, action: Any, done: Any = None, *, timeout: float | None = None, **teacher: Any) -> None:
        """Adds one row, or n rows with a leading axis.

        Args:
            obs: The observation of the expert, or of the expert and the student.
            action: The expert's action.
            done: Whether the step ended an episode; False by default. Recurrent students need it.
            timeout: Seconds to wait for a ``save`` that holds adds back and for other threads that add; None waits for
                ever, 0 not at all.
            **teacher: The declared outputs of the teacher; required if declared.

        Raises:
            SchemaError: Something is missing or does not fit. Nothing was written.
            NotReady: The timeout passed. Nothing was written.
        """
        self._check_open()
        missing = [name for name in self._extras if name not in teacher]
        if missing:
            raise SchemaError(f"add(): missing {', '.join(missing)}")
        unknown = [name for name in teacher if name not in self._extras]
        if unknown:
            raise SchemaError(f"add(): {unknown[0]}: the buffer has no such field; declare it with teacher=")
        values = {"obs": obs, "action": action, **teacher}
        lead = self._lead(obs)
        values["done"] = self._place.zeros(lead, np.dtype(bool)) if done is None else done
        if timeout is not None:
            seconds("add()", timeout)
        if self._rows is None:
            with self._first_add:
                if self._rows is None:
                    self._rows = self._begin(values, lead)
                    return
        if timeout is not None:
            values["timeout"] = timeout
        self._rows.adder()(**values)

    async def add_async(
        self, obs: Any, action: Any, done: Any = None, *, timeout: float | None = None, **teacher: Any
    ) -> None:
        """``add`` for an event loop. It waits for nothing but a server: the buffer has no pace."""
        if self._rows is not None and self._rows.is_remote:
            return await self._rows.in_thread(lambda: self.add(obs, action, done, timeout=timeout, **teacher))
        self.add(obs, action, done, timeout=timeout, **teacher)

    def _begin(self, values: dict[str, Any], lead: tuple[int, ...]) -> Rows:
        """Makes the rows and adds the first ones. If that fails, the action stays undecided and no file is made or
        changed."""
        path = None if self._storage is None else to_path(self._storage, "add()")
        self._nodes["action"] = self._infer_action(values["action"], lead)
        rows = None
        try:
            if not self._is_on_gpu:  # before a file is made, replaced or attached to
                prepare(self._row_schema(), self._capacity, self._num_envs, None, False, (), values)
            is_ours = path is not None and not path.exists()
            rows = self._make()
            rows.adder()(**values)
        except BaseException:
            del self._nodes["action"]
            if rows is not None:
                rows.close(is_ours and self._is_creator)
            raise
        return rows

    def _lead(self, obs: Any) -> tuple[int, ...]:
        """The leading axes of an add: () for one row."""
        node, value, path = self._nodes["obs"], obs, "obs"
        while isinstance(node, Mapping):
            key = next(iter(node))
            if not isinstance(value, Mapping) or key not in value:
                raise SchemaError(f"add(): {path}: expected a dict with {', '.join(node)}, got {type(value).__name__}")
            node, value, path = node[key], value[key], f"{path}/{key}"
        assert isinstance(node, Field)
        shape = tuple(value.shape if hasattr(value, "shape") else as_array(path, value).shape)
        axes = len(shape) - len(node.shape)
        if axes < 0 or shape[axes:] != node.shape or axes > (1 if self._num_envs is None else 2):
            raise SchemaError(f"add(): {path}: expected shape {node.shape} with at most a leading axis, got {shape}")
        return shape[:axes]

    def _infer_action(self, action: Any, lead: tuple[int, ...]) -> Field:
        array = action if hasattr(action, "shape") and hasattr(action, "dtype") else as_array("action", action)
        shape = tuple(array.shape)
        if shape[: len(lead)] != lead:
            raise SchemaError(f"add(): action: expected leading axes {lead} as of obs, got {shape}")
        return Field(shape[len(lead) :], array.dtype)

    def clear(self) -> None:
        """Removes all rows. Serials and the random stream continue."""
        self._check_open()
        if self._rows is not None:
            self._rows.clear()

    # ---- reading ----------------------------------------------------------------------------------------------

    def sample(
        self,
        batch_size: int,
        *,
        out: dict[str, Any] | None = None,
        device: Any = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Draws rows uniformly, with replacement.

        Args:
            batch_size: Rows in the batch.
            out: A batch of the same size to fill instead of new arrays; it is returned.
            device: None gives NumPy arrays, or tensors on the buffer's device; ``"cpu"`` torch tensors over the same
                memory; another device a copy there.
            timeout: Seconds to wait for another process that holds the index; None waits for ever, 0 not at all.

        Returns:
            A dict with ``"obs"``, ``"action"``, ``"done"``, the teacher's outputs, and under ``"indices"`` the serials
            of the rows.

        Raises:
            NotReady: The buffer is empty, or the timeout passed.
        """
        rows = self._rows
        if rows is None:
            rows = self._there("sample()")
        if device is None and rows.device is None:
            device = self.device
        return rows.sample(batch_size, out=out, device=device, timeout=timeout)

    async def sample_async(
        self,
        batch_size: int,
        *,
        out: dict[str, Any] | None = None,
        device: Any = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """``sample`` for an event loop. If another process holds the index, a thread waits for it."""
        limit = seconds("sample()", timeout)
        return await without_blocking(
            self._there("sample()"), lambda left: self.sample(batch_size, out=out, device=device, timeout=left), limit
        )

    def batches(
        self,
        batch_size: int,
        epochs: int = 1,
        *,
        drop_remainder: bool = False,
        device: Any = None,
        map: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """All rows in random order, each once in an epoch, as batches like those of ``sample``. Rows added later are
        not included.

        Args:
            batch_size: Rows in each batch; the last one of an epoch may be shorter.
            epochs: Passes over the rows that the buffer has now.
            drop_remainder: Leaves out that shorter batch.
            device: As in ``sample``.
            map: A function that takes a batch and returns the dict that the iterator returns in its place. It may
                change the batch in place and keep it. An error that it raises ends the iterator.

        Raises:
            NotReady: The buffer is empty.
            StaleHandle: Rows of the epoch were overwritten meanwhile.
        """
        where = "batches()"
        batch_size, epochs = whole(where, "batch_size", batch_size), whole(where, "epochs", epochs)
        truth(where, "drop_remainder", drop_remainder)
        device = None if device is None else read_device(f"{where}: device", device)[1]
        rows = self._there(where)
        change = read_map(where, map)
        made = self._batches(rows, _handles(where, rows), batch_size, epochs, drop_remainder, device)
        return made if change is None else (change(batch) for batch in made)

    def _batches(
        self, rows: Rows, handles: Any, size: int, epochs: int, drop: bool, device: Any
    ) -> Iterator[dict[str, Any]]:
        for _ in range(epochs):
            order = self._place.permutation(len(handles))
            order = np.asarray(order) if isinstance(handles, np.ndarray) else order
            for start in range(0, len(handles) - (size - 1 if drop else 0), size):
                yield self._get(rows, handles[order[start : start + size]], device)

    def _get(self, rows: Rows, handles: Any, device: Any) -> Batch:
        batch = rows.get(handles, self.device if device is None and rows.device is None else device)
        batch["done"] = batch["done"] | batch.pop("truncated")
        return batch

    def steps(self, length: int = 1, *, device: Any = None) -> Iterator[dict[str, Any]]:
        """All steps in the order in which they were added, for recurrent students. With several writers, their steps
        come in the order of the ring, not of time.

        Args:
            length: Steps in each batch; the last one may be shorter.
            device: As in ``sample``.

        Yields:
            Batches like those of ``sample``, with arrays of shape (length, num_envs, ...). Reset the student's state
            after a step whose ``"done"`` is True; it is also True where the next step is missing.
        """
        length = whole("steps()", "length", length)
        if self._num_envs is None:
            raise SchemaError("steps(): the order of rows is not known; give the buffer num_envs=")
        device = None if device is None else read_device("steps(): device", device)[1]
        rows = self._there("steps()")
        handles, breaks = _whole_steps(rows, _handles("steps()", rows), self._num_envs)
        return self._steps(rows, handles, breaks, length, self._num_envs, device)

    def _steps(
        self, rows: Rows, handles: Any, breaks: Any, length: int, envs: int, device: Any
    ) -> Iterator[dict[str, Any]]:
        for start in range(0, len(handles), length * envs):
            end = min(start + length * envs, len(handles))
            batch: Batch = _by_step(self._get(rows, handles[start:end], device), envs)
            batch["done"] = batch["done"] | _like(batch["done"], breaks[start // envs : end // envs, None])
            yield batch

    def _there(self, where: str) -> Rows:
        self._check_open()
        if self._rows is None:
            raise NotReady(f"{where}: the buffer is empty; add rows first")
        return self._rows

    # ---- facts ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        self._check_open()
        return 0 if self._rows is None else len(self._rows)

    @property
    def capacity(self) -> int:
        """Rows kept at most."""
        return self._capacity

    @property
    def num_envs(self) -> int | None:
        """Environments that step together, or None."""
        return self._num_envs

    @property
    def is_full(self) -> bool:
        """Whether ``len`` has reached the capacity."""
        return len(self) == self._capacity

    def stats(self, *, huge_pages: bool = False) -> dict[str, Any]:
        """Counts and sizes as plain numbers, for a logger. On a GPU waits for the device.

        Args:
            huge_pages: As for ``ReplayBuffer.stats``.
        """
        self._check_open()
        truth("stats()", "huge_pages", huge_pages)
        if self._rows is not None:
            return self._rows.stats() | ({"huge_page_bytes": self._rows.huge_page_bytes()} if huge_pages else {})
        counts = {"size": 0, "capacity": self._capacity, "rows_added": 0, "storage_bytes": 0}
        where = str(self.device) if self._is_on_gpu else self._storage or "memory"
        stats = {"storage": where, **counts, "seed": self._seed}
        return stats | {"huge_page_bytes": 0} if huge_pages else stats

    def __repr__(self) -> str:
        where = f"on {self.device}" if self._is_on_gpu else self._storage or "in memory"
        if self._is_closed:
            return f"<DistillationBuffer {where}: closed>"
        # How many rows a GPU holds is known only by waiting for it.
        state = f"capacity {self._capacity}" if self._is_on_gpu else f"{len(self)} of {self._capacity} rows"
        return f"<DistillationBuffer {where}: {state}, fields {', '.join(('obs', 'action', 'done', *self._extras))}>"

    # ---- life -------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a snapshot (rows, counters, random stream) to a file: the whole file or none.

        ``sharpwave.open(path)`` loads it into memory, ``sharpwave.open(path, device=...)`` onto any device. The order
        of ``batches`` starts again from the seed.

        Args:
            path: Where to; folders are made. An older snapshot is replaced, any other file is not.

        Raises:
            StorageError: It cannot be written there. The older snapshot is unchanged.
            NotReady: The action's shape is not known yet.
        """
        self._check_open()
        if self._rows is None:
            raise NotReady("save(): the action's shape is not known yet; give action_shape=, or add() first")
        self._rows.save(path, False)

    async def save_async(self, path: str | os.PathLike[str]) -> None:
        """``save`` in a thread; the event loop continues meanwhile."""
        self._check_open()
        if self._rows is None:
            return self.save(path)
        await self._rows.in_thread(lambda: self.save(path))

    def flush(self) -> None:
        """Returns when every row added so far is on the disk. Nothing to do for memory."""
        self._check_open()
        if self._rows is not None:
            self._rows.flush()

    async def flush_async(self) -> None:
        """``flush`` in a thread; the event loop continues meanwhile."""
        self._check_open()
        if self._rows is not None:
            await self._rows.in_thread(self.flush)

    @classmethod
    def _over(cls, rows: Rows, device: Any = None) -> DistillationBuffer:
        """A buffer over rows that exist."""
        made, spec = cls.__new__(cls), rows.spec
        made._capacity, made._num_envs, made._storage = spec.capacity, spec.num_envs, rows.address
        made._exist, made._is_closed, made._first_add = "error", False, threading.Lock()
        made._is_creator, made._seed = False, spec.seed
        made._place = place_of("open()", device if rows.device is None else rows.device, made._seed)
        made._nodes = {name: node for name, node in spec.schema.fields.items() if name != "done"}
        made._extras = [name for name in made._nodes if name not in ("obs", "action")]
        made._rows = rows
        return made

    def close(self, unlink: bool = False) -> None:
        """Closes the storage. A second call does nothing.

        Args:
            unlink: Also removes the file behind ``shm://`` or ``file://``.
        """
        truth("close()", "unlink", unlink)
        rows, self._rows, self._is_closed = self._rows, None, True
        if rows is not None:
            rows.close(unlink)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the buffer is closed")

    def __reduce__(self) -> tuple[Any, ...]:
        if self._is_closed:
            raise ClosedError("pickle: the buffer is closed")
        if self._storage is None:
            raise TypeError(
                "pickle: a buffer in memory belongs to one process; give storage='shm://name' to share it, or save() it"
            )
        if self._rows is None:
            raise NotReady("pickle: the action's shape is not known yet; give action_shape=, or add() first")
        return _reopen, (type(self), self._storage, None if self.device is None else str(self.device))

    def __enter__(self) -> DistillationBuffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _reopen(cls: type[DistillationBuffer], address: str, device: Any) -> DistillationBuffer:
    from .open import open

    return cls._over(open(address)._rows, device)


def _handles(where: str, rows: Rows) -> Any:
    handles = rows.handles()
    if not len(handles):
        raise NotReady(f"{where}: the buffer is empty; add rows first")
    return handles


def _whole_steps(rows: Rows, handles: Any, envs: int) -> tuple[Any, np.ndarray[Any, Any]]:
    """Handles of the rows of complete steps, and for each of these steps whether the next one is missing."""
    there = handles.cpu().numpy() if hasattr(handles, "cpu") else handles
    step, first, count = np.unique(rows.positions(there) // envs, return_index=True, return_counts=True)
    first, step = first[count == envs], step[count == envs]
    breaks = np.append(np.diff(step) != 1, False) if len(step) else np.zeros(0, bool)
    which = (first[:, None] + np.arange(envs)).reshape(-1)
    return handles[which], breaks


def _by_step(value: Any, envs: int) -> Any:
    """Rows as (steps, envs, ...)."""
    if isinstance(value, dict):
        return {key: _by_step(part, envs) for key, part in value.items()}
    return value.reshape(-1, envs, *value.shape[1:])


def _like(array: Any, values: np.ndarray[Any, Any]) -> Any:
    """The values as an array of the same kind, on the same device."""
    if isinstance(array, np.ndarray):
        return values
    import torch

    return torch.from_numpy(values).to(array.device)
