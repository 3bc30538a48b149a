"""Films an environment: `python -m harness.film ENVIRONMENT STEPS PATH`, in the environment `frames`.

Atari the way agents see it: every fourth frame, the larger of two, grey, 84 x 84. CartPole's rendering is scaled
down to the same.
"""

from __future__ import annotations

import sys

import cv2
import gymnasium
import numpy as np
from gymnasium.wrappers import AtariPreprocessing

SIDE = 84


def grey(image: np.ndarray) -> np.ndarray:
    return cv2.resize(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY), (SIDE, SIDE), interpolation=cv2.INTER_AREA)


class Screen(gymnasium.ObservationWrapper):
    """What is rendered becomes the observation."""

    def observation(self, observation: np.ndarray) -> np.ndarray:
        self.state = observation
        return grey(self.render())


def make(environment: str) -> gymnasium.Env:
    if environment.startswith("ALE/"):
        import ale_py

        gymnasium.register_envs(ale_py)
        return AtariPreprocessing(gymnasium.make(environment, frameskip=1), frame_skip=4, screen_size=SIDE)
    return Screen(gymnasium.make(environment, render_mode="rgb_array"))


def main() -> None:
    environment, steps, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    env, rng = make(environment), np.random.default_rng(0)
    frames, starts = [env.reset(seed=0)[0]], [True]
    while len(frames) - sum(starts) < steps:
        action = rng.integers(env.action_space.n)
        if isinstance(env, Screen) and rng.random() < 0.8:
            # Pushed towards where the pole falls, it stands for hundreds of steps.
            action = int(env.state[2] + env.state[3] > 0)
        frame, _, terminated, truncated, _ = env.step(action)
        frames.append(frame)
        starts.append(False)
        if (terminated or truncated) and len(frames) - sum(starts) < steps:
            frames.append(env.reset()[0])
            starts.append(True)
    np.savez_compressed(path, frames=np.stack(frames), starts=np.array(starts))


if __name__ == "__main__":
    main()
