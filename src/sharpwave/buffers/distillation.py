"""DistillationBuffer: what a teacher did in, pairs to learn from out."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .. import _core
from ..address import to_address, to_path
from ..arrays import as_array, prepare
from ..checks import check_settable, one_of, truth, whole
from ..errors import ClosedError, NotReady, SchemaError, StorageError
from ..rows.columns import Torch, place_of, read_names, read_node
from ..rows.device import DeviceRows
from ..rows.host import HostRows
from ..rows.protocol import Batch, Rows
from ..rows.spec import RowSpec
from ..sampling import Uniform
from ..schema import Field, Node, Schema
from ..views import Transitions

__all__ = ["DistillationBuffer"]


class DistillationBuffer:
    """A ring of observations and of what an expert did there.

    On the CPU the rows are the engine's: they can be saved, and live in shared memory or in a file. On a GPU they are
    tensors there.

    Args:
        capacity: Rows kept; the oldest goes first.
        obs_shape: Of one observation: a shape (float32), a ``Field``, or a dict of them, such as what the student and
            what the teacher sees.
        device: None gives NumPy arrays; anything that torch knows, tensors there.
        action_shape, action_dtype: Of one action; taken from the first one where not given.
        teacher: What the teacher says besides, by name (mean, std, logits): shapes or ``Field``s. ``add`` takes it by
            that name, ``sample(extras=True)`` returns it.
        num_envs: Environments that step together: each ``add`` brings one step of all, or (steps, num_envs). Needed for
            ``steps``.
        storage, exist: None is memory of this process; ``"shm://name"`` or ``"file://path"`` as of ``ReplayBuffer``.
        seed: Of the draws.

    Example:
        >>> import numpy as np, sharpwave as sw
        >>> dist = sw.DistillationBuffer(capacity=1000, obs_shape=(48,), seed=0)
        >>> dist.add(np.zeros((64, 48)), np.ones((64, 12), np.float32))
        >>> obs, expert_actions = dist.sample(batch_size=32)
        >>> obs.shape, expert_actions.shape
        ((32, 48), (32, 12))
    """

    def __init__(
        self,
        capacity: int,
        obs_shape: Any,
        device: Any = None,
        *,
        action_shape: Any = None,
        action_dtype: Any = None,
        teacher: Mapping[str, Any] | None = None,
        num_envs: int | None = None,
        storage: str | None = None,
        exist: Literal["error", "replace", "attach"] = "error",
        seed: int | None = None,
    ) -> None:
        where = "DistillationBuffer()"
        self._capacity = whole(where, "capacity", capacity)
        self._num_envs = None if num_envs is None else whole(where, "num_envs", num_envs)
        self._seed = None if seed is None else whole(where, "seed", seed, 0, 2**63 - 1)
        self._place = place_of(where, device, self._seed)
        self._exist = one_of(where, "exist", exist, ("error", "replace", "attach"))
        if storage is not None and to_path(storage, f"{where}: storage") is None:
            raise StorageError(f"{where}: storage: expected 'shm://name' or 'file://path', got {storage!r}")
        self._storage = None if storage is None else to_address(storage, where)
        if storage is not None and self._is_on_gpu:
            raise SchemaError(f"{where}: storage: rows on {self.device} belong to one process; give device='cpu'")
        if self._num_envs and self._capacity % self._num_envs:
            raise SchemaError(f"{where}: capacity: expected a multiple of num_envs={num_envs}, got {capacity}")
        if action_dtype is not None and action_shape is None:
            raise SchemaError(f"{where}: action_dtype: needs action_shape= as well; without both, the first add tells")
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
        # Names that a file could not hold are refused on every device, and before there is anything to lose.
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
        """Where batches are; None for NumPy arrays."""
        return self._place.device if isinstance(self._place, Torch) else None

    @property
    def _batch_device(self) -> Any:
        """What rows on the host are told about batches; rows on a GPU give tensors there anyway."""
        return None if self._is_on_gpu else self.device

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
            seed=secrets.randbits(63) if self._seed is None else self._seed,
            sampler=Uniform(),
            view=Transitions(),
            pace=None,
        )
        if self._is_on_gpu:
            return DeviceRows(where, spec, self.device)
        rows, self._is_creator = HostRows.make(where, spec, self._storage, self._exist)
        return rows

    # ---- writing ----------------------------------------------------------------------------------------------

    def add(self, obs: Any, action: Any, done: Any = None, **teacher: Any) -> None:
        """Adds one pair, or n of them with a leading axis.

        Args:
            obs: What the expert, and perhaps the student, saw.
            action: What the expert did.
            done: Whether the step ended an episode; False where not given. Recurrent students need it.
            **teacher: What else was declared; required then.

        Raises:
            SchemaError: Something is missing or does not fit. Nothing was written.
        """
        missing = [name for name in self._extras if name not in teacher]
        if missing:
            raise SchemaError(f"add(): missing {', '.join(missing)}")
        unknown = [name for name in teacher if name not in self._extras]
        if unknown:
            raise SchemaError(f"add(): {unknown[0]}: the buffer has no such field; declare it with teacher=")
        if self._is_closed:
            raise ClosedError("add(): the buffer is closed")
        values = {"obs": obs, "action": action, **teacher}
        lead = self._lead(obs)
        values["done"] = self._place.zeros(lead, np.dtype(bool)) if done is None else done
        if self._rows is None:
            with self._first_add:
                if self._rows is None:
                    self._rows = self._begin(values, lead)
                    return
        self._rows.adder()(**values)

    def _begin(self, values: dict[str, Any], lead: tuple[int, ...]) -> Rows:
        """The rows, with their first ones. One that fails decides nothing, and takes no file away."""
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
        """Leading axes of an add: none for one row."""
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
        """Forgets every row."""
        if self._rows is not None:
            self._rows.clear()

    # ---- reading ----------------------------------------------------------------------------------------------

    def sample(self, batch_size: int, *, extras: bool = False) -> tuple[Any, ...]:
        """Draws rows, with replacement.

        Args:
            batch_size: How many.
            extras: Also return a dict of what the teacher said besides.

        Returns:
            ``(obs, expert_actions)``, or ``(obs, expert_actions, extras)``.

        Raises:
            NotReady: The buffer is empty.
        """
        batch_size = whole("sample()", "batch_size", batch_size)
        truth("sample()", "extras", extras)
        batch = self._there("sample()").sample(batch_size, device=self._batch_device)
        return self._tuple(batch, extras)

    def batches(
        self, batch_size: int, epochs: int = 1, *, drop_remainder: bool = False, extras: bool = False
    ) -> Iterator[tuple[Any, ...]]:
        """All rows in random order, each once an epoch, as ``sample`` returns them. Rows added meanwhile wait for the
        next call.

        Args:
            batch_size: Of each; the last one of an epoch may be shorter.
            epochs: How often to go through the rows that are there now.
            drop_remainder: Leave that shorter one out.
            extras: As of ``sample``.

        Raises:
            StaleHandle: Rows of the epoch were written over meanwhile.
        """
        where = "batches()"
        batch_size, epochs = whole(where, "batch_size", batch_size), whole(where, "epochs", epochs)
        truth(where, "drop_remainder", drop_remainder)
        truth(where, "extras", extras)
        rows = self._there(where)
        return self._batches(rows, rows.handles(), batch_size, epochs, drop_remainder, extras)

    def _batches(
        self, rows: Rows, handles: Any, size: int, epochs: int, drop: bool, extras: bool
    ) -> Iterator[tuple[Any, ...]]:
        for _ in range(epochs):
            order = self._place.permutation(len(handles))
            order = np.asarray(order) if isinstance(handles, np.ndarray) else order
            for start in range(0, len(handles) - (size - 1 if drop else 0), size):
                yield self._tuple(self._get(rows, handles[order[start : start + size]]), extras)

    def _get(self, rows: Rows, handles: Any) -> Batch:
        batch = rows.get(handles)
        batch["done"] = batch["done"] | batch["truncated"]
        return batch if self._batch_device is None else _tensors(batch)

    def steps(self, length: int = 1, *, extras: bool = False) -> Iterator[tuple[Any, ...]]:
        """All steps in the order in which they came, for recurrent students. Of one writer: several writers' steps
        stand in the order of the ring, not of time.

        Args:
            length: Steps at a time; the last ones may be fewer.
            extras: As of ``sample``.

        Yields:
            ``(obs, expert_actions, dones)``, or ``(obs, expert_actions, dones, extras)``, each (length, num_envs, ...).
            A student's state is reset behind ``dones``.
        """
        length = whole("steps()", "length", length)
        if self._num_envs is None:
            raise SchemaError("steps(): which rows follow each other is not known; give the buffer num_envs=")
        truth("steps()", "extras", extras)
        rows = self._there("steps()")
        handles, breaks = _whole_steps(rows, self._num_envs)
        return self._steps(rows, handles, breaks, length, self._num_envs, extras)

    def _steps(
        self, rows: Rows, handles: Any, breaks: Any, length: int, envs: int, extras: bool
    ) -> Iterator[tuple[Any, ...]]:
        def lay(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: lay(part) for key, part in value.items()}
            return value.reshape(-1, envs, *value.shape[1:])

        for start in range(0, len(handles), length * envs):
            end = min(start + length * envs, len(handles))
            batch = self._get(rows, handles[start:end])
            dones = lay(batch["done"]) | self._place.index(breaks[start // envs : end // envs, None])
            step = lay(batch["obs"]), lay(batch["action"]), dones
            yield (*step, {name: lay(batch[name]) for name in self._extras}) if extras else step

    def _there(self, where: str) -> Rows:
        if self._is_closed:
            raise ClosedError(f"{where}: the buffer is closed")
        if self._rows is None or len(self._rows) == 0:
            raise NotReady(f"{where}: the buffer is empty; add() first")
        return self._rows

    def _tuple(self, batch: dict[str, Any], extras: bool) -> tuple[Any, ...]:
        pair = batch["obs"], batch["action"]
        return (*pair, {name: batch[name] for name in self._extras}) if extras else pair

    # ---- facts and life ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
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
        return len(self) == self._capacity

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a snapshot, whole or not at all, as ``ReplayBuffer.save``. ``sharpwave.open(path)`` loads it into
        memory, ``DistillationBuffer.load(path, device)`` also onto a GPU."""
        self._there("save()").save(os.fspath(path), False)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: Any = None) -> DistillationBuffer:
        """What ``save`` wrote, on any device."""
        table = _core.Table.load(os.fspath(path), False)
        return cls._over(HostRows(table, "DistillationBuffer", None), device)

    @classmethod
    def _over(cls, rows: HostRows, device: Any = None) -> DistillationBuffer:
        """A buffer over rows that exist."""
        made, spec = cls.__new__(cls), rows.spec
        made._capacity, made._num_envs, made._storage = spec.capacity, spec.num_envs, rows.address
        made._exist, made._is_closed, made._first_add = "error", False, threading.Lock()
        made._is_creator, made._seed = False, spec.seed
        made._place = place_of("load()", device, made._seed)
        made._nodes = {name: node for name, node in spec.schema.fields.items() if name != "done"}
        made._extras = [name for name in made._nodes if name not in ("obs", "action")]
        made._rows = rows
        if made._is_on_gpu:
            from ..rows.transfer import to_device

            made._rows = to_device(rows, device)
            rows.close(False)
        return made

    def close(self, unlink: bool = False) -> None:
        """Lets go of the rows. A second call does nothing.

        Args:
            unlink: Also removes the file behind ``shm://`` or ``file://``.
        """
        if self._rows is not None:
            self._rows.close(truth("close()", "unlink", unlink))
        self._rows, self._is_closed = None, True

    def __reduce__(self) -> tuple[Any, ...]:
        if self._is_closed:
            raise ClosedError("pickle: the buffer is closed")
        if self._storage is None:
            raise TypeError(
                "pickle: a buffer in memory belongs to one process; give storage='shm://name' to share it, or save() it"
            )
        if self._rows is None:
            raise NotReady("pickle: what an action is, is not known yet; give action_shape=, or add() first")
        return _attach, (self._storage, None if self.device is None else str(self.device))

    def __enter__(self) -> DistillationBuffer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = "NumPy" if self.device is None else str(self.device)
        return f"DistillationBuffer({len(self)} of {self._capacity} rows, {where})"


def _attach(address: str, device: Any) -> DistillationBuffer:
    table = _core.Table.attach(str(to_path(address, "open()")))
    return DistillationBuffer._over(HostRows(table, "DistillationBuffer", address), device)


def _whole_steps(rows: Rows, envs: int) -> tuple[Any, np.ndarray[Any, Any]]:
    """Handles of the rows of complete steps, and for each of these steps whether the next one is missing."""
    handles = rows.handles()
    there = handles.cpu().numpy() if hasattr(handles, "cpu") else handles
    step, first, count = np.unique(rows.positions(there) // envs, return_index=True, return_counts=True)
    first, step = first[count == envs], step[count == envs]
    breaks = np.append(np.diff(step) != 1, False) if len(step) else np.zeros(0, bool)
    which = (first[:, None] + np.arange(envs)).reshape(-1)
    return handles[which], breaks


def _tensors(value: Any) -> Any:
    """Over the same memory; tensors stay what they are."""
    if isinstance(value, dict):
        return {key: _tensors(part) for key, part in value.items()}
    import torch

    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
