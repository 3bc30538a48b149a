"""DQN on a mountain car with twenty demonstrations: Sharpwave where exploration alone does not find the goal.

    python examples/demos.py --seed 0
    python examples/demos.py --seed 0 --no-demos            # the same without demonstrations: the car stays where it is
    python examples/demos.py --compare --seeds 3            # both, three seeds each
    python examples/demos.py --compare --seeds 3 --plot demos.png

MountainCarContinuous-v0 gives 100 on top of the hill and takes 0.1 for each push. The motor is too weak to drive
straight up, and random pushes do not get there in the 200 steps of an episode: a DQN by itself learns that pushes cost,
and stops pushing. The demonstrator always pushes the way the car rolls. Demonstrations and online data are two buffers,
because demonstrations must not be overwritten. `Mix` draws each batch from both, half of it from each, and
`update_priorities` reaches the rows of either. The training loop is `collect(every=...)`.
"""

import argparse
import copy
import dataclasses
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import sharpwave as sw

MIDDLE, SCALE = torch.tensor([-0.3, 0.0]), torch.tensor([0.9, 0.07])  # of observations: position and speed
SCORE = 90.0  # the mean return from which the environment counts as solved; 0 without a push


@dataclass(frozen=True)
class Config:
    """What a run may change; the defaults reach the score in about ten seconds on one CPU core."""

    steps: int = 10_000
    seed: int = 0
    demos: int = 20  # episodes of the demonstrator; 0 learns from online data alone
    share: float = 0.5  # of a batch that is demonstrations
    capacity: int = 50_000
    batch_size: int = 64
    learning_starts: int = 1_000
    learn_every: int = 4  # environment steps per gradient step
    learning_rate: float = 1e-3
    gamma: float = 0.99
    n_step: int = 5
    target_rate: float = 0.01  # share of the online weights that moves into the target at a gradient step
    epsilon_final: float = 0.05
    epsilon_steps: int = 5_000  # steps over which epsilon falls from 1 to epsilon_final
    evaluate_every: int = 1_000


class QNetwork(nn.Module):
    """From position and speed to one value per push: left, none, right."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Returns the values of all pushes, as (..., 3)."""
        values: torch.Tensor = self.layers((obs - MIDDLE) / SCALE)
        return values

    @torch.inference_mode()
    def act(self, obs: np.ndarray) -> Any:
        """Returns the push of the highest value, for one observation or several."""
        return self(torch.from_numpy(obs)).argmax(dim=-1).numpy()


