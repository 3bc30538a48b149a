"""The specification of values that are written back, slow and obvious: the oracle's rows, by the handles that the
buffer gave them, and what every view must show of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

# From both rooms: tests/contract imports the models as a package.
try:
    from oracle import Oracle, Row, leaf_in, leaves_of, make_row, stack_rows
except ImportError:
    from model.oracle import Oracle, Row, leaf_in, leaves_of, make_row, stack_rows

import sharpwave as sw
from sharpwave.errors import StaleHandle

SCHEMA: dict[str, Any] = {
    "obs": sw.Field((3,)),
    "action": sw.Field((), "int64"),
    "reward": sw.Field((), mutable=True),
    "next_obs": sw.Field((3,)),
    "done": sw.Field((), "bool"),
    "state": {"h": sw.Field((5,), mutable=True), "steps": sw.Field((2, 1), "int32", mutable=True), "id": sw.Field(())},
    "seen": sw.Field((), "bool", mutable=True),
}
MUTABLE = [path for path, field in leaves_of(SCHEMA).items() if field.mutable]
GAMMA = 0.5
VIEWS: dict[str, Any] = {
    "one step": sw.Transitions(),
    "three steps": sw.Transitions(n_step=3, gamma=GAMMA),
    "windows": sw.Windows(3, burn_in=1),
}


class WritePair:
    """One stream of steps in a buffer and in an oracle. Rewards are small whole numbers: sums of them are exact."""

    def __init__(self, buffer: sw.ReplayBuffer, capacity: int) -> None:
        self.buffer, self.oracle = buffer, Oracle(capacity, None)
        self.rows: dict[int, Row] = {}  # by handle, of all rows ever
        self.starts: set[int] = set()  # numbers of rows that begin an episode
        self.number, self.is_new = 0, True

    # ---- calls ----------------------------------------------------------------------------------------------------

    def add(self, ends: list[str]) -> None:
        """One row a letter: "." goes on, "T" terminated, "U" truncated."""
        rows = []
        for end in ends:
            row = make_row(SCHEMA, self.number)
            row.leaves["reward"] = np.array(self.number % 13, np.float32)
            row.terminated, row.truncated = end == "T", end == "U"
            if self.is_new:
                self.starts.add(self.number)
            self.is_new = end != "."
            self.number += 1
            rows.append(row)
        values = stack_rows(SCHEMA, rows, (len(rows),))
        self.buffer.add(**values, truncated=np.array([row.truncated for row in rows]))
        self.oracle.add(rows)
        held = self.handles()
        self.rows |= dict(zip(held[-len(rows) :], rows[-len(held) :], strict=True))

    def handles(self) -> list[int]:
        return [int(serial) for part in self.buffer.rows() for serial in host(part["indices"])]

    def write(self, handles: np.ndarray, paths: list[str], seed: int, stale: str) -> None:
        """`handles` of any shape, with -1, handles of rows that are gone, and some that come twice."""
        values = {path: new_values(path, handles.size, seed) for path in paths}
        nested: dict[str, Any] = {}
        for path, flat in values.items():
            node = nested
            *parts, last = path.split("/")
            for part in parts:
                node = node.setdefault(part, {})
            node[last] = flat.reshape(*handles.shape, *flat.shape[1:])
        here = {id(row) for row in self.oracle.rows()}
        rows = [self.rows.get(handle) for handle in handles.reshape(-1).tolist()]
        rows = [row if id(row) in here else None for row in rows]
        gone = [h for h, row in zip(handles.reshape(-1).tolist(), rows, strict=True) if row is None and h != -1]
        if stale == "error" and gone:
            with pytest.raises(StaleHandle, match=f"row {gone[0]} is not in the buffer"):
                self.buffer.write(handles, **nested)
            return
        told = self.buffer.write(handles, stale=stale, **nested)
        applied = sum(row is not None for row in rows)
        assert {name: int(count) for name, count in told.items()} == {"applied": applied, "stale": len(gone)}
        self.oracle.write(rows, values)

    # ---- what must hold -------------------------------------------------------------------------------------------

    def check_rows(self) -> None:
        kept = self.oracle.rows()
        read = list(self.buffer.rows(7))
        assert sum(len(part["indices"]) for part in read) == len(kept)
        rows = iter(kept)
        for part in read:
            for i, handle in enumerate(host(part["indices"]).tolist()):
                row = next(rows)
                assert self.rows[handle] is row
                self.check_row(part, i, row)

    def check_row(self, batch: dict[str, Any], i: Any, row: Row, but: tuple[str, ...] = ()) -> None:
        for path, field in leaves_of(SCHEMA).items():
            if path in but:
                continue
            value = np.array(row.terminated, field.dtype) if path == "done" else row.leaves[path]
            np.testing.assert_array_equal(host(leaf_in(batch, path))[i], value, f"{path} of row {row.number}")

    def check_batch(self, batch: dict[str, Any], view: str) -> None:
        for i, handle in enumerate(host(batch["indices"]).tolist()):
            row = self.rows[handle]
            if view == "windows":
                self.check_window(batch, i, row)
                continue
            steps = self.steps_from(row, 3 if view == "three steps" else 1)
            total = sum(GAMMA**k * float(step.leaves["reward"]) for k, step in enumerate(steps))
            assert host(batch["reward"])[i] == np.float32(total)
            np.testing.assert_array_equal(host(batch["next_obs"])[i], steps[-1].leaves["next_obs"])
            assert host(batch["done"])[i] == steps[-1].terminated
            self.check_row(batch, i, row, but=("reward", "next_obs", "done"))

    def steps_from(self, row: Row, most: int) -> list[Row]:
        ring = self.oracle.ring
        steps = [row]
        at = ring.index(row)
        while len(steps) < most and not (ring[at].terminated or ring[at].truncated):
            at += 1
            if at == len(ring) or ring[at].number in self.starts:
                break
            steps.append(ring[at])
        return steps

    def check_window(self, batch: dict[str, Any], i: int, row: Row) -> None:
        ring = self.oracle.ring
        at = ring.index(row)
        before = [ring[at - 1]] if at > 0 and row.number not in self.starts else []
        shown = before + self.steps_from(row, 3)
        for place in range(4):
            assert host(batch["valid"])[i, place] == (place < len(shown))
            self.check_row(batch, (i, place), shown[min(place, len(shown) - 1)])


def new_values(path: str, count: int, seed: int) -> np.ndarray:
    field = leaves_of(SCHEMA)[path]
    stream = np.random.default_rng([seed, len(path)])
    return stream.integers(0, 2 if field.dtype.kind == "b" else 50, (count, *field.shape)).astype(field.dtype)


def host(values: Any) -> np.ndarray:
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values)
