"""DQN with hindsight on 15-bit flipping: Sharpwave where a reward almost never comes.

    python examples/her.py --seed 0
    python examples/her.py --seed 0 --no-hindsight       # the same but for one number: it learns nothing
    python examples/her.py --compare --seeds 3           # both, three seeds each

One of 2^15 words is the goal and a step flips one bit: by chance one episode in some two thousand gets there, and all
other rewards are -1. But each episode gets somewhere. Hindsight replays it as if that had been asked for. The buffer
appears on three lines: `ReplayBuffer.for_env` makes it, `collect` fills it, `sample` returns a batch of tensors, with
other goals in it.
"""

import argparse
import copy
import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import sharpwave as sw


@dataclass(frozen=True)
class Config:
    """What a run may change; the defaults solve 15 bits in about twenty seconds on one CPU core."""

    steps: int = 20_000
    seed: int = 0
    hindsight: bool = True  # False replaces no goal; everything else stays the same
    bits: int = 15
    capacity: int = 100_000
    batch_size: int = 128
    learning_starts: int = 1_000
    updates_per_episode: int = 6
    hidden_size: int = 256
    learning_rate: float = 1e-3
    gamma: float = 0.98
    target_rate: float = 0.05  # share of the online weights that moves into the target at a gradient step
    epsilon: float = 0.2
    evaluate_every: int = 2_000


class BitFlip(gym.Env):
    """A word, a goal for it, one flip a step: -1 until they are equal, for as many steps as there are bits."""

    def __init__(self, bits: int) -> None:
        word = gym.spaces.MultiBinary(bits)
        self.observation_space = gym.spaces.Dict({"observation": word, "achieved_goal": word, "desired_goal": word})
        self.action_space = gym.spaces.Discrete(bits)
        self.bits = bits

    def _observe(self) -> dict[str, np.ndarray]:
        return {"observation": self.word.copy(), "achieved_goal": self.word.copy(), "desired_goal": self.goal}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Draws a word and a goal that differs from it."""
        super().reset(seed=seed)
        self.word, self.goal = self.np_random.integers(0, 2, (2, self.bits), dtype=np.int8)
        while (self.word == self.goal).all():
            self.goal = self.np_random.integers(0, 2, self.bits, dtype=np.int8)
        self.steps = 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Flips a bit."""
        self.word[action] ^= 1
        self.steps += 1
        equal = bool(reached(self.word, self.goal))
        return self._observe(), float(reward(self.word, self.goal)), equal, self.steps == self.bits, {}


