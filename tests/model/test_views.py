"""n-step returns, derived observations and stacks: equal to the stored form, row by row, at both ends of the ring."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from oracle import leaf_in, leaves_of
from replay_model import Pair, PairMachine, Step, priorities

import sharpwave as sw
from sharpwave.errors import NotReady, SchemaError


def schemas(k: int, padding: str = "repeat") -> dict[str, dict[str, Any]]:
    """Observations of every form; what can be stacked is, k deep."""
    stack: dict[str, Any] = {"stack": k, "padding": padding} if k > 1 else {}
    return {
        "vector": {"obs": sw.Field((3,), **stack)},
        "number": {"obs": sw.Field((), "int16", **stack), "action": sw.Field((), "int64")},
        "image": {"obs": sw.Field((5, 4), "uint8", **stack), "reward": sw.Field((), "float64")},
        "dict": {
            "obs": {"image": sw.Field((4, 4), "uint8", **stack), "state": sw.Field((2,))},
            "action": sw.Field((2,)),
        },
        "tuple": {
            "obs": (sw.Field((2,), "float64"), sw.Field((7,), "uint8", **stack)),
            "done": sw.Field((), "float32"),
        },
        "history besides": {"obs": sw.Field((3,)), "note": sw.Field((2,), "int32", **stack)},
        "agents": {
            "obs": sw.Field((2, 2), **stack),
            "reward": sw.Field((3, 2)),
            "done": sw.Field((3,), "bool"),
        },
        "named agents": {
            "obs": {"a": sw.Field((2,), **stack), "b": sw.Field((3,), "int16")},
            "reward": {"a": sw.Field((), "float64"), "b": sw.Field((2,))},
            "done": {"a": sw.Field((), "bool"), "b": sw.Field((), "float32")},
        },
        "two rewards": {"obs": sw.Field((1,), **stack), "reward": (sw.Field(), sw.Field((5,), "float64"))},
        "two depths": {
            "obs": {
                "image": sw.Field((4, 4), "uint8", compression="lz4", **stack),
                "sound": sw.Field((3,), "int16", stack=3, padding="zero" if padding == "repeat" else "repeat"),
            }
        },
    }


def letters(stream: np.random.Generator, count: int, kinds: str = "........TURBMZYC") -> str:
    return "".join(stream.choice(list(kinds), count))


# ---- the model -------------------------------------------------------------------------------------------------------


class ViewCalls(PairMachine):
    @staticmethod
    def arguments(draw: Callable[..., Any]) -> dict[str, Any]:
        k = draw(st.sampled_from([1, 2, 4]))
        chosen = None
        if draw(st.booleans()):
            chosen = {
                "alpha": draw(st.sampled_from([0.0, 0.6])),
                "beta": 0.4,
                "normalize": draw(st.sampled_from(["batch", "buffer"])),
                "new_rows": draw(st.one_of(st.just("live_max"), priorities)),
            }
        return {
            "capacity": draw(st.one_of(st.integers(1, 8), st.integers(1, 40))),
            "schema": schemas(k, draw(st.sampled_from(["repeat", "zero"])))[draw(st.sampled_from(list(schemas(1))))],
            "next_obs": draw(st.sampled_from(["derived", "derived", "stored", None])),
            "num_envs": draw(st.sampled_from([None, 1, 3])),
            "prioritized": chosen,
            "n_step": draw(st.integers(1, 5)),
            "gamma": draw(st.sampled_from([0.99, 0.5, 1.0, 0.0])),
            "truncated": draw(st.booleans()),
            "variety": draw(st.sampled_from([None, None, 2, 5])),
            "writers": draw(st.sampled_from([1, 4, 64])),
        }


MORE = 50 if os.environ.get("HYPOTHESIS_PROFILE") == "soak" else 1
TestViewCalls = ViewCalls.TestCase
TestViewCalls.settings = settings(max_examples=MORE * 50, stateful_step_count=25)


# ---- against a stored buffer -----------------------------------------------------------------------------------------


class Recorder(Pair):
    """Keeps the calls, so that the stored form of the same stream can be made afterwards."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.calls: list[tuple[int | None, list[Step]]] = []

    def make_steps(self, codes: str, writer: Any, priority: Any) -> list[Step]:
        steps = super().make_steps(codes, writer, priority)
        self.calls.append((writer, steps))
        return steps

    def stored_twin(self) -> sw.ReplayBuffer:
        """Every observation and every stack whole in the row, every end flagged: nothing there to work out."""

        def widen(node: Any) -> Any:
            if isinstance(node, dict):
                return {name: widen(part) for name, part in node.items()}
            if isinstance(node, tuple):
                return tuple(widen(part) for part in node)
            k = node.stack
            return sw.Field((k, *node.shape) if k > 1 else node.shape, node.dtype)

        schema = {name: widen(node) for name, node in self.schema.items()}
        model = self.model
        view = {"view": sw.Transitions(n_step=model.n_step, gamma=model.gamma)} if model.n_step > 1 else {}
        num_envs = self.buffer.num_envs
        next_obs: Any = None if model.next_obs is None else "stored"
        if next_obs:
            schema.pop("next_obs")
        twin = sw.ReplayBuffer(model.capacity, schema=schema, next_obs=next_obs, num_envs=num_envs, seed=1, **view)
        writers: dict[int | None, Any] = {None: twin}
        for writer, steps in self.calls:
            if writer not in writers:
                writers[writer] = twin.writer()
            for step in steps:  # what the engine ended by itself
                ended = step.truncated and not step.told_truncated
                step.told = {path: told | ended for path, told in step.told.items()}
            arguments = self.arguments(steps, (len(steps),), stacks=True, by_agent=True)
            if not model.by_agent:
                arguments["truncated"] = np.array([step.truncated for step in steps])
            if num_envs is None:
                arguments = {name: first_of(value) for name, value in arguments.items()}
            writers[writer].add(**arguments)
        self.twin_writers = writers  # a writer that nobody holds closes, and ends its episodes
        return twin


