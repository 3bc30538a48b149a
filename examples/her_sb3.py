"""Stable-Baselines3's SAC with hindsight: a sliding puck is to stop at a goal, and almost every reward is -1.

    python examples/her_sb3.py                           # reaches the goal in 95 of 100 episodes and more
    python examples/her_sb3.py --goals 0                 # the same without new goals: it learns nothing
    python examples/her_sb3.py --compare --plot her.png  # both, and Stable-Baselines3's own buffer

The buffer appears on one line: `replay_buffer_class=HerReplayBuffer`. It calls the `compute_reward` of the environment,
as Stable-Baselines3's own one does, and stores each observation once.
"""

import argparse
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import SAC, her
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv

from sharpwave.adapters.sb3 import HerReplayBuffer

EPISODE_STEPS = 40
REACH = 0.08  # how near to its goal the puck must be


@dataclass(frozen=True)
class Config:
    """What a run may change."""

    steps: int = 8_000
    seed: int = 0
    goals: int = 4  # new goals for each goal of an episode's own; 0 replaces none
    own_buffer: bool = False  # Stable-Baselines3's HerReplayBuffer in the place of Sharpwave's
    envs: int = 4
    hidden_size: int = 64
    learning_starts: int = 800
    evaluate_every: int = 1_000


class Slide(gym.Env):
    """A puck on a square plate. An action pushes it, friction slows it down; the goal is a place anywhere on the plate.

    The reward is 0 near the goal and -1 elsewhere. Every episode has the same length, so no step is `done`.
    """

    def __init__(self) -> None:
        box = gym.spaces.Box
        self.observation_space = gym.spaces.Dict(
            {
                "observation": box(-2, 2, (4,)),  # place and speed
                "achieved_goal": box(-1, 1, (2,)),
                "desired_goal": box(-1, 1, (2,)),
            }
        )
        self.action_space = box(-1, 1, (2,))

    def _observe(self) -> dict[str, np.ndarray]:
        place = self.place.astype(np.float32)
        return {
            "observation": np.concatenate([place, self.speed]).astype(np.float32),
            "achieved_goal": place,
            "desired_goal": self.goal,
        }

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Puts the puck at rest in the middle and draws a goal."""
        super().reset(seed=seed)
        self.place, self.speed, self.steps = np.zeros(2), np.zeros(2), 0
        self.goal = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Pushes the puck."""
        self.speed = 0.8 * self.speed + 0.05 * np.clip(action, -1, 1)
        moved = self.place + self.speed
        self.place = np.clip(moved, -1, 1)
        self.speed = np.where(moved == self.place, self.speed, 0)  # the plate has a rim
        self.steps += 1
        seen = self._observe()
        reward = float(self.compute_reward(seen["achieved_goal"], seen["desired_goal"], {}))
        return seen, reward, False, self.steps == EPISODE_STEPS, {"is_success": reward == 0}

    def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, info: Any) -> np.ndarray:
        """The reward of one goal or of many; the buffer calls it for new goals."""
        far = np.linalg.norm(achieved - desired, axis=-1) > REACH
        return -far.astype(np.float32)


@dataclass
class Result:
    """What a run leaves behind."""

    model: SAC
    evaluations: list[tuple[int, float]] = field(default_factory=list)  # (step, share of 50 episodes with success)
    success: float = 0.0  # share of 200 episodes with other goals than those of the evaluations
    wall_s: float = 0.0


def evaluate(model: SAC, episodes: int, seed: int) -> float:
    """Returns the share of greedy episodes whose last step is at the goal."""
    envs = [Slide() for _ in range(episodes)]
    seen = [env.reset(seed=seed + i)[0] for i, env in enumerate(envs)]
    for _ in range(EPISODE_STEPS):
        actions, _ = model.predict({key: np.stack([obs[key] for obs in seen]) for key in seen[0]}, deterministic=True)
        outcomes = [env.step(action) for env, action in zip(envs, actions, strict=True)]
        seen = [outcome[0] for outcome in outcomes]
    return float(np.mean([outcome[4]["is_success"] for outcome in outcomes]))


