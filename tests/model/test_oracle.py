"""The engine and the oracle side by side, over random schemas and random calls."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from oracle import Oracle, Row, expected_bytes, leaves_of, make_row, read_all, row_bytes, stack_rows

import sharpwave as sw
from sharpwave.errors import NotReady, StaleHandle

NUMBERS = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
NUMBERS += ["float16", "float32", "float64", "complex64", "complex128", "S5", "U2", "M8[s]"]
SHAPES = [(), (1,), (3,), (2, 3), (12, 9, 3)]

fields = st.builds(sw.Field, st.sampled_from(SHAPES), st.sampled_from(NUMBERS))
nodes = st.one_of(
    fields,
    st.fixed_dictionaries({"image": fields, "state": fields}),
    st.tuples(fields, fields),
    st.fixed_dictionaries({"deep": st.fixed_dictionaries({"x": fields}), "pair": st.tuples(fields, fields)}),
)
schemas = st.fixed_dictionaries(
    {"obs": nodes},
    optional={
        "action": nodes,
        "reward": st.builds(sw.Field, st.just(()), st.sampled_from(["float32", "float64"])),
        "done": st.builds(sw.Field, st.just(()), st.sampled_from(["bool", "float32", "uint8", "float64"])),
        "extra": fields,
    },
)
sizes = st.one_of(st.integers(1, 8), st.integers(1, 200))


def swapped(value: Any) -> Any:
    """The same values in the other byte order: the engine's fast path does not take them."""
    if isinstance(value, dict):
        return {name: swapped(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(swapped(part) for part in value)
    return value.astype(value.dtype.newbyteorder(">"))


class OneWriter(RuleBasedStateMachine):
    """One writer at a time: rows() equals the oracle's rows exactly, in order."""

    @initialize(
        schema=schemas,
        capacity=sizes,
        num_envs=st.sampled_from([None, None, 1, 3, 8]),
        next_obs=st.sampled_from(["stored", None]),
        writers=st.sampled_from([1, 4, 64]),
    )
    def create(self, schema: Any, capacity: int, num_envs: int | None, next_obs: Any, writers: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.width = num_envs or 1
        capacity = -(-capacity // self.width) * self.width
        self.num_envs = num_envs
        self.buffer = sw.ReplayBuffer(
            capacity, schema=schema, next_obs=next_obs, num_envs=num_envs, seed=7, writers=writers
        )
        self.schema = self.buffer.schema
        self.oracle = Oracle(capacity, num_envs)
        self.made = 0
        self.number_of: dict[int, int] = {}  # serial -> row number, over the whole life
        self.writer: Any = self.buffer

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.close()
            self.folder.cleanup()

    def new_rows(self, data: st.DataObject, count: int) -> list[Row]:
        rows = [make_row(self.schema, self.made + i) for i in range(count)]
        self.made += count
        some = st.lists(st.sampled_from([False, False, True]), min_size=count, max_size=count)
        for row, terminated, truncated in zip(rows, data.draw(some), data.draw(some), strict=True):
            row.terminated, row.truncated = terminated, truncated
        return rows

    def draw_lead(self, data: st.DataObject) -> tuple[int, ...]:
        """() is one row, (n,) flat, (k, num_envs) by steps."""
        most = self.oracle.capacity // self.width
        steps = data.draw(st.one_of(st.integers(1, min(most, 8)), st.integers(1, most)))
        leads: list[tuple[int, ...]] = [(steps * self.width,)]
        if self.width == 1:
            leads = [(), (), *leads]
        if self.num_envs is not None:
            leads.append((steps, self.width))
        return data.draw(st.sampled_from(leads))

    def call_add(self, target: Any, rows: list[Row], lead: tuple[int, ...], how: str, masked: bool) -> None:
        values = stack_rows(self.schema, rows, lead)
        options: dict[str, Any] = {"truncated": np.array([row.truncated for row in rows]).reshape(lead)}
        if masked:
            options["mask"] = ~np.array([row.masked for row in rows]).reshape(lead)
        if not lead and how != "swapped":
            options = {name: bool(value) for name, value in options.items()}
        if how == "swapped":
            values = {name: swapped(value) for name, value in values.items()}
        if how == "keyword":
            values["terminated"] = values.pop("done")
            target.add(**values, **options)
        else:
            target.add(*values.values(), **options)

    @rule(data=st.data(), how=st.sampled_from(["position", "keyword", "swapped"]), masked=st.booleans())
    def add(self, data: st.DataObject, how: str, masked: bool) -> None:
        lead = self.draw_lead(data)
        rows = self.new_rows(data, int(np.prod(lead, dtype=int)))
        if masked:
            for row in rows:
                row.masked = data.draw(st.booleans())
        self.call_add(self.writer, rows, lead, how, masked)
        self.oracle.add(rows)

    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.oracle.clear()

    @rule()
    def take_another_writer(self) -> None:
        if self.writer is self.buffer:
            if self.buffer._rows._writer is not None:
                # A buffer's own writer ends with the buffer only, and two at once are another machine's business.
                return
        else:
            self.writer.close()
            self.oracle.close_writer()
        self.writer = self.buffer.writer()

    @rule(data=st.data())
    def save_and_open(self, data: st.DataObject) -> None:
        path = Path(self.folder.name) / "snapshot"
        self.buffer.save(path)
        copy = sw.open(path)
        assert read_all(copy, self.schema) == read_all(self.buffer, self.schema)
        assert len(copy) == len(self.buffer)
        assert copy.schema == self.schema
        assert (copy.capacity, copy.num_envs) == (self.buffer.capacity, self.buffer.num_envs)
        # The copy goes on as the buffer does that was never interrupted: the same serials, the same draws.
        lead = self.draw_lead(data)
        rows = self.new_rows(data, int(np.prod(lead, dtype=int)))
        for buffer, writer in ((self.buffer, self.writer), (copy, copy)):
            self.call_add(writer, rows, lead, "position", False)
            buffer.sample(3)
        ours, theirs = self.buffer.sample(16), copy.sample(16)
        assert ours["indices"].tolist() == theirs["indices"].tolist()
        assert [r[0] for r in read_all(copy, self.schema)] == [r[0] for r in read_all(self.buffer, self.schema)]
        self.buffer.close()
        self.buffer = self.writer = copy
        self.oracle = self.oracle.copy()
        self.oracle.add(rows)

    @precondition(lambda self: len(self.oracle) > 0)
    @rule(size=st.sampled_from([1, 2, 17, 300]), reuse=st.booleans())
    def sample(self, size: int, reuse: bool) -> None:
        batch = self.buffer.sample(size)
        if reuse:
            batch = self.buffer.sample(size, out=batch)
        held = {serial: row for serial, _, row in read_all(self.buffer, self.schema)}
        serials = batch["indices"].tolist()
        assert [row_bytes(batch, self.schema, i) for i in range(size)] == [held[serial] for serial in serials]
        again = self.buffer.get(batch["indices"])
        assert again["indices"].tolist() == serials
        assert [row_bytes(again, self.schema, i) for i in range(size)] == [held[serial] for serial in serials]

    @precondition(lambda self: len(self.oracle) == 0)
    @rule()
    def sample_nothing(self) -> None:
        with pytest.raises(NotReady):
            self.buffer.sample(1)

    @invariant()
    def engine_equals_oracle(self) -> None:
        if not hasattr(self, "buffer"):
            return
        expected = self.oracle.rows()
        read = read_all(self.buffer, self.schema, batch_size=64)
        assert len(self.buffer) == len(expected) == len(read)
        assert self.buffer.is_full == (len(expected) == self.oracle.capacity)
        assert [(truncated, row) for _, truncated, row in read] == [
            (row.truncated, expected_bytes(self.schema, row)) for row in expected
        ]
        serials = [serial for serial, _, _ in read]
        assert serials == sorted(set(serials))
        newest = max(self.number_of, default=-1)
        for serial, row in zip(serials, expected, strict=True):
            if serial not in self.number_of:
                assert serial > newest
            # A serial names one row for ever, also across clear() and save().
            assert self.number_of.setdefault(serial, row.number) == row.number
        gone = set(self.number_of) - set(serials)
        if gone:
            with pytest.raises(StaleHandle):
                self.buffer.get([min(gone)])


class SeveralWriters(RuleBasedStateMachine):
    """Several writers at once: nothing is invented, and what is left of each writer's rows is its newest, in order."""

    @initialize(
        capacity=st.one_of(st.integers(1, 8), st.integers(9, 400)),
        num_envs=st.sampled_from([None, 1, 3, 8]),
        limit=st.sampled_from([2, 5, 64]),
    )
    def create(self, capacity: int, num_envs: int | None, limit: int) -> None:
        self.width = num_envs or 1
        capacity = -(-capacity // self.width) * self.width
        self.buffer = sw.ReplayBuffer(
            capacity, schema={"obs": sw.Field((), "int64")}, next_obs=None, num_envs=num_envs, writers=limit, seed=3
        )
        self.limit = limit
        stats = self.buffer.stats()
        self.block_rows, self.blocks = stats["block_rows"], stats["blocks"]
        self.writers: list[tuple[int, Any]] = []
        self.added: list[list[int]] = []  # a writer's row numbers, in order
        self.since_clear = 0
        self.writers_since_clear = 0
        self.made = 0
        self.number_of: dict[int, int] = {}

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            for _, writer in self.writers:
                writer.close()
            self.buffer.close()

    @precondition(lambda self: len(self.writers) < min(self.limit, 6))
    @rule()
    def open_writer(self) -> None:
        self.writers.append((len(self.added), self.buffer.writer()))
        self.added.append([])
        self.writers_since_clear += 1

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def close_writer(self, data: st.DataObject) -> None:
        _, writer = self.writers.pop(data.draw(st.integers(0, len(self.writers) - 1)))
        writer.close()

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        which, writer = data.draw(st.sampled_from(self.writers))
        count = data.draw(st.integers(1, self.buffer.capacity // self.width)) * self.width
        numbers = np.arange(self.made, self.made + count)
        self.made += count
        writer.add(obs=numbers, reward=numbers.astype(np.float32), done=np.zeros(count, bool))
        self.added[which] += numbers.tolist()
        self.since_clear += count

    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.added = [[] for _ in self.added]
        self.since_clear = 0
        self.writers_since_clear = len(self.writers)

    @invariant()
    def what_is_left_is_each_writers_newest(self) -> None:
        if not hasattr(self, "buffer"):
            return
        rows = list(self.buffer.rows())
        numbers = [int(n) for batch in rows for n in batch["obs"]]
        serials = [int(n) for batch in rows for n in batch["indices"]]
        assert len(self.buffer) == len(numbers) <= self.buffer.capacity
        assert len(set(numbers)) == len(numbers)
        assert serials == sorted(set(serials))
        for serial, number in zip(serials, numbers, strict=True):
            assert self.number_of.setdefault(serial, number) == number
        held = set(numbers)
        # A block that a writer has begun to overwrite keeps its old end until the writer goes on, and others may pass
        # it meanwhile: these rows alone may outlive younger ones.
        newest_in: dict[int, int] = {}
        for serial in serials:
            ticket = serial // self.block_rows
            newest_in[ticket % self.blocks] = ticket  # serials rise
        old_ends = {
            number
            for serial, number in zip(serials, numbers, strict=True)
            if newest_in[serial // self.block_rows % self.blocks] != serial // self.block_rows
        }
        assert len(old_ends) < self.block_rows * (len(self.writers) + 1)
        for added in self.added:
            mine = set(added)
            left = [number for number in numbers if number in mine]
            assert left == sorted(left)
            left = [number for number in left if number not in old_ends]
            assert left == added[len(added) - len(left) :]
        assert held <= {number for added in self.added for number in added}
        # A writer may leave one block unfinished; nothing else may cost a row its place.
        if self.since_clear + self.writers_since_clear * self.block_rows <= self.buffer.capacity:
            assert len(numbers) == self.since_clear
        if numbers:
            batch = self.buffer.sample(20)
            assert set(batch["obs"].tolist()) <= held
            assert self.buffer.get(batch["indices"])["obs"].tolist() == batch["obs"].tolist()


# `make soak` asks for more cases than a change waits for.
MORE = 50 if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else 1
TestOneWriter = OneWriter.TestCase
TestOneWriter.settings = settings(max_examples=MORE * 60, stateful_step_count=20)
TestSeveralWriters = SeveralWriters.TestCase
TestSeveralWriters.settings = settings(max_examples=MORE * 35, stateful_step_count=30)


def test_oracle_and_engine_agree_on_schemas_with_more_fields_than_the_fast_path_takes() -> None:
    schema = {"obs": sw.Field((3,)), **{f"f{i}": sw.Field((), "int32") for i in range(80)}}
    buffer = sw.ReplayBuffer(5, schema=schema, seed=0)
    schema = buffer.schema
    assert len(leaves_of(schema)) > 64
    oracle = Oracle(5, None)
    for number in range(8):
        row = make_row(schema, number)
        buffer.add(*stack_rows(schema, [row], ()).values())
        oracle.add([row])
    assert [row for _, _, row in read_all(buffer, schema)] == [expected_bytes(schema, row) for row in oracle.rows()]


@pytest.mark.parametrize("num_envs", [None, 3])
def test_close_ends_an_episode_whose_last_step_was_masked(num_envs: int | None) -> None:
    width = num_envs or 1
    buffer = sw.ReplayBuffer(12, obs_shape=(), next_obs=None, num_envs=num_envs)
    zeros = np.zeros(width, np.float32)
    writer = buffer.writer()
    writer.add(zeros, zeros, zeros, np.zeros(width, bool))
    writer.add(zeros, zeros, zeros, np.zeros(width, bool), mask=np.arange(width) > 0)
    writer.close()
    (rows,) = buffer.rows()
    # Env 0's only row is its last; the other envs end in the second step.
    assert rows["truncated"].tolist() == [True] + [False] * (width - 1) + [True] * (width - 1)
