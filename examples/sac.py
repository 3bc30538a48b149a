"""Soft actor-critic on Pendulum-v1: Sharpwave with continuous actions.

    python examples/sac.py --steps 5000 --seed 0

Two Q networks, a tanh-Gaussian policy and a temperature that tunes itself. The buffer appears on three lines:
`ReplayBuffer.for_env` makes it, `add` stores a transition, `sample` returns a batch of tensors.
"""

import argparse
import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import sharpwave as sw

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Config:
    """What a run may change; the defaults swing the pendulum up in about twenty seconds on one CPU core."""

    steps: int = 5_000
    seed: int = 0
    capacity: int = 100_000
    batch_size: int = 256
    learning_starts: int = 500  # steps of random actions before the first gradient step
    hidden_size: int = 64
    learning_rate: float = 1e-3
    gamma: float = 0.99
    target_rate: float = 0.01  # share of the critic's weights that moves into its target at a gradient step
    evaluate_every: int = 1_000


@dataclass
class Result:
    """What a run leaves behind."""

    policy: nn.Module
    buffer: sw.ReplayBuffer
    evaluations: list[tuple[int, float]] = field(default_factory=list)  # (step, mean return of 10 greedy episodes)
    greedy_return: float = 0.0  # mean of 10 greedy episodes from other starts than those of the evaluations
    temperature: float = 0.0
    wall_s: float = 0.0


def mlp(inputs: int, hidden_size: int, outputs: int) -> nn.Module:
    """Returns a network of two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, hidden_size),
        nn.ReLU(),
        nn.Linear(hidden_size, hidden_size),
        nn.ReLU(),
        nn.Linear(hidden_size, outputs),
    )


class Policy(nn.Module):
    """A Gaussian squashed by tanh: actions lie in -1..1."""

    def __init__(self, obs_size: int, action_size: int, hidden_size: int) -> None:
        super().__init__()
        self.net = mlp(obs_size, hidden_size, 2 * action_size)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns actions drawn with a gradient through them, and their log-probabilities."""
        mean, log_std = self.net(obs).chunk(2, dim=-1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5.0, 2.0).exp(), validate_args=False)
        raw = normal.rsample()
        # log(1 - tanh(raw)^2), in the form that stays finite where tanh rounds to 1.
        log_slope = 2.0 * (math.log(2.0) - raw - nn.functional.softplus(-2.0 * raw))
        return raw.tanh(), (normal.log_prob(raw) - log_slope).sum(dim=-1)

    @torch.inference_mode()
    def act(self, obs: np.ndarray, greedy: bool) -> np.ndarray:
        """Returns an action for an observation: the mode's, or one drawn."""
        tensor = torch.from_numpy(obs)
        action = self.net(tensor).chunk(2, dim=-1)[0].tanh() if greedy else self(tensor)[0]
        return action.numpy()


