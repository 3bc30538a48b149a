"""Hindsight for Stable-Baselines3: the examples that its own HerReplayBuffer gives, and its algorithms on them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import NotReady, SchemaError

torch = pytest.importorskip("torch")
pytest.importorskip("stable_baselines3")
import gymnasium as gym  # noqa: E402
from gymnasium import spaces  # noqa: E402
from sb3_streams import one_thread  # noqa: E402, F401
from stable_baselines3 import DDPG, DQN, SAC, TD3, her  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.envs import BitFlippingEnv  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize  # noqa: E402

from sharpwave.adapters.sb3 import HerReplayBuffer, PrioritizedSAC  # noqa: E402

STRATEGIES = ("future", "final", "episode")


class Count(gym.Env):  # type: ignore[misc]
    """Counts; the goal is a count. Episodes have fixed lengths, and every other one ends by a time limit."""

    observation_space = spaces.Dict(
        {name: spaces.Box(0, 1e6, (1,)) for name in ("observation", "achieved_goal", "desired_goal")}
    )
    action_space = spaces.Discrete(2)
    lengths = (5, 3, 8)

    def __init__(self, start: int = 0) -> None:
        self.now, self.episode, self.calls = start, -1, 0

    def see(self) -> dict[str, Any]:
        here = np.array([self.now], np.float32)
        return {"observation": here, "achieved_goal": here + 0.5, "desired_goal": np.array([7e5], np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode += 1
        self.now += 1_000 - self.now % 1_000
        return self.see(), {}

    def step(self, action: Any) -> Any:
        self.now += 1
        over = self.now % 1_000 == self.lengths[self.episode % 3]
        return self.see(), -1.0, over and self.episode % 2 == 0, over and self.episode % 2 == 1, {"now": self.now}

    def compute_reward(self, achieved: Any, desired: Any, infos: Any) -> Any:
        assert len(achieved) == len(desired) == len(infos)
        self.calls += 1
        bonus = np.array([info.get("now", 0) for info in infos])
        return -np.abs(achieved - desired)[:, 0] + 10 * bonus


def play(steps: int, env: Any, *targets: Any) -> None:
    """Steps the environments as the algorithms do, and adds to every buffer."""
    obs = env.reset()
    for _ in range(steps):
        action = np.array([env.action_space.sample() for _ in range(env.num_envs)])
        new, reward, done, infos = env.step(action)
        after = copy.deepcopy(new)
        for i in np.flatnonzero(done):
            for key in after:
                after[key][i] = infos[i]["terminal_observation"][key]
        for target in targets:
            target.add(copy.deepcopy(obs), copy.deepcopy(after), action, reward, done, copy.deepcopy(infos))
        obs = new


def make(env: Any, *, steps: int = 60, rows: int = 1_000, **options: Any) -> tuple[Any, Any]:
    """Our buffer and theirs after the same steps."""
    shape = (rows * env.num_envs, env.observation_space, env.action_space, env, "cpu", env.num_envs)
    mine, theirs = HerReplayBuffer(*shape, seed=1, **options), her.HerReplayBuffer(*shape, **options)
    play(steps, env, mine, theirs)
    return mine, theirs


def envs(number: int = 2) -> DummyVecEnv:
    return DummyVecEnv([lambda i=i: Count(100_000 * i) for i in range(number)])


def examples(samples: Any) -> set[tuple[float, ...]]:
    """Each different example: where, goal, reward, done, where to; both observations name the same goal."""
    now, after = samples.observations, samples.next_observations
    assert torch.equal(now["desired_goal"], after["desired_goal"])
    columns = (now["observation"], now["desired_goal"], samples.rewards, samples.dones, after["observation"])
    return set(map(tuple, torch.cat(columns, dim=1).tolist()))


# ---- the same examples ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("infos", [False, True], ids=["without infos", "with infos"])
@pytest.mark.parametrize("handle", [True, False])
def test_examples_are_those_of_its_own_buffer(strategy: str, infos: bool, handle: bool) -> None:
    mine, theirs = make(
        envs(), goal_selection_strategy=strategy, copy_info_dict=infos, handle_timeout_termination=handle
    )
    one, other = (examples(buffer.sample(25_000)) for buffer in (mine, theirs))
    assert one == other
    assert len(one) > 200


@pytest.mark.parametrize("goals", [0, 1, 4])
def test_share_of_new_goals_is_that_of_its_own_buffer(goals: int) -> None:
    mine, theirs = make(envs(1), n_sampled_goal=goals)
    size = 20_000
    one, other = (
        float((buffer.sample(size).observations["desired_goal"] != 7e5).float().mean()) for buffer in (mine, theirs)
    )
    # Theirs is the same in every batch; ours is drawn example by example.
    assert other == pytest.approx(goals / (goals + 1), abs=1e-4)
    assert one == pytest.approx(other, abs=4 * np.sqrt(0.25 / size))
    assert mine.her_ratio == theirs.her_ratio


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_goals_are_as_likely_as_in_its_own_buffer(strategy: str) -> None:
    mine, theirs = make(envs(1), goal_selection_strategy=strategy, steps=16)
    counts = []
    for buffer in (mine, theirs):
        data = buffer.sample(40_000)
        pairs = torch.cat([data.observations["observation"], data.observations["desired_goal"]], dim=1)
        values, number = torch.unique(pairs, dim=0, return_counts=True)
        counts.append(dict(zip(map(tuple, values.tolist()), (number / 40_000).tolist(), strict=True)))
    assert counts[0].keys() == counts[1].keys()
    assert all(abs(share - counts[1][pair]) < 0.012 for pair, share in counts[0].items())


def test_open_episodes_are_not_drawn() -> None:
    mine, _ = make(envs(1), steps=12)  # two episodes, 5 and 3 steps, and four steps of a third
    rows = mine.sample(2_000).observations["observation"]
    assert sorted(rows.unique().tolist()) == [1000, 1001, 1002, 1003, 1004, 2000, 2001, 2002]
    empty, theirs = make(envs(1), steps=4)
    with pytest.raises(NotReady, match="hindsight draws from finished episodes and none has ended yet"):
        empty.sample(4)
    with pytest.raises(RuntimeError):
        theirs.sample(4)


@pytest.mark.parametrize("strategy", ["future", "final"])
def test_a_wrapped_ring_draws_the_rows_that_are_left_of_an_episode(strategy: str) -> None:
    """Its own buffer drops the rest of an episode whose first rows were overwritten. Ours draws it."""
    mine, theirs = make(envs(1), goal_selection_strategy=strategy, steps=40, rows=21)
    one, other = (examples(buffer.sample(20_000)) for buffer in (mine, theirs))
    assert other < one
    (rows,) = mine.inner.rows()
    assert {row[0] for row in one} == set(rows["obs"]["observation"][:, 0].tolist()) > {row[0] for row in other}
    assert all(row[1] == 7e5 or row[1] >= row[4] + 0.5 for row in one), "goals come from this step or later"


def test_infos_of_overwritten_rows_are_forgotten() -> None:
    mine, theirs = make(envs(2), steps=100, rows=24, copy_info_dict=True, goal_selection_strategy="final")
    one, other = (examples(buffer.sample(30_000)) for buffer in (mine, theirs))
    assert other <= one
    assert all(row[2] == -1 or row[2] == -abs(row[4] + 0.5 - row[1]) + 10 * row[4] for row in one)


def test_n_step_examples_have_the_rewards_of_every_step() -> None:
    mine, _ = make_n_step(3, 0.5)
    for now, goal, reward, _, after in examples(mine.sample(8_000)):
        steps = int(after - now)
        assert 1 <= steps <= 3
        places = now + 1.5 + np.arange(steps)
        each = np.full(steps, -1.0) if goal == 7e5 else -np.abs(places - goal)
        assert reward == pytest.approx(float(each @ 0.5 ** np.arange(steps)), rel=1e-5)


def make_n_step(n_steps: int, gamma: float) -> tuple[Any, Any]:
    env = envs(1)
    mine = HerReplayBuffer(
        1_000, env.observation_space, env.action_space, env, "cpu", n_steps=n_steps, gamma=gamma, seed=1
    )
    play(40, env, mine)
    return mine, env


def test_batches_are_normalised_as_with_its_own_buffer() -> None:
    env = VecNormalize(envs(1), norm_obs_keys=["observation"])
    env.obs_rms["observation"].mean, env.obs_rms["observation"].var = np.full(1, 3_000.0), np.full(1, 1e6)
    env.ret_rms.var = np.float64(4.0)
    mine, theirs = make(envs(1))
    one, other = (examples(buffer.sample(20_000, env=env)) for buffer in (mine, theirs))
    assert one == other


# ---- its algorithms -------------------------------------------------------------------------------------------------


def small(**options: Any) -> dict[str, Any]:
    few = {"policy_kwargs": {"net_arch": [16]}, "learning_starts": 60, "batch_size": 16, "train_freq": 4}
    return {**few, "device": "cpu", "seed": 5, "replay_buffer_class": HerReplayBuffer, **options}


@pytest.mark.parametrize(("algorithm", "image"), [(DQN, False), (SAC, False), (TD3, False), (DDPG, False), (DQN, True)])
def test_algorithms_learn_from_relabelled_goals(algorithm: Any, image: bool) -> None:
    env = make_vec_env(
        lambda: BitFlippingEnv(n_bits=4, continuous=algorithm is not DQN, image_obs_space=image), 1 if image else 2
    )
    settings = {"n_sampled_goal": 2, "copy_info_dict": image, "goal_selection_strategy": "future"}
    model = algorithm("MultiInputPolicy", env, **small(replay_buffer_kwargs=settings))
    before = copy.deepcopy(model.policy.state_dict())
    model.learn(120)
    assert any(not torch.equal(value, before[name]) for name, value in model.policy.state_dict().items())
    assert model.replay_buffer.inner.stats()["resets_unflagged"] == 0


def test_priorities_and_n_steps_combine_with_goals() -> None:
    env = make_vec_env(lambda: BitFlippingEnv(n_bits=4, continuous=True), 2)
    settings = {"sampler": sw.Prioritized(), "n_steps": 2, "compression": "lz4"}
    model = PrioritizedSAC("MultiInputPolicy", env, **small(replay_buffer_kwargs=settings, gamma=0.9)).learn(120)
    view = model.replay_buffer.inner.view
    assert (view.n_step, view.gamma, view.hindsight.ratio) == (2, 0.9, 0.8)
    assert model.replay_buffer.inner.stats()["updates_applied"] > 0


def test_environments_in_other_processes_compute_the_rewards() -> None:
    env = make_vec_env(
        lambda: BitFlippingEnv(n_bits=4), n_envs=2, vec_env_cls=SubprocVecEnv, vec_env_kwargs={"start_method": "fork"}
    )
    try:
        model = DQN("MultiInputPolicy", env, **small()).learn(90)
        data = model.replay_buffer.sample(200)
        equal = (data.next_observations["achieved_goal"] == data.observations["desired_goal"]).all(dim=1)
        assert torch.equal(data.rewards[:, 0], equal.float() - 1)
    finally:
        env.close()


def test_no_goal_comes_over_a_second_learn() -> None:
    """A second learn() resets the environments in mid-episode and does not tell the buffer."""
    model = DQN("MultiInputPolicy", envs(1), **small(learning_starts=1_000, train_freq=1))
    model.learn(7)  # an episode of five and two steps of another
    model.learn(8)
    data = model.replay_buffer.sample(4_000).observations
    assert set((data["observation"] // 1_000).unique().tolist()) == {1, 2, 3}
    mixed = (data["desired_goal"] != 7e5) & (data["desired_goal"] // 1_000 != data["observation"] // 1_000)
    assert not mixed.any()


# ---- life -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("infos", [False, True], ids=["without infos", "with infos"])
def test_saved_buffer_continues_with_the_environments_of_the_model(infos: bool, tmp_path: Path) -> None:
    model = DQN("MultiInputPolicy", envs(2), **small(replay_buffer_kwargs={"copy_info_dict": infos})).learn(80)
    model.save_replay_buffer(tmp_path / "replay")
    model.save(tmp_path / "model")
    loaded = DQN.load(tmp_path / "model", env=envs(2))
    loaded.load_replay_buffer(tmp_path / "replay")
    mine, theirs = model.replay_buffer, loaded.replay_buffer
    assert theirs.env is loaded.env
    assert (theirs.size(), theirs.pos) == (mine.size(), mine.pos) == (40, 40)
    one, other = mine.sample(64), theirs.sample(64)
    assert torch.equal(one.rewards, other.rewards)
    assert torch.equal(one.observations["desired_goal"], other.observations["desired_goal"])
    loaded.learn(40)
    assert theirs.size() == 60
    # The episodes that were open when the buffer was saved ended there.
    drawn = theirs.sample(4_000).observations["observation"].unique().tolist()
    held = next(iter(mine.inner.rows()))["obs"]["observation"][:, 0].tolist()
    assert set(held) <= set(drawn)


def test_unpickled_buffer_asks_for_its_environments() -> None:
    mine, _ = make(envs(1))
    other = pickle.loads(pickle.dumps(mine))
    assert other.env is None
    with pytest.raises(SchemaError, match=r"the environments that compute rewards are missing; call set_env\(env\)"):
        other.sample(64)
    other.set_env(envs(1))
    other.sample(64)
    with pytest.raises(ValueError, match="the buffer has its environments"):
        other.set_env(envs(1))
    with pytest.raises(ValueError, match="the buffer has its environments"):
        mine.set_env(envs(1))


def test_buffer_in_a_storage_is_saved_as_its_address(shm_address: str) -> None:
    env = envs(1)
    mine = HerReplayBuffer(100, env.observation_space, env.action_space, env, "cpu", storage=shm_address)
    play(20, env, mine)
    other = pickle.loads(pickle.dumps(mine))
    other.set_env(env)
    assert examples(other.sample(5_000)) == examples(mine.sample(5_000))
    other.inner.close()
    mine.inner.close(unlink=True)


def test_truncated_trajectory_may_be_drawn_and_is_not_continued() -> None:
    mine, _ = make(envs(1), steps=11)  # 5 + 3 + 3 steps
    assert 3_000.0 not in mine.sample(2_000).observations["observation"]
    mine.truncate_last_trajectory()
    rows = mine.sample(4_000)
    assert {3_000.0, 3_001.0, 3_002.0} <= set(rows.observations["observation"].flatten().tolist())
    ended = rows.observations["observation"] == 3_002.0
    assert (rows.dones[ended] == 0).all(), "its value is bootstrapped"
    play(2, mine.env, mine)
    assert mine.size() == 13


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"goal_selection_strategy": "past"}, "goal_selection_strategy: expected 'future', 'final' or 'episode'"),
        ({"n_sampled_goal": -1}, "n_sampled_goal: expected a whole number, at least 0, got -1"),
        ({"copy_info_dict": True, "storage": "shm://x"}, "copy_info_dict: the infos are Python objects of this"),
        ({"copy_info_dict": True, "n_steps": 2, "gamma": 0.9}, "copy_info_dict: an example of n_steps=2 has rewards"),
        ({"observation_space": spaces.Box(0, 1)}, "observation_space: expected a Dict with observation, achieved_goal"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(options: Any, words: str) -> None:
    env = envs(1)
    given = {"observation_space": env.observation_space, "action_space": env.action_space, "env": env}
    with pytest.raises(SchemaError) as caught:
        HerReplayBuffer(100, **{**given, **options})
    assert f"HerReplayBuffer(): {words}" in str(caught.value)


@pytest.mark.parametrize("strategy", ["FUTURE", her.GoalSelectionStrategy.FINAL, "Episode"], ids=str)
def test_strategies_are_named_as_in_its_own_buffer(strategy: Any) -> None:
    env = envs(1)
    mine = HerReplayBuffer(100, env.observation_space, env.action_space, env, "cpu", goal_selection_strategy=strategy)
    assert mine.inner.view.hindsight.strategy == getattr(strategy, "name", strategy).lower()