def reached(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    """Returns where goals are met: what ends an episode, and a relabelled example."""
    return np.asarray((achieved == desired).all(axis=-1))


def reward(achieved: np.ndarray, desired: np.ndarray) -> np.ndarray:
    """Returns 0 where goals are met and -1 elsewhere. The environment and hindsight must agree: both call this."""
    return reached(achieved, desired).astype(np.float32) - 1.0


class QNetwork(nn.Module):
    """From a word and the goal asked for to one value per bit that may be flipped."""

    def __init__(self, bits: int, hidden_size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 * bits, hidden_size), nn.ReLU(), nn.Linear(hidden_size, bits))

    def forward(self, obs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns the values of all flips, as (..., bits)."""
        words = torch.cat([obs["observation"], obs["desired_goal"]], dim=-1)
        values: torch.Tensor = self.layers(2.0 * words - 1.0)
        return values

    @torch.inference_mode()
    def act(self, obs: dict[str, np.ndarray]) -> int:
        """Returns the flip of the highest value."""
        return int(self({name: torch.from_numpy(part) for name, part in obs.items()}).argmax())


@dataclass
class Result:
    """What a run leaves behind."""

    policy: QNetwork
    buffer: sw.ReplayBuffer
    evaluations: list[tuple[int, float]] = field(default_factory=list)  # (step, share of 100 episodes with success)
    success: float = 0.0  # share of 500 greedy episodes with other goals than those of the evaluations
    wall_s: float = 0.0


def evaluate(policy: QNetwork, bits: int, episodes: int, seed: int) -> float:
    """Returns the share of greedy episodes that reach their goal."""
    env = BitFlip(bits)
    env.reset(seed=seed)
    reached_goal = 0
    for _ in range(episodes):
        obs, _ = env.reset()
        terminated = truncated = False
        while not (terminated or truncated):
            obs, _, terminated, truncated, _ = env.step(policy.act(obs))
        reached_goal += terminated
    return reached_goal / episodes


def td_loss(online: QNetwork, target: QNetwork, batch: dict[str, Any], gamma: float) -> torch.Tensor:
    """Returns double DQN's loss: the online network picks the next flip, the target one values it."""
    with torch.no_grad():
        next_action = online(batch["next_obs"]).argmax(dim=1, keepdim=True)
        next_value = target(batch["next_obs"]).gather(1, next_action).squeeze(1)
        # `done` is True where the goal is reached, the new one where it was replaced. When the steps are used up it is
        # False: no observation tells the time, so the value goes on.
        goal = batch["reward"] + gamma * next_value * ~batch["done"]
    value = online(batch["obs"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
    # Before the values have settled some errors are many steps large; squares of them would shake the rest.
    return nn.functional.smooth_l1_loss(value, goal)


def make_buffer(env: gym.Env, config: Config) -> sw.ReplayBuffer:
    """Returns a buffer that replaces four goals of five, or none."""
    # Ratio 0 draws the same rows, those of finished episodes, and leaves them as they are.
    ratio = 0.8 if config.hindsight else 0.0
    view = sw.Transitions(hindsight=sw.Hindsight("future", ratio, reward, terminated=reached))
    return sw.ReplayBuffer.for_env(env, capacity=config.capacity, view=view, seed=config.seed)


def train(config: Config, report: Callable[[int, float], None] | None = None) -> Result:
    """Trains one agent; on the CPU the same config gives the same result.

    Args:
        config: The run's settings.
        report: Called with each evaluation: the step and the share of greedy episodes that reach their goal.

    Returns:
        The last policy with its learning curve and buffer.
    """
    torch.set_num_threads(1)  # networks this small lose more to thread hand-over than they gain
    torch.manual_seed(config.seed)
    random = np.random.default_rng(config.seed)
    env = BitFlip(config.bits)
    online = QNetwork(config.bits, config.hidden_size)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), config.learning_rate, fused=True)
    buffer = make_buffer(env, config)
    result = Result(policy=target, buffer=buffer)
    began = time.perf_counter()

    def policy(obs: dict[str, np.ndarray]) -> int:
        return int(random.integers(config.bits)) if random.random() < config.epsilon else online.act(obs)

    next_evaluation = config.evaluate_every
    # Only finished episodes have a future to take goals from, so learning goes episode by episode.
    for episode in sw.collect(env, policy, buffer, config.steps, seed=config.seed):
        if episode["step"] < config.learning_starts:
            continue
        for _ in range(config.updates_per_episode):
            loss = td_loss(online, target, buffer.sample(config.batch_size, device="cpu"), config.gamma)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for old, new in zip(target.parameters(), online.parameters(), strict=True):
                    old.lerp_(new, config.target_rate)
        if episode["step"] >= next_evaluation:
            next_evaluation += config.evaluate_every
            result.evaluations.append((episode["step"], evaluate(target, config.bits, episodes=100, seed=1_000_000)))
            if report is not None:
                report(*result.evaluations[-1])

    result.wall_s = time.perf_counter() - began
    result.success = evaluate(target, config.bits, episodes=500, seed=2_000_000)
    return result


def compare(config: Config, seeds: range) -> None:
    """Prints how often the goal is reached with hindsight and without; all else is equal."""
    print(f"share of 500 greedy episodes that reach the goal, after {config.steps:,} steps")
    print(f"{'seed':18}" + "".join(f"{seed:>8}" for seed in seeds))
    for name, hindsight in (("with hindsight", True), ("without", False)):
        print(f"{name:18}", end="", flush=True)
        for seed in seeds:
            result = train(dataclasses.replace(config, seed=seed, hindsight=hindsight))
            print(f"{result.success:>8.1%}", end="", flush=True)
        print()


def main() -> None:
    """Trains from the command line and prints a line for each evaluation."""
    parser = argparse.ArgumentParser(description="DQN with hindsight on bit flipping, with a Sharpwave buffer.")
    parser.add_argument("--steps", type=int, default=Config.steps, help="environment steps to train for")
    parser.add_argument("--seed", type=int, default=Config.seed, help="seed of everything random")
    parser.add_argument("--bits", type=int, default=Config.bits, help="bits of a word, and steps of an episode")
    parser.add_argument("--no-hindsight", action="store_true", help="replace no goal")
    parser.add_argument("--compare", action="store_true", help="train with hindsight and without instead")
    parser.add_argument("--seeds", type=int, default=1, help="seeds of --compare, counted from --seed")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    config = Config(steps=options.steps, seed=options.seed, bits=options.bits, hindsight=not options.no_hindsight)
    if options.compare:
        compare(config, range(options.seed, options.seed + options.seeds))
        return

    def report(step: int, success: float) -> None:
        print(f"step {step:6d}  goal reached {success:6.1%}", flush=True)

    result = train(config, report)
    print(f"{options.steps} steps in {result.wall_s:.0f} s")
    print(f"goal reached in 500 greedy episodes: {result.success:.1%}")


if __name__ == "__main__":
    main()
