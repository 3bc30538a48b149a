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


def packer_of(
    spec: Any, full: Callable[..., Any], max_rows: int = 5, max_bytes: int = 1 << 30, linger_s: float = 1e9
) -> _core.Packer:
    """What a client makes of the spec of a buffer elsewhere."""
    one_row = None if spec.num_envs is not None else spec.order_reason
    return _core.Packer(
        tree=spec.batch_tree(weights=spec.is_prioritized, relabelled=False),
        fields=spec.schema.engine_fields(),
        capacity=spec.capacity,
        width=spec.num_envs or 1,
        prepare=functools.partial(prepare, spec.schema, spec.capacity, spec.num_envs, one_row, spec.is_prioritized),
        read_leaf=functools.partial(read_leaf, spec.schema),
        takes_steps=spec.num_envs is not None,
        one_row=one_row is not None,
        full=full,
        max_rows=max_rows,
        max_bytes=max_bytes,
        linger_s=linger_s,
    )


class Remote:
    """A packer, and the writer of a table that takes what it packs: a client and its server without a network."""

    def __init__(self, buffer: sw.ReplayBuffer, token: bytes = TOKEN, max_rows: int = 5, linger_s: float = 1e9) -> None:
        spec, self.table = buffer._rows.spec, buffer._rows.table
        # The writer's own add() is not called, nor are the functions that would read its values.
        self.writer = _core.Writer(self.table, prepare, read_leaf, spec.num_envs is not None, False, client=token)
        self.packer = packer_of(spec, self.full, max_rows, linger_s=linger_s)
        self.add = self.packer.add
        self.sent = self.writer.accepted
        self.calls: list[tuple[Any, bool]] = []

    def full(self, timeout: Any, wants_indices: bool) -> Any:
        self.calls.append((timeout, wants_indices))
        rows, last = self.packer.rows, self.packer.last_rows
        message = self.packer.take(ROOM)
        if message is None:
            return None
        assert message[:ROOM] == bytes(ROOM)
        assert self.packer.rows == 0
        try:
            answer = self.writer.append_packed(memoryview(message)[ROOM:], self.sent, wants_indices, timeout)
        except SchemaError as error:
            raise AssertionError("rows were packed that are refused") from error
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
                    (
                        np.ones(field.shape, field.dtype)
                        if ends
                        else (random.random(field.shape) < 0.3).astype(field.dtype)
                    )
                    if self.spec.schema.by_agent
                    else np.full(field.shape, ends, field.dtype)
                ),
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

        if random.random() < 0.7 or any(row[1] for row in rows):
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


def corrupt(random: np.random.Generator, world: World, value: Any) -> Any:
    """Another number in one frame, or in none."""
    if isinstance(value, dict):
        return {name: corrupt(random, world, part) for name, part in value.items()}
    changed = np.array(value)
    if changed.size and random.random() < 0.5:
        changed.flat[int(random.integers(changed.size))] += 1
    return changed


@settings(max_examples=150)
@given(
    st.sampled_from([name for name in CASES if name.startswith("frames")]),
    st.integers(0, 2**32 - 1),
    st.integers(1, 25),
)
def test_stacks_that_a_table_refuses_are_not_packed(case: str, seed: int, calls: int) -> None:
    here, there = (sw.ReplayBuffer(1000, **{"seed": 0, **CASES[case]}) for _ in range(2))
    remote, world = Remote(there, max_rows=20), World(here, seed)
    for _ in range(calls):
        if world.random.random() < 0.1:  # a reset that no flag tells
            world.past[int(world.random.integers(world.envs))] = [world.new_obs()]
        call = world.call()
        if world.random.random() < 0.2:
            name = "obs" if world.random.random() < 0.5 else "next_obs"
            call[name] = corrupt(world.random, world, call[name])
        errors: list[str | None] = [None, None]
        for i, to in enumerate((here, remote)):
            try:
                to.add(**call)
            except SchemaError as error:
                errors[i] = str(error)
        assert errors[0] == errors[1]
    remote.flush()  # and what was packed is not refused there
    assert content(here) == content(there)


# ---- packing --------------------------------------------------------------------------------------------------------


def make(**options: Any) -> sw.ReplayBuffer:
    return sw.ReplayBuffer(100, **({"obs_shape": (2,), "seed": 0} | options))


def add(to: Any, number: int, **kwargs: Any) -> Any:
    obs = np.full(2, number, np.float32)
    return to.add(obs, 0.0, float(number), obs + 1, False, **kwargs)


