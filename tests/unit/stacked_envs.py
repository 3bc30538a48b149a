"""A vector environment that stacks frames as ALE's own does, in plain NumPy: stacks begin with zeros, or with the first
frame over and over; next-step and same-step autoreset; episodes that terminate and episodes that are cut off."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

FRAME = (5, 7)


class StackedEnvs(VectorEnv):  # type: ignore[misc]
    def __init__(
        self, num_envs: int, stack: int = 4, padding: str = "zero", mode: AutoresetMode = AutoresetMode.NEXT_STEP
    ) -> None:
        self.num_envs, self.padding, self.mode = num_envs, padding, mode
        self.metadata = {"autoreset_mode": mode}
        self.single_observation_space = spaces.Box(0, 255, (stack, *FRAME), np.uint8)
        self.single_action_space = spaces.Discrete(3)
        self.stacks = np.zeros((num_envs, stack, *FRAME), np.uint8)
        self.ended = np.zeros(num_envs, bool)

    def frame(self) -> np.ndarray:
        # Few different frames: some are black, and some episodes begin as the one before ended.
        return np.full(FRAME, self.random.integers(0, 3), np.uint8) * np.uint8(self.random.integers(0, 2))

    def start(self, env: int) -> None:
        frame = self.frame()
        self.stacks[env] = 0 if self.padding == "zero" else frame
        self.stacks[env, -1] = frame

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.random = np.random.default_rng(seed)
        for env in range(self.num_envs):
            self.start(env)
        self.ended[:] = False
        return self.stacks.copy(), {}

    def step(self, actions: Any) -> Any:
        terminated, truncated = np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        reward = self.random.normal(size=self.num_envs).astype(np.float32)
        for env in range(self.num_envs):
            if self.mode == AutoresetMode.NEXT_STEP and self.ended[env]:
                self.start(env)
                continue
            self.stacks[env, :-1] = self.stacks[env, 1:]
            self.stacks[env, -1] = self.frame()
            terminated[env], truncated[env] = self.random.random(2) < (0.1, 0.06)
        self.ended = terminated | truncated
        info = {}
        if self.mode == AutoresetMode.SAME_STEP and self.ended.any():
            info["final_obs"] = self.stacks.copy()
            for env in np.flatnonzero(self.ended):
                self.start(env)
        return self.stacks.copy(), reward, terminated, truncated, info
