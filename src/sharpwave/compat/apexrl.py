"""The names of ApexRL's buffers: torch tensors in, torch tensors out.

    from sharpwave.compat.apexrl import DistillationBuffer, ReplayBuffer, RolloutBuffer

What differs from upstream, on purpose. ``ReplayBuffer``: the action dtype is taken from the first action when it is not
given, where upstream's default of int64 turns 0.5 into 0; and one unbatched transition is one row, where upstream reads
an observation of four numbers as four rows. ``RolloutBuffer``: the shape of actions is taken from the first ones, where
upstream fails on any but single numbers; privileged observations must come once they are declared, where upstream keeps
old ones; and what is not there yet (advantages, missing steps) is an error, where upstream hands out zeros or the last
rollout's rows. ``DistillationBuffer`` is a name without code upstream: here it is ``sharpwave.DistillationBuffer``.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

import sharpwave as sw
from sharpwave.buffers.columns import Torch
from sharpwave.checks import check_settable
from sharpwave.errors import BufferFull, SchemaError

__all__ = ["DistillationBuffer", "ReplayBuffer", "RolloutBuffer"]

_PLURAL = {
    "obs": "observations",
    "action": "actions",
    "reward": "rewards",
    "next_obs": "next_observations",
    "done": "dones",
    "critic_obs": "critic_observations",
    "next_critic_obs": "next_critic_observations",
}


class ReplayBuffer:
    """ApexRL's replay buffer over ``sharpwave.ReplayBuffer``, which ``.inner`` holds after the first add.

    Args:
        capacity: Rows kept.
        obs_shape: Shape of one observation.
        action_shape: Shape of one action.
        device: Where batches go; rows stay in host memory.
        obs_dtype: Of observations.
        action_dtype: Of actions; None takes int64 or float32, as the first action is.
        critic_obs_shape: Shape of the critic's own observation, if there is one.
        seed: Of the draws.
    """

    def __init__(
        self,
        capacity: int,
        obs_shape: tuple[int, ...],
        action_shape: tuple[int, ...] = (),
        device: Any = "cpu",
        obs_dtype: Any = torch.float32,
        action_dtype: Any = None,
        critic_obs_shape: tuple[int, ...] | None = None,
        seed: int | None = None,
    ) -> None:
        self._capacity = capacity
        self._device = torch.device(device)
        self._seed = seed
        self._action_shape = sw.Field(action_shape).shape
        self._action_dtype = action_dtype
        self._schema: dict[str, Any] = {
            "obs": sw.Field(obs_shape, obs_dtype),
            "done": sw.Field((), "float32"),
        }
        if critic_obs_shape is not None:
            self._schema["critic_obs"] = sw.Field(critic_obs_shape)
            self._schema["next_critic_obs"] = sw.Field(critic_obs_shape)
        self.inner: sw.ReplayBuffer | None = None
        self._first_add = threading.Lock()
        sw.ReplayBuffer(capacity, obs_shape=1).close()  # a wrong capacity is an error here, not at the first add

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "inner":
            check_settable(self, name)
        object.__setattr__(self, name, value)

    def add(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        done: Any,
        critic_obs: Any = None,
        next_critic_obs: Any = None,
    ) -> None:
        """Adds one transition, or a batch with a leading axis; a batch of none does nothing."""
        values = {"obs": obs, "action": action, "reward": reward, "next_obs": next_obs, "done": done}
        values |= {"critic_obs": critic_obs, "next_critic_obs": next_critic_obs}
        row = {name: _to_host(value) for name, value in values.items() if value is not None}
        if row["reward"].size == 0:
            return
        if self.inner is None:
            with self._first_add:
                if self.inner is None:
                    inner = self._build(row["action"])
                    inner.add(**row)
                    self.inner = inner  # only now: a first add that fails leaves nothing decided
                    return
        self.inner.add(**row)

    def _build(self, action: np.ndarray[Any, Any]) -> sw.ReplayBuffer:
        dtype = self._action_dtype
        if dtype is None:
            dtype = "int64" if action.dtype.kind in "iub" else "float32"
        schema = {**self._schema, "action": sw.Field(self._action_shape, dtype)}
        return sw.ReplayBuffer(self._capacity, schema=schema, seed=self._seed)

    def sample(self, batch_size: int) -> dict[str, torch.Tensor]:
        """Rows drawn with replacement, as tensors on the buffer's device.

        Raises:
            SchemaError: ``batch_size`` is not positive, or more than the buffer holds.
        """
        if self.inner is None or not 1 <= batch_size <= len(self.inner):
            raise SchemaError(f"sample(): batch_size: expected 1 to the {len(self)} rows held, got {batch_size}")
        batch = self.inner.sample(batch_size, device=self._device)
        return {_PLURAL[name]: tensor for name, tensor in batch.items() if name in _PLURAL}

    def __len__(self) -> int:
        return 0 if self.inner is None else len(self.inner)

    def clear(self) -> None:
        """Forgets every row."""
        if self.inner is not None:
            self.inner.clear()

    def state_dict(self) -> dict[str, Any]:
        """Rows as tensors, oldest first, and what they must fit."""
        held = [] if self.inner is None else list(self.inner.rows())
        rows = {
            name: torch.from_numpy(np.concatenate([part[name] for part in held]))
            for name in (held[0] if held else {})
            if name in _PLURAL
        }
        return {"capacity": self._capacity, "rows": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces the rows by those of ``state_dict()``."""
        if state["capacity"] != self._capacity:
            raise SchemaError(f"load_state_dict(): capacity: expected {self._capacity}, got {state['capacity']}")
        if not state["rows"]:
            self.clear()
            return
        held, self.inner = self.inner, None
        try:
            self.add(**state["rows"])
        except SchemaError:
            self.inner = held  # the rows do not fit: nothing has changed
            raise


