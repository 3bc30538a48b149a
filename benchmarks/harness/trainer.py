"""Whole training steps in torch: the contender's side.

`python -m harness.trainer NAME` loads `peers/training/NAME.py` and obeys one JSON line at a time: `fill`, `time`.
A step adds one row, draws a batch, trains on it and, by priority, gives the batch new priorities. The buffer's calls
are timed apart from the rest, with whatever makes tensors of what the buffer gives and takes.
"""

from __future__ import annotations

import copy
import gc
import importlib
import sys
import time
from collections.abc import Mapping
from itertools import cycle, islice, pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional

from harness.worker import GAMMA, about, obey, wait_until_quiet
from harness.workloads import DISCRETE_ACTIONS, WORKLOADS, Workload

POLYAK = 0.005
ENTROPY = 0.2
LOG_STD_RANGE = (-5.0, 2.0)
TORCH_THREADS = 1  # the same for everybody


class Batch(NamedTuple):
    """What a learner needs: float32 but for discrete actions, which are int64; a row a number where it is one."""

    obs: torch.Tensor
    action: torch.Tensor
    reward: torch.Tensor
    next_obs: torch.Tensor
    done: torch.Tensor
    weights: torch.Tensor | None = None
    indices: Any = None


class Trainee:
    """One library's buffer under a learner, by its own best documented path."""

    packages: tuple[str, ...] = ()
    note = ""
    facts: Mapping[str, Any] = {}

    def __init__(self, prioritized: bool) -> None:
        self.prioritized = prioritized

    def fill(self, workload: Workload, capacity: int) -> None:
        raise NotImplementedError

    def rows(self) -> list[tuple[Any, ...]]:
        """What `add` is given in turn, as an environment loop of this library holds it."""
        raise NotImplementedError

    def add(self, *row: Any) -> None:
        raise NotImplementedError

    def draw(self, count: int) -> Batch:
        raise NotImplementedError

    def update(self, indices: Any, priorities: torch.Tensor) -> None:
        raise NotImplementedError


def network(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Learner(Protocol):
    def learn(self, batch: Batch) -> torch.Tensor:
        """Trains on a batch; answers with its errors, one a row."""
        ...


class Dqn:
    def __init__(self, workload: Workload) -> None:
        self.online = network(workload.obs_shape[0], 128, 128, DISCRETE_ACTIONS)
        self.target = copy.deepcopy(self.online)
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=1e-4)

    def learn(self, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            after = self.target(batch.next_obs).max(dim=1).values
            wanted = batch.reward + GAMMA * (1 - batch.done) * after
        guessed = self.online(batch.obs).gather(1, batch.action[:, None])[:, 0]
        errors = wanted - guessed
        losses = errors.square()
        loss = losses.mean() if batch.weights is None else (losses * batch.weights).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return errors.detach().abs()


class Sac:
    def __init__(self, workload: Workload) -> None:
        obs, action = workload.obs_shape[0], workload.action_shape[0]
        self.actor = network(obs, 256, 256, 2 * action)
        self.critics = nn.ModuleList(network(obs + action, 256, 256, 1) for _ in range(2))
        self.targets = copy.deepcopy(self.critics)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=3e-4)
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=3e-4)

    def act(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_std = self.actor(obs).chunk(2, dim=1)
        log_std = log_std.clamp(*LOG_STD_RANGE)
        noise = torch.randn_like(mean)
        raw = mean + log_std.exp() * noise
        # Of the squashed action; constants do not matter here.
        likely = -0.5 * noise.square() - log_std - 2 * (raw.neg() - functional.softplus(-2 * raw))
        return raw.tanh(), likely.sum(dim=1)

    def learn(self, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            action, likely = self.act(batch.next_obs)
            after = torch.cat([batch.next_obs, action], dim=1)
            least = torch.minimum(*(critic(after)[:, 0] for critic in self.targets))
            wanted = batch.reward + GAMMA * (1 - batch.done) * (least - ENTROPY * likely)
        now = torch.cat([batch.obs, batch.action], dim=1)
        guesses = [critic(now)[:, 0] for critic in self.critics]
        loss = sum(functional.mse_loss(guessed, wanted) for guessed in guesses)
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()

        action, likely = self.act(batch.obs)
        chosen = torch.cat([batch.obs, action], dim=1)
        value = torch.minimum(*(critic(chosen)[:, 0] for critic in self.critics))
        self.actor_optimizer.zero_grad()
        (ENTROPY * likely - value).mean().backward()
        self.actor_optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(self.critics.parameters(), self.targets.parameters(), strict=True):
                theirs.lerp_(ours, POLYAK)
        return (wanted - guesses[0]).detach().abs()


class Worker:
    def __init__(self, name: str) -> None:
        self.make = importlib.import_module(f"peers.training.{name}").TRAINEE

    def fill(self, workload: str, capacity: int, algorithm: str, prioritized: bool, batch: int) -> dict[str, object]:
        torch.set_num_threads(TORCH_THREADS)
        torch.manual_seed(0)
        kind = WORKLOADS[workload]
        self.trainee, self.batch = self.make(prioritized), batch
        self.trainee.fill(kind, capacity)
        self.learner: Learner = {"dqn": Dqn, "sac": Sac}[algorithm](kind)
        self.endless = cycle(self.trainee.rows())
        self.check()
        gc.collect()
        gc.freeze()
        return about(self.trainee)

    def check(self) -> None:
        """Raises where a batch is not what a learner needs."""
        batch = self.trainee.draw(self.batch)
        for name in ("obs", "reward", "next_obs", "done"):
            value = getattr(batch, name)
            if value.dtype != torch.float32 or len(value) != self.batch:
                raise TypeError(f"{name} is {value.dtype} of {tuple(value.shape)}")
        if (
            batch.reward.ndim != 1
            or batch.done.ndim != 1
            or (batch.action.ndim == 1) != (not batch.action.is_floating_point())
        ):
            raise TypeError("rewards and ends are one number a row, and so are discrete actions")

    def time(self, steps: int) -> dict[str, float]:
        """Nanoseconds a step in the buffer and in all."""
        gc.disable()
        self.run(max(1, steps // 8))
        in_buffer, in_all = self.run(steps)
        gc.enable()
        wait_until_quiet()
        return {"buffer_ns": in_buffer / steps, "step_ns": in_all / steps}

    def run(self, steps: int) -> tuple[int, int]:
        trainee, learn, clock, spent = self.trainee, self.learner.learn, time.perf_counter_ns, 0
        began = clock()
        for row in islice(self.endless, steps):
            start = clock()
            trainee.add(*row)
            batch = trainee.draw(self.batch)
            spent += clock() - start
            errors = learn(batch)
            if trainee.prioritized:
                start = clock()
                trainee.update(batch.indices, errors)
                spent += clock() - start
        return spent, clock() - began


def main() -> None:
    (name,) = sys.argv[1:]
    obey(lambda: Worker(name))


if __name__ == "__main__":
    main()
