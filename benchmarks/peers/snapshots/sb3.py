"""Stable-Baselines3 `save_to_pkl` and `load_from_pkl`, as its `save_replay_buffer` does."""

from __future__ import annotations

from harness.keeper import FIRST_BATCH, Keeper
from harness.workloads import Workload
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl

from peers.sb3 import Sb3


class Sb3Keeper(Keeper):
    packages = ("stable-baselines3", "torch", "numpy")
    note = "pickles"

    def fill(self, workload: Workload, capacity: int) -> None:
        contender = Sb3()
        contender.fill(workload, capacity)
        self.buffer = contender.buffer

    def save(self, path: str) -> None:
        with open(path, "wb") as file:  # by name it appends a suffix
            save_to_pkl(file, self.buffer)

    def load(self, path: str) -> ReplayBuffer:
        with open(path, "rb") as file:
            loaded = load_from_pkl(file)
        loaded.sample(FIRST_BATCH)
        return loaded


KEEPER = Sb3Keeper