def rewards(buffer: sw.ReplayBuffer) -> list[float]:
    return [reward for batch in buffer.rows() for reward in batch["reward"].tolist()]


def test_rows_are_sent_when_there_are_enough_or_an_answer_is_wanted() -> None:
    buffer = make()
    remote = Remote(buffer, max_rows=3)
    assert add(remote, 0) is None
    assert add(remote, 1) is None
    assert (remote.packer.rows, len(buffer), remote.calls) == (2, 0, [])
    add(remote, 2)
    assert (remote.packer.rows, len(buffer), remote.calls) == (0, 3, [(None, False)])
    add(remote, 3)
    assert add(remote, 4, return_indices=True).tolist() == [4]
    add(remote, 5, timeout=2.5)
    add(remote, 6, timeout=None, return_indices=False)  # as if neither was given
    assert remote.calls[1:] == [(None, True), (2.5, False)]
    assert rewards(buffer) == [0, 1, 2, 3, 4, 5]
    remote.flush()
    assert rewards(buffer)[-1] == 6


def test_rows_are_sent_when_the_first_of_them_is_old_or_they_are_many_bytes() -> None:
    buffer = make()
    add(at_once := Remote(buffer, linger_s=0.0), 0)
    assert at_once.calls
    assert len(buffer) == 1
    spec = buffer._rows.spec
    taken: list[int] = []
    packer: Any = None

    def full(timeout: Any, wants_indices: bool) -> int:
        taken.append(packer.bytes)
        assert len(packer.take(0)) == taken[-1]
        return 7

    packer = packer_of(spec, full, max_rows=1000, max_bytes=300)
    answers = [packer.add([1, 2], 0.0, 1.0, [3, 4], True) for _ in range(40)]
    assert set(answers) == {None, 7}
    assert all(300 <= size < 340 for size in taken)
    packer.add([1, 2], 0.0, 1.0, [3, 4], True)
    assert packer.take(0) is not None
    assert packer.take(0) is None


@pytest.mark.parametrize("wrong", [{"truncated": 3.5}, {"timeout": "soon"}, {"timeout": -1}, {"colour": 1}])
def test_refused_call_packs_nothing_and_has_the_words_of_add(wrong: dict[str, Any]) -> None:
    buffer = make()
    remote = Remote(buffer)
    add(remote, 0)
    texts = []
    for to in (buffer, remote):
        with pytest.raises(SchemaError) as error:
            add(to, 1, **wrong)
        texts.append(str(error.value))
    assert texts[0] == texts[1]
    for to in (buffer, remote):
        with pytest.raises(SchemaError, match="obs"):
            to.add(np.zeros(3), 0.0, 0.0, np.zeros(2), False)
    assert remote.packer.rows == 1
    remote.flush()
    assert rewards(buffer) == [0]


def test_other_frames_or_priorities_are_sent_before() -> None:
    field = sw.Field((1,), stack=2)
    buffer = sw.ReplayBuffer(100, schema={"obs": field}, num_envs=1, sampler=sw.Prioritized(), seed=0)
    remote = Remote(buffer, max_rows=100)
    frames = np.zeros((1, 2, 1), np.float32)
    remote.add(obs=frames, reward=[0.0], next_obs=frames, done=[False])
    remote.add(obs=frames, reward=[1.0], next_obs=frames, done=[False])
    assert not remote.calls
    remote.add(obs=frames[:, 1], reward=[2.0], next_obs=frames[:, 1], done=[False])
    assert (remote.calls, remote.packer.rows) == ([(None, False)], 1)
    remote.add(obs=frames[:, 1], reward=[3.0], next_obs=frames[:, 1], done=[False], priority=[0.5])
    assert len(remote.calls) == 2
    remote.flush()
    assert rewards(buffer) == [0, 1, 2, 3]


def test_more_rows_than_the_capacity_are_never_in_one_body() -> None:
    buffer = make()
    remote = Remote(buffer, max_rows=1000)
    many = np.zeros((60, 2), np.float32)
    for _ in range(2):
        remote.add(many, np.zeros(60), np.zeros(60), many, np.zeros(60, bool))
    assert (len(remote.calls), remote.packer.rows) == (1, 60)


def test_values_that_add_rows_while_they_are_read_leave_those_before_them() -> None:
    buffer = make()
    remote = Remote(buffer, max_rows=100)

    class Nested:
        def __array__(self, *args: Any, **kwargs: Any) -> Any:
            add(remote, 1)
            remote.flush()
            add(remote, 2)
            return np.zeros(2, np.float32)

    add(remote, 0)
    remote.add(Nested(), 0.0, 3.0, np.zeros(2, np.float32), False)
    remote.flush()
    assert rewards(buffer)[-1] == 3
    assert sorted(set(rewards(buffer))) == [0, 1, 2, 3]