def first_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: first_of(part) for name, part in value.items()}
    return tuple(map(first_of, value)) if isinstance(value, tuple) else value[0]


def by_id(batches: Any, paths: list[str]) -> dict[int, tuple[Any, ...]]:
    """What each row holds, in bytes."""
    found = {}
    for batch in batches:
        columns = [leaf_in(batch, path) for path in paths]
        for i, number in enumerate(batch["id"].tolist()):
            row = tuple((column.dtype.str, column[i].shape, column[i].tobytes()) for column in columns)
            assert found.setdefault(number, row) == row
    return found


def assert_same_rows(pair: Recorder, twin: sw.ReplayBuffer) -> None:
    paths = [*leaves_of(pair.schema), "truncated"]
    ours, theirs = by_id(pair.buffer.rows(), paths), by_id(twin.rows(), paths)
    assert list(ours) == list(theirs)
    assert ours == theirs
    held = np.concatenate([np.empty(0, np.int64), *(batch["indices"] for batch in pair.buffer.rows())])
    assert by_id([pair.buffer.get(held[::-1])], paths) == theirs


def assert_same_examples(pair: Recorder, twin: sw.ReplayBuffer) -> None:
    paths = [*leaves_of(pair.schema)]
    if pair.model.n_step > 1:
        by_agent = [path.replace("done", "discount") for path in paths if path.split("/")[0] == "done"]
        paths += by_agent if pair.model.by_agent else ["discount"]
    rows = len(pair.buffer)
    draws = max(256, 30 * rows)
    ours, theirs = (by_id([buffer.sample(draws)], paths) for buffer in (pair.buffer, twin))
    assert len(ours) == len(theirs) == rows
    assert ours == theirs