class Pushes(gym.ActionWrapper):
    """Three pushes instead of a force: 0 left, 1 none, 2 right."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self.action_space = gym.spaces.Discrete(3)

    def action(self, action: Any) -> np.ndarray:
        """Returns the force of a push."""
        return np.array([action - 1.0], np.float32)


def make_env() -> gym.Env:
    """Returns a mountain car with 200 steps in an episode."""
    return Pushes(gym.make("MountainCarContinuous-v0", max_episode_steps=200))


def demonstrate(obs: np.ndarray) -> int:
    """Returns the push of the demonstrator: the way the car rolls."""
    return 2 if obs[1] > 0 else 0


@dataclass
class Result:
    """What a run leaves behind."""

    policy: QNetwork
    mix: sw.Mix  # of online data and demonstrations
    evaluations: list[tuple[int, float]] = field(default_factory=list)  # (step, mean greedy return of 20 episodes)
    score: float = 0.0  # mean greedy return of 100 other episodes
    wall_s: float = 0.0


def evaluate(policy: QNetwork, episodes: int, seed: int) -> float:
    """Returns the mean return of greedy episodes, all of them stepped together."""
    envs = gym.vector.SyncVectorEnv([make_env] * episodes)
    obs, _ = envs.reset(seed=seed)
    returns, is_running = np.zeros(episodes), np.ones(episodes, bool)
    while is_running.any():
        obs, reward, terminated, truncated, _ = envs.step(policy.act(obs))
        returns += reward * is_running
        is_running &= ~(terminated | truncated)
    return float(returns.mean())


def make_buffers(env: gym.Env, config: Config) -> dict[sw.ReplayBuffer, float]:
    """Returns the buffers with their shares of a batch: online data and, if there are any, demonstrations."""
    view, sampler = sw.Transitions(n_step=config.n_step, gamma=config.gamma), sw.Prioritized(alpha=0.6, beta=0.4)

    def make(capacity: int, seed: int) -> sw.ReplayBuffer:
        return sw.ReplayBuffer.for_env(env, capacity=capacity, view=view, sampler=sampler, seed=seed)

    online = make(config.capacity, config.seed)
    if config.demos == 0:
        return {online: 1.0}
    demos = make(200 * config.demos, config.seed + 1)
    shown = sw.collect(env, demonstrate, demos, None, seed=1_000 + config.seed)
    lengths = [episode["length"] for episode in itertools.islice(shown, config.demos)]
    print(f"{config.demos} demonstrations, {np.mean(lengths):.0f} steps on average", flush=True)
    return {online: 1.0 - config.share, demos: config.share}


def td_errors(online: QNetwork, target: QNetwork, batch: dict[str, Any]) -> torch.Tensor:
    """Returns double DQN's errors: the online network picks the next push, the target one values it."""
    with torch.no_grad():
        next_action = online(batch["next_obs"]).argmax(dim=1, keepdim=True)
        next_value = target(batch["next_obs"]).gather(1, next_action).squeeze(1)
        goal = batch["reward"] / 100.0 + batch["discount"] * next_value * ~batch["done"]
    return online(batch["obs"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1) - goal


def train(config: Config, report: Callable[[int, float], None] | None = None) -> Result:
    """Trains one agent; on the CPU the same config gives the same result.

    Args:
        config: The run's settings.
        report: Called with each evaluation: the step and the mean greedy return.

    Returns:
        The last policy with its learning curve and mix.
    """
    torch.set_num_threads(1)  # networks this small lose more to thread hand-over than they gain
    torch.manual_seed(config.seed)
    random = np.random.default_rng(config.seed)
    env = make_env()
    online = QNetwork()
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), config.learning_rate, fused=True)
    began, step, next_evaluation = time.perf_counter(), 0, config.evaluate_every
    mix = sw.Mix(make_buffers(env, config))
    result = Result(policy=target, mix=mix)

    def policy(obs: np.ndarray) -> int:
        epsilon = max(config.epsilon_final, 1.0 - step / config.epsilon_steps)
        return int(random.integers(3)) if random.random() < epsilon else int(online.act(obs))

    online_rows = mix.buffers[0]
    for progress in sw.collect(env, policy, online_rows, config.steps, every=config.learn_every, seed=config.seed):
        step = progress["step"]
        if step >= config.learning_starts:
            batch = mix.sample(config.batch_size, device="cpu")
            errors = td_errors(online, target, batch)
            loss = (batch["weights"] * errors.square()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mix.update_priorities(batch["indices"], errors)
            with torch.no_grad():
                for old, new in zip(target.parameters(), online.parameters(), strict=True):
                    old.lerp_(new, config.target_rate)
        if step >= next_evaluation:
            next_evaluation += config.evaluate_every
            result.evaluations.append((step, evaluate(target, episodes=20, seed=1_000_000)))
            if report is not None:
                report(*result.evaluations[-1])

    result.wall_s = time.perf_counter() - began
    result.score = evaluate(target, episodes=100, seed=2_000_000)
    return result


def compare(config: Config, seeds: range, plot: str | None) -> None:
    """Prints the scores with demonstrations and without, and draws the learning curves; all else is equal."""
    curves: dict[str, list[Any]] = {}
    for name, demos in (("with demonstrations", config.demos), ("without", 0)):
        runs = [train(dataclasses.replace(config, seed=seed, demos=demos)) for seed in seeds]
        print(f"{name:20} mean return of 100 greedy episodes:", *(f"{run.score:.0f}" for run in runs), flush=True)
        curves[name] = [run.evaluations for run in runs]
    if plot is None:
        return
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for color, (name, runs) in zip(("C0", "C3"), curves.items(), strict=True):
        values = np.array([[value for _, value in run] for run in runs])
        steps = [step for step, _ in runs[0]]
        axes.plot(steps, values.mean(axis=0), color=color, label=name)
        axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, linewidth=0)
    axes.axhline(SCORE, color="grey", linestyle=":", linewidth=1)
    axes.set(xlabel="environment steps", ylabel="greedy return", title=f"DQN on a mountain car, {len(seeds)} seeds")
    axes.legend(frameon=False)
    figure.savefig(plot, dpi=120)


def main() -> None:
    """Trains from the command line and prints a line for each evaluation."""
    parser = argparse.ArgumentParser(description="DQN with demonstrations, with two Sharpwave buffers.")
    parser.add_argument("--steps", type=int, default=Config.steps, help="environment steps to train for")
    parser.add_argument("--seed", type=int, default=Config.seed, help="seed of everything random")
    parser.add_argument("--no-demos", action="store_true", help="learn from online data alone")
    parser.add_argument("--compare", action="store_true", help="train with demonstrations and without instead")
    parser.add_argument("--seeds", type=int, default=1, help="seeds of --compare, counted from --seed")
    parser.add_argument("--plot", help="file for the learning curves of --compare")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    config = Config(steps=options.steps, seed=options.seed, demos=0 if options.no_demos else Config.demos)
    if options.compare:
        compare(config, range(options.seed, options.seed + options.seeds), options.plot)
        return

    def report(step: int, value: float) -> None:
        print(f"step {step:6d}  greedy return {value:7.1f}", flush=True)

    result = train(config, report)
    print(f"{options.steps} steps in {result.wall_s:.0f} s")
    reached = "reached" if result.score >= SCORE else "not reached"
    print(f"mean return of 100 greedy episodes: {result.score:.1f}, {SCORE:.0f} is {reached}")


if __name__ == "__main__":
    main()
