"""Prioritized 3-step double DQN on CartPole-v1: Sharpwave in a whole training loop.

    python examples/per_dqn.py --steps 15000 --seed 0 --out runs/per_dqn
    python examples/per_dqn.py --compare                 # prioritized against uniform draws, three seeds each
    python examples/per_dqn.py --compare --seeds 24      # CartPole's runs differ much: more seeds tell more

The buffer appears on four lines: `ReplayBuffer.for_env` makes it, `add` stores a transition, `sample` returns a batch
of tensors, `update_priorities` tells it how wrong the network was. `sharpwave demo` calls this same `train`.
"""

import argparse
import copy
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns as clock

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import sharpwave as sw

SOLVED = 450.0  # of 500: the mean greedy return that --compare waits for
OBS_SCALE = torch.tensor([1.0, 1.0, 10.0, 1.0])  # position, speed, angle, turning speed; 0.2 rad is a fall


@dataclass(frozen=True)
class Config:
    """What a run may change; the defaults solve CartPole-v1 in about forty seconds on one CPU core."""

    steps: int = 15_000
    seed: int = 0
    prioritized: bool = True  # False draws uniformly; everything else stays the same
    capacity: int = 100_000
    batch_size: int = 64
    learning_starts: int = 500
    learn_every: int = 4  # environment steps per gradient step
    learning_rate: float = 1e-3
    gamma: float = 0.99
    target_rate: float = 0.05  # share of the online weights that moves into the target at a gradient step
    epsilon_final: float = 0.05
    epsilon_steps: int = 3_000  # steps over which epsilon falls from 1 to epsilon_final
    evaluate_every: int = 100
    stop_return: float = math.inf  # an evaluation that reaches it ends the run


