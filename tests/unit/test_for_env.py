"""Buffers for Gymnasium environments: what a space samples is what comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import SchemaError

gym = pytest.importorskip("gymnasium")
from gymnasium import spaces  # noqa: E402


class Wild(gym.Env):  # type: ignore[misc]
    """An environment whose observations and actions are samples of any space."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        observation_space.seed(0)
        action_space.seed(1)

    def reset(self, **_: Any) -> Any:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        return self.observation_space.sample(), 1.0, False, False, {}


def assert_same(stored: Any, given: Any, i: int) -> None:
    if isinstance(given, dict):
        assert set(stored) == set(given)
        for name in given:
            assert_same(stored[name], given[name], i)
    elif isinstance(given, tuple):
        assert isinstance(stored, tuple)
        for mine, theirs in zip(stored, given, strict=True):
            assert_same(mine, theirs, i)
    else:
        assert stored.dtype == np.asarray(given).dtype
        assert np.array_equal(stored[i], given)


def play(env: Any, buffer: sw.ReplayBuffer, steps: int = 25) -> None:
    """Acts at random and checks that every row comes back as it was."""
    env.action_space.seed(3)
    obs, _ = env.reset(seed=0)
    given = []
    for _ in range(steps):
        action = env.action_space.sample()
        next_obs, reward, terminated, truncated, _ = env.step(action)
        values = {"obs": obs, "action": action, "next_obs": next_obs}
        buffer.add(**values, reward=reward, terminated=terminated, truncated=truncated)
        given.append((values, reward, terminated, truncated))
        obs = env.reset()[0] if terminated or truncated else next_obs
    assert len(buffer) == steps
    (batch,) = buffer.rows()
    for i, (values, reward, terminated, truncated) in enumerate(given):
        for name, value in values.items():
            assert_same(batch[name], value, i)
        assert batch["reward"][i] == np.float32(reward)
        assert (batch["done"][i], batch["truncated"][i]) == (terminated, truncated)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0", "Acrobot-v1"])
def test_real_environments_are_stored_as_they_are(name: str) -> None:
    env = gym.make(name)
    buffer = sw.ReplayBuffer.for_env(env, capacity=100, seed=0)
    assert buffer.num_envs is None
    assert buffer.schema["obs"] == sw.Field(env.observation_space.shape, env.observation_space.dtype)
    play(env, buffer)
    env.close()


IMAGE = spaces.Box(0, 255, (8, 8, 3), np.uint8)
SPACES = {
    "box of no axes": spaces.Box(-1, 1, (), np.float64),
    "image": IMAGE,
    "discrete from three": spaces.Discrete(5, start=3),
    "multi discrete": spaces.MultiDiscrete([3, 4, 5]),
    "multi discrete of two axes": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    "multi binary": spaces.MultiBinary(7),
    "multi binary of two axes": spaces.MultiBinary((2, 3)),
    "dict": spaces.Dict({"image": IMAGE, "state": spaces.Box(-1, 1, (3,)), "mode": spaces.Discrete(4)}),
    "tuple": spaces.Tuple((IMAGE, spaces.Discrete(2), spaces.MultiBinary(3))),
    "dict in tuple in dict": spaces.Dict({"a": spaces.Tuple((spaces.Dict({"b": IMAGE}), spaces.Discrete(3)))}),
}


@pytest.mark.parametrize("name", SPACES)
def test_samples_of_every_space_come_back(name: str) -> None:
    play(Wild(SPACES[name], spaces.Discrete(2)), sw.ReplayBuffer.for_env(Wild(SPACES[name], spaces.Discrete(2)), 50))
    play(Wild(spaces.Discrete(2), SPACES[name]), sw.ReplayBuffer.for_env(Wild(spaces.Discrete(2), SPACES[name]), 50))


def play_vector(env: Any, buffer: sw.ReplayBuffer, steps: int = 30) -> None:
    env.action_space.seed(3)
    obs, _ = env.reset(seed=0)
    given = []
    for _ in range(steps):
        action = env.action_space.sample()
        next_obs, reward, terminated, truncated, _ = env.step(action)
        buffer.add(obs, action, reward, next_obs, terminated, truncated=truncated)
        given.append((obs, action, reward, terminated))
        obs = next_obs
    (batch,) = buffer.rows()
    width = env.num_envs
    assert len(buffer) == steps * width

    def part(value: Any, i: int) -> Any:
        if isinstance(value, dict):
            return {name: part(item, i) for name, item in value.items()}
        return tuple(part(item, i) for item in value) if isinstance(value, tuple) else value[i]

    for step, (obs, action, reward, terminated) in enumerate(given):
        for i in range(width):
            assert_same(batch["obs"], part(obs, i), step * width + i)
            assert_same(batch["action"], part(action, i), step * width + i)
            assert batch["reward"][step * width + i] == np.float32(reward[i])
            assert batch["done"][step * width + i] == terminated[i]


def test_vector_environment_sets_num_envs() -> None:
    env = gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync")
    buffer = sw.ReplayBuffer.for_env(env, capacity=400)
    assert buffer.num_envs == 4
    play_vector(env, buffer)
    env.close()


@pytest.mark.parametrize("name", ["dict", "image", "multi discrete"])
def test_vector_environment_of_nested_spaces_is_stored(name: str) -> None:
    env = gym.vector.SyncVectorEnv([lambda: Wild(SPACES[name], spaces.Discrete(2)) for _ in range(3)])
    buffer = sw.ReplayBuffer.for_env(env, capacity=90)
    play_vector(env, buffer)
    env.close()


def test_options_go_to_the_constructor_and_a_schema_adds_fields() -> None:
    env = gym.make("CartPole-v1")
    buffer = sw.ReplayBuffer.for_env(env, 10, schema={"logp": sw.Field(())}, next_obs=None, seed=5, writers=3)
    assert list(buffer.schema) == ["obs", "action", "reward", "done", "logp"]
    assert (buffer.stats()["seed"], buffer.stats()["max_writers"]) == (5, 3)
    assert sw.ReplayBuffer.for_env(env, 12, num_envs=3).num_envs == 3


@pytest.mark.parametrize(
    ("space", "where"),
    [
        (spaces.Text(5), "observation_space"),
        (spaces.Sequence(spaces.Discrete(2)), "observation_space"),
        (spaces.Dict({"name": spaces.Text(5), "a": spaces.Discrete(2)}), "observation_space['name']"),
        (spaces.Tuple((spaces.Discrete(2), spaces.Text(5))), "observation_space[1]"),
    ],
)
def test_unsupported_space_is_named_with_its_place(space: Any, where: str) -> None:
    with pytest.raises(SchemaError) as caught:
        sw.ReplayBuffer.for_env(Wild(space, spaces.Discrete(2)), 10)
    assert f"for_env(): {where}: expected Box, Discrete" in str(caught.value)
    assert "give a schema= of your own" in str(caught.value)
