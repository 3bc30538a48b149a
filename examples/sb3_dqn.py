"""Stable-Baselines3's DQN on CartPole-v1 with its own replay buffer and with Sharpwave's, the same seeds for both.

    python examples/sb3_dqn.py                   # the third buffer draws by priority and gives 3-step returns
    python examples/sb3_dqn.py --seeds 1 --steps 20000

What changes is what a buffer is given by: `replay_buffer_class` and `replay_buffer_kwargs`; by priority also the class
of the algorithm, whose losses must be weighted.
"""

import argparse
import time
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.evaluation import evaluate_policy

import sharpwave as sw
from sharpwave.adapters.sb3 import PrioritizedDQN, ReplayBuffer

LEARNING_STARTS, TRAIN_FREQ, GRADIENT_STEPS = 1_000, 256, 128
EVALUATIONS = 5  # on the way: a last policy alone tells little


def make_buffers(steps: int) -> dict[str, dict[str, Any]]:
    """Returns what DQN is given besides its other arguments, by the name of the buffer."""
    gradient_steps = max(1, (steps - LEARNING_STARTS) * GRADIENT_STEPS // TRAIN_FREQ)
    sampler = sw.Prioritized(beta=sw.Linear(0.4, 1.0, gradient_steps))
    return {
        "SB3's own": {},
        "Sharpwave": {"replay_buffer_class": ReplayBuffer},
        "Sharpwave, prioritized, 3-step": {
            "replay_buffer_class": ReplayBuffer,
            "replay_buffer_kwargs": {"sampler": sampler, "n_steps": 3},
        },
    }


def train(steps: int, seed: int, options: dict[str, Any]) -> list[float]:
    """Trains one agent; returns the mean greedy return of twenty episodes at each evaluation."""
    is_prioritized = "sampler" in options.get("replay_buffer_kwargs", {})
    model = (PrioritizedDQN if is_prioritized else DQN)(
        "MlpPolicy",
        gym.make("CartPole-v1"),
        learning_rate=2.3e-3,
        batch_size=64,
        buffer_size=100_000,
        learning_starts=LEARNING_STARTS,
        gamma=0.99,
        target_update_interval=10,
        train_freq=TRAIN_FREQ,
        gradient_steps=GRADIENT_STEPS,
        exploration_fraction=0.16,
        exploration_final_eps=0.04,
        policy_kwargs={"net_arch": [256, 256]},
        seed=seed,
        device="cpu",
        **options,
    )
    curve: list[float] = []

    def evaluate(local: dict[str, Any], _: dict[str, Any]) -> bool:
        if local["self"].num_timesteps % (steps // EVALUATIONS) == 0:
            env = gym.make("CartPole-v1")
            env.reset(seed=1_000 + seed)
            curve.append(float(evaluate_policy(model, env, n_eval_episodes=20, deterministic=True)[0]))
        return True

    model.learn(steps, callback=evaluate)
    return curve


def compare(steps: int, seeds: range) -> dict[str, np.ndarray]:
    """Trains with every buffer; returns the evaluations, one row a seed."""
    buffers = make_buffers(steps)
    curves: dict[str, list[list[float]]] = {name: [] for name in buffers}
    for seed in seeds:
        for name, options in buffers.items():
            began = time.perf_counter()
            curves[name].append(train(steps, seed, options))
            line = " ".join(f"{value:6.1f}" for value in curves[name][-1])
            print(f"seed {seed}  {name:32}{line}  {time.perf_counter() - began:5.0f} s", flush=True)
    return {name: np.array(rows) for name, rows in curves.items()}


def main() -> None:
    """Compares from the command line and prints a table."""
    parser = argparse.ArgumentParser(description="Stable-Baselines3's DQN with its own and with Sharpwave's buffer.")
    parser.add_argument("--steps", type=int, default=50_000, help="environment steps of each run")
    parser.add_argument("--seeds", type=int, default=3, help="runs with each buffer")
    options = parser.parse_args()
    if options.steps < 1_000 or options.steps % EVALUATIONS:
        parser.error(f"--steps must be at least 1000 and a multiple of {EVALUATIONS}, got {options.steps}")
    torch.set_num_threads(1)  # networks this small lose more to thread hand-over than they gain
    warnings.filterwarnings("ignore", message="Evaluation environment is not wrapped")
    results = compare(options.steps, range(options.seeds))
    print(f"\n{'mean and spread over the seeds':40}{'last evaluation':>22}{'all evaluations':>22}")
    for name, curves in results.items():
        spread = 1 if len(curves) > 1 else 0
        parts = [(values.mean(), values.std(ddof=spread)) for values in (curves[:, -1], curves.mean(axis=1))]
        print(f"{name:40}" + "".join(f"{f'{mean:.1f} +- {width:.1f}':>22}" for mean, width in parts))


if __name__ == "__main__":
    main()