class QNetwork(nn.Module):
    """From an observation of CartPole-v1 to one value per action: push left, push right."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
        # Values start at 0, right wherever no fall is near: at first only falls surprise, then what leads to them.
        for parameter in self.layers[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        """Returns the values of both actions, as (..., 2)."""
        values: torch.Tensor = self.layers(obs * OBS_SCALE)
        return values

    @torch.inference_mode()
    def act(self, obs: np.ndarray) -> np.ndarray:
        """Returns the action of the highest value for each observation."""
        return np.asarray(self(torch.from_numpy(obs)).argmax(dim=-1))


@dataclass
class Result:
    """What a run leaves behind: the best policy, its curve, its replay buffer and where the time went."""

    policy: QNetwork
    buffer: sw.ReplayBuffer
    greedy_return: float = 0.0  # mean of 100 greedy episodes with the best weights
    episodes: list[tuple[int, float]] = field(default_factory=list)  # (step at which it ended, return)
    evaluations: list[tuple[int, float]] = field(default_factory=list)  # (step, mean of 100 greedy episodes)
    loss: float = math.nan  # of the last gradient step
    buffer_ns: Counter[str] = field(default_factory=Counter)  # spent in add, sample and update
    wall_ns: int = 0

    def recent_return(self) -> float:
        """Returns the mean over the last 20 training episodes; nan before the first one ends."""
        return statistics.fmean(value for _, value in self.episodes[-20:]) if self.episodes else math.nan


def evaluate(policy: QNetwork, seed: int) -> float:
    """Returns the mean return of 100 greedy episodes, played side by side; a seed fixes their starts."""
    envs = gym.make_vec("CartPole-v1", 100, vectorization_mode="vector_entry_point")
    obs, _ = envs.reset(seed=seed)
    alive, total = np.ones(100, bool), 0.0
    while alive.any():
        obs, reward, terminated, truncated, _ = envs.step(policy.act(obs))
        total += float(reward[alive].sum())
        alive &= ~(terminated | truncated)
    envs.close()
    return total / 100


def td_errors(online: QNetwork, target: QNetwork, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns double DQN's errors: the online network picks the next action, the target one values it."""
    with torch.no_grad():
        next_action = online(batch["next_obs"]).argmax(dim=1, keepdim=True)
        next_value = target(batch["next_obs"]).gather(1, next_action).squeeze(1)
        # `reward` sums up to three rewards and `discount` is gamma to the power of their number. `done` is True only
        # where the pole fell; at the time limit the next state still has its value.
        goal = batch["reward"] + batch["discount"] * next_value * ~batch["done"]
    errors: torch.Tensor = goal - online(batch["obs"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
    return errors


def make_buffer(env: gym.Env, config: Config) -> sw.ReplayBuffer:
    """Returns a buffer of 3-step transitions, prioritized or not."""
    gradient_steps = max(1, (config.steps - config.learning_starts) // config.learn_every)
    prioritized = sw.Prioritized(alpha=0.6, beta=sw.Linear(0.4, 1.0, gradient_steps))
    sampler = prioritized if config.prioritized else sw.Uniform()
    view = sw.Transitions(n_step=3, gamma=config.gamma)
    return sw.ReplayBuffer.for_env(env, capacity=config.capacity, sampler=sampler, view=view, seed=config.seed)


def train(config: Config, progress: Callable[[int, Result], None] = lambda step, result: None) -> Result:
    """Trains one agent; on the CPU the same config gives the same result.

    Args:
        config: The run's settings.
        progress: Called after each evaluation with the step and the result so far.

    Returns:
        The best-evaluated policy with its learning curve, buffer and timings.
    """
    torch.set_num_threads(1)  # networks this small lose more to thread hand-over than they gain
    torch.manual_seed(config.seed)
    rng = np.random.default_rng(config.seed)
    env = gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))
    online = QNetwork()
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=config.learning_rate, fused=True)
    buffer = make_buffer(env, config)
    result = Result(policy=copy.deepcopy(online), buffer=buffer)
    began = clock()

    obs, _ = env.reset(seed=config.seed)
    for step in range(1, config.steps + 1):
        epsilon = 1.0 + min(1.0, step / config.epsilon_steps) * (config.epsilon_final - 1.0)
        action = int(rng.integers(2) if rng.random() < epsilon else online.act(obs))
        next_obs, _, terminated, truncated, info = env.step(action)

        # -1 for a fall instead of CartPole's 1 a step ranks policies alike, and makes the rows that tell something few.
        fall = -float(terminated)
        # next_obs is where the action led, also at an episode's end: reset() comes after.
        start = clock()
        buffer.add(obs=obs, action=action, reward=fall, next_obs=next_obs, terminated=terminated, truncated=truncated)
        result.buffer_ns["add"] += clock() - start
        obs = next_obs
        if terminated or truncated:
            result.episodes.append((step, float(info["episode"]["r"])))
            obs, _ = env.reset()

        if step >= config.learning_starts and step % config.learn_every == 0:
            start = clock()
            batch = buffer.sample(config.batch_size, device="cpu")
            result.buffer_ns["sample"] += clock() - start

            errors = td_errors(online, target, batch)
            # Rows drawn more often than their share count less each time; uniform draws bring no weights.
            loss = (batch.get("weights", 1.0) * errors.square()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            result.loss = loss.item()
            with torch.no_grad():
                for old, new in zip(target.parameters(), online.parameters(), strict=True):
                    old.lerp_(new, config.target_rate)
            if config.prioritized:
                start = clock()
                buffer.update_priorities(batch["indices"], errors.detach())
                result.buffer_ns["update"] += clock() - start

        if step % config.evaluate_every == 0 or step == config.steps:
            # The target network is evaluated and kept: it averages the online one over its last steps.
            mean_return = evaluate(target, seed=1_000_000)
            result.evaluations.append((step, mean_return))
            if mean_return == max(value for _, value in result.evaluations):  # of equals the later has learnt more
                result.policy.load_state_dict(target.state_dict())
            progress(step, result)
            if mean_return >= config.stop_return:
                break

    result.wall_ns = clock() - began
    # Other starts than those that chose the best weights: the number reported is not the one selected on.
    result.greedy_return = evaluate(result.policy, seed=2_000_000)
    env.close()
    return result


def compare(steps: int, seeds: range) -> None:
    """Prints how many environment steps each sampler takes to a greedy return of 450; all else is equal."""
    print(f"environment steps until the mean of 100 greedy episodes is {SOLVED:.0f} or more; inf: not in {steps:,}")
    print(f"{'seed':12}" + "".join(f"{seed:>8}" for seed in seeds) + f"{'median':>10}")
    for name, prioritized in (("prioritized", True), ("uniform", False)):
        print(f"{name:12}", end="", flush=True)
        taken = []
        for seed in seeds:
            result = train(Config(steps=steps, seed=seed, prioritized=prioritized, stop_return=SOLVED))
            taken.append(next((step for step, value in result.evaluations if value >= SOLVED), math.inf))
            print(f"{taken[-1]:>8,}", end="", flush=True)
        print(f"{statistics.median(taken):>10,.0f}")


def save(result: Result, out: Path) -> None:
    """Writes the policy, the learning curve and the replay buffer into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    torch.save(result.policy.state_dict(), out / "policy.pt")
    curve = {"greedy_return": result.greedy_return, "episodes": result.episodes, "evaluations": result.evaluations}
    (out / "curve.json").write_text(json.dumps(curve))
    result.buffer.save(out / "replay")  # sw.open(out / "replay") brings it back


def main() -> None:
    """Trains from the command line and prints a line now and then."""
    parser = argparse.ArgumentParser(description="Prioritized 3-step double DQN on CartPole-v1.")
    parser.add_argument("--steps", type=int, default=Config.steps, help="environment steps to train for")
    parser.add_argument("--seed", type=int, default=Config.seed, help="seed of everything random")
    parser.add_argument("--out", type=Path, default=Path("runs/per_dqn"), help="folder for the results")
    parser.add_argument("--compare", action="store_true", help="set prioritized against uniform draws instead")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of --compare, counted from --seed")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    if options.compare:
        compare(options.steps, range(options.seed, options.seed + options.seeds))
        return

    def report(step: int, now: Result) -> None:
        if step % 2_000 == 0 or step == options.steps:
            print(f"step {step:6d}  return {now.recent_return():5.1f}  loss {now.loss:.6f}", flush=True)

    result = train(Config(steps=options.steps, seed=options.seed), progress=report)
    save(result, options.out)
    print(f"greedy return over 100 episodes: {result.greedy_return:.1f}; results in {options.out}")


if __name__ == "__main__":
    main()
