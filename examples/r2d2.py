"""Recurrent replay (R2D2) in a T-maze: Sharpwave with windows of rows and stored recurrent states.

    python examples/r2d2.py --seed 0
    python examples/r2d2.py --seed 0 --memoryless        # forgets at every step, so it can only guess

The first observation says which way to turn at the end of a corridor. Each row keeps the recurrent state in which its
action was chosen; a window of rows begins with the state at its first place, and the network is unrolled from there.
The buffer appears on five lines: `ReplayBuffer.for_env` makes it, `add` stores a step, `sample` returns windows with
their masks, `update_priorities` sets how wrong the network was in each, `write` replaces old states by today's.
"""

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import sharpwave as sw

FORWARD, LEFT, RIGHT = range(3)


@dataclass(frozen=True)
class Config:
    """What a run may change; the defaults learn the maze in about a minute on one CPU core."""

    steps: int = 30_000
    seed: int = 0
    memoryless: bool = False  # True begins every step from a state of zeros; everything else stays the same
    corridor: int = 12
    capacity: int = 20_000
    length: int = 16  # longer than the corridor, so that the error of a turn reaches what the network made of the sign
    burn_in: int = 4
    stride: int = 4
    batch_size: int = 32
    learning_starts: int = 1_000
    updates_per_episode: int = 4
    state_size: int = 32
    learning_rate: float = 2e-3
    gamma: float = 0.95
    target_rate: float = 0.05  # share of the online weights that moves into the target at a gradient step
    epsilon_final: float = 0.1
    epsilon_steps: int = 5_000  # steps over which epsilon falls from 1 to epsilon_final
    evaluate_every: int = 3_000


class TMaze(gym.Env):
    """A sign at the start, a corridor, a turn at its end: the reward is 1 for turning as the sign said, else 0.

    Observations are (sign says left, sign says right, in the corridor, at the turn). In the corridor turns do nothing.
    """

    def __init__(self, corridor: int) -> None:
        self.observation_space = gym.spaces.Box(0, 1, (4,), np.float32)
        self.action_space = gym.spaces.Discrete(3)
        self.corridor = corridor

    def _observe(self) -> np.ndarray:
        obs = np.zeros(4, np.float32)
        obs[self.sign - LEFT if self.steps == 0 else 3 if self.place == self.corridor else 2] = 1
        return obs

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Puts up a sign and goes back to the start."""
        super().reset(seed=seed)
        self.sign = int(self.np_random.integers(LEFT, RIGHT + 1))
        self.place = self.steps = 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Goes forward in the corridor, or turns at its end."""
        self.steps += 1
        turned = self.place == self.corridor and action != FORWARD
        reward = float(turned and action == self.sign)
        self.place = min(self.place + (action == FORWARD), self.corridor)
        return self._observe(), reward, turned, self.steps == 4 * self.corridor, {}


