"""Stable-Baselines3 `ReplayBuffer`, `NStepReplayBuffer`, `HerReplayBuffer`: NumPy arrays inside, torch tensors out."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces
from harness.worker import GAMMA, GOAL_RATIO, STEPS, Contender, Operation, goal_reward
from harness.workloads import Workload
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv
from stable_baselines3.her import HerReplayBuffer


class Sb3(Contender):
    packages = ("stable-baselines3", "torch", "numpy")
    note = "many rows in one add only as n_envs"
    kind = ReplayBuffer
    settings: ClassVar[dict[str, Any]] = {}

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload, self.capacity = workload, capacity
        self.buffer = self.filled(1)

    def filled(self, n_envs: int) -> ReplayBuffer:
        rows = self.workload
        image = rows.obs_dtype == "uint8"
        obs_space = spaces.Box(0 if image else -np.inf, 255 if image else np.inf, rows.obs_shape, rows.obs_dtype)
        action_space = spaces.Box(-1, 1, rows.action_shape, np.float32) if rows.action_shape else spaces.Discrete(6)
        buffer = self.kind(self.capacity, obs_space, action_space, device="cpu", n_envs=n_envs, **self.settings)
        # Through its arrays, as add() takes one step at a time. The flat views see (position, env) as rows.
        targets = {
            "obs": buffer.observations,
            "action": buffer.actions,
            "reward": buffer.rewards,
            "done": buffer.dones,
        }
        if not buffer.optimize_memory_usage:
            targets["next_obs"] = buffer.next_observations
        flat = {name: array.reshape(-1, *array.shape[2:]) for name, array in targets.items()}
        start = 0
        for chunk in rows.chunks(len(flat["obs"])):
            end = start + len(chunk["reward"])
            for name, array in flat.items():
                array[start:end] = chunk[name].reshape(array[start:end].shape)
            start = end
        buffer.timeouts[:] = 0
        buffer.full = True
        return buffer

    def add_one(self) -> dict[str, Operation]:
        steps = [
            (obs[None], after[None], np.asarray(action)[None], np.array([reward]), np.array([done]), [{}])
            for obs, action, reward, after, done in self.workload.rows()
        ]
        return {"": self.adding(self.buffer, steps)}

    def add_many(self, count: int) -> dict[str, Operation]:
        batch = self.workload.columns(count)
        infos: list[dict] = [{} for _ in range(count)]
        step = (batch["obs"], batch["next_obs"], batch["action"], batch["reward"], batch["done"], infos)
        return {"": self.adding(self.filled(count), [step])}

    @staticmethod
    def adding(buffer: ReplayBuffer, steps: list[tuple]) -> Operation:
        endless = cycle(steps)

        def add(calls: int) -> None:
            for obs, next_obs, action, reward, done, infos in islice(endless, calls):
                buffer.add(obs, next_obs, action, reward, done, infos)

        return Operation(add)

    def sample(self, count: int) -> dict[str, Operation]:
        buffer = self.buffer

        def sample(calls: int) -> None:
            for _ in range(calls):
                _batch = buffer.sample(count)

        return {"": Operation(sample)}


class NStep(Sb3):
    note = "NStepReplayBuffer: folds the steps when it samples"
    kind = NStepReplayBuffer
    settings: ClassVar[dict[str, Any]] = {"n_steps": STEPS, "gamma": GAMMA}


class Derived(Sb3):
    note = "optimize_memory_usage: each stack is kept once"
    settings: ClassVar[dict[str, Any]] = {"optimize_memory_usage": True, "handle_timeout_termination": False}


class GoalEnv(gymnasium.Env):
    """What the buffer asks an environment: its spaces, and the reward of many pairs of goals."""

    def __init__(self, workload: Workload) -> None:
        parts = workload.split_goals(workload.columns(1)["obs"])
        boxes = {name: spaces.Box(-np.inf, np.inf, part.shape[1:], part.dtype) for name, part in parts.items()}
        self.observation_space = spaces.Dict(boxes)
        self.action_space = spaces.Box(-1, 1, workload.action_shape, np.float32)

    def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, _infos: object) -> np.ndarray:
        return goal_reward(achieved, desired)


class Hindsight(Sb3):
    note = "HerReplayBuffer: 4 of 5 examples get a goal from the future"

    def fill(self, workload: Workload, capacity: int) -> None:
        self.workload = workload
        env = DummyVecEnv([lambda: GoalEnv(workload)])
        self.buffer = HerReplayBuffer(
            capacity,
            env.observation_space,
            env.action_space,
            env,
            device="cpu",
            n_sampled_goal=round(GOAL_RATIO / (1 - GOAL_RATIO)),
            goal_selection_strategy="future",
        )
        for chunk in workload.chunks(capacity):
            self.adding(self.buffer, self.steps(list(zip(*chunk.values(), strict=True)))).run(len(chunk["reward"]))

    def steps(self, rows: list[tuple]) -> list[tuple]:
        split = self.workload.split_goals
        return [
            (split(obs[None]), split(after[None]), action[None], np.array([reward]), np.array([done]), [{}])
            for obs, action, reward, after, done in rows
        ]

    def add_one(self) -> dict[str, Operation]:
        return {"": self.adding(self.buffer, self.steps(self.workload.rows()))}


FORMS = {"plain": Sb3, "nstep": NStep, "derived": Derived, "hindsight": Hindsight}
