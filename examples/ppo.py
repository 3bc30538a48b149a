"""PPO on CartPole-v1: a RolloutBuffer in a whole training loop, with the right value behind every end.

    python examples/ppo.py --seed 0                      # Gymnasium's environments, on one CPU core
    python examples/ppo.py --device cuda --envs 4096     # CartPole in torch: no step leaves the GPU or waits for it
    python examples/ppo.py --env torch                   # the same environments without a GPU

The buffer appears on four lines: it is made once, `add` stores a step of all environments, a full rollout gets its
advantages, `minibatches` hands the rows out. `examples/distill.py` takes its teacher from here.
"""

import argparse
import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn

import sharpwave as sw

OBS_SCALE = (1.0, 1.0, 10.0, 1.0)  # position, speed, angle, turning speed; 0.2 rad is a fall
TIME_LIMIT = 500


@dataclass(frozen=True)
class Config:
    """What a run may change; the defaults solve CartPole-v1 in seconds on one CPU core."""

    steps: int = 4_096  # of each environment, at most
    seed: int = 0
    device: str = "cpu"
    env: str = "gym"  # or "torch"
    envs: int = 16
    target: float = 490.0  # five evaluations in a row that reach it end the run
    rollout_steps: int = 64
    minibatches: int = 4
    epochs: int = 8
    learning_rate: float = 5e-4  # falls to 0 over the run
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    evaluate_every: int = 4  # rollouts


class Step(NamedTuple):
    """What a step of all environments gave."""

    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: Tensor  # where the step led; the environments' `obs` begins the next episode where one ended


class GymCartPole:
    """Gymnasium's CartPole-v1, several side by side. In the mode SAME_STEP an end's own observation is in `info`."""

    def __init__(self, envs: int, seed: int, device: str) -> None:
        same_step = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.envs = gym.make_vec("CartPole-v1", envs, vectorization_mode="sync", vector_kwargs=same_step)
        self.obs = torch.from_numpy(self.envs.reset(seed=seed)[0]).to(device)

    def step(self, action: Tensor) -> Step:
        """Takes one action an environment."""
        obs, reward, terminated, truncated, info = self.envs.step(action.cpu().numpy())
        final_obs = obs.copy()
        for env in np.flatnonzero(terminated | truncated):
            final_obs[env] = info["final_obs"][env]
        arrays = (obs, reward.astype(np.float32), terminated, truncated, final_obs)
        self.obs, *rest = (torch.from_numpy(array).to(self.obs.device) for array in arrays)
        return Step(*rest)


class TorchCartPole:
    """The same environment as tensors on one device. Nothing branches on what they hold, so nothing waits for them."""

    def __init__(self, envs: int, seed: int, device: str) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.obs = self._starts(torch.empty(envs, 4, device=device))
        self.age = torch.zeros(envs, dtype=torch.int64, device=device)

    def _starts(self, like: Tensor) -> Tensor:
        return torch.empty_like(like).uniform_(-0.05, 0.05, generator=self.generator)

    def step(self, action: Tensor) -> Step:
        """Takes one action an environment: a push of 10 N to the left (0) or to the right (1), for 0.02 s."""
        _, speed, angle, turning = self.obs.unbind(1)
        sin, cos = angle.sin(), angle.cos()
        # A cart of 1 kg, a pole of 0.1 kg whose middle is 0.5 m from the joint.
        push = (20.0 * action - 10.0 + 0.05 * turning.square() * sin) / 1.1
        turning_change = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos.square() / 1.1))
        speed_change = push - 0.05 * turning_change * cos / 1.1
        final_obs = self.obs + 0.02 * torch.stack((speed, speed_change, turning, turning_change), dim=1)
        terminated = (final_obs[:, 0].abs() > 2.4) | (final_obs[:, 2].abs() > math.radians(12))
        truncated = self.age + 1 >= TIME_LIMIT
        over = terminated | truncated
        # Every environment draws a start and few take it: that is cheaper than to ask the device which ones need it.
        self.obs = torch.where(over[:, None], self._starts(final_obs), final_obs)
        self.age = torch.where(over, 0, self.age + 1)
        return Step(torch.ones_like(speed), terminated, truncated, final_obs)


def network(hidden: int, outputs: int) -> nn.Sequential:
    """Returns a small network whose outputs start at 0: both actions alike, and no return promised."""
    last = nn.Linear(hidden, outputs)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), last)


class Policy(nn.Module):
    """Two small networks: one from observations to the logits of both actions, one to their value."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(OBS_SCALE))
        self.actor, self.critic = network(hidden, 2), network(hidden, 1)

    def logits(self, obs: Tensor) -> Tensor:
        """Returns (..., 2); the greedy action is the larger one's."""
        return self.actor(obs * self.scale)

    def value(self, obs: Tensor) -> Tensor:
        """Returns (...): the return that the critic expects."""
        return self.critic(obs * self.scale).squeeze(-1)


@dataclass
class Result:
    """What a run leaves behind."""

    policy: Policy  # the best-evaluated one, on the CPU
    rollout: sw.RolloutBuffer  # with the last rollout in it
    greedy_return: float = 0.0  # mean of 20 greedy episodes, from other starts than the evaluations'
    evaluations: list[tuple[int, float]] = field(default_factory=list)  # (steps of all environments, mean of 20)
    steps: int = 0  # of all environments together
    seconds: float = 0.0


