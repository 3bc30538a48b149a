"""ApexRL's ReplayBuffer over ``sharpwave.ReplayBuffer``."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

import sharpwave as sw
from sharpwave.checks import check_settable, told, whole
from sharpwave.errors import SchemaError, StaleHandle
from sharpwave.rows.tensors import read_device

from .observations import as_tensordict, each, is_tree, read_spec, to_host
from .slots import Slots
from .stored import Stored

__all__ = ["ReplayBuffer"]

# Upstream's names of the fields, and the engine's.
_FIELDS = {
    "observations": "obs",
    "actions": "action",
    "rewards": "reward",
    "next_observations": "next_obs",
    "dones": "done",
    "critic_observations": "critic_obs",
    "next_critic_observations": "next_critic_obs",
}
_CRITIC = ("critic_observations", "next_critic_observations")


def _column_property(name: str) -> property:
    def read(self: ReplayBuffer) -> Any:
        column = self._columns([name], self._capacity)[name]
        hint = f"ReplayBuffer.{name} is a copy: assign the changed values, buffer.{name} = ..."
        return as_tensordict(each(column, lambda leaf: Stored.of(leaf, hint)), (self._capacity,))

    def write(self: ReplayBuffer, value: Any) -> None:
        where = f"ReplayBuffer.{name}"
        if name in _CRITIC and "critic_obs" not in self._schema:
            raise SchemaError(f"{where}: the buffer has none; give it critic_obs_shape=")

        def cut(leaf: Any) -> Any:
            if len(leaf) != self._capacity:
                raise SchemaError(f"{where}: expected {self._capacity} rows, as many as its capacity, got {len(leaf)}")
            return leaf[: len(self)]

        with self._adding:
            # Rows exist, so the dtype of actions is decided.
            self._load(where, {**self.state_dict(), name: each(value, cut)}, self.action_dtype)

    return property(read, write, doc=f"The {name.replace('_', ' ')} by slot, (capacity, ...).")


class ReplayBuffer:
    """ApexRL's replay buffer over ``sharpwave.ReplayBuffer``, which ``.inner`` holds after the first add.

    Without ``seed`` rows are drawn by torch's own generator, in upstream's way: after ``torch.manual_seed`` both give
    the same batches. (On a GPU, and with ``seed``, the engine draws.)

    The columns are attributes (``observations``, ``rewards``, ...), of shape (capacity, ...) as upstream stores them:
    row ``pos`` is the next one to be written. They are copies, made at each access, and refuse to be written to;
    assigning one (``buffer.rewards = changed``) stores it.

    Args:
        capacity: Rows kept.
        obs_shape: Of one observation: a shape, a ``TensorLeafSpec``, or a nested dict of them.
        action_shape: Shape of one action.
        device: Where batches go; rows stay in host memory.
        obs_dtype: Of observations whose ``obs_shape`` names no dtype.
        action_dtype: Of actions; None takes int64 or float32, depending on the first action.
        critic_obs_shape: As ``obs_shape``, of the critic's own observation, if there is one.
        seed: Of the engine's draws; None draws as upstream does.
    """

    def __init__(
        self,
        capacity: int,
        obs_shape: Any,
        action_shape: tuple[int, ...] = (),
        device: Any = "cpu",
        obs_dtype: Any = torch.float32,
        action_dtype: Any = None,
        critic_obs_shape: Any = None,
        seed: int | None = None,
    ) -> None:
        where = "ReplayBuffer()"
        self._capacity = whole(where, "capacity", capacity, 1)
        self._device: torch.device = read_device(f"{where}: device", device)[1]
        self._seed = seed
        self._given = {"obs_shape": obs_shape, "obs_dtype": obs_dtype, "critic_obs_shape": critic_obs_shape}
        self._action_shape = sw.Field(action_shape).shape
        self._action_dtype = action_dtype
        self._schema: dict[str, Any] = {
            "obs": read_spec(where, "obs_shape", obs_shape, obs_dtype),
            "done": sw.Field((), "float32"),
        }
        if critic_obs_shape is not None:
            critic = read_spec(where, "critic_obs_shape", critic_obs_shape, obs_dtype)
            self._schema |= {"critic_obs": critic, "next_critic_obs": critic}
        self.inner: sw.ReplayBuffer | None = None
        self._slots = Slots(self._capacity)
        self._adding = threading.RLock()
        self._build("int64" if action_dtype is None else action_dtype).close()  # raises for wrong arguments

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "inner":
            check_settable(self, name)
        object.__setattr__(self, name, value)

    # ---- writing ------------------------------------------------------------------------------------------------

    def add(
        self,
        observations: Any,
        actions: Any,
        rewards: Any,
        next_observations: Any,
        dones: Any,
        critic_observations: Any = None,
        next_critic_observations: Any = None,
    ) -> None:
        """Adds one transition, or a batch with a leading axis; a batch of none does nothing.

        Raises:
            SchemaError: A value is missing or does not fit. Nothing was written.
        """
        given = (
            observations,
            actions,
            rewards,
            next_observations,
            dones,
            critic_observations,
            next_critic_observations,
        )
        row = {
            name: to_host(f"add(): {name}", value)
            for name, value in zip(_FIELDS, given, strict=True)
            if value is not None
        }
        for name in _CRITIC:
            if (name in row) != ("critic_obs" in self._schema):
                problem = "the buffer has none; give it critic_obs_shape=" if name in row else "missing"
                raise SchemaError(f"add(): {name}: {problem}")
        if row["rewards"].size == 0:
            return
        with self._adding:
            inner = self._build(_dtype_of(row["actions"])) if self.inner is None else self.inner
            inner.add(**{_FIELDS[name]: value for name, value in row.items()})
            if self.inner is None:
                self.inner = inner  # after the add: if it fails, the action's dtype stays undecided
            self._slots.count(inner, row["rewards"].size)

    def _build(self, action_dtype: Any) -> sw.ReplayBuffer:
        dtype = action_dtype if self._action_dtype is None else self._action_dtype
        schema = {**self._schema, "action": sw.Field(self._action_shape, dtype)}
        return sw.ReplayBuffer(self._capacity, schema=schema, seed=self._seed)

    def clear(self) -> None:
        """Forgets every row."""
        with self._adding:
            if self.inner is not None:
                self.inner.clear()
            self._slots = Slots(self._capacity)

    # ---- reading ------------------------------------------------------------------------------------------------

    def sample(self, batch_size: int) -> dict[str, Any]:
        """Rows drawn with replacement, as tensors on the buffer's device; nested observations as upstream has them.

        Raises:
            SchemaError: ``batch_size`` is not positive, or more than the buffer holds.
        """
        size = operator.index(batch_size) if hasattr(batch_size, "__index__") and batch_size is not True else 0
        batch = None
        while batch is None:
            with self._adding:
                inner, ring, added = self.inner, self._slots, self._slots.added
            held = min(added, self._capacity)
            if inner is None or not 1 <= size <= held:
                raise SchemaError(f"sample(): batch_size: expected 1 to the {held} rows held, got {told(batch_size)}")
            if self._seed is not None or self._device.type != "cpu":
                batch = inner.sample(size, device=self._device)
                break
            slots = torch.randint(0, held, (size,)).numpy()
            try:
                batch = each(inner.get(ring.serials(slots, added)), torch.from_numpy)
            except StaleHandle:
                if ring is self._slots and added == ring.added:
                    raise
                # Another thread has overwritten one of them meanwhile: draw again.
        return {name: as_tensordict(batch[field], (size,)) for name, field in _FIELDS.items() if field in batch}

    def state_dict(self) -> dict[str, Any]:
        """The rows and the settings, in the form of upstream's class."""
        with self._adding:
            size = len(self)
            state = {
                "capacity": self._capacity,
                "obs_shape": self.obs_shape,
                "action_shape": self._action_shape,
                "obs_dtype": self.obs_dtype,
                "action_dtype": self.action_dtype,
                "critic_obs_shape": self.critic_obs_shape,
                "pos": self.pos,
                "full": self.full,
                "size": size,
            }
            return state | {name: as_tensordict(value, (size,)) for name, value in self._columns(_FIELDS, size).items()}

    def _columns(self, names: Iterable[str], length: int) -> dict[str, Any]:
        """Values by name, in the order of upstream's slots, padded with zeros; None for missing fields."""
        with self._adding:
            inner = self._build("int64") if self.inner is None else self.inner
            fields = {name: inner.schema.get(_FIELDS[name]) for name in names}
            made = {
                name: each(field, lambda leaf: np.zeros((length, *leaf.shape), leaf.dtype))
                for name, field in fields.items()
            }
            at = self._slots.pos if self.full else 0
            for part in inner.rows():
                count = len(part["indices"])
                slots = np.arange(at, at + count) % self._capacity
                at += count
                for name, column in made.items():
                    if column is not None:
                        _put(column, slots, part[_FIELDS[name]])
        return {
            name: each(column, lambda array: torch.from_numpy(array).to(self._device)) for name, column in made.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces the rows by those of a ``state_dict()``, of this class or of upstream's.

        With ``seed`` the draws start over.

        Raises:
            SchemaError: It does not fit, or its sizes contradict each other. Nothing was changed.
        """
        self._load("load_state_dict()", state_dict, None)

    def _load(self, where: str, state_dict: dict[str, Any], action_dtype: Any) -> None:
        wanted = {
            "capacity": self._capacity,
            "obs_shape": self._schema["obs"],
            "action_shape": self._action_shape,
            "critic_obs_shape": self._schema.get("critic_obs"),
        }
        for name, mine in wanted.items():
            if name not in state_dict and name != "critic_obs_shape":
                raise SchemaError(f"{where}: {name}: missing")
            value = state_dict.get(name)
            got = _read_shape(where, name, value, self.obs_dtype)
            if got != mine:
                raise SchemaError(f"{where}: {name}: expected {told(getattr(self, name))}, got {told(value)}")
        size = whole(where, "size", state_dict.get("size", 0), 0, self._capacity)
        pos = whole(where, "pos", state_dict.get("pos", size % self._capacity), 0, self._capacity - 1)
        if size < self._capacity and pos != size:
            raise SchemaError(f"{where}: pos: expected {size}, as size says, got {pos}")
        if bool(state_dict.get("full", size == self._capacity)) != (size == self._capacity):
            raise SchemaError(
                f"{where}: full: expected {size == self._capacity}, as size says, got {state_dict['full']}"
            )
        if not size:
            self.clear()
            return
        names = [name for name in _FIELDS if name not in _CRITIC or "critic_obs" in self._schema]
        row = {name: _in_order(where, name, state_dict.get(name), size, pos) for name in names}
        with self._adding:
            inner = self._build(_dtype_of(row["actions"]) if action_dtype is None else action_dtype)
            inner.add(**{_FIELDS[name]: value for name, value in row.items()})
            ring = Slots(self._capacity, pos if size == self._capacity else 0)
            ring.count(inner, size)
            self.inner, self._slots = inner, ring

    # ---- facts --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return 0 if self.inner is None else len(self.inner)

    @property
    def size(self) -> int:
        """Rows held."""
        return len(self)

    @property
    def capacity(self) -> int:
        """Rows kept at most."""
        return self._capacity

    @property
    def pos(self) -> int:
        """The slot that is written next."""
        return self._slots.pos

    @property
    def full(self) -> bool:
        """Whether every slot has been written."""
        return len(self) == self._capacity

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        return self._device

    @property
    def obs_shape(self) -> Any:
        """As it was given."""
        return self._given["obs_shape"]

    @property
    def critic_obs_shape(self) -> Any:
        """As it was given."""
        return self._given["critic_obs_shape"]

    @property
    def obs_dtype(self) -> Any:
        """As it was given."""
        return self._given["obs_dtype"]

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Of one action."""
        return self._action_shape

    @property
    def action_dtype(self) -> Any:
        """Of actions; None until the first add decides."""
        if self._action_dtype is not None or self.inner is None:
            return self._action_dtype
        field: Any = self.inner.schema["action"]
        return torch.from_numpy(np.empty(0, field.dtype)).dtype

    observations = _column_property("observations")
    actions = _column_property("actions")
    rewards = _column_property("rewards")
    next_observations = _column_property("next_observations")
    dones = _column_property("dones")
    critic_observations = _column_property("critic_observations")
    next_critic_observations = _column_property("next_critic_observations")

    def __repr__(self) -> str:
        return f"<apexrl.ReplayBuffer: {len(self)} of {self._capacity} rows>"


def _put(column: Any, slots: np.ndarray[Any, Any], values: Any) -> None:
    if isinstance(column, dict):
        for key, part in column.items():
            _put(part, slots, values[key])
    else:
        column[slots] = values


def _dtype_of(action: Any) -> str:
    if is_tree(action):
        raise SchemaError("actions: expected a tensor, got a dict")
    return "int64" if action.dtype.kind in "iub" else "float32"


def _read_shape(where: str, name: str, value: Any, obs_dtype: Any) -> Any:
    if value is None or name == "capacity":
        return value
    spec = read_spec(where, name, value, obs_dtype)
    return spec.shape if name == "action_shape" else spec  # type: ignore[union-attr]


def _in_order(where: str, name: str, value: Any, size: int, pos: int) -> Any:
    """Values by slot to values by age, oldest first."""
    if value is None:
        raise SchemaError(f"{where}: {name}: missing")

    def turn(leaf: Any) -> Any:
        if leaf.shape[:1] != (size,):
            raise SchemaError(f"{where}: {name}: expected {size} rows, as size says, got shape {tuple(leaf.shape)}")
        return np.roll(leaf, -(pos % size), axis=0)

    return each(to_host(f"{where}: {name}", value), turn)
