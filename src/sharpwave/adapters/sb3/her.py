"""Hindsight experience replay for Stable-Baselines3: goals are replaced when rows are drawn."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer as Base

import sharpwave as sw
from sharpwave.checks import one_of, whole
from sharpwave.errors import SchemaError

from .buffer import ReplayBuffer

__all__ = ["HerReplayBuffer"]

Array = np.ndarray[Any, Any]
_GOALS = ("observation", "achieved_goal", "desired_goal")


class HerReplayBuffer(ReplayBuffer, Base):
    """Replaces ``HerReplayBuffer`` of Stable-Baselines3: hindsight experience replay with the environment's
    ``compute_reward``.

    Args:
        buffer_size, observation_space, action_space, device, n_envs, optimize_memory_usage, handle_timeout_termination:
            As for ``ReplayBuffer``. The observation is a dict with ``achieved_goal`` and ``desired_goal``.
        env: The environments; ``compute_reward(achieved_goal, desired_goal, infos)`` of the first one is called with
            arrays of many goals. The algorithm gives it.
        n_sampled_goal: Examples with a new goal for each example with its own goal, on average.
        goal_selection_strategy: The step whose achieved goal becomes the new goal: ``"future"`` this step or a later
            one, ``"final"`` the last step of the episode, ``"episode"`` any step of it.
        copy_info_dict: Keeps the ``infos`` and gives them to ``compute_reward``, which gets empty dicts otherwise.
        **options: Those of ``ReplayBuffer``.

    Example:
        >>> from stable_baselines3 import DQN
        >>> from stable_baselines3.common.envs import BitFlippingEnv
        >>> model = DQN("MultiInputPolicy", BitFlippingEnv(), replay_buffer_class=HerReplayBuffer)
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Dict,
        action_space: spaces.Space[Any],
        env: Any,
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        n_sampled_goal: int = 4,
        goal_selection_strategy: Any = "future",
        copy_info_dict: bool = False,
        **options: Any,
    ) -> None:
        where = "HerReplayBuffer()"
        if not isinstance(observation_space, spaces.Dict) or not set(_GOALS) <= set(observation_space.spaces):
            raise SchemaError(
                f"{where}: observation_space: expected a Dict with {', '.join(_GOALS)}, got {observation_space}"
            )
        self.n_sampled_goal = whole(where, "n_sampled_goal", n_sampled_goal, 0)
        self.her_ratio = 1 - 1 / (self.n_sampled_goal + 1)
        name = getattr(goal_selection_strategy, "name", goal_selection_strategy)
        name = name.lower() if isinstance(name, str) else name
        self.goal_selection_strategy = one_of(where, "goal_selection_strategy", name, ("future", "final", "episode"))
        self.copy_info_dict = copy_info_dict
        if copy_info_dict and options.get("storage") is not None:
            raise SchemaError(
                f"{where}: copy_info_dict: the infos are Python objects of this process; give no storage=, or "
                "copy_info_dict=False"
            )
        self._compute_reward = EnvReward(env)
        super().__init__(
            buffer_size,
            observation_space,
            action_space,
            device,
            n_envs,
            optimize_memory_usage,
            handle_timeout_termination,
            **options,
        )
        if copy_info_dict and self.n_steps > 1:
            raise SchemaError(
                f"{where}: copy_info_dict: an example of n_steps={self.n_steps} has rewards of several steps, and "
                "compute_reward gets the infos of one; give n_steps=1, or copy_info_dict=False"
            )
        self._infos = np.full(self.buffer_size * n_envs if copy_info_dict else 0, None, object)
        self._rows_added = 0
        self._open_stream()

    def _view(self, n_steps: int, gamma: float) -> sw.Transitions:
        # With infos the rewards are computed after the draw, when the rows are known.
        reward = _no_reward if self.copy_info_dict else self._compute_reward
        strategy: Any = self.goal_selection_strategy  # SB3's enumeration has our names
        return sw.Transitions(n_steps, gamma, sw.Hindsight(strategy, self.her_ratio, reward))

    def _own_fields(self) -> dict[str, Any]:
        return {"info": sw.Field((), "int64")} if self.copy_info_dict else {}

    def _open_stream(self) -> None:
        if self._inner is not None:
            self._stream = self._inner.writer()

    @property
    def env(self) -> Any:
        """The environments; None after unpickling, until ``set_env``."""
        return self._compute_reward.env

    def set_env(self, env: Any) -> None:
        """Gives the environments to a buffer that was unpickled."""
        if self.env is not None:
            raise ValueError("set_env(): the buffer has its environments; make another buffer for others")
        self._compute_reward.env = env

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Adds one step of every environment; ``next_obs`` of an episode's last step is its final observation."""
        if not self.copy_info_dict:
            self._add(obs, next_obs, action, reward, done, infos, {})
            return
        numbers = self._rows_added + np.arange(self.n_envs)
        self._add(obs, next_obs, action, reward, done, infos, {"info": numbers})
        self._infos[numbers % len(self._infos)] = infos
        self._rows_added += self.n_envs

    def _draw(self, batch_size: int) -> dict[str, Any]:
        batch = self.inner.sample(batch_size)
        if self.copy_info_dict and batch["relabelled"].any():
            new = batch["relabelled"]
            achieved, desired = batch["next_obs"]["achieved_goal"][new], batch["obs"]["desired_goal"][new]
            infos = [copy.deepcopy(info) for info in self._infos[batch["info"][new] % len(self._infos)]]
            batch["reward"][new] = self._compute_reward(achieved, desired, infos)
        return batch

    def truncate_last_trajectory(self) -> None:
        """Ends the open episodes: they may be drawn, and the next steps added start new ones."""
        if self._stream is not None:
            self._stream.close()
            self._open_stream()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        hindsight = self.inner.view.hindsight  # type: ignore[union-attr]
        if not self.copy_info_dict:
            self._compute_reward = hindsight.reward  # type: ignore[union-attr,assignment]
        self._open_stream()


class EnvReward:
    """The reward of goals, computed by the environments; pickled without them."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __call__(self, achieved: Array, desired: Array, infos: list[Any] | None = None) -> Array:
        if self.env is None:
            raise SchemaError("sample(): the environments that compute rewards are missing; call set_env(env)")
        infos = [{} for _ in range(len(achieved))] if infos is None else infos
        # As in Stable-Baselines3: all environments are alike, and the first one computes.
        (rewards,) = self.env.env_method("compute_reward", achieved, desired, infos, indices=[0])
        return np.asarray(rewards, np.float32).reshape(len(achieved))

    def __reduce__(self) -> tuple[Any, ...]:
        return EnvReward, (None,)


def _no_reward(achieved: Array, desired: Array) -> Array:
    return np.zeros(len(achieved), np.float32)
