"""Stable-Baselines3 over our buffer: one stream gives the same batches, and its algorithms learn from priorities."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import SchemaError

torch = pytest.importorskip("torch")
pytest.importorskip("stable_baselines3")
import gymnasium as gym  # noqa: E402
from gymnasium import spaces  # noqa: E402
from stable_baselines3 import DQN, SAC, TD3  # noqa: E402
from stable_baselines3.common import buffers  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize  # noqa: E402
from torch.nn import functional  # noqa: E402

from sharpwave.adapters import sb3  # noqa: E402
from sharpwave.adapters.sb3 import ReplayBuffer  # noqa: E402

BOX = spaces.Box(-1e6, 1e6, (3,))
DICT = spaces.Dict({"where": BOX, "image": spaces.Box(0, 255, (1, 4, 4), np.uint8), "mode": spaces.Discrete(1000)})
NAMES = ("observations", "actions", "next_observations", "dones", "rewards")


def value_of(space: spaces.Space[Any], number: int) -> Any:
    """A value of the space that tells which number it was made from."""
    if isinstance(space, spaces.Dict):
        return {name: value_of(part, number) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return np.int64(number % 1000)
    return np.full(space.shape, number % 256 if space.dtype == np.uint8 else number, space.dtype)


def stacked(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: stacked([value[name] for value in values]) for name in values[0]}
    return np.stack(values)


def fill(steps: int, n_envs: int, space: spaces.Space[Any], *targets: Any, seed: int = 0) -> None:
    """Adds one stream to every buffer: each observation is a number of its own, ends are of both kinds."""
    rng = np.random.default_rng(seed)
    number = 0

    def fresh() -> int:
        nonlocal number
        number += 1
        return number

    now = [fresh() for _ in range(n_envs)]
    for _ in range(steps):
        after = [fresh() for _ in range(n_envs)]
        action = rng.integers(0, 5, n_envs)
        reward = rng.normal(size=n_envs).astype(np.float32)
        done = rng.random(n_envs) < 0.2
        timeout = done & (rng.random(n_envs) < 0.5)
        infos = [
            {"TimeLimit.truncated": bool(flag)} if ended else {} for flag, ended in zip(timeout, done, strict=True)
        ]
        for target in targets:
            obs, next_obs = (stacked([value_of(space, n) for n in numbers]) for numbers in (now, after))
            target.add(obs, next_obs, action, reward, done, infos)
        now = [fresh() if ended else n for ended, n in zip(done, after, strict=True)]


def rows_of(samples: Any) -> dict[Any, dict[str, Any]]:
    """Each example of a batch by its observation."""

    def at(value: Any, i: int) -> Any:
        return {name: at(part, i) for name, part in value.items()} if isinstance(value, dict) else value[i].tolist()

    filled = [name for name, value in samples._asdict().items() if value is not None]
    rows = ({name: at(getattr(samples, name), i) for name in filled} for i in range(len(samples.rewards)))
    return {repr(row["observations"]): row for row in rows}


def assert_same_examples(mine: Any, theirs: Any, rows: int, **tolerance: float) -> None:
    """Both buffers give the same examples; many more draws than rows bring each of them up."""
    one, other = (rows_of(buffer.sample(rows * 25)) for buffer in (mine, theirs))
    assert len(one) == len(other) == rows
    for key, row in one.items():
        assert set(row) == set(other[key])
        for name, value in row.items():
            if tolerance and name in ("rewards", "discounts"):
                assert value == pytest.approx(other[key][name], **tolerance)
            else:
                assert value == other[key][name], name


# ---- the same stream, the same batches ------------------------------------------------------------------------------


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("steps", [40, 130], ids=["partly filled", "wrapped"])
@pytest.mark.parametrize("options", [{}, {"optimize_memory_usage": True}, {"compression": "lz4"}], ids=str)
def test_batches_are_those_of_its_own_buffer(n_envs: int, steps: int, options: Any) -> None:
    shape = (60 * n_envs, BOX, spaces.Discrete(5), "cpu", n_envs)
    mine, theirs = ReplayBuffer(*shape, **options), buffers.ReplayBuffer(*shape)
    fill(steps, n_envs, BOX, mine, theirs)
    assert (mine.size(), mine.full, mine.pos, mine.buffer_size) == (theirs.size(), theirs.full, theirs.pos, 60)
    held = min(steps, 60)
    order = (np.arange(held) + theirs.pos) % 60 if theirs.full else np.arange(held)
    (rows,) = mine.inner.rows()
    assert np.array_equal(rows["obs"], theirs.observations[order].reshape(-1, 3))
    assert np.array_equal(rows["next_obs"], theirs.next_observations[order].reshape(-1, 3))
    assert np.array_equal(rows["action"], theirs.actions[order].reshape(-1, 1))
    assert np.array_equal(rows["reward"], theirs.rewards[order].reshape(-1))
    timeouts = theirs.timeouts[order].reshape(-1)
    assert np.array_equal(rows["done"], theirs.dones[order].reshape(-1) * (1 - timeouts))
    assert 0 < timeouts.sum() < theirs.dones[order].sum()
    assert_same_examples(mine, theirs, held * n_envs)


@pytest.mark.parametrize("n_envs", [1, 2])
def test_timeouts_count_as_done_where_they_are_not_handled(n_envs: int) -> None:
    shape = (100, BOX, spaces.Discrete(5), "cpu", n_envs, False, False)
    mine, theirs = ReplayBuffer(*shape), buffers.ReplayBuffer(*shape)
    fill(50 // n_envs, n_envs, BOX, mine, theirs)
    assert_same_examples(mine, theirs, 50)


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("steps", [40, 130], ids=["partly filled", "wrapped"])
@pytest.mark.parametrize("handle", [True, False])
@pytest.mark.parametrize("n_steps", [2, 5])
def test_n_step_batches_are_those_of_its_own_buffer(n_envs: int, steps: int, handle: bool, n_steps: int) -> None:
    options: Any = {"n_steps": n_steps, "gamma": 0.9, "handle_timeout_termination": handle}
    shape = (60 * n_envs, BOX, spaces.Discrete(5), "cpu", n_envs)
    mine, theirs = ReplayBuffer(*shape, **options), buffers.NStepReplayBuffer(*shape, **options)
    fill(steps, n_envs, BOX, mine, theirs)
    assert_same_examples(mine, theirs, min(steps, 60) * n_envs, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("options", [{}, {"optimize_memory_usage": True}, {"compression": "zstd"}], ids=str)
def test_dict_observations_are_those_of_its_own_buffer(options: Any) -> None:
    shape = (120, DICT, spaces.Discrete(5), "cpu", 2)
    mine, theirs = ReplayBuffer(*shape, **options), buffers.DictReplayBuffer(*shape)
    fill(90, 2, DICT, mine, theirs)
    assert_same_examples(mine, theirs, 120)
    one, other = mine.sample(4), theirs.sample(4)
    assert type(one) is type(other)
    for name, value in other.observations.items():
        assert one.observations[name].shape == value.shape
        assert one.observations[name].dtype == value.dtype


@pytest.mark.parametrize(
    ("observations", "actions"),
    [
        (BOX, spaces.Discrete(4)),
        (spaces.Discrete(7), spaces.Box(-1, 1, (2,), np.float64)),
        (spaces.MultiDiscrete([3, 4]), spaces.MultiDiscrete([3, 4, 5])),
        (spaces.MultiBinary(6), spaces.MultiBinary(3)),
        (spaces.Box(0, 255, (3, 8, 8), np.uint8), spaces.Box(-1, 1, (2, 2))),
    ],
    ids=str,
)
@pytest.mark.parametrize("n_envs", [1, 2])
def test_tensors_have_the_shapes_and_dtypes_of_its_own(observations: Any, actions: Any, n_envs: int) -> None:
    mine = ReplayBuffer(20, observations, actions, "cpu", n_envs)
    theirs = buffers.ReplayBuffer(20, observations, actions, "cpu", n_envs)
    for buffer in (mine, theirs):
        draw = [(observations.sample(), observations.sample(), actions.sample()) for _ in range(n_envs)]
        obs, next_obs, action = (np.stack(parts) for parts in zip(*draw, strict=True))
        buffer.add(obs, next_obs, action, np.ones(n_envs), np.zeros(n_envs), [{}] * n_envs)
    one, other = mine.sample(6), theirs.sample(6)
    assert type(one) is type(other)
    for name in NAMES:
        assert getattr(one, name).shape == getattr(other, name).shape, name
        assert getattr(one, name).dtype == getattr(other, name).dtype, name
        assert type(getattr(one, name)) is torch.Tensor
    assert one.discounts is None


def normalizer(observation_space: spaces.Space[Any] = BOX) -> VecNormalize:
    """Statistics of nothing in particular."""

    class Idle(gym.Env):  # type: ignore[misc]
        def __init__(self) -> None:
            self.observation_space, self.action_space = observation_space, spaces.Discrete(5)

    env = VecNormalize(DummyVecEnv([Idle]), norm_obs_keys=["where"] if observation_space is DICT else None)
    rms = env.obs_rms["where"] if observation_space is DICT else env.obs_rms
    rms.mean, rms.var, env.ret_rms.var = np.full(3, 20.0), np.full(3, 9.0), np.float64(4.0)
    return env


@pytest.mark.parametrize("n_steps", [1, 3])
def test_vec_normalize_normalises_batches_as_with_its_own_buffer(n_steps: int) -> None:
    env = normalizer()
    options: Any = {"n_steps": n_steps, "gamma": 0.9}
    mine = ReplayBuffer(100, BOX, spaces.Discrete(5), "cpu", **options)
    theirs = buffers.NStepReplayBuffer(100, BOX, spaces.Discrete(5), "cpu", **options)
    fill(100, 1, BOX, mine, theirs)
    one, other = (rows_of(buffer.sample(2_500, env=env)) for buffer in (mine, theirs))
    # Clipped observations are no longer told apart; the rest are.
    assert len(one) == len(other) > 20
    inner = [key for key in one if "10.0" not in key]
    for key in inner:
        assert one[key]["rewards"] == pytest.approx(other[key]["rewards"], rel=1e-4, abs=1e-6)
        assert one[key]["next_observations"] == other[key]["next_observations"]
    assert len(inner) > 20


def test_vec_normalize_normalises_the_keys_it_was_given() -> None:
    env = normalizer(DICT)
    mine = ReplayBuffer(100, DICT, spaces.Discrete(5), "cpu")
    fill(10, 1, DICT, mine)
    plain, normal = (
        {row["observations"]["mode"][0]: row for row in rows_of(mine.sample(300, env=e)).values()} for e in (None, env)
    )
    for mode, row in plain.items():
        expected = (np.array(row["observations"]["where"]) - 20) / 3
        assert normal[mode]["observations"]["where"] == pytest.approx(expected, rel=1e-5)
        assert normal[mode]["observations"]["image"] == row["observations"]["image"]


def test_extend_adds_step_by_step_and_reset_forgets() -> None:
    mine = ReplayBuffer(10, BOX, spaces.Discrete(5), "cpu", 2)
    zeros = np.zeros((4, 2, 3), np.float32)
    mine.extend(zeros, zeros, np.ones((4, 2), int), np.ones((4, 2)), np.zeros((4, 2)), [[{}, {}]] * 4)
    assert (mine.size(), len(mine.inner)) == (4, 8)
    mine.reset()
    assert (mine.size(), len(mine.inner), mine.full) == (0, 0, False)


def test_a_timeout_that_nobody_flags_ends_an_n_step_return() -> None:
    """CleanRL adds terminations as done, and a truncated episode's true final observation."""
    mine = ReplayBuffer(10, BOX, spaces.Discrete(5), "cpu", handle_timeout_termination=False, n_steps=3, gamma=0.5)
    for now, after in ((0, 1), (1, 2), (50, 51), (51, 52)):  # 2 was final: the environment has reset to 50
        obs, next_obs = np.full((1, 3), now), np.full((1, 3), after)
        mine.add(obs, next_obs, np.array([0]), np.array([1.0]), np.array([False]), {"final_obs": None})
    rows = {row["observations"][0]: row for row in rows_of(mine.sample(200)).values()}
    assert [rows[n]["next_observations"][0] for n in (0, 1, 50, 51)] == [2, 2, 52, 52]
    assert [rows[n]["rewards"] for n in (0, 1, 50, 51)] == [[1.5], [1.0], [1.5], [1.0]]
    assert [rows[n]["discounts"] for n in (0, 1, 50, 51)] == [[0.25], [0.5], [0.25], [0.5]]


