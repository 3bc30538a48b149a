"""Hindsight from the outside: settings and their errors, functions that go wrong, opening again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import NotReady, SchemaError, SharpwaveError

GOAL = sw.Field((2,))


def reward(achieved: Any, desired: Any) -> Any:
    return -np.linalg.norm(achieved - desired, axis=1)


def another_reward(achieved: Any, desired: Any) -> Any:
    return np.zeros(len(achieved))


def schema(**changes: Any) -> dict[str, Any]:
    return {"obs": {"observation": sw.Field((3,)), "achieved_goal": GOAL, "desired_goal": GOAL, **changes}}


def view(function: Any = reward, n_step: int = 1, **settings: Any) -> Any:
    return sw.Transitions(n_step=n_step, hindsight=sw.Hindsight(reward=function, **settings))


def obs_of(number: float, names: tuple[str, str] = ("achieved_goal", "desired_goal")) -> dict[str, Any]:
    achieved, desired = names
    return {
        "observation": np.full(3, number, np.float32),
        achieved: np.full(2, number, np.float32),
        desired: np.full(2, 50, np.float32),
    }


def fill(buffer: Any, count: int = 9, ends: tuple[int, ...] = (4,), **names: Any) -> Any:
    for i in range(count):
        after = obs_of(i + 1, **names)
        buffer.add(obs=obs_of(i, **names), reward=float(i), next_obs=after, done=False, truncated=i in ends)
    return buffer


def filled(function: Any = reward, *, n_step: int = 1, options: dict[str, Any] | None = None, **settings: Any) -> Any:
    return fill(
        sw.ReplayBuffer(20, schema=schema(), view=view(function, n_step, **settings), seed=0, **(options or {}))
    )


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("strategy", ["past", "", None, 1]),
        ("ratio", [-0.1, 1.1, float("nan"), "half", None, True]),
        ("reward", [None, 3, "reward"]),
        ("terminated", [3, "yes"]),
        ("goal", [3, "yes"]),
        ("achieved", [None, 3]),
        ("desired", [None, 3]),
    ],
)
def test_wrong_settings_are_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(SchemaError, match=name):
            sw.Hindsight(**{"reward": reward, name: value})


def test_hindsight_of_transitions_must_be_one() -> None:
    with pytest.raises(SchemaError, match="hindsight"):
        sw.Transitions(hindsight="future")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("made", "options", "word"),
    [
        ({"obs": sw.Field((3,))}, {}, "obs"),
        ({"obs": {"achieved_goal": GOAL}}, {}, "desired_goal"),
        ({"obs": {"desired_goal": GOAL}}, {}, "achieved_goal"),
        (schema(), {"next_obs": None}, "next_obs"),
        (schema(desired_goal=sw.Field((3,))), {}, "goal"),
    ],
    ids=["no dict", "no desired goal", "no achieved goal", "no next_obs", "goals of different shapes"],
)
def test_schema_that_cannot_be_relabelled_is_refused(made: Any, options: dict[str, Any], word: str) -> None:
    with pytest.raises(SchemaError, match=word) as caught:
        sw.ReplayBuffer(20, schema=made, view=view(), **options)
    assert "\n" not in str(caught.value)


def test_goals_may_have_other_names() -> None:
    made = {"obs": {"observation": sw.Field((3,)), "is": GOAL, "ought": GOAL}}
    settings = {"achieved": "is", "desired": "ought", "ratio": 1.0}
    buffer = sw.ReplayBuffer(20, schema=made, view=view(**settings), seed=0)
    batch = fill(buffer, names=("is", "ought")).sample(50)
    assert (batch["obs"]["ought"] <= 5).all()


def test_settings_are_told() -> None:
    hindsight = sw.Hindsight("final", 0.5, reward)
    assert (hindsight.strategy, hindsight.ratio, hindsight.reward) == ("final", 0.5, reward)
    assert sw.Hindsight(reward=reward).strategy == "future"
    assert sw.Hindsight(reward=reward).ratio == 0.8
    assert "final" in repr(hindsight)
    assert filled().view.hindsight.ratio == 0.8


# ---- examples --------------------------------------------------------------------------------------------------------


def test_only_finished_episodes_are_drawn() -> None:
    buffer = sw.ReplayBuffer(20, schema=schema(), view=view(), seed=0)
    with pytest.raises(NotReady):
        buffer.sample(1)
    fill(buffer, 3, ends=())
    with pytest.raises(NotReady, match="episode"):
        buffer.sample(1)
    assert len(buffer) == 3
    fill(buffer, 2, ends=(1,))
    # 0, 1, 2 and then 0 again: nobody said that the first was over, so all five are one episode.
    batch = buffer.sample(300)
    assert len(set(batch["indices"].tolist())) == 5
    assert set(batch["reward"][~batch["relabelled"]].tolist()) == {0.0, 1.0, 2.0}


def test_rows_are_never_written_back() -> None:
    buffer = filled(ratio=1.0)
    (before,) = buffer.rows()
    for _ in range(20):
        assert buffer.sample(32)["relabelled"].all()
    (after,) = buffer.rows()
    assert (after["obs"]["desired_goal"] == 50).all()
    assert (after["next_obs"]["desired_goal"] == 50).all()
    assert after["reward"].tolist() == before["reward"].tolist() == [float(i) for i in range(9)]
    assert "relabelled" not in after
    assert (buffer.get(buffer.sample(5)["indices"])["obs"]["desired_goal"] == 50).all()


@pytest.mark.parametrize("n_step", [1, 3])
def test_batch_has_the_dtypes_of_the_schema(n_step: int) -> None:
    batch = filled(n_step=n_step).sample(6)
    assert batch["reward"].dtype == np.float32
    assert batch["relabelled"].dtype == bool
    assert batch["obs"]["desired_goal"].dtype == np.float32
    assert ("discount" in batch) == (n_step > 1)


def test_batch_may_be_reused() -> None:
    buffer = filled(ratio=1.0)
    batch = buffer.sample(8)
    place = batch["obs"]["desired_goal"].ctypes.data
    assert buffer.sample(8, out=batch) is batch
    assert batch["obs"]["desired_goal"].ctypes.data == place
    achieved, desired = batch["next_obs"]["achieved_goal"], batch["obs"]["desired_goal"]
    assert np.allclose(batch["reward"], reward(achieved, desired))


def test_function_gets_arrays_of_its_own() -> None:
    def greedy(achieved: Any, desired: Any) -> Any:
        assert achieved.shape == desired.shape
        assert achieved.shape[1:] == (2,)
        result = reward(achieved, desired)
        achieved[:] = desired[:] = -1
        return result

    buffer = filled(greedy, ratio=1.0)
    buffer.sample(16)
    (held,) = buffer.rows()
    assert (held["obs"]["desired_goal"] == 50).all()
    assert (held["next_obs"]["achieved_goal"][:, 0] == np.arange(1, 10)).all()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda achieved, desired: 0.0,
        lambda achieved, desired: np.zeros(len(achieved) + 1),
        lambda achieved, desired: np.zeros((len(achieved), 2)),
        lambda achieved, desired: ["high"] * len(achieved),
        lambda achieved, desired: None,
    ],
    ids=["one number", "too many", "two axes", "words", "nothing"],
)
def test_wrong_rewards_are_refused(wrong: Any) -> None:
    with pytest.raises(SchemaError, match="reward"):
        filled(wrong, ratio=1.0).sample(4)


def test_error_of_a_function_comes_through() -> None:
    def broken(achieved: Any, desired: Any) -> Any:
        raise ZeroDivisionError("mine")

    buffer = filled(broken, ratio=1.0)
    with pytest.raises(ZeroDivisionError, match="mine"):
        buffer.sample(4)
    (held,) = buffer.rows()
    assert len(held["reward"]) == 9


def test_priorities_go_with_hindsight() -> None:
    buffer = filled(ratio=1.0, options={"sampler": sw.Prioritized()})
    batch = buffer.sample(16)
    assert batch["weights"].shape == (16,)
    assert buffer.update_priorities(batch["indices"], batch["reward"]) == {"applied": 16, "stale": 0}


# ---- opening again ---------------------------------------------------------------------------------------------------


def test_opened_buffer_needs_its_functions(tmp_path: Path) -> None:
    filled().save(tmp_path / "snapshot")
    with pytest.raises(SharpwaveError, match="reward"):
        sw.open(tmp_path / "snapshot")
    with pytest.raises(SchemaError, match="reward"):
        sw.open(tmp_path / "snapshot", view=view(another_reward))
    copy = sw.open(tmp_path / "snapshot", view=view())
    assert copy.sample(4)["relabelled"].shape == (4,)
    assert len(copy) == 9


def test_other_settings_at_opening_are_refused(tmp_path: Path) -> None:
    filled().save(tmp_path / "snapshot")
    with pytest.raises(SchemaError):
        sw.open(tmp_path / "snapshot", view=view(n_step=2))


def test_attached_handle_relabels_too(shm_address: str) -> None:
    buffer = filled(options={"storage": shm_address}, ratio=1.0)
    other = sw.open(shm_address, view=view(ratio=1.0))
    assert other.sample(8)["relabelled"].all()
    other.close()
    buffer.close(unlink=True)
