"""Prioritized 3-step double DQN on CartPole-v1: Sharpwave in a whole training loop.

    python examples/per_dqn.py --steps 20000 --seed 0 --out runs/per_dqn
    python examples/per_dqn.py --compare      # prioritized against uniform draws, three seeds each

The buffer appears on four lines: `ReplayBuffer.for_env` makes it, `add` stores a transition, `sample` returns a batch
of tensors, `update_priorities` tells it how wrong the network was. `sharpwave demo` calls this same `train`.
"""

import argparse
import copy
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import sharpwave as sw

Batch = dict[str, torch.Tensor]
OBS_SIZE, NUM_ACTIONS = 4, 2  # CartPole-v1: position, speed, angle, turning speed; push left or right
SOLVED = 450.0  # of 500: the greedy return that --compare waits for


@dataclass(frozen=True)
class Config:
    """What a run may change; the defaults solve CartPole-v1 in about half a minute on one CPU core."""

    steps: int = 20_000
    seed: int = 0
    sampler: str = "prioritized"  # or "uniform": everything else stays the same
    alpha: float = 0.6  # 0 draws uniformly, 1 in proportion to the error
    beta: float = 0.4  # share of the drawing's bias that the weights take back at first; all of it at the end
    n_step: int = 3
    capacity: int = 100_000
    batch_size: int = 64
    learning_starts: int = 500
    learn_every: int = 2  # environment steps per gradient step
    learning_rate: float = 1e-3
    lr_end: float = 1.0
    gamma: float = 0.99
    target_rate: float = 0.02  # share of the online weights that moves into the target at a gradient step
    epsilon_final: float = 0.05
    epsilon_steps: int = 3_000  # steps over which epsilon falls from 1 to epsilon_final
    evaluate_every: int = 500
    stop_return: float = float("inf")  # an evaluation that reaches it ends the run
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
    steps: int = 0
    rows_sampled: int = 0
    priorities_updated: int = 0
    priorities_stale: int = 0  # the row had left the buffer before its priority came
    add_ns: int = 0
    sample_ns: int = 0
    update_ns: int = 0
    wall_ns: int = 0


def make_q_network() -> nn.Module:
    """Returns a small network from an observation to one value per action."""
    return nn.Sequential(
        nn.Linear(OBS_SIZE, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, NUM_ACTIONS)
    )