def evaluate(logits: Callable[[Tensor], Tensor], seed: int, episodes: int = 20) -> float:
    """Returns the mean return of greedy episodes in Gymnasium's CartPole-v1, played side by side on the CPU."""
    envs = gym.make_vec("CartPole-v1", episodes, vectorization_mode="vector_entry_point")
    obs, _ = envs.reset(seed=seed)
    alive, total = np.ones(episodes, bool), 0.0
    with torch.inference_mode():
        while alive.any():
            obs, reward, terminated, truncated, _ = envs.step(logits(torch.from_numpy(obs)).argmax(dim=-1).numpy())
            total += float(reward[alive].sum())
            alive &= ~(terminated | truncated)
    return total / episodes


@torch.no_grad()
def collect(env: GymCartPole | TorchCartPole, policy: Policy, rollout: sw.RolloutBuffer, config: Config) -> None:
    """Fills the buffer with steps of the policy, and works their advantages out."""
    rollout.clear()  # what the policy did before it learnt does not count any more
    while not rollout.is_full:
        obs = env.obs
        log_probs = policy.logits(obs).log_softmax(dim=-1)
        # The larger sum with Gumbel noise is a draw from these probabilities, and the host need not check them.
        action = (log_probs - torch.empty_like(log_probs).exponential_().log()).argmax(dim=-1)
        step = env.step(action)
        rollout.add(
            observations=obs,
            actions=action,
            # Discounted sums of these are means: between 0 and 1, which a small critic reaches at once.
            rewards=(1 - config.gamma) * step.reward,
            dones=step.terminated | step.truncated,
            values=policy.value(obs),
            log_probs=log_probs.gather(-1, action[:, None]).squeeze(-1),
            # A pole that falls at the time limit has fallen: nothing would have followed.
            truncated=step.truncated & ~step.terminated,
            # Of all environments, though few rows use it: which ones, only the device knows.
            final_values=policy.value(step.final_obs),
        )
    rollout.compute_returns_and_advantages(policy.value(env.obs), config.gamma, config.gae_lambda)


def learn(policy: Policy, optimizer: torch.optim.Optimizer, rollout: sw.RolloutBuffer, config: Config) -> None:
    """Takes PPO's gradient steps over one rollout."""
    for batch in rollout.minibatches(config.minibatches, config.epochs, normalize_advantages="minibatch"):
        log_probs = policy.logits(batch["observations"]).log_softmax(dim=-1)
        taken = log_probs.gather(-1, batch["actions"][:, None]).squeeze(-1)
        ratio = (taken - batch["old_log_probs"]).exp()
        clipped = ratio.clamp(1 - config.clip, 1 + config.clip)
        gain = torch.minimum(ratio * batch["advantages"], clipped * batch["advantages"])
        value_loss = nn.functional.mse_loss(policy.value(batch["observations"]), batch["returns"])
        optimizer.zero_grad()
        (value_loss - gain.mean()).backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()


def train(config: Config, progress: Callable[[Result], None] = lambda result: None) -> Result:
    """Trains one agent; on the CPU the same config gives the same result."""
    torch.set_num_threads(1)  # networks this small lose more to thread hand-over than they gain
    torch.manual_seed(config.seed)
    env = (GymCartPole if config.env == "gym" else TorchCartPole)(config.envs, config.seed, config.device)
    policy = Policy().to(config.device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=config.learning_rate, fused=True)
    rollout = sw.RolloutBuffer(config.envs, config.rollout_steps, obs_shape=4, device=config.device, seed=config.seed)
    result = Result(policy=Policy(), rollout=rollout)
    rollouts = max(1, config.steps // config.rollout_steps)
    began, best = time.monotonic(), -1.0
    for number in range(1, rollouts + 1):
        optimizer.param_groups[0]["lr"] = config.learning_rate * (1 - (number - 1) / rollouts)
        collect(env, policy, rollout, config)
        learn(policy, optimizer, rollout, config)
        result.steps += len(rollout)
        if number % config.evaluate_every == 0 or number == rollouts:
            now = copy.deepcopy(policy).cpu()
            value = evaluate(now.logits, seed=1_000_000)
            result.evaluations.append((result.steps, value))
            result.seconds = time.monotonic() - began
            if value >= best:  # of equals the later has learnt more
                best, result.policy = value, now
            progress(result)
            if sum(value >= config.target for _, value in result.evaluations[-5:]) == 5:
                break
    result.greedy_return = evaluate(result.policy.logits, seed=2_000_000)
    return result


def main() -> None:
    """Trains from the command line and prints a line an evaluation."""
    parser = argparse.ArgumentParser(description="PPO on CartPole-v1.")
    for name in ("steps", "seed", "device", "envs", "target"):
        default = getattr(Config, name)
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--env", choices=("gym", "torch"), help="default: gym on the CPU, torch elsewhere")
    options = parser.parse_args()
    if min(options.steps, options.envs) < 1:
        parser.error("--steps and --envs must be at least 1")
    options.env = options.env or ("gym" if options.device == "cpu" else "torch")

    def report(now: Result) -> None:
        print(f"{now.steps:11,} steps  greedy return {now.evaluations[-1][1]:5.1f}  {now.seconds:5.1f} s", flush=True)

    result = train(Config(**vars(options)), progress=report)
    print(f"greedy return over 20 episodes: {result.greedy_return:.1f}, after {result.seconds:.0f} s")


if __name__ == "__main__":
    main()
