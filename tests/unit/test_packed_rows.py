"""Rows that are packed for a table elsewhere: they arrive as if they had been added there, and each arrives once."""

from __future__ import annotations

import functools
import gc
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import HANG_S

import sharpwave as sw
from sharpwave import _core
from sharpwave.arrays import prepare, read_leaf
from sharpwave.errors import NotReady, SchemaError
from sharpwave.schema import Field

TOKEN = bytes(range(16))
ROOM = 64


class Remote:
    """A packer, and the writer of a table that takes what it packs: a client and its server without a network."""

    def __init__(self, buffer: sw.ReplayBuffer, token: bytes = TOKEN, max_rows: int = 5, linger_s: float = 1e9) -> None:
        spec, self.table = buffer._rows.spec, buffer._rows.table
        one_row = None if spec.num_envs is not None else spec.order_reason
        careful = functools.partial(prepare, spec.schema, spec.capacity, spec.num_envs, one_row, spec.is_prioritized)
        read = functools.partial(read_leaf, spec.schema)
        takes_steps, takes_one = spec.num_envs is not None, one_row is not None
        self.writer = _core.Writer(self.table, careful, read, takes_steps, takes_one, client=token)
        self.packer = _core.Packer(
            spec.batch_tree(weights=spec.is_prioritized, relabelled=False),
            spec.schema.engine_fields(),
            spec.capacity,
            spec.num_envs or 1,
            careful,
            read,
            takes_steps,
            takes_one,
            self.full,
            max_rows,
            1 << 30,
            linger_s,
        )
        self.add = self.packer.add
        self.sent = self.writer.accepted
        self.calls: list[tuple[Any, bool]] = []

    def full(self, timeout: Any, wants_indices: bool) -> Any:
        self.calls.append((timeout, wants_indices))
        rows, last = self.packer.rows, self.packer.last_rows
        message = self.packer.take(ROOM)
        if message is None:
            return None
        assert message[:ROOM] == bytes(ROOM) and self.packer.rows == 0
        answer = self.writer.append_packed(memoryview(message)[ROOM:], self.sent, wants_indices, timeout)
        self.sent += rows
        accepted, indices = answer if wants_indices else (answer, None)
        assert accepted == self.sent == self.writer.accepted
        return None if indices is None else indices[len(indices) - last :]

    def flush(self) -> None:
        self.full(None, False)


# ---- the same calls, here and there ---------------------------------------------------------------------------------

NESTED = {
    "obs": {"image": sw.Field((2, 2), "uint8"), "pair": (sw.Field((), "float64"), sw.Field((3,), "int16"))},
    "action": sw.Field((), "int64"),
    "note": sw.Field((2,), "S3"),
}
FRAMES = {"obs": {"eye": sw.Field((2,), "uint8", stack=3), "ear": sw.Field((1,), stack=2)}, "action": sw.Field()}
ZERO = {"obs": sw.Field((2,), "uint8", stack=4, padding="zero"), "action": sw.Field((), "int8")}
RAGGED = {"obs": sw.Field((2,)), "words": sw.Field((5,), "int32", ragged=True), "pairs": sw.Field((3, 2), ragged=True)}
RAGGED_OBS = {"obs": sw.Field((6,), "int16", ragged=True), "action": sw.Field((), "bool")}
MUTABLE = {"obs": sw.Field((3,)), "state": sw.Field((2,), "float64", mutable=True), "mark": sw.Field((), mutable=True)}
AGENTS = {"obs": sw.Field((3, 2)), "reward": sw.Field((3,)), "done": sw.Field((3,), "bool")}
NAMED = {
    "obs": {name: sw.Field((2,)) for name in ("scout", "guard")},
    "reward": {name: sw.Field() for name in ("scout", "guard")},
    "done": {name: sw.Field((), "float16") for name in ("scout", "guard")},
}
PACKED = {"obs": sw.Field((50,), "uint8", compression="lz4"), "action": sw.Field((), "int64")}
HALF = {"obs": sw.Field((2,)), "done": sw.Field((), "float16")}