def test_error_of_full_comes_through_and_a_full_that_sends_nothing_is_told() -> None:
    buffer = make(sampler=sw.Prioritized())
    spec = buffer._rows.spec

    def refuse(timeout: Any, wants_indices: bool) -> None:
        raise NotReady("the server is away")

    for full, message in ((refuse, "the server is away"), (lambda *a: None, "left rows pending")):
        packer = packer_of(spec, full)
        add(packer, 0)
        with pytest.raises((NotReady, RuntimeError), match=message):
            add(packer, 1, priority=0.5)
        assert packer.rows == 1


def test_stack_that_was_not_sent_may_be_given_again() -> None:
    buffer = sw.ReplayBuffer(100, schema={"obs": sw.Field((1,), stack=3)}, num_envs=1, seed=0)
    sends = Remote(buffer, max_rows=1)
    is_away = False

    def full(timeout: Any, wants_indices: bool) -> Any:
        if is_away:
            packer.take(0)
            raise NotReady("the server is away")
        rows, body = packer.rows, packer.take(0)
        sends.sent = sends.writer.append_packed(body, sends.sent, False, timeout)
        return rows

    packer = packer_of(buffer._rows.spec, full, max_rows=1)

    def add_stack(*frames: int) -> None:
        obs, after = np.array(frames).reshape(1, 3, 1), np.array([*frames[1:], frames[-1] + 1]).reshape(1, 3, 1)
        packer.add(obs=obs, reward=[0.0], next_obs=after, done=[False])

    add_stack(1, 1, 1)
    add_stack(1, 1, 2)
    for is_away in (True, True, False):
        if is_away:
            with pytest.raises(NotReady):
                add_stack(1, 2, 3)
        else:
            add_stack(1, 2, 3)
    add_stack(2, 3, 4)
    with pytest.raises(SchemaError, match="does not go on from the frames added before"):
        add_stack(2, 3, 9)
    (rows,) = buffer.rows()
    assert rows["obs"][:, :, 0].tolist() == [[1, 1, 1], [1, 1, 2], [1, 2, 3], [2, 3, 4]]


@pytest.mark.parametrize("case", ["ragged", "ragged, derived", "nested", "nested, derived"])
def test_rows_taken_back_leave_those_before_them(case: str) -> None:
    buffer = sw.ReplayBuffer(100, **{"seed": 0, **CASES[case]})
    world = World(buffer, 3)
    bodies = []
    first, second = world.call(), world.call()
    for drops in (False, True):
        packer = packer_of(buffer._rows.spec, lambda *args: None, max_rows=1000)
        packer.add(**first)
        rows, bytes_before = packer.rows, packer.bytes
        if drops:
            packer.add(**second | {"truncated": None, "mask": None})
            assert packer.rows > rows
            packer.drop_last()
        assert (packer.rows, packer.bytes) == (rows, bytes_before)
        bodies.append(packer.take(0))
    assert bodies[0] == bodies[1]


def test_packer_and_what_holds_it_go_together() -> None:
    remote = Remote(make())
    gone = weakref.ref(remote)
    remote.writer.close()
    del remote
    gc.collect()
    assert gone() is None


# ---- taking ---------------------------------------------------------------------------------------------------------


def body_of(remote: Remote, *numbers: int) -> bytearray:
    for number in numbers:
        add(remote, number)
    body = remote.packer.take(0)
    assert body is not None
    return body


def test_body_is_taken_once_from_any_buffer_wherever_it_lies() -> None:
    buffer = make()
    remote = Remote(buffer, max_rows=100)
    take = remote.writer.append_packed
    body = bytes(body_of(remote, 0, 1, 2))
    assert take(body, 0, False) == 3
    assert take(body, 0, False, None) == 3
    accepted, indices = take(memoryview(body), 0, True, 0.5)
    assert (accepted, indices.dtype, indices.tolist()) == (3, np.int64, [-1, -1, -1])
    for shift in range(1, 8):
        moved = bytearray(shift) + body
        accepted, indices = take(memoryview(moved)[shift:], 3 * shift - 1, True)
        assert accepted == 3 * shift + 2
        assert indices.tolist() == [
            -1 if shift == 1 else 3 * shift - 1,
            3 * shift,
            3 * shift + 1,
        ]
    with pytest.raises(SchemaError, match="expected row 23 or an earlier one, got first_row=24"):
        take(body, 24, False)
    with pytest.raises(SchemaError, match="packed rows: rows: expected 8 bytes"):
        take(b"", 23, False)
    with pytest.raises(BufferError):
        take(memoryview(body)[::2], 23, False)
    with pytest.raises(TypeError):
        take(3, 23, False)
    assert len(buffer) == 23


