"""Stable-Baselines3's algorithms over our buffers: the same networks, and the same networks with priorities."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sharpwave as sw
from sharpwave.errors import SchemaError, StorageError

torch = pytest.importorskip("torch")
pytest.importorskip("stable_baselines3")
import gymnasium as gym  # noqa: E402
from gymnasium import spaces  # noqa: E402
from sb3_streams import Recorded, following, one_thread, rows_of  # noqa: E402, F401
from stable_baselines3 import DDPG, DQN, SAC, TD3  # noqa: E402
from stable_baselines3.common import buffers  # noqa: E402
from stable_baselines3.common.env_util import make_vec_env  # noqa: E402
from stable_baselines3.common.noise import NormalActionNoise  # noqa: E402
from stable_baselines3.common.vec_env import VecNormalize  # noqa: E402
from torch.nn import functional  # noqa: E402

from sharpwave.adapters.sb3 import (  # noqa: E402
    PrioritizedDDPG,
    PrioritizedDQN,
    PrioritizedSAC,
    PrioritizedTD3,
    ReplayBuffer,
)

SOAK = os.environ.get("SHARPWAVE_SOAK") == "1"


def small(**options: Any) -> dict[str, Any]:
    """Settings of a model that learns little, and fast. Algorithms write into the dicts they are given."""
    few = {"policy_kwargs": {"net_arch": [16]}, "learning_starts": 50, "batch_size": 16, "train_freq": 1}
    return {**few, "device": "cpu", "seed": 5, "replay_buffer_class": ReplayBuffer, **options}


SETTINGS = {
    "uniform": {},
    "prioritized": {"sampler": sw.Prioritized(beta=sw.Linear(0.4, 1.0, 200))},
    "prioritized, 3-step": {"sampler": sw.Prioritized(), "n_steps": 3},
}


BY_PRIORITY = {DQN: PrioritizedDQN, SAC: PrioritizedSAC, TD3: PrioritizedTD3, DDPG: PrioritizedDDPG}


def by_priority(algorithm: Any, settings: str) -> Any:
    return algorithm if settings == "uniform" else BY_PRIORITY[algorithm]


ALGORITHMS = [  # DQN in both forms of memory, the others by turns
    (DQN, "CartPole-v1", False),
    (DQN, "CartPole-v1", True),
    (SAC, "Pendulum-v1", False),
    (TD3, "Pendulum-v1", True),
    (DDPG, "Pendulum-v1", False),
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("algorithm", "env", "optimize"), ALGORITHMS)
def test_algorithms_learn(algorithm: Any, env: str, optimize: bool, settings: str) -> None:
    options = small(replay_buffer_kwargs=dict(SETTINGS[settings]), buffer_size=100, optimize_memory_usage=optimize)
    model = by_priority(algorithm, settings)("MlpPolicy", env, **options)
    before = copy.deepcopy(model.policy.state_dict())
    model.learn(150)
    assert any(not torch.equal(value, before[name]) for name, value in model.policy.state_dict().items())
    buffer = model.replay_buffer
    assert (buffer.size(), buffer.full, len(buffer.inner)) == (100, True, 100)
    stats = buffer.inner.stats()
    assert stats["rows_sampled"] == 100 * 16
    if settings != "uniform":
        assert stats["updates_applied"] + stats["updates_stale"] == 100 * 16
        assert len(np.unique(buffer.inner.sample(500)["probabilities"])) > 50
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
    options = small(replay_buffer_kwargs=dict(SETTINGS[settings]), buffer_size=90)
    model = by_priority(DQN, settings)("MultiInputPolicy", env, **options)
    model.learn(300)
    assert (model.replay_buffer.size(), len(model.replay_buffer.inner)) == (30, 90)
    assert model.replay_buffer.inner.stats()["resets_unflagged"] == 0


def test_vec_normalize_around_the_environment_learns() -> None:
    env = VecNormalize(make_vec_env("Pendulum-v1", n_envs=2, seed=0))
    options = small(replay_buffer_kwargs=dict(SETTINGS["prioritized, 3-step"]), buffer_size=300)
    model = PrioritizedSAC("MlpPolicy", env, **options)
    model.learn(330)
    rewards = next(iter(model.replay_buffer.inner.rows()))["reward"]
    assert rewards.min() < -5, "rows keep what the environment gave"
    assert len(model.replay_buffer.inner) == 300
    assert abs(model.replay_buffer.sample(64, env=env).rewards).max() < 5


@pytest.mark.parametrize(("algorithm", "critics"), [(DQN, 1), (SAC, 2), (SAC, 3), (TD3, 2), (DDPG, 1)])
def test_train_weights_each_row_and_gives_it_the_critics_mean_error(algorithm: Any, critics: int) -> None:
    """One gradient step, against the same step made by hand."""
    env = "CartPole-v1" if algorithm is DQN else "Pendulum-v1"
    sampler = sw.Prioritized(alpha=1.0, beta=1.0, eps=0.0)
    options = small(replay_buffer_kwargs={"sampler": sampler, "seed": 1}, learning_starts=1_000, learning_rate=0.0)
    if critics == 3:
        options["policy_kwargs"] = {"net_arch": [16], "n_critics": 3}
    if algorithm in (TD3, DDPG):
        options["target_policy_noise"] = 0.0
        if algorithm is DDPG:
            del options["target_policy_noise"]
    model = BY_PRIORITY[algorithm]("MlpPolicy", env, **options)
    model.learn(40)
    buffer = model.replay_buffer
    serials = next(iter(buffer.inner.rows()))["indices"]
    buffer.inner.update_priorities(serials, np.linspace(1, 4, 40))
    seen: list[Any] = []
    draw = buffer.sample
    buffer.sample = lambda *args, **kwargs: seen.append(draw(*args, **kwargs)) or seen[-1]  # type: ignore[func-returns-value]
    logged: dict[str, float] = {}
    model.logger.record = lambda name, value, *_, **__: logged.__setitem__(name, value)
    torch.manual_seed(3)
    model.train(1, 16)
    del buffer.sample
    (data,) = seen
    assert data.weights.std() > 0

    torch.manual_seed(3)
    with torch.no_grad():
        if algorithm is DQN:
            after = model.q_net_target(data.next_observations).max(dim=1, keepdim=True).values
            estimates = [model.q_net(data.observations).gather(1, data.actions.long())]
        else:
            if algorithm is SAC:
                model.actor.action_log_prob(data.observations)  # the same random numbers in the same order
                actions, log_prob = model.actor.action_log_prob(data.next_observations)
            else:
                actions, log_prob = model.actor_target(data.next_observations), torch.zeros(16)
                if algorithm is DDPG:
                    assert model.target_policy_noise == 0.1
                    noise = (
                        data.actions.clone().normal_(0, 0.1).clamp(-model.target_noise_clip, model.target_noise_clip)
                    )
                    actions = (actions + noise).clamp(-1, 1)
            after = (
                torch.cat(model.critic_target(data.next_observations, actions), dim=1).min(dim=1, keepdim=True).values
            )
            if algorithm is SAC:
                after = after - torch.exp(model.log_ent_coef) * log_prob.reshape(-1, 1)
            estimates = model.critic(data.observations, data.actions)
        target = data.rewards + (1 - data.dones) * model.gamma * after
        assert len(estimates) == critics
        each = functional.smooth_l1_loss if algorithm is DQN else functional.mse_loss
        loss = sum((data.weights * each(q, target, reduction="none")).mean() for q in estimates)
        errors = torch.stack([(q - target).abs() for q in estimates]).mean(dim=0)[:, 0]
    name, factor = ("train/loss", 1) if algorithm is DQN else ("train/critic_loss", 0.5 if algorithm is SAC else 1)
    assert logged[name] == pytest.approx(factor * float(loss), rel=1e-5)

    priorities = dict(zip(serials.tolist(), np.linspace(1, 4, 40), strict=True))
    priorities.update(zip(data.indices.tolist(), errors.tolist(), strict=True))
    batch = buffer.inner.sample(2_000)
    total = sum(priorities.values())
    expected = [priorities[serial] / total for serial in batch["indices"].tolist()]
    assert batch["probabilities"] == pytest.approx(expected, rel=1e-4)


def test_plain_algorithm_by_priority_is_refused_soon() -> None:
    options = small(replay_buffer_kwargs=dict(SETTINGS["prioritized"]))
    with pytest.raises(SchemaError, match=r"10 batches were drawn by priority .* train with PrioritizedDQN"):
        DQN("MlpPolicy", "CartPole-v1", **options).learn(100)


def test_compiled_networks_learn_by_priority() -> None:
    options = small(replay_buffer_kwargs=dict(SETTINGS["prioritized"]))
    model = PrioritizedDQN("MlpPolicy", "CartPole-v1", **options)
    model.q_net.q_net = torch.compile(model.q_net.q_net, backend="eager")
    model.learn(80)
    assert model.replay_buffer.inner.stats()["updates_applied"] == 30 * 16


def test_algorithms_by_priority_refuse_other_buffers() -> None:
    for options, words in (
        ({}, r"PrioritizedDQN\(\): sampler: expected sw.Prioritized\(\), got another; give replay_buffer_kwargs="),
        ({"replay_buffer_class": None}, r"PrioritizedDQN\(\): replay_buffer_class: expected ReplayBuffer or Her"),
    ):
        with pytest.raises(SchemaError, match=words):
            PrioritizedDQN("MlpPolicy", "CartPole-v1", **small(**options))
    model = PrioritizedDQN("MlpPolicy", "CartPole-v1", **small(replay_buffer_kwargs=dict(SETTINGS["prioritized"])))
    model.replay_buffer = ReplayBuffer(10, model.observation_space, model.action_space)
    with pytest.raises(SchemaError, match=r"PrioritizedDQN\(\): sampler: expected"):
        model.learn(60)


def test_its_seed_fixes_the_run() -> None:
    def weights(seed: int) -> Any:
        options = small(replay_buffer_kwargs=dict(SETTINGS["prioritized"]), seed=seed)
        model = PrioritizedDQN("MlpPolicy", "CartPole-v1", **options).learn(120)
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


# ---- in lockstep with its own buffers --------------------------------------------------------------------------------


def weights_of(model: Any) -> list[Any]:
    """Every number that training changes: networks, targets, optimizers, entropy coefficient."""
    parts = [model.policy.state_dict()]
    parts += [optimizer.state_dict()["state"] for optimizer in optimizers_of(model)]
    parts.append({"log_ent_coef": getattr(model, "log_ent_coef", None)})

    def leaves(value: Any) -> Iterator[Any]:
        if isinstance(value, dict):
            for part in value.values():
                yield from leaves(part)
        elif isinstance(value, torch.Tensor):
            yield value.detach().clone()

    return list(leaves(dict(enumerate(parts))))


def optimizers_of(model: Any) -> list[Any]:
    names = ("policy.optimizer", "actor.optimizer", "critic.optimizer", "ent_coef_optimizer")
    found = []
    for name in names:
        value = model
        for part in name.split("."):
            value = getattr(value, part, None)
        found += [value] if value is not None else []
    return found


def assert_same_networks(
    algorithm: Any, n_envs: int, n_steps: int, *, by_priority: bool, steps: int = 60, **options: Any
) -> None:
    """Trains on our batches, then on those of Stable-Baselines3's own buffer at the same rows.

    Rewards are multiples of 1/64 and gamma is 1/2, so sums of three are exact. Otherwise the two round n-step returns
    in different orders.
    """
    name = "CartPole-v1" if algorithm is DQN else "Pendulum-v1"
    settings: dict[str, Any] = {"seed": 7}  # with a seed, nothing is taken from NumPy's generator
    if by_priority:
        settings["sampler"] = sw.Prioritized(alpha=0.0)
    shared = {"gamma": 0.5, "n_steps": n_steps, "learning_starts": 20, "buffer_size": 48, "batch_size": 23, **options}
    shared |= {"device": "cpu", "seed": 5, "train_freq": 2}

    def learn(kind: Any, **own: Any) -> Any:
        env = make_vec_env(
            lambda: gym.wrappers.TransformReward(gym.make(name), lambda reward: round(64 * reward) / 64),
            n_envs=n_envs,
            seed=3,
        )
        more = {key: (dict(value) if isinstance(value, dict) else value) for key, value in shared.items()}
        noise = {} if algorithm is DQN else {"action_noise": NormalActionNoise(np.zeros(1), np.full(1, 0.1))}
        return kind("MlpPolicy", env, **{"policy_kwargs": {"net_arch": [9]}, **more}, **noise, **own).learn(steps)

    kind = BY_PRIORITY[algorithm] if by_priority else algorithm
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`n_steps=3` is ignored")  # a claim about classes that do not read it
        mine = learn(kind, replay_buffer_class=Recorded, replay_buffer_kwargs=dict(settings))
        base = buffers.ReplayBuffer if n_steps == 1 else buffers.NStepReplayBuffer
        own = {} if n_steps == 1 else {"n_steps": n_steps, "gamma": 0.5}
        followed = following(base, mine.replay_buffer.drawn)
        theirs = learn(algorithm, replay_buffer_class=followed, replay_buffer_kwargs=own)
    assert len(mine.replay_buffer.drawn) == mine._n_updates == theirs._n_updates > 5
    pairs = list(zip(weights_of(mine), weights_of(theirs), strict=True))
    assert len(pairs) > 8
    assert all(torch.equal(one, other) for one, other in pairs)
    if by_priority:
        assert mine.replay_buffer.inner.stats()["updates_applied"] > 0


@pytest.mark.parametrize(("n_envs", "n_steps"), [(1, 1), (3, 3)])
@pytest.mark.parametrize("algorithm", [DQN, SAC, TD3, DDPG])
def test_networks_are_bit_equal_to_those_on_its_own_buffer(algorithm: Any, n_envs: int, n_steps: int) -> None:
    assert_same_networks(algorithm, n_envs, n_steps, by_priority=False)


@pytest.mark.parametrize(("algorithm", "n_steps"), [(DQN, 1), (DQN, 3), (SAC, 3), (TD3, 1), (DDPG, 3)])
def test_networks_by_equal_priorities_are_bit_equal_to_its_own(algorithm: Any, n_steps: int) -> None:
    assert_same_networks(algorithm, 2, n_steps, by_priority=True)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (SAC, {"ent_coef": 0.2, "gradient_steps": 3, "target_update_interval": 2}),
        (SAC, {"use_sde": True, "policy_kwargs": {"net_arch": [9], "n_critics": 3}}),
        (TD3, {"policy_delay": 3, "gradient_steps": 4}),
        (DQN, {"gradient_steps": 2, "target_update_interval": 10, "max_grad_norm": 0.1}),
    ],
    ids=str,
)
def test_settings_of_the_algorithms_hold_by_priority(algorithm: Any, options: Any) -> None:
    assert_same_networks(algorithm, 1, 1, by_priority=True, **options)


@pytest.mark.skipif(not SOAK, reason="many steps: SHARPWAVE_SOAK=1")
@pytest.mark.parametrize("batch_size", [7, 64, 100, 256])
@pytest.mark.parametrize("by_priority", [False, True])
@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("algorithm", [DQN, SAC, TD3, DDPG])
def test_networks_stay_bit_equal(algorithm: Any, n_steps: int, by_priority: bool, batch_size: int) -> None:
    options = {"batch_size": batch_size, "buffer_size": 900, "policy_kwargs": {"net_arch": [64, 64]}}
    assert_same_networks(algorithm, 3, n_steps, by_priority=by_priority, steps=3_000, **options)


# ---- n_steps and gamma ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [({"n_steps": 3}, {}), ({}, {"n_steps": 3}), ({"n_steps": 3}, {"n_steps": 3, "gamma": 0.95})],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:`n_steps=3` is ignored")
def test_steps_and_discount_are_those_of_the_algorithm(algorithm: Any, settings: Any, tmp_path: Path) -> None:
    class Mine(ReplayBuffer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    for kind in (ReplayBuffer, Mine):
        options = small(replay_buffer_kwargs=dict(settings), gamma=0.95, replay_buffer_class=kind, **algorithm)
        model = DQN("MlpPolicy", "CartPole-v1", **options)
        view = model.replay_buffer.inner.view
        assert (view.n_step, view.gamma) == (3, 0.95)
        assert (model.replay_buffer.n_steps, model.replay_buffer.gamma) == (3, 0.95)  # as of NStepReplayBuffer
    model = DQN("MlpPolicy", "CartPole-v1", **small(replay_buffer_kwargs={"n_steps": 3}, gamma=0.95))
    model.save(tmp_path / "model")
    again = DQN.load(tmp_path / "model", env=gym.make("CartPole-v1"), gamma=0.9)
    assert (again.replay_buffer.inner.view.n_step, again.replay_buffer.inner.view.gamma) == (3, 0.9)


@pytest.mark.parametrize(
    ("algorithm", "settings", "words"),
    [
        ({}, {"n_steps": 3, "gamma": 0.99}, "gamma: expected 0.95, the gamma of DQN, got 0.99"),
        ({}, {"gamma": 0.99}, "gamma: expected 0.95, the gamma of DQN, got 0.99"),
        ({"n_steps": 3}, {"n_steps": 2}, "n_steps: expected 3, the n_steps of DQN, got 2"),
        ({"n_steps": 3}, {"n_steps": 1}, "n_steps: expected 3, the n_steps of DQN, got 1"),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:`n_steps=3` is ignored")
def test_steps_and_discount_that_differ_from_the_algorithms_are_refused(
    algorithm: Any, settings: Any, words: str
) -> None:
    with pytest.raises(SchemaError) as caught:
        DQN("MlpPolicy", "CartPole-v1", **small(replay_buffer_kwargs=settings, gamma=0.95, **algorithm))
    assert str(caught.value) == f"ReplayBuffer(): {words}; leave it out of replay_buffer_kwargs"


# ---- life ------------------------------------------------------------------------------------------------------------


def test_saved_replay_buffer_goes_on_where_it_stopped(tmp_path: Path) -> None:
    options = small(replay_buffer_kwargs=dict(SETTINGS["prioritized, 3-step"]), buffer_size=100)
    model = PrioritizedDQN("MlpPolicy", "CartPole-v1", **options).learn(90)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "replay")
    loaded = PrioritizedDQN.load(tmp_path / "model", env=gym.make("CartPole-v1"))
    loaded.load_replay_buffer(tmp_path / "replay")
    mine, theirs = model.replay_buffer, loaded.replay_buffer
    assert (theirs.size(), theirs.pos, theirs.full) == (90, 90, False)
    for one, other in zip(mine.inner.rows(), theirs.inner.rows(), strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)
    assert rows_of(mine.sample(32)) == rows_of(theirs.sample(32))
    loaded.learn(80)
    assert theirs.full
    assert theirs.inner.stats()["updates_applied"] > mine.inner.stats()["updates_applied"]


@pytest.mark.parametrize("how", ["acts only", "load_replay_buffer", "attach"])
def test_a_model_with_a_storage_loads(how: str, shm_address: str, tmp_path: Path) -> None:
    settings = {"storage": shm_address, "sampler": sw.Prioritized()}
    model = PrioritizedDQN("MlpPolicy", "CartPole-v1", **small(replay_buffer_kwargs=settings)).learn(60)
    model.save(tmp_path / "model")
    model.save_replay_buffer(tmp_path / "replay")
    env = gym.make("CartPole-v1")
    if how == "attach":
        loaded = PrioritizedDQN.load(tmp_path / "model", env=env, replay_buffer_kwargs={**settings, "exist": "attach"})
    else:
        loaded = PrioritizedDQN.load(tmp_path / "model", env=env)
    observation = np.zeros(4, np.float32)
    assert loaded.predict(observation, deterministic=True) == model.predict(observation, deterministic=True)
    if how == "acts only":
        with pytest.raises(StorageError) as caught:
            loaded.learn(10)
        assert str(caught.value) == (
            f"ReplayBuffer(): storage: {shm_address!r} exists. After DQN.load, continue with its rows by "
            "model.load_replay_buffer(...), or load with DQN.load(..., replay_buffer_kwargs={..., 'exist': 'attach'}); "
            "for a new run give replay_buffer_kwargs 'exist': 'replace'"
        )
        assert len(model.replay_buffer.inner) == 60
    else:
        if how == "load_replay_buffer":
            loaded.load_replay_buffer(tmp_path / "replay")
        loaded.learn(20, reset_num_timesteps=False)
        assert len(loaded.replay_buffer.inner) == len(model.replay_buffer.inner) == 80
        loaded.replay_buffer.inner.close()
    model.replay_buffer.inner.close(unlink=True)