CASES: dict[str, dict[str, Any]] = {
    "plain": {"obs_shape": (3,)},
    "one env": {"obs_shape": (3,), "num_envs": 1},
    "three envs": {"obs_shape": (3,), "num_envs": 3},
    "derived": {"obs_shape": (3,), "next_obs": "derived"},
    "derived, three envs": {"obs_shape": (3,), "next_obs": "derived", "num_envs": 3},
    "nested": {"schema": NESTED, "num_envs": 2},
    "nested, derived": {"schema": NESTED, "next_obs": "derived", "num_envs": 2},
    "frames": {"schema": FRAMES, "num_envs": 2},
    "frames, derived": {"schema": FRAMES, "next_obs": "derived", "num_envs": 2},
    "frames, one row": {"schema": FRAMES, "next_obs": "derived"},
    "frames from zero": {"schema": ZERO, "num_envs": 1},
    "ragged": {"schema": RAGGED, "num_envs": 2},
    "ragged, derived": {"schema": RAGGED_OBS, "next_obs": "derived", "num_envs": 2},
    "mutable": {"schema": MUTABLE},
    "agents": {"schema": AGENTS, "num_envs": 2},
    "named agents": {"schema": NAMED},
    "compressed": {"schema": PACKED, "num_envs": 3, "next_obs": "derived"},
    "half precision done": {"schema": HALF, "num_envs": 2},
    "by priority": {"obs_shape": (2,), "sampler": sw.Prioritized()},
    "by priority, two envs": {"obs_shape": (2,), "num_envs": 2, "sampler": sw.Prioritized()},
}


def random_value(random: np.random.Generator, field: Field) -> np.ndarray[Any, Any]:
    shape = field.shape
    if field.ragged:
        shape = (int(random.integers(0, shape[0] + 1)), *shape[1:])
    return random.integers(0, 2 if field.dtype.kind == "b" else 100, shape).astype(field.dtype)


def make_node(node: Any, leaf: Callable[[Field, tuple[Any, ...]], Any], path: tuple[Any, ...] = ()) -> Any:
    if isinstance(node, Field):
        return leaf(node, path)
    if isinstance(node, tuple):
        return tuple(make_node(child, leaf, (*path, i)) for i, child in enumerate(node))
    return {name: make_node(child, leaf, (*path, name)) for name, child in node.items()}


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    return functools.reduce(lambda node, key: node[key], path, tree)


