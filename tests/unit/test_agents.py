"""Rewards and dones of many agents: every form in which they are given, every place where rows are."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.cases import flatten
from contract.device_place import PLACES, device_of, here, on_device

import sharpwave as sw
from sharpwave.errors import SchemaError

NAMES = ("scout", "guard")
THREE: dict[str, Any] = {"obs": sw.Field((3, 2)), "reward": sw.Field((3,)), "done": sw.Field((3,), "bool")}
NAMED: dict[str, Any] = {
    "obs": {name: sw.Field((2,)) for name in NAMES},
    "reward": {name: sw.Field() for name in NAMES},
    "done": {name: sw.Field((), "bool") for name in NAMES},
}
STEPS = sw.Transitions(n_step=3, gamma=0.5)


def add(buffer: Any, number: int, done: list[int], truncated: Any = None) -> None:
    """One row of three agents; its numbers follow from the row's."""
    obs = np.full((3, 2), number, np.float32)
    buffer.add(obs, np.array([1, 10, 100]) * (number + 1), obs + 1, np.array(done, bool), truncated=truncated)


def by_obs(batch: dict[str, Any], *names: str) -> dict[int, Any]:
    rows = zip(batch["obs"][:, 0, 0].astype(int).tolist(), *(batch[name].tolist() for name in names), strict=True)
    return {row: tuple(rest) for row, *rest in rows}


def test_row_ends_when_every_agent_has_ended() -> None:
    buffer = sw.ReplayBuffer(20, schema=THREE)
    add(buffer, 0, [0, 0, 0])
    add(buffer, 1, [1, 0, 1])
    add(buffer, 2, [1, 0, 0], truncated=[False, False, True])  # cut: the second goes on
    add(buffer, 3, [1, 0, 0], truncated=np.array([False, True, True]))
    add(buffer, 4, [1, 1, 1])
    add(buffer, 5, [0, 0, 0], truncated=True)  # of the row: of all agents
    assert buffer.stats()["episodes"] == 3
    (rows,) = buffer.rows()
    assert rows["truncated"].tolist() == [False, False, False, True, False, True]
    assert rows["done"].tolist()[3] == [True, False, False]  # of each agent, as it was given
    windows = sw.ReplayBuffer(20, schema=THREE, view=sw.Windows(2, end="stop"), num_envs=1, seed=0)
    for number, (done, truncated) in enumerate(
        [([0, 0, 0], None), ([0, 1, 0], [True, False, False]), ([1, 1, 1], None)]
    ):
        add(windows, number, done, truncated)
    starts = {int(obs[0, 0, 0]) for obs in windows.sample(64)["obs"]}
    assert starts == {0, 1}  # a row that is cut does not end the episode


def test_each_agents_rewards_are_summed_up_to_its_own_done() -> None:
    buffer = sw.ReplayBuffer(20, schema=THREE, view=STEPS, num_envs=1, seed=0)
    for number, done in enumerate([[0, 0, 0], [0, 1, 0], [0, 1, 0], [1, 1, 1]]):
        add(buffer, number, done)
    found = by_obs(buffer.sample(200), "reward", "discount", "done")
    assert found[0] == ([1 + 1 + 0.75, 10 + 10, 100 + 100 + 75], [0.125, 0.25, 0.125], [False, True, False])
    assert found[1] == ([2 + 1.5 + 1, 20, 200 + 150 + 100], [0.125, 0.5, 0.125], [True, True, True])
    assert found[2] == ([3 + 2, 30, 300 + 200], [0.25, 0.5, 0.25], [True, True, True])
    assert found[3] == ([4, 40, 400], [0.5] * 3, [True] * 3)


def test_examples_of_several_steps_stop_where_an_agent_is_truncated() -> None:
    """The observation after that row is the last one of an agent that is not done: what bootstraps from it is there."""
    buffer = sw.ReplayBuffer(20, schema=THREE, view=STEPS, num_envs=1, seed=0)
    for number, told in enumerate([None, [False, True, False], None, None]):
        add(buffer, number, [0, number > 1, 0], told)
    batch = buffer.sample(200)
    found = by_obs(batch, "discount", "done", "next_obs")
    assert [found[row][0] for row in range(4)] == [[0.25] * 3, [0.5] * 3, [0.25, 0.5, 0.25], [0.5] * 3]
    assert found[0][2][0] == [2, 2]  # after row 1
    assert found[1][1] == [False] * 3


def named_rows(count: int) -> list[dict[str, Any]]:
    stream = np.random.default_rng(3)
    rows = []
    for number in range(count):
        done = stream.random(2) < 0.4
        told = (stream.random(2) < 0.3) & ~done
        rows.append(
            {
                "obs": {name: np.full(2, number, np.float32) for name in NAMES},
                "reward": {name: float(stream.normal()) for name in NAMES},
                "next_obs": {name: np.full(2, number + 1, np.float32) for name in NAMES},
                "terminated": dict(zip(NAMES, done.tolist(), strict=True)),
                "truncated": dict(zip(NAMES, told.tolist(), strict=True)),
            }
        )
    return rows