@pytest.mark.parametrize("n_step", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_envs", [None, 1, 3])
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("name", list(schemas(1)))
def test_derived_form_equals_the_stored_form(name: str, k: int, num_envs: int | None, n_step: int) -> None:
    stream = np.random.default_rng([k, num_envs or 0, n_step])
    width = num_envs or 1
    capacity = width * int(stream.integers(4, 14))
    schema = schemas(k, "zero" if n_step % 2 else "repeat")[name]
    pair = Recorder(capacity, schema, next_obs="derived", num_envs=num_envs, n_step=n_step, gamma=0.9)
    total = 0
    while total < 3.5 * capacity:
        steps = 1 if num_envs is None else int(stream.integers(1, 4))
        pair.add(letters(stream, steps * width), () if num_envs is None else None, stacks=bool(stream.integers(2)))
        total += steps * width
        if stream.random() < 0.15 or total >= 3.5 * capacity:
            twin = pair.stored_twin()
            assert_same_rows(pair, twin)
            if len(twin):
                assert_same_examples(pair, twin)
    pair.close()


@pytest.mark.parametrize("next_obs", ["stored", None])
@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("padding", ["repeat", "zero"])
@pytest.mark.parametrize("name", list(schemas(1)))
def test_stacks_equal_the_stored_form_whatever_becomes_of_next_obs(
    name: str, padding: str, num_envs: int | None, next_obs: str | None
) -> None:
    stream = np.random.default_rng(2)
    width = num_envs or 1
    pair = Recorder(9 * width, schemas(3, padding)[name], next_obs=next_obs, num_envs=num_envs, n_step=2)
    for turn in range(40):
        pair.add(letters(stream, width), () if num_envs is None else None, stacks=bool(turn % 2))
        if turn % 9 == 0 or turn > 35:
            twin = pair.stored_twin()
            assert_same_rows(pair, twin)
            if len(twin):
                assert_same_examples(pair, twin)


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_derived_form_of_several_writers_equals_the_stored_form(num_envs: int, k: int, n_step: int) -> None:
    stream = np.random.default_rng(7)
    pair = Recorder(1200, schemas(k)["dict"], next_obs="derived", num_envs=num_envs, n_step=n_step, writers=4)
    names = [pair.open_writer() for _ in range(3)]
    for _ in range(60):
        pair.add(letters(stream, num_envs * int(stream.integers(1, 4))), writer=names[int(stream.integers(3))])
    pair.check()
    twin = pair.stored_twin()
    paths = [*leaves_of(pair.schema), "truncated"]
    assert by_id(pair.buffer.rows(), paths) == by_id(twin.rows(), paths)
    assert_same_examples(pair, twin)
    # Small against the writers' blocks: rows leave in an order that only the engine knows.
    small = Pair(60, schemas(k)["dict"], next_obs="derived", num_envs=num_envs, n_step=n_step, writers=4)
    names = [small.open_writer() for _ in range(3)]
    for _ in range(150):
        small.add(letters(stream, num_envs), writer=names[int(stream.choice(3, p=[0.8, 0.15, 0.05]))])
        small.check()
    small.sample_all()


# ---- n-step ----------------------------------------------------------------------------------------------------------


def filled(rewards: list[float], ends: dict[int, str], n_step: int, gamma: float, **options: Any) -> sw.ReplayBuffer:
    view = sw.Transitions(n_step=n_step, gamma=gamma)
    buffer = sw.ReplayBuffer(options.pop("capacity", 10), schema={"obs": sw.Field(())}, view=view, seed=0, **options)
    for i, reward in enumerate(rewards):
        over = ends.get(i)
        buffer.add(
            obs=float(i),
            reward=reward,
            next_obs=float(i + 1) if over is None else 100.0 + i,
            terminated=over == "terminated",
            truncated=over == "truncated",
        )
    return buffer


def table(buffer: sw.ReplayBuffer) -> dict[int, tuple[float, float, float, bool]]:
    """Reward, discount, next_obs and done of every row, by its obs."""
    batch = buffer.sample(500)
    columns = (batch[name].tolist() for name in ("reward", "discount", "next_obs", "done"))
    return dict(sorted(zip(batch["obs"].astype(int).tolist(), zip(*columns, strict=True), strict=True)))


@pytest.mark.parametrize("next_obs", ["stored", "derived"])
@pytest.mark.parametrize("over", ["terminated", "truncated", None])
def test_returns_of_one_two_three(over: str | None, next_obs: Any) -> None:
    """r = 1, 2, 3, gamma = .9, n = 3, end at index 2: 5.23 with gamma^3, 4.7 with gamma^2."""
    ends = {} if over is None else {2: over}
    found = table(filled([1, 2, 3], ends, 3, 0.9, next_obs=next_obs))
    last = 3.0 if over is None else 102.0
    for i, (reward, power) in enumerate([(5.23, 3), (4.7, 2), (3.0, 1)]):
        assert found[i][:3] == pytest.approx((reward, 0.9**power, last))
        assert found[i][3] == (over == "terminated")


@pytest.mark.parametrize("next_obs", ["stored", "derived"])
@pytest.mark.parametrize("over", ["terminated", "truncated"])
@pytest.mark.parametrize("end", range(7))
@pytest.mark.parametrize("n_step", [2, 5])
def test_end_at_every_offset(n_step: int, end: int, over: str, next_obs: Any) -> None:
    rewards = [2.0**i for i in range(7)]
    found = table(filled(rewards, {end: over}, n_step, 0.5, next_obs=next_obs))
    for start in range(7):
        last = min(start + n_step - 1, end if start <= end else 6, 6)
        steps = last - start + 1
        reward = sum(0.5**k * rewards[start + k] for k in range(steps))
        assert found[start][:2] == pytest.approx((reward, 0.5**steps))
        assert found[start][2] == (100.0 + last if last == end else last + 1.0)
        assert found[start][3] == (last == end and over == "terminated")


@pytest.mark.parametrize("next_obs", ["stored", "derived"])
@pytest.mark.parametrize("added", range(1, 30))
def test_newest_row_never_goes_on_in_the_oldest(added: int, next_obs: Any) -> None:
    found = table(filled([1.0] * added, {}, 3, 1.0, capacity=7, next_obs=next_obs))
    assert list(found) == list(range(max(0, added - 7), added))
    for start, (reward, _, after, _) in found.items():
        steps = min(3, added - start)
        assert reward == steps
        assert after == start + steps


def test_one_step_has_no_discount_and_n_steps_have_one() -> None:
    assert "discount" not in filled([1, 2], {}, 1, 0.9).sample(2)
    batch = filled([1, 2], {}, 2, 0.9).sample(4)
    assert batch["discount"].dtype == np.float32
    assert batch["reward"].dtype == np.float32


def test_get_and_rows_give_single_steps() -> None:
    buffer = filled([1, 2, 3], {2: "truncated"}, 3, 0.9)
    batch = buffer.get(np.sort(np.unique(buffer.sample(100)["indices"])))
    assert batch["reward"].tolist() == [1, 2, 3]
    assert batch["next_obs"].tolist() == [1, 2, 102]
    assert batch["truncated"].tolist() == [False, False, True]
    assert "discount" not in batch
    (rows,) = buffer.rows()
    assert rows["reward"].tolist() == [1, 2, 3]


def test_sum_is_made_in_double_precision() -> None:
    found = table(filled([1e8, 1.0, -1e8, 1.0, 1.0], {}, 5, 1.0))
    assert found[0][0] == 3.0


def test_masked_steps_are_skipped() -> None:
    view = sw.Transitions(n_step=3, gamma=0.5)
    buffer = sw.ReplayBuffer(20, schema={"obs": sw.Field(())}, num_envs=2, view=view, seed=0)
    for i in range(5):
        obs = np.array([i, 10.0 + i], np.float32)
        mask = np.array([i % 2 == 0, True])
        buffer.add(obs=obs, reward=2.0**obs, next_obs=obs + 1, done=np.zeros(2, bool), mask=mask)
    found = table(buffer)
    assert found[0] == (1 + 0.5 * 4 + 0.25 * 16, 0.125, 5.0, False)
    assert found[2] == (4 + 0.5 * 16, 0.25, 5.0, False)
    assert found[10] == (2**10 + 0.5 * 2**11 + 0.25 * 2**12, 0.125, 13.0, False)


def test_closed_writer_ends_its_streams() -> None:
    view = sw.Transitions(n_step=4, gamma=1.0)
    buffer = sw.ReplayBuffer(40, schema={"obs": sw.Field(())}, next_obs="derived", view=view, seed=0)
    for first in (0, 10):
        with buffer.writer() as writer:
            for i in range(first, first + 3):
                writer.add(obs=float(i), reward=1.0, next_obs=float(i + 1), done=False)
    # The second writer begins where the first would have gone on; it is another stream all the same.
    with buffer.writer() as writer:
        writer.add(obs=13.0, reward=1.0, next_obs=14.0, done=False)
    assert {i: (row[0], row[2]) for i, row in table(buffer).items()} == {
        0: (3.0, 3.0),
        1: (2.0, 3.0),
        2: (1.0, 3.0),
        10: (3.0, 13.0),
        11: (2.0, 13.0),
        12: (1.0, 13.0),
        13: (1.0, 14.0),
    }


@pytest.mark.parametrize(
    "options",
    [
        {"view": {"n_step": 3}},
        {"next_obs": "derived"},
        {"stack": 2},
    ],
    ids=str,
)
def test_several_rows_at_once_need_num_envs(options: dict[str, Any]) -> None:
    view = sw.Transitions(**options.pop("view", {}))
    schema = {"obs": sw.Field((2,), **({"stack": options.pop("stack")} if "stack" in options else {}))}
    values = {"obs": np.zeros((3, 2)), "reward": np.zeros(3), "next_obs": np.zeros((3, 2)), "done": np.zeros(3, bool)}
    buffer = sw.ReplayBuffer(9, schema=schema, view=view, **options)
    with pytest.raises(SchemaError, match="num_envs"):
        buffer.add(**values)
    assert len(buffer) == 0
    buffer.add(obs=np.zeros(2), reward=0.0, next_obs=np.zeros(2), done=False)
    one = sw.ReplayBuffer(9, schema=schema, view=view, num_envs=1, **options)
    one.add(**values)
    assert len(one) == 3


def test_rows_added_at_once_with_one_environment_are_successive_steps() -> None:
    buffer = sw.ReplayBuffer(
        9,
        schema={"obs": sw.Field(())},
        view=sw.Transitions(n_step=3, gamma=1.0),
        num_envs=1,
        next_obs="derived",
        seed=0,
    )
    obs = np.arange(6, dtype=np.float32)
    buffer.add(obs=obs, reward=np.ones(6), next_obs=obs + 1, done=np.zeros(6, bool))
    assert {i: (row[0], row[2]) for i, row in table(buffer).items()} == {
        i: (float(min(3, 6 - i)), float(min(6, i + 3))) for i in range(6)
    }


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"n_step": 0}, "n_step"), ({"n_step": -1}, "n_step"), ({"n_step": 1.5}, "n_step"), ({"n_step": "3"}, "n_step")]
    + [({"n_step": 2, "gamma": gamma}, "gamma") for gamma in (-0.1, 1.1, float("nan"), "high", None)],
)
def test_wrong_settings_of_transitions_are_refused(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(SchemaError, match=name):
        sw.Transitions(**settings)


def test_view_in_force_is_told(tmp_path: Path) -> None:
    buffer = filled([1, 2], {}, 3, 0.9)
    buffer.save(tmp_path / "snapshot")
    for held in (buffer, sw.open(tmp_path / "snapshot")):
        assert (held.view.n_step, held.view.gamma) == (3, 0.9)


# ---- derived observations --------------------------------------------------------------------------------------------


def test_reset_that_nobody_flagged_is_seen_and_counted() -> None:
    pair = Pair(12, {"obs": sw.Field((2,))}, next_obs="derived")
    for code in "..R...RT.U.":
        pair.add(code, ())
        pair.check()
        pair.check_counts()
    assert pair.buffer.stats()["resets_unflagged"] == 2
    (rows,) = pair.buffer.rows()
    assert rows["truncated"].tolist() == [code in "RU" for code in "..R...RT.U."]
    assert rows["done"].tolist() == [code == "T" for code in "..R...RT.U."]


def test_shuffled_data_keeps_every_next_obs() -> None:
    stream = np.random.default_rng(0)
    buffer = sw.ReplayBuffer(100, schema={"obs": sw.Field((4,))}, next_obs="derived", num_envs=1)
    obs, after = stream.normal(size=(2, 100, 4)).astype(np.float32)
    buffer.add(obs=obs, reward=np.zeros(100), next_obs=after, done=np.zeros(100, bool))
    (rows,) = buffer.rows()
    assert np.array_equal(rows["obs"], obs)
    assert np.array_equal(rows["next_obs"], after)
    assert buffer.stats()["resets_unflagged"] == 99


def test_final_observation_of_a_truncated_episode_is_not_the_next_reset() -> None:
    buffer = sw.ReplayBuffer(10, schema={"obs": sw.Field(())}, next_obs="derived", seed=0)
    buffer.add(obs=0.0, reward=0.0, next_obs=1.0, done=False, truncated=True)
    buffer.add(obs=50.0, reward=0.0, next_obs=51.0, done=False)
    (rows,) = buffer.rows()
    assert rows["next_obs"].tolist() == [1.0, 51.0]
    assert buffer.stats()["resets_unflagged"] == 0


def test_comparison_is_of_bytes() -> None:
    """NaN equals itself there, and the zeros are two."""
    buffer = sw.ReplayBuffer(10, schema={"obs": sw.Field(())}, next_obs="derived")
    for obs, after in [(1.0, np.nan), (np.nan, 0.0), (-0.0, 2.0), (2.0, 3.0)]:
        buffer.add(obs=obs, reward=0.0, next_obs=after, done=False)
    (rows,) = buffer.rows()
    assert rows["truncated"].tolist() == [False, True, False, False]
    assert buffer.stats()["resets_unflagged"] == 1
    assert rows["next_obs"].tobytes() == np.array([np.nan, 0.0, 2.0, 3.0], np.float32).tobytes()


def test_derived_needs_an_obs() -> None:
    with pytest.raises(SchemaError, match="obs"):
        sw.ReplayBuffer(10, schema={"image": sw.Field(())}, next_obs="derived")
    with pytest.raises(SchemaError, match="next_obs"):
        sw.ReplayBuffer(10, schema={"obs": sw.Field(())}, next_obs="guessed")  # type: ignore[arg-type]


def test_cleared_buffer_begins_new_streams() -> None:
    pair = Pair(12, schemas(3)["dict"], next_obs="derived", num_envs=3, n_step=3)
    pair.add("...." * 3)
    pair.clear()
    pair.add("..." * 3)
    pair.check()
    pair.sample_all()
    assert pair.buffer.stats()["resets_unflagged"] == 0


@pytest.mark.parametrize("k", [1, 4])
def test_another_handle_on_shared_memory_reads_the_newest_and_the_oldest(k: int, shm_address: str) -> None:
    pair = Pair(12, schemas(k)["dict"], next_obs="derived", num_envs=3, n_step=3, storage=shm_address)
    other = sw.open(shm_address)
    stream = np.random.default_rng(0)
    for _ in range(20):
        pair.add(letters(stream, 3))
        pair.check()
        ours, theirs = list(pair.buffer.rows()), list(other.rows())
        for first, second in zip(ours, theirs, strict=True):
            assert first["indices"].tolist() == second["indices"].tolist()
            assert all(
                leaf_in(first, path).tobytes() == leaf_in(second, path).tobytes() for path in leaves_of(pair.schema)
            )
        batch = other.sample(50)
        pair.model.check_values(batch, pair.steps_of(batch), drawn=True)
    other.close()
    pair.close()


# ---- stacks ----------------------------------------------------------------------------------------------------------


def test_stacks_are_padded_by_the_first_frame_and_never_cross_a_start() -> None:
    buffer = sw.ReplayBuffer(10, schema={"obs": sw.Field((), "int32", stack=3)}, next_obs="derived")
    for obs, after, over in [(1, 2, False), (2, 3, False), (3, 4, True), (10, 11, False), (11, 12, False)]:
        buffer.add(obs=obs, reward=0.0, next_obs=after, done=False, truncated=over)
    (rows,) = buffer.rows()
    assert rows["obs"].tolist() == [[1, 1, 1], [1, 1, 2], [1, 2, 3], [10, 10, 10], [10, 10, 11]]
    assert rows["next_obs"].tolist() == [[1, 1, 2], [1, 2, 3], [2, 3, 4], [10, 10, 11], [10, 11, 12]]


@pytest.mark.parametrize("k", [2, 4, 7])
@pytest.mark.parametrize("next_obs", ["stored", "derived", None])
def test_oldest_rows_have_all_their_history(k: int, next_obs: Any) -> None:
    buffer = sw.ReplayBuffer(5, schema={"obs": sw.Field((), "int32", stack=k)}, next_obs=next_obs)
    for obs in range(40):
        after = {} if next_obs is None else {"next_obs": obs + 1}
        buffer.add(obs=obs, reward=0.0, done=False, **after)
        (rows,) = buffer.rows()
        newest = np.arange(max(0, obs - 4), obs + 1)[:, None]
        wanted = np.maximum(newest + np.arange(-k + 1, 1), 0)
        assert rows["obs"].tolist() == wanted.tolist()
        if after:
            assert rows["next_obs"].tolist() == np.maximum(wanted[:, -1:] + np.arange(-k + 2, 2), 0).tolist()


def test_stacks_and_frames_may_be_given_in_turn() -> None:
    frames = np.arange(8, dtype=np.int32)
    buffers = [sw.ReplayBuffer(6, schema={"obs": sw.Field((), "int32", stack=3)}, next_obs="derived") for _ in range(2)]
    for i in range(7):
        stack = frames[np.maximum(np.arange(i - 2, i + 1), 0)]
        after = frames[np.maximum(np.arange(i - 1, i + 2), 0)]
        buffers[0].add(obs=frames[i], reward=0.0, next_obs=frames[i + 1], done=False)
        if i % 2:
            buffers[1].add(obs=stack, reward=0.0, next_obs=after, done=False)
        else:
            buffers[1].add(obs=frames[i], reward=0.0, next_obs=frames[i + 1], done=False)
    first, second = (next(iter(buffer.rows())) for buffer in buffers)
    assert first["obs"].tolist() == second["obs"].tolist()
    assert first["next_obs"].tolist() == second["next_obs"].tolist()


@pytest.mark.parametrize(
    ("obs", "next_obs"),
    [([0, 1, 1], [1, 1, 2]), ([1, 1, 1], [1, 2, 2]), ([1, 1, 1], [0, 1, 2]), ([1, 1], [1, 2]), ([1] * 4, [1, 1, 1, 2])],
)
def test_stacks_that_do_not_fit_their_frames_are_refused(obs: list[int], next_obs: list[int]) -> None:
    buffer = sw.ReplayBuffer(6, schema={"obs": sw.Field((), "int32", stack=3)}, next_obs="derived")
    with pytest.raises(SchemaError, match="obs"):
        buffer.add(obs=np.array(obs, np.int32), reward=0.0, next_obs=np.array(next_obs, np.int32), done=False)
    assert len(buffer) == 0
    buffer.add(obs=np.array([1, 1, 1]), reward=0.0, next_obs=np.array([1, 1, 2]), done=False)
    assert len(buffer) == 1


@pytest.mark.parametrize("stack", [0, -1, 1.5, "2", None, True])
def test_wrong_stack_is_refused(stack: Any) -> None:
    with pytest.raises(SchemaError, match="stack"):
        sw.Field((2,), stack=stack)


# ---- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prioritized", [False, True])
def test_examples_are_whole_while_writers_wrap(prioritized: bool) -> None:
    """Each writer counts up; frame, successor and discount of a row tell whether it was put together rightly."""
    sampler = {"sampler": sw.Prioritized()} if prioritized else {}
    buffer = sw.ReplayBuffer(
        200,
        schema={"obs": sw.Field((40,), "int64", stack=3)},
        next_obs="derived",
        view=sw.Transitions(n_step=3, gamma=0.5),
        writers=4,
        seed=0,
        **sampler,  # type: ignore[arg-type]
    )
    stop = threading.Event()
    errors: list[BaseException] = []
    drawn = 0

    def write(first: int) -> None:
        with buffer.writer() as writer:
            number = first
            while not stop.is_set():
                over = number % 11 == 10
                obs = np.full(40, number)
                writer.add(obs=obs, reward=float(number % 11), next_obs=obs + 1, done=False, truncated=over)
                number += 1

    def read() -> None:
        nonlocal drawn
        while not stop.is_set():
            try:
                batch = buffer.sample(64)
            except NotReady:
                continue
            for name in ("obs", "next_obs"):
                assert (batch[name] == batch[name][:, :, :1]).all()
            frames, after = batch["obs"][:, :, 0], batch["next_obs"][:, :, 0]
            start = frames[:, -1] // 11 * 11
            assert (frames == np.maximum(frames[:, -1:] + np.arange(-2, 1), start[:, None])).all()
            steps = after[:, -1] - frames[:, -1]
            assert ((steps >= 1) & (steps <= 3)).all()
            assert (after == np.maximum(after[:, -1:] + np.arange(-2, 1), start[:, None])).all()
            assert (batch["discount"] == 0.5**steps).all()
            offset = frames[:, -1] - start
            reward = sum(np.where(i < steps, 0.5**i * (offset + i), 0.0) for i in range(3))
            assert np.allclose(batch["reward"], reward)
            if prioritized:
                buffer.update_priorities(batch["indices"], batch["reward"])
            drawn += 64

    def guarded(job: Callable[..., None], *args: Any) -> None:
        try:
            job(*args)
        except BaseException as error:
            errors.append(error)
            stop.set()

    # Multiples of eleven, so that every writer's episodes begin where the numbers say.
    jobs = [(write, 0), (write, 11 * 10**9), (read,), (read,)]
    threads = [threading.Thread(target=guarded, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    stop.wait(1.5)
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
    assert drawn > 0