class TwinQ(nn.Module):
    """Two Q networks that share nothing but the call."""

    def __init__(self, obs_size: int, action_size: int, hidden_size: int) -> None:
        super().__init__()
        self.pair = nn.ModuleList(mlp(obs_size + action_size, hidden_size, 1) for _ in range(2))

    def forward(self, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Returns the values both give, as (2, n)."""
        inputs = torch.cat([obs, action], dim=-1)
        return torch.stack([q(inputs).squeeze(-1) for q in self.pair])


class Agent:
    """The networks and their three losses."""

    def __init__(self, obs_size: int, action_size: int, config: Config) -> None:
        self.config = config
        self.policy = Policy(obs_size, action_size, config.hidden_size)
        self.critic = TwinQ(obs_size, action_size, config.hidden_size)
        self.target = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_temperature = torch.zeros((), requires_grad=True)
        self.target_entropy = -float(action_size)
        self.policy_optimizer = torch.optim.Adam(self.policy.parameters(), config.learning_rate, fused=True)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), config.learning_rate, fused=True)
        self.temperature_optimizer = torch.optim.Adam([self.log_temperature], config.learning_rate, fused=True)

    def learn(self, batch: Batch) -> None:
        """Takes one gradient step of each: critic, policy, temperature."""
        temperature = self.log_temperature.detach().exp()
        with torch.no_grad():
            next_action, next_log_prob = self.policy(batch["next_obs"])
            next_value = self.target(batch["next_obs"], next_action).amin(dim=0) - temperature * next_log_prob
            # `done` is True only where the task ended; at Pendulum's time limit the next state keeps its value.
            goal = batch["reward"] + self.config.gamma * next_value * ~batch["done"]
        values = self.critic(batch["obs"], batch["action"])
        _step(self.critic_optimizer, (values - goal).square().mean(dim=1).sum())

        action, log_prob = self.policy(batch["obs"])
        value = self.critic(batch["obs"], action).amin(dim=0)
        _step(self.policy_optimizer, (temperature * log_prob - value).mean())

        entropy_gap = -log_prob.detach().mean() - self.target_entropy
        _step(self.temperature_optimizer, self.log_temperature.exp() * entropy_gap)

        with torch.no_grad():
            for old, new in zip(self.target.parameters(), self.critic.parameters(), strict=True):
                old.lerp_(new, self.config.target_rate)


def _step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()  # also drops what the policy's loss left in the critic
    loss.backward()
    optimizer.step()


def make_env() -> gym.Env:
    """Returns Pendulum-v1 with actions in -1..1 instead of its torques in -2..2."""
    return gym.wrappers.RescaleAction(gym.make("Pendulum-v1"), np.float32(-1), np.float32(1))


def evaluate(policy: Policy, episodes: int, first_seed: int) -> float:
    """Returns the mean return of greedy episodes that start from fixed seeds."""
    env = make_env()
    total = 0.0
    for episode in range(episodes):
        obs, _ = env.reset(seed=first_seed + episode)
        over = False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(policy.act(obs, greedy=True))
            total += float(reward)
            over = terminated or truncated
    env.close()
    return total / episodes


def train(config: Config, report: Callable[[int, float], None] | None = None) -> Result:
    """Trains one agent; on the CPU the same config gives the same result.

    Args:
        config: The run's settings.
        report: Called with each evaluation: the step and the mean greedy return.

    Returns:
        The last policy with its learning curve and buffer.
    """
    torch.set_num_threads(1)  # networks this small lose more to thread hand-over than they gain
    torch.manual_seed(config.seed)
    env = make_env()
    env.action_space.seed(config.seed)
    agent = Agent(env.observation_space.shape[0], env.action_space.shape[0], config)
    buffer = sw.ReplayBuffer.for_env(env, capacity=config.capacity, seed=config.seed)
    result = Result(policy=agent.policy, buffer=buffer)
    began = time.perf_counter()

    obs, _ = env.reset(seed=config.seed)
    for step in range(1, config.steps + 1):
        if step <= config.learning_starts:
            action = env.action_space.sample()
        else:
            action = agent.policy.act(obs, greedy=False)
        next_obs, reward, terminated, truncated, _ = env.step(action)
        # next_obs is where the action led, also at an episode's end: reset() comes after.
        buffer.add(obs=obs, action=action, reward=reward, next_obs=next_obs, terminated=terminated, truncated=truncated)
        obs = env.reset()[0] if terminated or truncated else next_obs

        if step > config.learning_starts:
            agent.learn(buffer.sample(config.batch_size, device="cpu"))
        if step == config.steps or step % config.evaluate_every == 0:
            mean_return = evaluate(agent.policy, episodes=10, first_seed=1_000_000)
            result.evaluations.append((step, mean_return))
            if report is not None:
                report(step, mean_return)

    result.wall_s = time.perf_counter() - began
    result.temperature = agent.log_temperature.exp().item()
    result.greedy_return = evaluate(agent.policy, episodes=10, first_seed=2_000_000)
    env.close()
    return result


def main() -> None:
    """Trains from the command line and prints a line for each evaluation."""
    parser = argparse.ArgumentParser(description="Soft actor-critic on Pendulum-v1 with a Sharpwave buffer.")
    parser.add_argument("--steps", type=int, default=Config.steps, help="environment steps to train for")
    parser.add_argument("--seed", type=int, default=Config.seed, help="seed of everything random")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")

    def report(step: int, mean_return: float) -> None:
        print(f"step {step:6d}  greedy return {mean_return:8.1f}", flush=True)

    result = train(Config(steps=options.steps, seed=options.seed), report)
    print(f"{options.steps} steps in {result.wall_s:.0f} s, temperature {result.temperature:.3f}")
    print(f"greedy return, mean of 10 episodes: {result.greedy_return:.1f}")


if __name__ == "__main__":
    main()
