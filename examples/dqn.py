"""Double DQN on CartPole-v1: Sharpwave in a whole training loop.

    python examples/dqn.py --steps 40000 --seed 0 --out runs/dqn

The buffer appears on three lines: `ReplayBuffer.for_env` makes it, `add` stores a transition, `sample`
returns a batch of tensors. Everything else is ordinary PyTorch. `sharpwave demo` calls this same `train`.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import sharpwave as sw

OBS_SIZE, NUM_ACTIONS = 4, 2  # CartPole-v1: position, speed, angle, turning speed; push left or right


@dataclass(frozen=True)
class Config:
    """What a run may change; the defaults solve CartPole-v1 in about half a minute on one CPU core."""

    steps: int = 40_000
    seed: int = 0
    capacity: int = 100_000
    batch_size: int = 128
    learning_starts: int = 500
    learn_every: int = 2  # environment steps per gradient step
    learning_rate: float = 3e-3
    gamma: float = 0.99
    target_rate: float = 0.03  # share of the online weights that moves into the target at a gradient step
    epsilon_final: float = 0.05
    epsilon_share: float = 0.15  # share of the run over which epsilon falls from 1 to epsilon_final
    evaluate_every: int = 2_000
    report_every: int = 200


@dataclass
class Progress:
    """What `train` tells its `progress` callback every `report_every` steps."""

    step: int
    recent_return: float  # mean over the last 20 training episodes; nan before the first one ends
    rows: int
    loss: float  # nan before learning starts


@dataclass
class Result:
    """What a run leaves behind: the best policy, its curve, its replay buffer and where the time went."""

    policy: nn.Module
    buffer: sw.ReplayBuffer
    greedy_return: float = 0.0  # mean of 20 greedy episodes with the best weights
    episodes: list[tuple[int, float]] = field(default_factory=list)  # (step at which it ended, return)
    evaluations: list[tuple[int, float]] = field(default_factory=list)  # (step, mean greedy return)
    rows_added: int = 0
    rows_sampled: int = 0
    add_ns: int = 0
    sample_ns: int = 0
    wall_ns: int = 0


def make_q_network() -> nn.Module:
    """Returns a small network from an observation to one value per action."""
    return nn.Sequential(
        nn.Linear(OBS_SIZE, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, NUM_ACTIONS)
    )


def greedy_action(policy: nn.Module, obs: np.ndarray) -> int:
    """Returns the action of the highest value."""
    with torch.inference_mode():
        return int(policy(torch.from_numpy(obs)).argmax())


def evaluate(policy: nn.Module, episodes: int, first_seed: int) -> float:
    """Returns the mean return of greedy episodes that start from fixed seeds."""
    env = gym.make("CartPole-v1")
    total = 0.0
    for episode in range(episodes):
        obs, _ = env.reset(seed=first_seed + episode)
        over = False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(greedy_action(policy, obs))
            total += float(reward)
            over = terminated or truncated
    env.close()
    return total / episodes


def td_loss(online: nn.Module, target: nn.Module, batch: dict[str, torch.Tensor], gamma: float) -> torch.Tensor:
    """Returns the double DQN loss: the online network picks the next action, the target one values it."""
    with torch.no_grad():
        next_action = online(batch["next_obs"]).argmax(dim=1, keepdim=True)
        next_value = target(batch["next_obs"]).gather(1, next_action).squeeze(1)
        # `done` is True only where the pole fell; at the time limit the next state still has its value.
        # Rewards weigh 1 - gamma, so values lie in 0..1 and errors in the quadratic part of the Huber loss;
        # with plain rewards values near 100 put the error of a fall on its linear part.
        goal = (1.0 - gamma) * batch["reward"] + gamma * next_value * ~batch["done"]
    value = online(batch["obs"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
    return nn.functional.smooth_l1_loss(value, goal)


def train(config: Config, progress: Callable[[Progress], None] | None = None) -> Result:
    """Trains one agent; on the CPU the same config gives the same result.

    Args:
        config: The run's settings.
        progress: Called every `config.report_every` steps and after the last one.

    Returns:
        The best-evaluated policy with its learning curve, buffer and timings.
    """
    torch.set_num_threads(1)  # networks this small lose more to thread hand-over than they gain
    torch.manual_seed(config.seed)
    rng = np.random.default_rng(config.seed)

    env = gym.make("CartPole-v1")
    online = make_q_network()
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=config.learning_rate, fused=True)
    # A falling rate calms the end of the run but does not rule out a late relapse: the best weights are kept.
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=config.steps // config.learn_every)

    buffer = sw.ReplayBuffer.for_env(env, capacity=config.capacity, seed=config.seed)
    result = Result(policy=copy.deepcopy(online), buffer=buffer)
    best_return = -np.inf
    episode_return = 0.0
    loss = torch.tensor(float("nan"))
    clock = time.perf_counter_ns
    began = clock()

    obs, _ = env.reset(seed=config.seed)
    for step in range(1, config.steps + 1):
        explored = min(1.0, step / (config.epsilon_share * config.steps))
        epsilon = 1.0 + explored * (config.epsilon_final - 1.0)
        if rng.random() < epsilon:
            action = int(rng.integers(NUM_ACTIONS))
        else:
            action = greedy_action(online, obs)
        next_obs, reward, terminated, truncated, _ = env.step(action)
        episode_return += float(reward)

        # next_obs is where the action led, also at an episode's end: reset() comes after.
        start = clock()
        buffer.add(
            obs=obs,
            action=action,
            reward=reward,
            next_obs=next_obs,
            terminated=terminated,
            truncated=truncated,
        )
        result.add_ns += clock() - start
        obs = next_obs
        if terminated or truncated:
            result.episodes.append((step, episode_return))
            episode_return = 0.0
            obs, _ = env.reset()

        if step >= config.learning_starts and step % config.learn_every == 0:
            start = clock()
            batch = buffer.sample(config.batch_size, device="cpu")
            result.sample_ns += clock() - start
            result.rows_sampled += config.batch_size

            loss = td_loss(online, target, batch, config.gamma)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            decay.step()
            with torch.no_grad():
                for old, new in zip(target.parameters(), online.parameters(), strict=True):
                    old.lerp_(new, config.target_rate)

        last = step == config.steps
        if last or step % config.evaluate_every == 0:
            # The target network is evaluated and kept: it averages the online one over its last steps.
            mean_return = evaluate(target, episodes=10, first_seed=1_000_000)
            result.evaluations.append((step, mean_return))
            if mean_return >= best_return:  # of equals the later one has learnt more
                best_return = mean_return
                result.policy.load_state_dict(target.state_dict())
        if progress is not None and (last or step % config.report_every == 0):
            recent = [value for _, value in result.episodes[-20:]]
            progress(Progress(step, float(np.mean(recent)) if recent else np.nan, len(buffer), loss.item()))

    result.wall_ns = clock() - began
    result.rows_added = config.steps
    # Other starts than those that chose the best weights: the number reported is not the one selected on.
    result.greedy_return = evaluate(result.policy, episodes=20, first_seed=2_000_000)
    env.close()
    return result


def save(result: Result, out: Path) -> None:
    """Writes the policy, the learning curve and the replay buffer into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    torch.save(result.policy.state_dict(), out / "policy.pt")
    curve = {
        "greedy_return": result.greedy_return,
        "episodes": result.episodes,
        "evaluations": result.evaluations,
    }
    (out / "curve.json").write_text(json.dumps(curve))
    result.buffer.save(out / "replay")  # sw.open(out / "replay") brings it back


def main() -> None:
    """Trains from the command line and prints a line now and then."""
    parser = argparse.ArgumentParser(description="Double DQN on CartPole-v1 with a Sharpwave buffer.")
    parser.add_argument("--steps", type=int, default=Config.steps, help="environment steps to train for")
    parser.add_argument("--seed", type=int, default=Config.seed, help="seed of everything random")
    parser.add_argument("--out", type=Path, default=Path("runs/dqn"), help="folder for the results")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")

    def report(now: Progress) -> None:
        if now.step % 2_000 == 0 or now.step == options.steps:
            line = f"step {now.step:6d}  return {now.recent_return:5.1f}  rows {now.rows:6d}"
            print(f"{line}  loss {now.loss:.6f}", flush=True)

    result = train(Config(steps=options.steps, seed=options.seed), progress=report)
    save(result, options.out)
    print(f"greedy return over 20 episodes: {result.greedy_return:.1f}; results in {options.out}")


if __name__ == "__main__":
    main()