class QNetwork(nn.Module):
    """From a window of observations, and the recurrent state before it, to values of all actions at each place."""

    def __init__(self, state_size: int, memoryless: bool) -> None:
        super().__init__()
        self.memory = nn.GRU(4, state_size, batch_first=True)
        self.values = nn.Linear(state_size, 3)
        self.memoryless = memoryless

    def forward(self, obs: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns values (windows, places, actions) and the state after each place (windows, places, state_size)."""
        if self.memoryless:  # each place is a window of its own, begun from zeros
            after = self.memory(obs.reshape(-1, 1, obs.shape[2]))[0].reshape(*obs.shape[:2], -1)
            return self.values(after), torch.zeros_like(after)
        after, _ = self.memory(obs, state.unsqueeze(0).contiguous())
        return self.values(after), after

    @torch.inference_mode()
    def act(self, obs: np.ndarray, state: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Returns the action of the highest value, and the state for the next step."""
        values, states = self(torch.from_numpy(obs)[None, None], state)
        return int(values.argmax()), states[:, -1]


@dataclass
class Result:
    """What a run leaves behind; success is turning as the sign said."""

    policy: QNetwork
    buffer: sw.ReplayBuffer
    evaluations: list[tuple[int, float]] = field(default_factory=list)  # (step, success of 100 greedy episodes)
    success: float = 0.0  # share of 500 greedy episodes, others than those of the evaluations
    wall_s: float = 0.0


def evaluate(policy: QNetwork, config: Config, episodes: int, seed: int) -> float:
    """Returns the share of greedy episodes that turn as the sign said."""
    env = TMaze(config.corridor)
    env.reset(seed=seed)
    right = 0
    for _ in range(episodes):
        obs, _ = env.reset()
        state = torch.zeros(1, config.state_size)
        terminated = truncated = False
        while not (terminated or truncated):
            action, state = policy.act(obs, state)
            obs, reward, terminated, truncated, _ = env.step(action)
            right += reward > 0
    return right / episodes


def td_errors(online: QNetwork, target: QNetwork, batch: dict[str, Any], gamma: float) -> tuple[torch.Tensor, ...]:
    """Returns double DQN's errors, one a place (0 where nothing is to be learnt), and the states after each place."""
    # Place 0 is always a row, the oldest of its window. Later places get their states from today's weights: the burn-in
    # lets an old state catch up before anything is learnt from it.
    state = batch["h"][:, 0]
    values, states = online(batch["obs"], state)
    with torch.no_grad():
        target_values, _ = target(batch["obs"], state)
        best = values.argmax(dim=2, keepdim=True)
        next_value = target_values.gather(2, best).squeeze(2)[:, 1:]
        # Where the next place is no row the episode was over: at a turn nothing is to come; else there is no target.
        done = batch["done"][:, :-1]
        goal = batch["reward"][:, :-1] + gamma * next_value * ~done
        learnt = batch["mask"][:, :-1] & (batch["valid"][:, 1:] | done)
    value = values.gather(2, batch["action"].unsqueeze(2)).squeeze(2)[:, :-1]
    # The last place only serves the target of the one before.
    return nn.functional.pad(torch.where(learnt, goal - value, 0.0), (0, 1)), states.detach()


def make_buffer(env: gym.Env, config: Config) -> sw.ReplayBuffer:
    """Returns a buffer of rows with their recurrent states, drawn as windows by priority."""
    return sw.ReplayBuffer.for_env(
        env,
        capacity=config.capacity,
        schema={"h": sw.Field((config.state_size,), mutable=True)},
        next_obs=None,  # the row after has it, and a window has the row after
        view=sw.Windows(config.length, burn_in=config.burn_in, stride=config.stride, bootstrap=1, place_indices=True),
        sampler=sw.Prioritized(alpha=0.6, beta=0.6),
        seed=config.seed,
    )


def train(config: Config, report: Callable[[int, float], None] | None = None) -> Result:
    """Trains one agent and reports each evaluation (step, success); on the CPU one config gives one result."""
    torch.set_num_threads(1)  # networks this small lose more to thread hand-over than they gain
    torch.manual_seed(config.seed)
    random = np.random.default_rng(config.seed)
    env = TMaze(config.corridor)
    online = QNetwork(config.state_size, config.memoryless)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), config.learning_rate, fused=True)
    buffer = make_buffer(env, config)
    result = Result(policy=target, buffer=buffer)
    began = time.perf_counter()

    obs, _ = env.reset(seed=config.seed)
    state = torch.zeros(1, config.state_size)
    for step in range(1, config.steps + 1):
        epsilon = max(config.epsilon_final, 1.0 - step / config.epsilon_steps)
        greedy, next_state = online.act(obs, state)  # also where the action is random: the state must see every step
        action = int(random.integers(3)) if random.random() < epsilon else greedy
        next_obs, reward, terminated, truncated, _ = env.step(action)
        # `h` is the state before this observation: what the network needs to begin at this row.
        buffer.add(obs=obs, action=action, reward=reward, h=state[0], terminated=terminated, truncated=truncated)
        obs, state = next_obs, next_state
        if terminated or truncated:
            obs, _ = env.reset()
            state = torch.zeros_like(state)
            # Learnt from between episodes, so that no window is drawn, and given a priority, before it is whole.
            for _ in range(config.updates_per_episode if step > config.learning_starts else 0):
                batch = buffer.sample(config.batch_size, device="cpu")
                errors, states = td_errors(online, target, batch, config.gamma)
                loss = (batch["weights"].unsqueeze(1) * errors.square()).sum() / batch["mask"].sum()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(online.parameters(), 10.0)
                optimizer.step()
                with torch.no_grad():
                    for old, new in zip(target.parameters(), online.parameters(), strict=True):
                        old.lerp_(new, config.target_rate)
                buffer.update_priorities(batch["indices"], errors, mask=batch["mask"])
                # The state after a place belongs to the next one: rows drawn again begin with a state of newer weights.
                buffer.write(batch["place_indices"][:, 1:], h=states[:, :-1])

        if step == config.steps or step % config.evaluate_every == 0:
            result.evaluations.append((step, evaluate(target, config, episodes=100, seed=1_000_000)))
            if report is not None:
                report(*result.evaluations[-1])

    result.wall_s = time.perf_counter() - began
    result.success = evaluate(target, config, episodes=500, seed=2_000_000)
    return result


def draw(evaluations: list[tuple[int, float]], path: str) -> None:
    """Writes a picture of the learning curve."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(*zip(*evaluations, strict=True), marker="o")
    axes.set(xlabel="environment steps", ylabel="share of right turns", ylim=(0, 1.02))
    figure.savefig(path, dpi=120)


def main() -> None:
    """Trains from the command line and prints a line for each evaluation."""
    parser = argparse.ArgumentParser(description="R2D2 in a T-maze with a Sharpwave buffer.")
    parser.add_argument("--steps", type=int, default=Config.steps, help="environment steps to train for")
    parser.add_argument("--seed", type=int, default=Config.seed, help="seed of everything random")
    parser.add_argument("--memoryless", action="store_true", help="zero the recurrent state at every step")
    parser.add_argument("--plot", help="write a picture of the learning curve to this file")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    config = Config(steps=options.steps, seed=options.seed, memoryless=options.memoryless)
    result = train(config, lambda step, success: print(f"step {step:6d}  success {success:6.1%}", flush=True))
    print(f"{options.steps} steps in {result.wall_s:.0f} s")
    print(f"turned as the sign said in 500 greedy episodes: {result.success:.1%}")
    if options.plot:
        draw(result.evaluations, options.plot)


if __name__ == "__main__":
    main()
