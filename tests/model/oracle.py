"""The specification of a ReplayBuffer, slow and obvious: a list of rows, the oldest thrown away first.

One writer at a time. Rows are plain objects; a masked row keeps its place in the ring and is never seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import sharpwave as sw


@dataclass
class Row:
    number: int  # of all rows ever made, in order
    leaves: dict[str, np.ndarray]  # by path: "obs/image"
    terminated: bool = False
    truncated: bool = False
    masked: bool = False


class Oracle:
    def __init__(self, capacity: int, num_envs: int | None) -> None:
        self.capacity = capacity
        self.width = num_envs or 1
        self.ring: list[Row] = []
        self.open_rows: list[Row | None] = [None] * self.width  # the last row of each env's unfinished episode

    def add(self, rows: list[Row]) -> None:
        assert len(rows) % self.width == 0
        for i, row in enumerate(rows):
            self.ring.append(row)
            if len(self.ring) > self.capacity:
                self.ring.pop(0)
            if not row.masked:
                self.open_rows[i % self.width] = None if row.terminated or row.truncated else row

    def write(self, rows: list[Row | None], leaves: dict[str, np.ndarray]) -> None:
        """New values of some leaves, one a row, in their order: of a row that comes twice the last one holds."""
        for i, row in enumerate(rows):
            if row is not None:
                row.leaves |= {path: values[i].copy() for path, values in leaves.items()}

    def close_writer(self) -> None:
        for row in self.open_rows:
            if row is not None:
                row.truncated = True
        self.open_rows = [None] * self.width

    def clear(self) -> None:
        self.ring = []
        self.open_rows = [None] * self.width

    def copy(self) -> Oracle:
        """What a snapshot holds: the rows. An episode that was open then is open for nobody now."""
        twin = Oracle(self.capacity, self.width)
        twin.ring = [replace(row, leaves=dict(row.leaves)) for row in self.ring]
        return twin

    def rows(self) -> list[Row]:
        return [row for row in self.ring if not row.masked]

    def __len__(self) -> int:
        return len(self.rows())


# ---- rows of any schema ----------------------------------------------------------------------------------------------


def leaves_of(schema: Any, path: str = "") -> dict[str, sw.Field]:
    """Field by path, in the schema's order."""
    if isinstance(schema, sw.Field):
        return {path: schema}
    parts = schema.items() if isinstance(schema, dict) else enumerate(schema)
    found: dict[str, sw.Field] = {}
    for name, part in parts:
        found |= leaves_of(part, f"{path}/{name}" if path else str(name))
    return found


def make_row(schema: dict[str, Any], number: int) -> Row:
    """A row whose every byte follows from its number."""
    stream = np.random.default_rng(number)
    leaves = {}
    for path, field in leaves_of(schema).items():
        if path == "done":
            continue
        items = int(np.prod(field.shape, dtype=int))
        raw = np.frombuffer(stream.bytes(items * field.dtype.itemsize), np.uint8)
        if field.dtype.kind == "b":
            raw = raw & 1
        elif field.dtype.kind == "U":
            raw = (raw.view(np.uint32) % 0xD800).view(np.uint8)  # code points that exist
        leaves[path] = raw.view(field.dtype).reshape(field.shape)
    return Row(number, leaves)


def stack_rows(schema: dict[str, Any], rows: list[Row], lead: tuple[int, ...]) -> dict[str, Any]:
    """The arguments of an add of these rows, nested as the schema is."""

    def build(node: Any, path: str) -> Any:
        if isinstance(node, sw.Field):
            if path == "done":
                return np.array([row.terminated for row in rows]).astype(node.dtype).reshape(lead)
            return np.array([row.leaves[path] for row in rows], node.dtype).reshape((*lead, *node.shape))
        if isinstance(node, tuple):
            return tuple(build(part, f"{path}/{i}") for i, part in enumerate(node))
        return {name: build(part, f"{path}/{name}") for name, part in node.items()}

    return {name: build(node, name) for name, node in schema.items()}


def leaf_in(batch: dict[str, Any], path: str) -> np.ndarray:
    """The array under a path of a batch."""
    node: Any = batch
    for part in path.split("/"):
        node = node[int(part)] if isinstance(node, tuple) else node[part]
    return node


def row_bytes(batch: dict[str, Any], schema: dict[str, Any], i: int) -> tuple[bytes, ...]:
    """Row i of a batch, comparable: bytes, because NaN differs from itself."""
    return tuple(leaf_in(batch, path)[i : i + 1].tobytes() for path in leaves_of(schema))


def expected_bytes(schema: dict[str, Any], row: Row) -> tuple[bytes, ...]:
    return tuple(
        (np.array(row.terminated, field.dtype) if path == "done" else row.leaves[path]).tobytes()
        for path, field in leaves_of(schema).items()
    )


def read_all(buffer: sw.ReplayBuffer, schema: dict[str, Any], batch_size: int = 4096) -> list[tuple[Any, ...]]:
    """Every row as (serial, truncated, bytes), in the order of rows()."""
    return [
        (int(batch["indices"][i]), bool(batch["truncated"][i]), row_bytes(batch, schema, i))
        for batch in buffer.rows(batch_size)
        for i in range(len(batch["indices"]))
    ]
