"""Advantages and returns of a rollout: the contender's side.

`python -m harness.estimator NAME` loads `peers/returns/NAME.py` and obeys one JSON line at a time: `describe`,
`prepare`, `time`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from harness import worker
from harness.worker import Operation, about, obey

# What everybody is set to.
GAMMA, GAE_LAMBDA = 0.99, 0.95
DONE_SHARE = 0.02
MOST_ERROR = 1e-4


class WrongAnswerError(RuntimeError):
    """Advantages or returns are not what the formula gives."""


class Rollout(NamedTuple):
    """The steps of all environments, (steps, envs): float32, and bool for `dones`. Every end is a termination."""

    rewards: np.ndarray
    values: np.ndarray
    dones: np.ndarray
    last_values: np.ndarray  # (envs,)

    @property
    def next_values(self) -> np.ndarray:
        """Values of what each step led to. After an end that is another episode's start, which must not count."""
        return np.concatenate([self.values[1:], self.last_values[None]])


def make_rollout(steps: int, envs: int) -> Rollout:
    """The same one for everybody."""
    rng = np.random.default_rng(0)
    rewards, values = rng.standard_normal((2, steps, envs), np.float32)
    dones = rng.random((steps, envs)) < DONE_SHARE
    return Rollout(rewards, values, dones, rng.standard_normal(envs, np.float32))


def textbook_gae(rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns by the formula, in float64."""
    arrays = (rollout.rewards, rollout.values, rollout.next_values)
    rewards, values, next_values = (array.astype(np.float64) for array in arrays)
    advantages, carry = np.empty_like(rewards), np.zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        alive = 1.0 - rollout.dones[t]
        carry = rewards[t] + GAMMA * alive * next_values[t] - values[t] + GAMMA * GAE_LAMBDA * alive * carry
        advantages[t] = carry
    return advantages, advantages + values


class Estimator:
    """One library's way to advantages and returns, by its own best documented path."""

    packages: tuple[str, ...] = ()
    note = ""
    facts: Mapping[str, Any] = {}

    def gae(self, rollout: Rollout) -> dict[str, Operation]:
        """Operations by variant. Inputs are laid out beforehand as the library likes them best; `run` answers with
        the last call's advantages and returns, both (steps, envs)."""
        raise NotImplementedError


class Worker(worker.Worker):
    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        self.operations: dict[str, Operation] = {}

    def describe(self) -> dict[str, object]:
        return about(self.estimator)

    def operations_of(self, case: str) -> dict[str, Operation]:
        steps, envs = map(int, case.removeprefix("gae_").split("x"))
        rollout = make_rollout(steps, envs)
        self.expected = textbook_gae(rollout)
        return self.estimator.gae(rollout)

    def check(self, operation: Operation) -> None:
        answer: Any = operation.run(1)
        for what, got, expected in zip(("advantages", "returns"), answer, self.expected, strict=True):
            error = float(np.abs(np.asarray(got) - expected).max())
            if not error <= MOST_ERROR:  # so that a NaN is wrong, too
                raise WrongAnswerError(f"{what} are off by {error:.2g}, at most {MOST_ERROR:g} is float32's rounding")


def main() -> None:
    (name,) = sys.argv[1:]
    obey(lambda: Worker(importlib.import_module(f"peers.returns.{name}").ESTIMATOR()))


if __name__ == "__main__":
    main()