def test_done_of_the_values_ends_episodes_and_nan_is_refused() -> None:
    schema = {"obs": sw.Field((2,)), "done": sw.Field((), "float32")}
    buffer = sw.ReplayBuffer(100, schema=schema, seed=0)
    remote = Remote(buffer, max_rows=100)
    remote.add(obs=np.zeros(2), reward=0.0, next_obs=np.zeros(2), done=1.0)
    body = remote.packer.take(0)
    assert body is not None
    assert remote.writer.append_packed(body, 0, False, None) == 1
    assert buffer.stats()["episodes"] == 1
    where = bytes(body).index(struct.pack("<f", 1.0))
    body[where : where + 4] = struct.pack("<f", float("nan"))
    with pytest.raises(SchemaError, match="field 'done': expected 0 or 1, or truth values, got NaN"):
        remote.writer.append_packed(body, 1, False, None)
    assert remote.writer.accepted == 1


def test_body_with_a_wrong_number_changes_nothing() -> None:
    buffer = make()
    remote = Remote(buffer, max_rows=100)
    body = body_of(remote, 0, 1)
    for place in range(0, len(body), 4):
        wrong = bytearray(body)
        wrong[place : place + 4] = b"\xff\xff\xff\xff"
        try:
            remote.writer.append_packed(wrong, remote.writer.accepted, False, None)
        except SchemaError:
            continue
    assert len(buffer) == remote.writer.accepted


def test_rows_wait_for_their_turn() -> None:
    buffer = make(pace=sw.Pace(min_size=1, min_diff=-2, max_diff=2))
    remote = Remote(buffer, max_rows=100)
    take = remote.writer.append_packed
    assert take(body_of(remote, 0, 1), 0, False, 0) == 2
    body = body_of(remote, 2, 3)
    with pytest.raises(NotReady, match="adding waits"):
        take(body, 2, False, 0)
    assert (remote.writer.accepted, len(buffer)) == (2, 2)
    assert take(body_of(remote, 0, 1), 0, False, 0) == 2  # rows that are there already wait for nothing
    done: list[int] = []
    waiter = threading.Thread(target=lambda: done.append(take(body, 2, False, HANG_S)))
    waiter.start()
    buffer.sample(2, timeout=HANG_S)
    waiter.join(HANG_S)
    assert done == [4]
    assert rewards(buffer) == [0, 1, 2, 3]


def test_client_is_known_by_its_token_after_its_writer_is_closed(shm_address: str) -> None:
    buffer = make(storage=shm_address)
    table = buffer._rows.table
    assert table.client_rows(TOKEN) is None
    assert table.clients() == []
    remote = Remote(buffer)
    assert remote.writer.accepted == 0
    assert table.client_rows(TOKEN) == 0
    with pytest.raises(NotReady, match="this client's token is held by a live writer; close that one first"):
        Remote(buffer)
    for number in range(7):
        add(remote, number)
    remote.writer.close()
    assert table.clients() == [(TOKEN, 5)]
    again = Remote(buffer)
    assert again.sent == 5
    for number in (5, 6):
        add(again, number)
    again.flush()
    again.writer.close()
    buffer.close()
    opened = sw.open(shm_address)
    assert opened._rows.table.clients() == [(TOKEN, 7)]
    assert rewards(opened) == [0, 1, 2, 3, 4, 5, 6]
    opened.close(unlink=True)
    for wrong in (b"short", bytes(17)):
        with pytest.raises(SchemaError, match="expected 16 bytes, got"):
            Remote(make(), wrong)


def test_large_body_is_taken_while_other_threads_run() -> None:
    buffer = sw.ReplayBuffer(4000, obs_shape=(200,), seed=0)
    remote = Remote(buffer, max_rows=10**6)
    many = np.arange(3000 * 200, dtype=np.float32).reshape(3000, 200)
    remote.add(many, np.zeros(3000), np.arange(3000), many + 1, np.zeros(3000, bool))
    remote.flush()
    (batch,) = buffer.rows(batch_size=4000)
    assert (batch["obs"] == many).all()
    assert (batch["next_obs"] == many + 1).all()