def make_buffer(env: gym.Env, config: Config) -> sw.ReplayBuffer:
    """Returns a buffer that draws as `config.sampler` says and gives n-step transitions."""
    gradient_steps = max(1, (config.steps - config.learning_starts) // config.learn_every)
    samplers = {
        "prioritized": sw.Prioritized(alpha=config.alpha, beta=sw.Linear(config.beta, 1.0, gradient_steps)),
        "uniform": sw.Uniform(),
    }
    view = sw.Transitions(n_step=config.n_step, gamma=config.gamma)
    return sw.ReplayBuffer.for_env(
        env, capacity=config.capacity, sampler=samplers[config.sampler], view=view, seed=config.seed
    )


@torch.inference_mode()
def evaluate(policy: nn.Module, episodes: int, seed: int) -> float:
    """Returns the mean return of greedy episodes, played side by side, that start from a fixed seed."""
    envs = gym.make_vec("CartPole-v1", episodes, vectorization_mode="vector_entry_point")
    obs, _ = envs.reset(seed=seed)
    alive, total = np.ones(episodes, bool), 0.0
    while alive.any():
        obs, reward, terminated, truncated, _ = envs.step(policy(torch.from_numpy(obs)).argmax(dim=1).numpy())
        total += float(reward[alive].sum())
        alive &= ~(terminated | truncated)
    envs.close()
    return total / episodes


def td_errors(online: nn.Module, target: nn.Module, batch: Batch, gamma: float) -> torch.Tensor:
    """Returns double DQN's errors: the online network picks the next action, the target one values it."""
    with torch.no_grad():
        next_action = online(batch["next_obs"]).argmax(dim=1, keepdim=True)
        next_value = target(batch["next_obs"]).gather(1, next_action).squeeze(1)
        # `reward` sums up to n_step rewards and `discount` is gamma to the power of their number. `done` is True only
        # where the pole fell; at the time limit the next state still has its value. Rewards weigh 1 - gamma: values lie
        # in 0..1, so that the error of a fall is of the size of the others' and not a hundred times theirs.
        goal = (1.0 - gamma) * batch["reward"] + batch["discount"] * next_value * ~batch["done"]
    return goal - online(batch["obs"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)


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
    decay = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1.0, config.lr_end, total_iters=config.steps // config.learn_every
    )
    buffer = make_buffer(env, config)
    result = Result(policy=copy.deepcopy(online), buffer=buffer)
    best_return = -np.inf
    episode_return = 0.0
    loss = torch.tensor(float("nan"))
    clock = time.perf_counter_ns
    began = clock()

    obs, _ = env.reset(seed=config.seed)
    for step in range(1, config.steps + 1):
        epsilon = 1.0 + min(1.0, step / config.epsilon_steps) * (config.epsilon_final - 1.0)
        if rng.random() < epsilon:
            action = int(rng.integers(NUM_ACTIONS))
        else:
            with torch.inference_mode():
                action = int(online(torch.from_numpy(obs)).argmax())
        next_obs, reward, terminated, truncated, _ = env.step(action)
        episode_return += float(reward)

        # next_obs is where the action led, also at an episode's end: reset() comes after.
        start = clock()
        buffer.add(obs=obs, action=action, reward=reward, next_obs=next_obs, terminated=terminated, truncated=truncated)
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

            errors = td_errors(online, target, batch, config.gamma)
            loss = errors.square()
            if config.sampler == "prioritized":
                loss = loss * batch["weights"]  # rows drawn more often than their share count less each time
                start = clock()
                outcome = buffer.update_priorities(batch["indices"], errors.detach())
                result.update_ns += clock() - start
                result.priorities_updated += outcome["applied"]
                result.priorities_stale += outcome["stale"]
            loss = loss.mean()
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
            mean_return = evaluate(target, episodes=20, seed=1_000_000)
            result.evaluations.append((step, mean_return))
            if mean_return >= best_return:  # of equals the later one has learnt more
                best_return = mean_return
                result.policy.load_state_dict(target.state_dict())
            last = last or mean_return >= config.stop_return
        if progress is not None and (last or step % config.report_every == 0):
            recent = [value for _, value in result.episodes[-20:]]
            progress(Progress(step, float(np.mean(recent)) if recent else np.nan, len(buffer), loss.item()))
        if last:
            result.steps = step
            break

    result.wall_ns = clock() - began
    # Other starts than those that chose the best weights: the number reported is not the one selected on.
    result.greedy_return = evaluate(result.policy, episodes=20, seed=2_000_000)
    env.close()
    return result


def compare(steps: int, seeds: range) -> None:
    """Prints how many environment steps each sampler takes to a greedy return of 450; all else is equal."""
    print(f"environment steps until the mean of 20 greedy episodes is {SOLVED:.0f} or more, at most {steps:,}")
    print(f"{'':12}" + "".join(f"{f'seed {seed}':>10}" for seed in seeds) + f"{'median':>10}")
    for sampler in ("prioritized", "uniform"):
        print(f"{sampler:12}", end="", flush=True)
        taken = []
        for seed in seeds:
            result = train(Config(steps=steps, seed=seed, sampler=sampler, stop_return=SOLVED))
            taken.append(result.steps if result.evaluations[-1][1] >= SOLVED else math.inf)
            print(f"{taken[-1]:>10,}", end="", flush=True)
        print(f"{statistics.median(taken):>10,}")


def save(result: Result, out: Path) -> None:
    """Writes the policy, the learning curve and the replay buffer into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    torch.save(result.policy.state_dict(), out / "policy.pt")
    curve = {"greedy_return": result.greedy_return, "episodes": result.episodes, "evaluations": result.evaluations}
    (out / "curve.json").write_text(json.dumps(curve))
    result.buffer.save(out / "replay")  # sw.open(out / "replay") brings it back


def main() -> None:
    """Trains from the command line and prints a line now and then."""
    parser = argparse.ArgumentParser(
        description="Prioritized 3-step double DQN on CartPole-v1 with a Sharpwave buffer."
    )
    parser.add_argument("--steps", type=int, default=Config.steps, help="environment steps to train for")
    parser.add_argument("--seed", type=int, default=Config.seed, help="seed of everything random")
    parser.add_argument(
        "--sampler", choices=["prioritized", "uniform"], default=Config.sampler, help="how rows are drawn"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/per_dqn"), help="folder for the results")
    parser.add_argument("--compare", action="store_true", help="run both samplers over three seeds; writes nothing")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    if options.compare:
        compare(options.steps, range(options.seed, options.seed + 3))
        return

    def report(now: Progress) -> None:
        if now.step % 2_000 == 0 or now.step == options.steps:
            line = f"step {now.step:6d}  return {now.recent_return:5.1f}  rows {now.rows:6d}"
            print(f"{line}  loss {now.loss:.6f}", flush=True)

    result = train(Config(steps=options.steps, seed=options.seed, sampler=options.sampler), progress=report)
    save(result, options.out)
    print(f"greedy return over 20 episodes: {result.greedy_return:.1f}; results in {options.out}")


if __name__ == "__main__":
    main()
