"""Where a DistillationBuffer's rows are: in a table of the engine's, or in a ring of tensors on a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import SchemaError, StaleHandle
from ..schema import Field, Node, Schema
from .columns import Columns, Host
from .replay import ReplayBuffer

__all__ = ["DeviceRows", "EngineRows", "TeacherRows", "chunk_rows", "to_device"]

_CHUNK = 65_536  # rows read at a time where all are


def chunk_rows(num_envs: int | None) -> int:
    """Rows to read at a time: whole steps."""
    envs = num_envs or 1
    return max(_CHUNK // envs, 1) * envs


class TeacherRows(ReplayBuffer):
    """The engine's rows, without what only transitions have."""

    _face = "DistillationBuffer"

    def _build_schema(self, fields: Any, **options: Any) -> Schema:
        return Schema({**fields, "done": Field((), "bool")})


class EngineRows:
    def __init__(self, buffer: ReplayBuffer, device: Any) -> None:
        self.buffer, self.device = buffer, device

    def add(self, values: dict[str, Any], lead: tuple[int, ...]) -> None:
        self.buffer.add(**values)

    def __len__(self) -> int:
        return len(self.buffer)

    def clear(self) -> None:
        self.buffer.clear()

    def sample(self, batch_size: int) -> dict[str, Any]:
        return self.buffer.sample(batch_size, device=self.device)

    def names(self) -> Any:
        return self.buffer._table.live_serials()

    def whole_steps(self, envs: int) -> tuple[Any, np.ndarray[Any, Any]]:
        """Rows of steps of which none is missing, and behind which of them something is."""
        names = self.names()
        step, first, count = np.unique(names // envs, return_index=True, return_counts=True)
        first, step = first[count == envs], step[count == envs]
        breaks = np.append(np.diff(step) != 1, False) if len(step) else np.zeros(0, bool)
        return names[(first[:, None] + np.arange(envs)).reshape(-1)], breaks

    def get(self, names: Any, which: Any) -> dict[str, Any]:
        rows = self.buffer.get(names[np.asarray(which)])
        rows["done"] = rows["done"] | rows["truncated"]
        return rows if self.device is None else to_device(rows, None)

    def save(self, path: Any, make: Any) -> None:
        self.buffer.save(path)


class Slots:
    """Rows of a ring, as long as no more than so many were ever added to it."""

    def __init__(self, slots: Any, until: int) -> None:
        self.slots, self.until = slots, until

    def __len__(self) -> int:
        return len(self.slots)


class DeviceRows:
    """A ring of tensors on a GPU."""

    def __init__(self, place: Host, nodes: Mapping[str, Node], capacity: int, num_envs: int | None) -> None:
        self.place, self.capacity, self.num_envs = place, capacity, num_envs
        self.columns = Columns(place, (capacity,))
        for name, node in nodes.items():
            self.columns.declare(name, node)
        self.columns.declare("done", Field((), "bool"))
        self.head, self.count, self.added = 0, 0, 0

    def add(self, values: dict[str, Any], lead: tuple[int, ...]) -> None:
        rows = int(np.prod(lead, dtype=np.int64))
        if rows > self.capacity:
            raise SchemaError(f"add(): got {rows} rows, the capacity is {self.capacity}; add fewer at once")
        if rows % (self.num_envs or 1):
            raise SchemaError(f"add(): expected a multiple of num_envs={self.num_envs} rows, got {rows}")
        done = values.pop("done")
        checked = [part for name, value in values.items() for part in self.columns.check("add()", name, value, lead)]
        if done is None:
            checked.append(("done", self.place.zeros(lead, np.dtype(bool))))
        else:
            checked += self.columns.check("add()", "done", done, lead)
        first = min(rows, self.capacity - self.head)
        flat = [(path, array.reshape(rows, *self.columns.arrays[path].shape[1:])) for path, array in checked]
        for path, array in flat:
            self.columns.arrays[path][self.head : self.head + first] = array[:first]
            self.columns.arrays[path][: rows - first] = array[first:]
        self.head = (self.head + rows) % self.capacity
        self.count = min(self.count + rows, self.capacity)
        self.added += rows

    def __len__(self) -> int:
        return self.count

    def clear(self) -> None:
        self.added += self.capacity  # whoever still reads has nothing left
        self.head = self.count = 0

    def sample(self, batch_size: int) -> dict[str, Any]:
        return self._rows(self.place.integers(self.count, batch_size))

    def names(self) -> Slots:
        """Oldest first."""
        slots = self.place.index((np.arange(self.count) + self.head - self.count) % self.capacity)
        return Slots(slots, self.added + self.capacity - self.count)

    def whole_steps(self, envs: int) -> tuple[Slots, np.ndarray[Any, Any]]:
        return self.names(), np.zeros(self.count // envs, bool)

    def get(self, names: Slots, which: Any) -> dict[str, Any]:
        if self.added > names.until:
            raise StaleHandle(
                "rows were written over since the iteration began; collect first, or give a larger capacity"
            )
        return self._rows(self.place.take(names.slots, which))

    def _rows(self, slots: Any) -> dict[str, Any]:
        take = self.place.take
        return {name: self.columns.tree(name, lambda array: take(array, slots)) for name in self.columns.nodes}

    def save(self, path: Any, make: Any) -> None:
        with make() as rows:
            slots, step = self.names().slots, chunk_rows(self.num_envs)
            for start in range(0, self.count, step):
                part = self._rows(slots[start : start + step])
                rows.add(**to_host(part, self.place))
            rows.save(path)


def to_host(value: Any, place: Host) -> Any:
    if isinstance(value, dict):
        return {key: to_host(part, place) for key, part in value.items()}
    return place.to_host(value)[0]


def to_device(value: Any, place: Host | None) -> Any:
    """Tensors of arrays: over the same memory, or on that place."""
    if isinstance(value, dict):
        return {key: to_device(part, place) for key, part in value.items()}
    if place is not None:
        return place.index(value)
    import torch

    return torch.from_numpy(value)
