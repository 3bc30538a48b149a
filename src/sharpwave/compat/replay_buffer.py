"""The names of the "Experience Replay Buffer Service" specification.

    from sharpwave.compat.replay_buffer import BufferConfig, ReplayBuffer

    config = BufferConfig(capacity=1_000_000, strategy="prioritized", alpha=0.6, beta=0.4)
    buffer = ReplayBuffer(config, obs_shape=(84, 84, 4), action_dim=6)
    buffer.add(obs, action, reward, next_obs, done)
    batch = buffer.sample(batch_size=32)
    buffer.update_priorities(batch["indices"], td_errors)

The specification leaves open whether ``action_dim`` counts discrete actions or the entries of a vector. The first
action tells: a whole number is stored as int64, a vector of ``action_dim`` entries in its own dtype. Observations
likewise keep uint8 where the first one is uint8, and are float32 otherwise.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

import sharpwave as sw
from sharpwave.checks import check_settable
from sharpwave.errors import NotReady, SchemaError

__all__ = ["BufferConfig", "ReplayBuffer"]


@dataclass(frozen=True)
class BufferConfig:
    """How many rows, and how they are drawn."""

    capacity: int
    strategy: str = "uniform"
    alpha: float = 0.6
    beta: float = 0.4
    enable_compression: bool = False

    def __post_init__(self) -> None:
        if self.strategy not in ("uniform", "prioritized"):
            raise SchemaError(f"BufferConfig(): strategy: expected 'uniform' or 'prioritized', got {self.strategy!r}")
        sw.Prioritized(self.alpha, self.beta)  # a wrong exponent is an error here


class ReplayBuffer:
    """The specification's buffer over ``sharpwave.ReplayBuffer``, which ``.inner`` holds after the first add."""

    def __init__(
        self, config: BufferConfig, obs_shape: tuple[int, ...], action_dim: int, seed: int | None = None
    ) -> None:
        self._config = config
        self._obs_shape = sw.Field(obs_shape).shape
        self._action_dim = sw.Field(action_dim).shape[0]
        self._seed = seed
        self.inner: sw.ReplayBuffer | None = None
        self._first_add = threading.Lock()
        sw.ReplayBuffer(config.capacity, obs_shape=1).close()  # a wrong capacity is an error here, not at the first add

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "inner":
            check_settable(self, name)
        object.__setattr__(self, name, value)

    def add(self, obs: Any, action: Any, reward: Any, next_obs: Any, done: Any) -> None:
        """Adds one transition, or n with a leading axis."""
        if self.inner is None:
            with self._first_add:
                if self.inner is None:
                    inner = self._build(np.asarray(obs), np.asarray(action), np.ndim(reward))
                    inner.add(obs, action, reward, next_obs, done)
                    self.inner = inner  # only now: a first add that fails leaves nothing decided
                    return
        self.inner.add(obs, action, reward, next_obs, done)

    def _build(self, obs: np.ndarray[Any, Any], action: np.ndarray[Any, Any], axes: int) -> sw.ReplayBuffer:
        is_number = action.ndim == axes
        if is_number and action.dtype.kind not in "iu":
            raise SchemaError(
                f"add(): field 'action': expected a whole number or {self._action_dim} entries, got {action.dtype}"
            )
        vector_dtype = action.dtype if action.dtype.kind in "iu" else np.float32
        config = self._config
        obs_dtype = np.uint8 if obs.dtype == np.uint8 else np.float32
        schema = {
            "obs": sw.Field(self._obs_shape, obs_dtype, compression="lz4" if config.enable_compression else None),
            "action": sw.Field((), np.int64) if is_number else sw.Field((self._action_dim,), vector_dtype),
        }
        sampler = sw.Prioritized(config.alpha, config.beta) if config.strategy == "prioritized" else None
        return sw.ReplayBuffer(config.capacity, schema=schema, sampler=sampler, seed=self._seed)

    def sample(self, batch_size: int) -> dict[str, Any]:
        """A dict of NumPy arrays: obs, action, reward, next_obs, done, indices; weights with priorities."""
        if self.inner is None:
            raise NotReady("sample(): the buffer is empty; add rows first")
        return self.inner.sample(batch_size)

    def update_priorities(self, indices: Any, priorities: Any) -> None:
        """New priorities from TD errors, signed or not, for rows that ``sample`` gave."""
        if self.inner is None:
            raise NotReady("update_priorities(): the buffer is empty; add rows first")
        self.inner.update_priorities(indices, priorities)

    def size(self) -> int:
        """Rows held."""
        return 0 if self.inner is None else len(self.inner)

    __len__ = size

    def capacity(self) -> int:
        """Rows held at most."""
        return self._config.capacity

    def is_full(self) -> bool:
        """Whether the next row pushes one out."""
        return self.size() == self._config.capacity