def joined(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: {name: np.stack([row[key][name] for row in rows]) for name in NAMES} for key in rows[0]}


def test_rows_of_named_agents_may_come_in_any_form() -> None:
    """One by one or together, as dicts or other mappings, as numbers, arrays, lists or tensors: the same rows."""
    torch = pytest.importorskip("torch")
    rows = named_rows(40)
    options: dict[str, Any] = {"schema": NAMED, "view": STEPS, "num_envs": 1, "seed": 5}
    one_by_one, together, mappings, lists, tensors = (sw.ReplayBuffer(60, **options) for _ in range(5))
    for row in rows:
        one_by_one.add(**row)
        mappings.add(**{key: UserDict(part) for key, part in row.items()})  # the careful way
    whole = joined(rows)
    together.add(**whole)
    lists.add(**{key: {name: value.tolist() for name, value in part.items()} for key, part in whole.items()})
    tensors.add(**{key: {name: torch.from_numpy(value) for name, value in part.items()} for key, part in whole.items()})
    wanted, drawn = flatten(next(one_by_one.rows())), flatten(one_by_one.sample(64))
    assert set(one_by_one.sample(8)["discount"]) == set(NAMES)
    for buffer in (together, mappings, lists, tensors):
        assert flatten(next(buffer.rows())) == wanted
        assert flatten(buffer.sample(64)) == drawn
    assert one_by_one.stats()["episodes"] > 3


def test_tuples_of_agents_have_tuples_of_dones_and_discounts() -> None:
    schema = {
        "obs": sw.Field(),
        "reward": (sw.Field(), sw.Field()),
        "done": (sw.Field((), "bool"), sw.Field((), "bool")),
    }
    buffer = sw.ReplayBuffer(9, schema=schema, view=STEPS, seed=0)
    buffer.add(0.0, (1.0, 2.0), 1.0, (False, True), truncated=(False, False))
    buffer.add(1.0, (1.0, 2.0), 2.0, (False, True), truncated=(True, False))
    (rows,) = buffer.rows()
    assert rows["truncated"].tolist() == [False, True]
    batch = buffer.sample(64)
    first = batch["obs"] == 0
    assert set(batch["discount"][0][first].tolist()) == {0.25}
    assert set(batch["discount"][1].tolist()) == {0.5}


@pytest.mark.parametrize("schema", [THREE, NAMED], ids=["array", "names"])
def test_ends_of_agents_are_kept_in_every_storage(schema: Any, tmp_path: Path, shm_address: str) -> None:
    """With checksums, through a close and an open, a save and a load."""
    places = [None, shm_address, f"file://{tmp_path}/live.sw"]
    buffers = [sw.ReplayBuffer(60, schema=schema, view=STEPS, num_envs=1, seed=5, storage=place) for place in places]
    for number, row in enumerate(named_rows(90)):
        for buffer in buffers:
            if schema is NAMED:
                buffer.add(**row)
            else:
                done, told = (np.array([*row[key].values(), True]) for key in ("terminated", "truncated"))
                add(buffer, number, done.tolist(), told & ~done)
    buffers[2].close()
    buffers[0].save(tmp_path / "saved")
    drawn = flatten(buffers[0].sample(200))
    for again in (buffers[1], sw.open(tmp_path / "saved"), sw.open(str(places[2]))):
        assert flatten(next(again.rows())) == flatten(next(buffers[0].rows()))
        assert flatten(again.sample(200)) == drawn
    buffers[1].close(unlink=True)


def test_batches_as_tensors_have_the_same_names() -> None:
    torch = pytest.importorskip("torch")
    arrays, tensors = (
        sw.ReplayBuffer(60, schema=NAMED, view=STEPS, num_envs=1, seed=5, device=d) for d in (None, "cpu")
    )
    for buffer in (arrays, tensors):
        buffer.add(**joined(named_rows(30)))
    ours, theirs = arrays.sample(16), tensors.sample(16)
    assert all(isinstance(theirs["discount"][name], torch.Tensor) for name in NAMES)
    assert flatten(ours) == flatten(here(theirs))
    again = next(iter(tensors.batches(16)))
    assert again["discount"]["scout"].shape == again["reward"]["scout"].shape == (16,)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("schema", [THREE, NAMED], ids=["array", "names"])