class _Full(BufferFull, ValueError):
    """Upstream's class of the same mistake."""


class RolloutBuffer(sw.RolloutBuffer):
    """ApexRL's rollout buffer: ``sharpwave.RolloutBuffer`` with tensors, and upstream's further calls."""

    _flag_dtype = "float32"  # upstream's dones are numbers, and may be written to
    __setattr__ = sw.RolloutBuffer.__setattr__  # names that it does not have are refused here too

    def __init__(
        self,
        num_envs: int,
        num_steps: int,
        obs_shape: Any,
        device: Any = "cpu",
        num_privileged_obs: int = 0,
        *,
        action_shape: Any = None,
        action_dtype: Any = None,
        privileged_obs_shape: Any = None,
        seed: int | None = None,
    ) -> None:
        options = {"action_shape": action_shape, "action_dtype": action_dtype, "seed": seed}
        super().__init__(
            num_envs,
            num_steps,
            obs_shape,
            device,
            0 if privileged_obs_shape is not None else num_privileged_obs,
            privileged_obs_shape=privileged_obs_shape,
            **options,
        )

    def add(self, *args: Any, **kwargs: Any) -> None:
        """Adds one step of every environment.

        Raises:
            ValueError: The rollout is full.
        """
        if self.is_full:
            raise _Full(f"Rollout buffer is full (capacity: {self.num_steps})")
        super().add(*args, **kwargs)

    def to(self, device: Any) -> RolloutBuffer:
        """Moves every tensor; returns the buffer itself."""
        self._place = self._columns.place = Torch("to()", device, None)
        self._columns.arrays = {path: tensor.to(self.device) for path, tensor in self._columns.arrays.items()}
        self._columns.forget_views()
        return self

    def get_minibatch(self, batch_size: int) -> tuple[Any, ...]:
        """Rows drawn with replacement: observations, privileged ones, actions, old log-probabilities, advantages,
        returns, values. ``minibatches`` gives each row once an epoch."""
        data = self.get_all_data()
        index = self._place.integers(len(self), batch_size)

        def take(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: take(part) for key, part in value.items()}
            return None if value is None else value[index]

        names = (
            "observations",
            "privileged_observations",
            "actions",
            "old_log_probs",
            "advantages",
            "returns",
            "values",
        )
        return tuple(take(data[name]) for name in names)


class DistillationBuffer(sw.DistillationBuffer):
    """``sharpwave.DistillationBuffer`` with tensors wherever it is."""

    def __init__(self, capacity: int, obs_shape: Any, device: Any = "cpu", **options: Any) -> None:
        super().__init__(capacity, obs_shape, device, **options)

    @classmethod
    def load(cls, path: Any, device: Any = "cpu") -> sw.DistillationBuffer:
        """What ``save`` wrote, as tensors."""
        return super().load(path, device)


def _to_host(value: Any) -> np.ndarray[Any, Any]:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
