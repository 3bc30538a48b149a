"""Loops of the form that CleanRL's scripts have: without Stable-Baselines3, and bit-equal to its buffer."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("stable_baselines3")
import gymnasium as gym  # noqa: E402
from sb3_streams import Recorded, following, one_thread  # noqa: E402, F401
from stable_baselines3.common import buffers  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

STEPS = 4_000 if os.environ.get("SHARPWAVE_SOAK") == "1" else 75
GAMMA = 0.97


def network(inputs: int, outputs: int) -> Any:
    return nn.Sequential(nn.Linear(inputs, 12), nn.ReLU(), nn.Linear(12, outputs))


class Agent:
    """Networks, targets of them, and one optimizer for each group."""

    def __init__(self, groups: dict[str, Any]) -> None:
        self.networks, self.targets = nn.ModuleDict(groups), nn.ModuleDict(copy.deepcopy(groups))
        self.optimizers = {name: torch.optim.Adam(part.parameters(), 1e-3) for name, part in groups.items()}
        self.updates = 0

    def minimise(self, loss: Any, *names: str) -> None:
        for name in names:
            self.optimizers[name].zero_grad()
        loss.backward()
        for name in names:
            self.optimizers[name].step()

    def follow(self, rate: float) -> None:
        with torch.no_grad():
            for old, new in zip(self.targets.parameters(), self.networks.parameters(), strict=True):
                old.copy_(rate * new + (1 - rate) * old)


class Dqn(Agent):
    env = "CartPole-v1"

    def __init__(self) -> None:
        super().__init__({"q": network(4, 2)})

    def act(self, obs: Any) -> Any:
        return self.networks["q"](obs).argmax(dim=1)

    def learn(self, data: Any) -> None:
        with torch.no_grad():
            best = self.targets["q"](data.next_observations).max(dim=1).values
            target = data.rewards.flatten() + GAMMA * best * (1 - data.dones.flatten())
        value = self.networks["q"](data.observations).gather(1, data.actions).squeeze()
        self.minimise(functional.mse_loss(target, value), "q")
        if self.updates % 10 == 0:
            self.follow(1.0)


class C51(Dqn):
    atoms = torch.linspace(-20, 20, 11)

    def __init__(self) -> None:
        Agent.__init__(self, {"q": network(4, 2 * 11)})

    def chances(self, net: Any, obs: Any) -> Any:
        return net(obs).reshape(-1, 2, 11).softmax(dim=2)

    def act(self, obs: Any) -> Any:
        return (self.chances(self.networks["q"], obs) * self.atoms).sum(dim=2).argmax(dim=1)

    def learn(self, data: Any) -> None:
        rows = torch.arange(len(data.rewards))
        with torch.no_grad():
            after = self.chances(self.targets["q"], data.next_observations)
            after = after[rows, (after * self.atoms).sum(dim=2).argmax(dim=1)]
            places = (data.rewards + GAMMA * self.atoms * (1 - data.dones)).clamp(-20, 20)
            # Each atom gives its chance to its neighbours on the grid, the nearer the more.
            nearness = (1 - (places[:, :, None] - self.atoms).abs() / 4).clamp(min=0)
            target = (after[:, :, None] * nearness).sum(dim=1)
        now = self.chances(self.networks["q"], data.observations)[rows, data.actions.flatten()]
        self.minimise(-(target * now.clamp(1e-5, 1 - 1e-5).log()).sum(dim=1).mean(), "q")
        if self.updates % 10 == 0:
            self.follow(1.0)


class Ddpg(Agent):
    env, delay, noise, critics = "Pendulum-v1", 1, 0.0, ("q1",)

    def __init__(self) -> None:
        super().__init__({"actor": network(3, 1), **{name: network(4, 1) for name in self.critics}})

    def act(self, obs: Any) -> Any:
        return 2 * torch.tanh(self.networks["actor"](obs)) + 0.2 * torch.randn(len(obs), 1)

    def values(self, networks: Any, obs: Any, actions: Any) -> list[Any]:
        pairs = torch.cat([obs, actions], dim=1)
        return [networks[name](pairs).view(-1) for name in self.critics]

    def learn(self, data: Any) -> None:
        with torch.no_grad():
            noise = (torch.randn_like(data.actions) * self.noise).clamp(-0.5, 0.5)
            after = (2 * torch.tanh(self.targets["actor"](data.next_observations)) + noise).clamp(-2, 2)
            value = torch.stack(self.values(self.targets, data.next_observations, after)).min(dim=0).values
            target = data.rewards.flatten() + (1 - data.dones.flatten()) * GAMMA * value
        losses = [functional.mse_loss(q, target) for q in self.values(self.networks, data.observations, data.actions)]
        self.minimise(sum(losses), *self.critics)
        if self.updates % self.delay == 0:
            actions = 2 * torch.tanh(self.networks["actor"](data.observations))
            self.minimise(-self.values(self.networks, data.observations, actions)[0].mean(), "actor")
            self.follow(0.05)


class Td3(Ddpg):
    delay, noise, critics = 2, 0.2, ("q1", "q2")


class Sac(Ddpg):
    critics = ("q1", "q2")

    def __init__(self) -> None:
        Agent.__init__(self, {"actor": network(3, 2), "q1": network(4, 1), "q2": network(4, 1), "alpha": Scalar()})

    def draw(self, obs: Any) -> tuple[Any, Any]:
        mean, log_std = self.networks["actor"](obs).chunk(2, dim=1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = normal.rsample()
        squashed = torch.tanh(raw)
        return 2 * squashed, (normal.log_prob(raw) - torch.log(2 * (1 - squashed**2) + 1e-6)).sum(dim=1)

    def act(self, obs: Any) -> Any:
        return self.draw(obs)[0]

    def learn(self, data: Any) -> None:
        alpha = self.networks["alpha"].value.exp().detach()
        with torch.no_grad():
            after, log_prob = self.draw(data.next_observations)
            value = torch.stack(self.values(self.targets, data.next_observations, after)).min(dim=0).values
            target = data.rewards.flatten() + (1 - data.dones.flatten()) * GAMMA * (value - alpha * log_prob)
        losses = [functional.mse_loss(q, target) for q in self.values(self.networks, data.observations, data.actions)]
        self.minimise(sum(losses), *self.critics)
        actions, log_prob = self.draw(data.observations)
        value = torch.stack(self.values(self.networks, data.observations, actions)).min(dim=0).values
        self.minimise((alpha * log_prob - value).mean(), "actor")
        self.minimise(-(self.networks["alpha"].value.exp() * (log_prob.detach() - 1)).mean(), "alpha")
        self.follow(0.05)


class Scalar(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))


def train(agent_class: Any, n_envs: int, make: Callable[..., Any]) -> tuple[Agent, Any]:
    """A loop of CleanRL's form: terminations are added as done, and a truncated step's final observation."""
    torch.manual_seed(1)
    agent = agent_class()
    envs = gym.vector.SyncVectorEnv(
        [lambda: gym.make(agent.env, max_episode_steps=17)] * n_envs,
        autoreset_mode=gym.vector.AutoresetMode.SAME_STEP,
    )
    rb = make(
        60 * n_envs,
        envs.single_observation_space,
        envs.single_action_space,
        "cpu",
        n_envs=n_envs,
        handle_timeout_termination=False,
    )
    envs.action_space.seed(2)
    obs, _ = envs.reset(seed=2)
    for step in range(STEPS):
        actions = envs.action_space.sample() if step < 20 else agent.act(torch.as_tensor(obs)).detach().numpy()
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        real_next_obs = next_obs.copy()
        for i in np.flatnonzero(truncations):
            real_next_obs[i] = infos["final_obs"][i]
        rb.add(obs, real_next_obs, actions, rewards, terminations, infos)
        obs = next_obs
        if step > 20:
            agent.updates += 1
            agent.learn(rb.sample(23))
    return agent, rb


@pytest.mark.parametrize("n_envs", [1, 3])
@pytest.mark.parametrize("agent_class", [Dqn, C51, Sac, Td3, Ddpg])
def test_networks_of_a_loop_are_bit_equal_to_those_on_its_buffer(agent_class: Any, n_envs: int) -> None:
    mine, rb = train(agent_class, n_envs, lambda *args, **options: Recorded(*args, **options, seed=4))
    theirs, _ = train(agent_class, n_envs, following(buffers.ReplayBuffer, rb.drawn))
    assert mine.updates == theirs.updates == len(rb.drawn) > 50
    for one, other in ((mine.networks, theirs.networks), (mine.targets, theirs.targets)):
        states = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
        assert all(torch.equal(left, right) for left, right in states)
    fresh = agent_class()
    assert not all(
        torch.equal(left, right)
        for left, right in zip(mine.targets.parameters(), fresh.targets.parameters(), strict=True)
    )


# ---- without Stable-Baselines3 --------------------------------------------------------------------------------------

WITHOUT = """
import sys
sys.modules["stable_baselines3"] = None
import numpy as np, torch
from gymnasium import spaces
import sharpwave as sw
from sharpwave.adapters.sb3 import ReplayBuffer, PrioritizedSamples
from sharpwave.adapters import sb3