def test_rows_on_a_gpu_end_as_those_on_the_host(place: str, schema: Any) -> None:
    device = device_of(place)
    host = sw.ReplayBuffer(30, schema=schema, num_envs=1, seed=5)
    there = on_device(30, device=device, schema=schema, num_envs=1, seed=5)
    for number, row in enumerate(named_rows(40)):
        for buffer in (host, there):
            if schema is NAMED:
                buffer.add(**row)
            else:
                done, told = (np.array([*row[key].values(), True]) for key in ("terminated", "truncated"))
                add(buffer, number, done.tolist(), told & ~done)
    assert flatten(here(next(iter(there.rows())))) == flatten(next(iter(host.rows())))
    assert flatten(here(there.sample(32))) == flatten(host.sample(32))
    assert there.stats()["episodes"] == host.stats()["episodes"] > 3
    with pytest.raises(SchemaError, match="rows on a GPU have n_step=1 where each agent has its own done"):
        on_device(30, device=device, schema=schema, num_envs=1, view=STEPS)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("schema", [THREE, NAMED], ids=["array", "names"])
def test_gpu_that_reads_host_rows_gives_the_same_batches(place: str, schema: Any) -> None:
    from test_feed import Direct

    host, other = (sw.ReplayBuffer(40, schema=schema, view=STEPS, num_envs=1, seed=5) for _ in range(2))
    for number, row in enumerate(named_rows(60)):
        for buffer in (host, other):
            if schema is NAMED:
                buffer.add(**row)
            else:
                add(buffer, number, [*row["terminated"].values(), True])
    direct = Direct(other, device_of(place))
    for _ in range(3):
        assert flatten(here(direct.sample(12))) == flatten(host.sample(12))


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("truncated", "says"),
    [
        (np.zeros((3, 1), bool), r"truncated: expected shape \(3,\), one truth value per agent, or \(\), one per row"),
        (np.zeros(2, bool), r"truncated: expected shape \(3,\), one truth value per agent, or \(\), one per row, got"),
        ([0.5, 0, 0], "truncated: expected truth values"),
        ({"a": True}, "truncated: expected"),
    ],
)
def test_truncated_of_another_shape_is_refused(truncated: Any, says: str) -> None:
    buffer = sw.ReplayBuffer(9, schema=THREE)
    with pytest.raises(SchemaError, match=says):
        add(buffer, 0, [0, 0, 0], truncated)
    assert len(buffer) == 0


def test_names_that_are_missing_are_named() -> None:
    buffer = sw.ReplayBuffer(9, schema=NAMED)
    (row,) = named_rows(1)
    with pytest.raises(
        SchemaError, match=r"field 'truncated': expected the keys scout, guard, got missing \['guard'\]"
    ):
        buffer.add(**row | {"truncated": {"scout": True}})
    with pytest.raises(SchemaError, match=r"field 'done': expected the keys scout, guard, got missing \['scout'\]"):
        buffer.add(**row | {"terminated": {"guard": True}})
    with pytest.raises(SchemaError, match=r"truncated: expected shape \(\), one truth value per row, got \(2,\)"):
        buffer.add(**row | {"truncated": [True, False]})
    with pytest.raises(
        SchemaError, match=r"truncated/guard: expected shape \(\), one truth value per agent, got \(2,\)"
    ):
        buffer.add(**row | {"truncated": {"scout": True, "guard": [True, False]}})
    assert len(buffer) == 0


@pytest.mark.parametrize("reward", [sw.Field(), sw.Field((2,)), {"a": sw.Field()}])
def test_several_steps_need_a_reward_for_each_agent(reward: Any) -> None:
    schema = {"obs": sw.Field(), "reward": reward, "done": sw.Field((3,), "bool")}
    with pytest.raises(SchemaError, match=r"n_step=3: each agent has its own done, .* expected a reward for each"):
        sw.ReplayBuffer(9, schema=schema, view=STEPS)
    sw.ReplayBuffer(9, schema=schema)  # one step sums nothing


def test_settings_that_have_no_meaning_for_agents_are_refused() -> None:
    with pytest.raises(SchemaError, match="field 'done/a': expected a plain Field"):
        sw.ReplayBuffer(9, schema={"obs": sw.Field(), "done": {"a": sw.Field((2,), "bool", stack=2)}})
    with pytest.raises(SchemaError, match="field 'done': n_step > 1 reads it: expected bool, got float16"):
        sw.ReplayBuffer(9, schema={**THREE, "done": sw.Field((3,), "float16")}, view=STEPS)
    goals = {"achieved_goal": sw.Field((2,)), "desired_goal": sw.Field((2,))}
    view = sw.Transitions(hindsight=sw.Hindsight("final", 0.5, lambda a, d: (a - d).sum(axis=1)))
    with pytest.raises(SchemaError, match="hindsight: done: expected Field"):
        sw.ReplayBuffer(9, schema={"obs": goals, "done": sw.Field((3,), "bool")}, view=view)
    with pytest.raises(SchemaError, match="hindsight: reward: expected Field"):
        sw.ReplayBuffer(9, schema={"obs": goals, "reward": {"a": sw.Field()}}, view=view)
    buffer = sw.ReplayBuffer(9, schema=NAMED, view=STEPS)
    buffer.add(**named_rows(1)[0])
    with pytest.raises(SchemaError, match="out: the discounts of agents by name are parts of one new array"):
        buffer.sample(2, out=buffer.sample(2))