class Evaluations(BaseCallback):
    """Evaluates on the way."""

    def __init__(self, result: Result, config: Config, title: str) -> None:
        super().__init__()
        self.result, self.config, self.title = result, config, title

    def _on_step(self) -> bool:
        if self.num_timesteps % self.config.evaluate_every < self.config.envs:
            self.result.evaluations.append((self.num_timesteps, evaluate(self.result.model, 50, seed=10_000)))
            if self.title:
                step, success = self.result.evaluations[-1]
                print(f"{self.title}step {step:6d}  at the goal {success:6.1%}", flush=True)
        return True


def train(config: Config, title: str = "") -> Result:
    """Trains one agent.

    Args:
        config: The run's settings.
        title: Printed before each evaluation; "" prints none.
    """
    torch.set_num_threads(1)  # networks this small lose more to thread hand-over than they gain
    model = SAC(
        "MultiInputPolicy",
        DummyVecEnv([Slide] * config.envs),
        replay_buffer_class=her.HerReplayBuffer if config.own_buffer else HerReplayBuffer,
        replay_buffer_kwargs={"n_sampled_goal": config.goals, "goal_selection_strategy": "future"},
        buffer_size=100_000,
        learning_starts=config.learning_starts,
        train_freq=8,
        gradient_steps=8,
        batch_size=256,
        learning_rate=2e-3,
        gamma=0.95,
        tau=0.02,
        policy_kwargs={"net_arch": [config.hidden_size] * 2},
        seed=config.seed,
        device="cpu",
    )
    result = Result(model)
    began = time.perf_counter()
    model.learn(config.steps, callback=Evaluations(result, config, title))
    result.wall_s = time.perf_counter() - began
    result.success = evaluate(model, 200, seed=20_000)
    return result


def draw(results: dict[str, Result], path: Path) -> None:
    """Writes a picture of the evaluations."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name, result in results.items():
        steps, success = zip(*result.evaluations, strict=True)
        axes.plot(steps, success, marker="o", markersize=3, label=name)
    axes.set(xlabel="environment steps", ylabel="share of episodes that end at the goal", ylim=(-0.03, 1.03))
    axes.legend()
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def main() -> None:
    """Trains from the command line and prints a line for each evaluation."""
    parser = argparse.ArgumentParser(description="Stable-Baselines3's SAC with a Sharpwave buffer for hindsight.")
    parser.add_argument("--steps", type=int, default=Config.steps, help="environment steps to train for")
    parser.add_argument("--seed", type=int, default=Config.seed, help="seed of everything random")
    parser.add_argument("--goals", type=int, default=Config.goals, help="new goals for each of an episode's own")
    parser.add_argument("--compare", action="store_true", help="also without new goals, and with SB3's own buffer")
    parser.add_argument("--plot", type=Path, help="write a picture of the learning curve to this file")
    options = parser.parse_args()
    if options.steps < Config.evaluate_every:
        parser.error(f"--steps must be at least {Config.evaluate_every}, got {options.steps}")
    config = Config(steps=options.steps, seed=options.seed, goals=options.goals)
    runs = {"Sharpwave": config}
    if options.compare:
        runs["Stable-Baselines3's buffer"] = replace(config, own_buffer=True)
        runs["without new goals"] = replace(config, goals=0)
    results = {}
    for name, settings in runs.items():
        results[name] = train(settings, title=f"{name:28}" if options.compare else " ")
        print(f"{name}: {options.steps} steps in {results[name].wall_s:.0f} s")
        print(f"{name}: at the goal after 200 greedy episodes: {results[name].success:.1%}")
    if options.plot is not None:
        draw(results, options.plot)


if __name__ == "__main__":
    main()