assert "stable_baselines3" not in {name for name, module in sys.modules.items() if module is not None}
box, image = spaces.Box(-1, 1, (3,)), spaces.Box(0, 255, (4, 8, 8), np.uint8)
both = spaces.Dict({"image": image, "mode": spaces.Discrete(3)})
rng = np.random.default_rng(0)


def seen(space, n):
    values = [space.sample() for _ in range(n)]
    if isinstance(space, spaces.Dict):
        return {key: np.stack([value[key] for value in values]) for key in space.spaces}
    return np.stack(values)


kinds = (box, spaces.Discrete(4)), (image, spaces.Box(-1, 1, (2,))), (both, spaces.Discrete(4))
for obs_space, action_space in kinds:
    for sampler in (None, sw.Prioritized()):
        for n_steps in (1, 3):
            rb = ReplayBuffer(
                100, obs_space, action_space, "cpu", n_envs=2, handle_timeout_termination=False, sampler=sampler,
                n_steps=n_steps, gamma=0.9,
            )
            obs = seen(obs_space, 2)
            for step in range(20):
                next_obs = seen(obs_space, 2)
                rb.add(obs, next_obs, seen(action_space, 2), rng.normal(size=2), rng.random(2) < 0.1, {})
                obs = next_obs
            data = rb.sample(16)
            shape = {key: value.shape[1:] for key, value in data.observations.items()} if obs_space is both else (
                data.observations.shape[1:])
            assert shape == ({"image": (4, 8, 8), "mode": (1,)} if obs_space is both else obs_space.shape)
            assert data.actions.shape == (16, 1 if action_space == spaces.Discrete(4) else 2)
            assert data.rewards.shape == data.dones.shape == (16, 1)
            assert data.dones.dtype == data.rewards.dtype == torch.float32
            assert (data.discounts is None) == (n_steps == 1)
            assert isinstance(data, PrioritizedSamples) == (sampler is not None)
            if sampler is not None:
                assert rb.update_priorities(data.indices, data.weights)["applied"] == 16
            assert (rb.size(), rb.pos, rb.full, rb.buffer_size) == (20, 20, False, 50)
            rb.reset()
            assert rb.size() == 0

try:
    from sharpwave.adapters.sb3 import HerReplayBuffer
except ModuleNotFoundError as error:
    print(error)
assert dir(sb3).count("PrioritizedDQN") == 0
from sharpwave.adapters.sb3 import *
"""


def test_the_buffer_works_without_stable_baselines3() -> None:
    command = [sys.executable, "-W", "error", "-c", WITHOUT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (
        "sharpwave.adapters.sb3: HerReplayBuffer needs Stable-Baselines3, which is not installed: pip install "
        '"sharpwave[sb3]"'
    )


@pytest.mark.parametrize("missing", ["torch", "gymnasium"])
def test_a_missing_package_is_named_with_the_extra(missing: str) -> None:
    blocked = f"import sys; sys.modules['stable_baselines3'] = sys.modules[{missing!r}] = None\n"
    code = blocked + "import sharpwave.adapters.sb3"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith('pip install "sharpwave[torch,gym]"')