# ---- losses that know their rows -------------------------------------------------------------------------------------


def prioritized(rows: int = 8, **options: Any) -> ReplayBuffer:
    sampler = sw.Prioritized(alpha=1.0, beta=1.0, eps=0.0, normalize="none")
    mine = ReplayBuffer(rows, BOX, spaces.Discrete(5), "cpu", sampler=sampler, seed=3, **options)
    for i in range(rows):
        obs = np.full((1, 3), i, np.float32)
        mine.add(obs, obs + 1, np.array([1]), np.array([float(i)]), np.array([False]), [{}])
    mine.inner.update_priorities(mine.inner.sample(256)["indices"], np.ones(256))
    serials = next(iter(mine.inner.rows()))["indices"]
    mine.inner.update_priorities(serials, 1.0 + np.arange(rows))
    return mine


@pytest.mark.parametrize(
    "loss", [functional.mse_loss, functional.smooth_l1_loss, functional.huber_loss, functional.l1_loss]
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("flat", [False, True], ids=["as SB3", "as CleanRL"])
def test_loss_is_weighted_row_by_row_and_its_errors_are_the_new_priorities(
    loss: Any, reduction: str, flat: bool
) -> None:
    mine = prioritized()
    data = mine.sample(16)
    # P is in proportion to 1 + i, and the weight is its inverse times the number of rows.
    weights = (36 / 8) / (1 + data.observations[:, 0])
    estimates = torch.linspace(-2, 3, 16).requires_grad_()
    with torch.no_grad():
        target = data.rewards + (1 - data.dones) * 0.9 * torch.ones(16, 1)
    plain = data.observations[:, 0] + 0.9
    if flat:
        total = loss(target.flatten(), estimates, reduction=reduction)
    else:
        total = loss(estimates.reshape(-1, 1), target, reduction=reduction)
    each = weights * loss(estimates, plain, reduction="none")
    expected = {"mean": each.mean(), "sum": each.sum(), "none": each if flat else each.reshape(-1, 1)}[reduction]
    assert type(total) is torch.Tensor
    assert torch.allclose(total, expected)
    (gradient,) = torch.autograd.grad(total.sum(), estimates)
    (wanted,) = torch.autograd.grad(expected.sum(), estimates)
    assert torch.allclose(gradient, wanted)

    priorities = 1.0 + np.arange(8)
    for i, error in zip(data.observations[:, 0].long(), (estimates - plain).abs().detach(), strict=True):
        priorities[i] = error  # of rows that come twice, the last
    batch = mine.inner.sample(4_096)
    assert np.allclose(
        batch["probabilities"], (priorities / priorities.sum())[batch["obs"][:, 0].astype(int)], rtol=1e-4
    )


def test_priority_is_the_mean_of_the_critics_errors() -> None:
    mine = prioritized()  # row i has priority 1 + i, and reward i
    data = mine.sample(1)
    row = int(data.rewards)
    for estimate in (row + 1.0, row - 4.0):
        functional.mse_loss(torch.tensor([[estimate]]), data.rewards + 0.0)
    batch = mine.inner.sample(512)
    (chance,) = set(batch["probabilities"][batch["obs"][:, 0] == row].tolist())
    assert chance == pytest.approx(2.5 / (36 - (1 + row) + 2.5))


def test_rewards_pass_their_batch_on_through_any_computation() -> None:
    mine = prioritized()
    data = mine.sample(4)
    low, _ = torch.cat([data.rewards, data.rewards + 1], dim=1).min(dim=1, keepdim=True)
    before = mine.inner.stats()["updates_applied"]
    functional.mse_loss(torch.zeros(4, 1), low)
    assert mine.inner.stats()["updates_applied"] == before + 4
    # Something else than one error a row is none of ours.
    assert functional.mse_loss(data.rewards.mean(), torch.tensor(0.0)) == data.rewards.mean() ** 2
    assert functional.mse_loss(data.rewards[:2], torch.zeros(2, 1)) == (data.rewards[:2] ** 2).mean()
    assert mine.inner.stats()["updates_applied"] == before + 4


@pytest.mark.filterwarnings("error")
def test_batches_that_no_loss_is_made_of_are_told_once() -> None:
    mine = prioritized()
    for _ in range(9):
        mine.sample(4)
    functional.mse_loss(torch.zeros(4, 1), mine.sample(4).rewards)
    for _ in range(10):
        mine.sample(4)  # a warning here would be an error
    with pytest.warns(RuntimeWarning, match=r"sample\(\): 10 batches were drawn by priority, no loss gave their rows"):
        mine.sample(4)
    uniform = ReplayBuffer(10, BOX, spaces.Discrete(5), "cpu")
    fill(5, 1, BOX, uniform)
    for buffer in (mine, uniform):
        for _ in range(12):
            buffer.sample(4)


def test_errors_that_are_not_finite_are_refused() -> None:
    data = prioritized().sample(4)
    with pytest.raises(SchemaError, match="expected finite numbers, got nan"):
        functional.mse_loss(torch.full((4, 1), float("nan")), data.rewards)


# ---- its algorithms --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small networks lose more to handing work over than they gain."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(**options: Any) -> dict[str, Any]:
    """Settings of a model that learns little, and fast. Algorithms write into the dicts they are given."""
    few = {"policy_kwargs": {"net_arch": [16]}, "learning_starts": 50, "batch_size": 16, "train_freq": 1}
    return {**few, "device": "cpu", "seed": 5, "replay_buffer_class": ReplayBuffer, **options}


SETTINGS = {
    "uniform": {},
    "prioritized": {"sampler": sw.Prioritized(beta=sw.Linear(0.4, 1.0, 200))},
    "prioritized, 3-step": {"sampler": sw.Prioritized(), "n_steps": 3, "gamma": 0.99},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("optimize", [False, True], ids=["stored", "optimized"])
@pytest.mark.parametrize(
    ("algorithm", "env", "critics"), [(DQN, "CartPole-v1", 1), (SAC, "Pendulum-v1", 2), (TD3, "Pendulum-v1", 2)]
)
def test_algorithms_learn(algorithm: Any, env: str, critics: int, optimize: bool, settings: str) -> None:
    options = small(replay_buffer_kwargs=dict(SETTINGS[settings]), buffer_size=200, optimize_memory_usage=optimize)
    model = algorithm("MlpPolicy", env, **options)
    before = copy.deepcopy(model.policy.state_dict())
    model.learn(250)
    assert any(not torch.equal(value, before[name]) for name, value in model.policy.state_dict().items())
    buffer = model.replay_buffer
    assert (buffer.size(), buffer.full, len(buffer.inner)) == (200, True, 200)
    stats = buffer.inner.stats()
    assert stats["rows_sampled"] == 200 * 16
    if settings != "uniform":
        assert stats["updates_applied"] + stats["updates_stale"] == 200 * 16 * critics
        assert len(np.unique(buffer.inner.sample(500)["probabilities"])) > 100
    assert stats["resets_unflagged"] == 0


@pytest.mark.parametrize("settings", SETTINGS)
def test_several_environments_and_dict_observations_learn(settings: str) -> None:
    class Seek(gym.Env):  # type: ignore[misc]
        observation_space = spaces.Dict({"goal": spaces.Box(-1, 1, (2,)), "mode": spaces.Discrete(3)})
        action_space = spaces.Discrete(3)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            return self.see(), {}

        def see(self) -> Any:
            return {
                "goal": self.np_random.uniform(-1, 1, 2).astype(np.float32),
                "mode": int(self.np_random.integers(3)),
            }

        def step(self, action: Any) -> Any:
            return self.see(), 1.0, self.np_random.random() < 0.1, self.np_random.random() < 0.1, {}

    env = make_vec_env(Seek, n_envs=3, seed=0)
    model = DQN("MultiInputPolicy", env, **small(replay_buffer_kwargs=dict(SETTINGS[settings]), buffer_size=90))
    model.learn(300)
    assert (model.replay_buffer.size(), len(model.replay_buffer.inner)) == (30, 90)
    assert model.replay_buffer.inner.stats()["resets_unflagged"] == 0


def test_vec_normalize_around_the_environment_learns() -> None:
    env = VecNormalize(make_vec_env("Pendulum-v1", n_envs=2, seed=0))
    options = small(replay_buffer_kwargs=dict(SETTINGS["prioritized, 3-step"]), buffer_size=300)
    model = SAC("MlpPolicy", env, **options)
    model.learn(500)
    rewards = next(iter(model.replay_buffer.inner.rows()))["reward"]
    assert rewards.min() < -5, "rows keep what the environment gave"
    assert len(model.replay_buffer.inner) == 300
    assert abs(model.replay_buffer.sample(64, env=env).rewards).max() < 5


def test_its_seed_fixes_the_run() -> None:
    def weights(seed: int) -> Any:
        options = small(replay_buffer_kwargs=dict(SETTINGS["prioritized"]), seed=seed)
        model = DQN("MlpPolicy", "CartPole-v1", **options).learn(120)
        return torch.cat([value.flatten() for value in model.policy.state_dict().values()]).tolist()

    first, again, other = weights(1), weights(1), weights(2)
    assert first == again
    assert first != other


class Count(gym.Env):  # type: ignore[misc]
    """Observations count up from a hundred times the number of the episode; no episode ends."""

    observation_space = spaces.Box(0, 1e6, (1,))
    action_space = spaces.Discrete(2)
    episodes = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.episodes += 1
        self.now = 100.0 * self.episodes
        return np.array([self.now], np.float32), {}

    def step(self, action: Any) -> Any:
        self.now += 1
        return np.array([self.now], np.float32), 1.0, False, False, {}


@pytest.mark.parametrize(
    "options", [{"optimize_memory_usage": True}, {"replay_buffer_kwargs": {"n_steps": 4}}], ids=str
)
@pytest.mark.filterwarnings("ignore:The last trajectory in the replay buffer")
def test_no_example_runs_over_a_second_learn(options: Any) -> None:
    model = DQN("MlpPolicy", Count(), **small(**options, learning_starts=1_000))
    model.learn(20)
    model.learn(20)
    data = model.replay_buffer.sample(2_000)
    steps = (data.next_observations - data.observations)[:, 0]
    assert steps.min() >= 1
    assert steps.max() <= 4, "from one episode to the next there would be 80 or more"
    assert data.dones.sum() == 0
    if data.discounts is not None:
        assert torch.allclose(data.rewards[:, 0], sum(0.99**k * (steps > k) for k in range(4)))


# ---- life ------------------------------------------------------------------------------------------------------------


def test_saved_replay_buffer_goes_on_where_it_stopped(tmp_path: Path) -> None:
    options = small(replay_buffer_kwargs=dict(SETTINGS["prioritized, 3-step"]), buffer_size=100)
    model = DQN("MlpPolicy", "CartPole-v1", **options).learn(90)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "replay")
    loaded = DQN.load(tmp_path / "model", env=gym.make("CartPole-v1"))
    loaded.load_replay_buffer(tmp_path / "replay")
    mine, theirs = model.replay_buffer, loaded.replay_buffer
    assert (theirs.size(), theirs.pos, theirs.full) == (90, 90, False)
    for one, other in zip(mine.inner.rows(), theirs.inner.rows(), strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)
    assert rows_of(mine.sample(32)) == rows_of(theirs.sample(32))
    loaded.learn(80)
    assert theirs.full
    assert theirs.inner.stats()["updates_applied"] > mine.inner.stats()["updates_applied"]


def test_a_buffer_in_a_storage_pickles_as_its_address(shm_address: str) -> None:
    mine = ReplayBuffer(10, BOX, spaces.Discrete(5), "cpu", storage=shm_address)
    fill(4, 1, BOX, mine)
    other = pickle.loads(pickle.dumps(mine))
    fill(3, 1, BOX, mine, seed=1)
    assert len(other.inner) == len(mine.inner) == 7
    again = ReplayBuffer(10, BOX, spaces.Discrete(5), "cpu", storage=shm_address, exist="attach")
    assert (again.size(), again.pos) == (7, 7)
    for buffer in (again, other):
        buffer.inner.close()
    mine.inner.close(unlink=True)


def test_its_arrays_are_named_with_where_their_rows_are() -> None:
    mine = ReplayBuffer(10, BOX, spaces.Discrete(5), "cpu")
    with pytest.raises(AttributeError) as caught:
        mine.observations  # noqa: B018
    assert str(caught.value) == "ReplayBuffer: observations: the engine keeps the rows; read them with .inner.rows()"
    with pytest.raises(AttributeError, match="no attribute 'unheard_of'"):
        mine.unheard_of  # noqa: B018


def test_infos_of_a_gymnasium_vector_environment_are_refused_where_timeouts_are_read() -> None:
    mine = ReplayBuffer(10, BOX, spaces.Discrete(5), "cpu")
    zeros = np.zeros((1, 3), np.float32)
    with pytest.raises(SchemaError) as caught:
        mine.add(zeros, zeros, np.array([1]), np.array([0.0]), np.array([False]), {"final_obs": None})
    assert str(caught.value) == (
        "add(): infos: expected a list of dicts, one an environment, got a dict, which tells no timeouts; give the "
        "buffer handle_timeout_termination=False and add terminations as done"
    )
    assert mine.size() == 0


def test_versions_whose_losses_take_no_discounts_refuse_n_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(NamedTuple):
        observations: Any
        actions: Any
        next_observations: Any
        dones: Any
        rewards: Any

    monkeypatch.setattr(sb3, "ReplayBufferSamples", Old)
    monkeypatch.setattr(sb3.stable_baselines3, "__version__", "2.6.0")
    mine = ReplayBuffer(10, BOX, spaces.Discrete(5), "cpu")
    fill(5, 1, BOX, mine)
    assert type(mine.sample(4)) is Old
    with pytest.raises(SchemaError) as caught:
        ReplayBuffer(10, BOX, spaces.Discrete(5), "cpu", n_steps=3)
    assert str(caught.value) == (
        "ReplayBuffer(): n_steps: expected 1 with Stable-Baselines3 2.6.0, whose losses take no discounts, got 3; "
        "pip install -U stable-baselines3"
    )


def test_import_without_stable_baselines3_names_the_extra() -> None:
    code = "import sys; sys.modules['stable_baselines3'] = None\nimport sharpwave.adapters.sb3"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith('pip install "sharpwave[sb3]"')