class World:
    """Environments whose steps are the arguments of ``add``; every choice comes from one seed."""

    def __init__(self, buffer: sw.ReplayBuffer, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.spec = buffer._rows.spec
        self.fields = self.spec.schema.fields
        self.envs = self.spec.num_envs or 1
        self.past: list[list[Any]] = [[self.new_obs()] for _ in range(self.envs)]

    def new_obs(self) -> Any:
        return make_node(self.fields["obs"], lambda field, path: random_value(self.random, field))

    def frames(self, obs: list[Any], field: Field, path: tuple[Any, ...], whole: bool) -> Any:
        values = [at(one, path) for one in obs[-field.stack :]]
        if field.stack == 1 or not whole:
            return values[-1]
        first = values[0] if field.padding == "repeat" else np.zeros_like(values[0])
        return np.stack([first] * (field.stack - len(values)) + values)

    def row(self, env: int, whole: bool) -> tuple[dict[str, Any], bool, bool]:
        """The values of one row, whether it is truncated and whether it is masked out."""
        random, past = self.random, self.past[env]
        after = self.new_obs()
        values = {
            name: make_node(node, lambda field, path: random_value(random, field)) for name, node in self.fields.items()
        }
        values["obs"] = make_node(
            self.fields["obs"], lambda field, path: self.frames(past, field, path, whole and field.stack > 1)
        )
        if "next_obs" in self.fields:
            seen = [*past, after]
            values["next_obs"] = make_node(
                self.fields["next_obs"], lambda field, path: self.frames(seen, field, path, whole and field.stack > 1)
            )
        ends = bool(random.random() < 0.2)
        if "done" in self.fields:
            values["done"] = make_node(
                self.fields["done"],
                lambda field, path: (
                    np.ones(field.shape, field.dtype) if ends else (random.random(field.shape) < 0.3).astype(field.dtype)
                )
                if self.spec.schema.by_agent
                else np.full(field.shape, ends, field.dtype),
            )
        is_truncated, is_masked = bool(random.random() < 0.1), bool(random.random() < 0.15)
        if not is_masked:
            past.append(after)
            all_done = "done" in self.fields and all(
                np.all(leaf) for leaf in leaves_of(values["done"], self.fields["done"])
            )
            if all_done or is_truncated:
                self.past[env] = [self.new_obs()]
        return values, is_truncated, is_masked

    def call(self) -> dict[str, Any]:
        random = self.random
        whole = bool(random.random() < 0.5)
        many = self.spec.num_envs is not None or self.spec.order_reason is None
        steps = int(random.integers(1, 4)) if many and random.random() < 0.6 else 1
        rows = [self.row(env, whole) for _ in range(steps) for env in range(self.envs)]
        lead: tuple[int, ...] = (len(rows),)
        if self.spec.num_envs is not None and random.random() < 0.5:
            lead = (steps, self.envs)
        is_one = len(rows) == 1 and (self.spec.num_envs is None or random.random() < 0.5)

        def join(field: Field, path: tuple[Any, ...]) -> Any:
            values = [at(row[0], path) for row in rows]
            if is_one:
                return values[0]
            return values if field.ragged else np.stack(values).reshape(*lead, *values[0].shape)

        kwargs = {name: make_node(node, lambda f, p, n=name: join(f, (n, *p))) for name, node in self.fields.items()}

        def flag(values: list[bool]) -> Any:
            return values[0] if is_one else np.array(values).reshape(lead)

        if random.random() < 0.7:
            kwargs["truncated"] = flag([row[1] for row in rows])
        elif any(row[1] for row in rows):
            kwargs["truncated"] = flag([row[1] for row in rows])
        if any(row[2] for row in rows):
            kwargs["mask"] = flag([not row[2] for row in rows])
        if self.spec.is_prioritized and random.random() < 0.5:
            given_priorities = random.random(len(rows)).astype(np.float32)
            kwargs["priority"] = given_priorities[0] if is_one else given_priorities.reshape(lead)
        return kwargs


def leaves_of(value: Any, node: Any) -> Iterator[Any]:
    if isinstance(node, Field):
        yield value
    else:
        for key in node if isinstance(node, dict) else range(len(node)):
            yield from leaves_of(value[key], node[key])


def plain(value: Any) -> Any:
    """For comparison: dtype, shape and bytes of every array."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    array = np.asarray(value)
    return array.dtype.str, array.shape, array.tobytes()


def content(buffer: sw.ReplayBuffer) -> tuple[Any, ...]:
    counts = buffer.stats()
    names = ("size", "rows_added", "rows_voided", "episodes", "resets_unflagged", "rows_retired")
    return (
        [plain(batch) for batch in buffer.rows(ids=True)],
        [plain(episode) for episode in buffer.episodes(partial=True, unfinished=True)],
        {name: counts[name] for name in names},
    )


@settings(max_examples=150)
@given(st.sampled_from(list(CASES)), st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 12))
def test_packed_rows_arrive_as_added_ones(case: str, seed: int, calls: int, max_rows: int) -> None:
    options = {"seed": 0, **CASES[case]}
    here, there = sw.ReplayBuffer(24, **options), sw.ReplayBuffer(24, **options)
    remote, world = Remote(there, max_rows=max_rows), World(here, seed)
    for number in range(calls):
        call = world.call()
        wants = bool(world.random.random() < 0.2)
        errors: list[str | None] = [None, None]
        indices: list[Any] = [None, None]
        for i, add in enumerate((here.add, remote.add)):
            try:
                indices[i] = add(**call, return_indices=True) if wants else add(**call)
            except SchemaError as error:
                errors[i] = str(error)
        assert errors == [None, None], number
        if wants:
            assert indices[0].tolist() == indices[1].tolist()
    remote.flush()
    assert content(here) == content(there)
    batches = [buffer.sample(16) if len(buffer) else {} for buffer in (here, there)]  # priorities arrive too
    assert plain(batches[0]) == plain(batches[1])
