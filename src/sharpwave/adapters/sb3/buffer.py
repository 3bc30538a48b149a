"""The replay buffer: the interface of Stable-Baselines3's buffers over a ``sharpwave.ReplayBuffer``."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from gymnasium import spaces

import sharpwave as sw
from sharpwave.address import to_path
from sharpwave.checks import one_of
from sharpwave.errors import SchemaError, StorageError

from .columns import Column, Columns, action_size, obs_shape, read_obs_columns
from .n_step import read_returns
from .samples import HAS_SB3, DictReplayBufferSamples, PrioritizedSamples, ReplayBufferSamples

if TYPE_CHECKING or not HAS_SB3:
    Base: Any = object
else:
    # Its algorithms take only subclasses of their own buffers.
    from stable_baselines3.common.buffers import ReplayBuffer as Base

__all__ = ["ReplayBuffer"]

_UNTOLD_BATCHES = 10  # batches that may be drawn without any call of update_priorities
_ARRAYS = {"observations", "next_observations", "actions", "rewards", "timeouts"}


class ReplayBuffer(Base):
    """A replay buffer for Stable-Baselines3 and CleanRL; a ``sharpwave.ReplayBuffer``, ``inner``, stores the rows.

    Replaces ``ReplayBuffer``, ``DictReplayBuffer`` and ``NStepReplayBuffer``. All settings can be combined. Where
    Stable-Baselines3 is not installed, it works in loops of your own.

    Args:
        buffer_size: Rows kept, over all environments.
        observation_space, action_space: Spaces of one environment.
        device: Device of the batches; rows stay in host memory.
        n_envs: Environments that step together.
        optimize_memory_usage: Stores each observation once; batches are the same.
        handle_timeout_termination: Reads ``TimeLimit.truncated`` from ``infos``: a truncated step is not done.
        sampler: ``sw.Uniform()``, the default, or ``sw.Prioritized()``, which needs ``PrioritizedDQN`` or a loop that
            calls ``update_priorities``: after ten batches without new priorities ``sample`` raises.
        n_steps: Largest number of steps in an example. None takes it from the algorithm that makes the buffer; 1 in a
            loop of your own.
        gamma: Discount per step. None takes it from the algorithm; a loop of your own must give it if ``n_steps`` is
            above 1. A value that differs from the algorithm's is refused.
        stack: Frames that the environment stacks in an observation, as ``VecFrameStack`` does. Rows store single
            frames; batches are the same. For a dict of observations also a dict, with the frames of each key.
        channels_order: The axis that has the frames, ``"first"`` or ``"last"``, as for ``VecFrameStack``. None takes
            the channels of an image, and the last axis of other observations.
        padding: The frames before the first one of an episode: ``"zero"``, as ``VecFrameStack`` gives them, or
            ``"repeat"``, the first frame again.
        compression: Compression of observations: ``"lz4"`` or ``"zstd"``.
        storage, exist: Where rows live, as for ``sharpwave.ReplayBuffer``. With ``exist="error"`` a storage that exists
            is refused when the rows are first needed, so that ``DQN.load`` can make the model.
        seed: Seed of the draws. None takes one from NumPy's global generator, which the algorithm's ``seed`` seeds.

    Example:
        >>> from gymnasium import spaces
        >>> buf = ReplayBuffer(1000, spaces.Box(-1, 1, (4,)), spaces.Discrete(2), "cpu", sampler=sw.Prioritized())
        >>> zeros = np.zeros((1, 4), np.float32)
        >>> buf.add(zeros, zeros, np.array([1]), np.array([0.5]), np.array([False]), [{}])
        >>> buf.sample(32).observations.shape
        torch.Size([32, 4])
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        sampler: sw.Uniform | sw.Prioritized | sw.Recent | sw.Shuffle | None = None,
        n_steps: int | None = None,
        gamma: float | None = None,
        stack: int | Mapping[str, int] = 1,
        channels_order: Literal["first", "last"] | None = None,
        padding: Literal["zero", "repeat"] = "zero",
        compression: Literal["lz4", "zstd"] | None = None,
        storage: str | None = None,
        exist: Literal["error", "replace", "attach"] = "error",
        seed: int | None = None,
    ) -> None:
        # The constructor of Stable-Baselines3's class is not called: it would allocate arrays.
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.observation_space, self.action_space, self.n_envs = observation_space, action_space, n_envs
        self.obs_shape, self.action_dim = obs_shape(observation_space), action_size(action_space)
        if str(device) == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self.is_prioritized = isinstance(sampler, sw.Prioritized)
        self._padding: str = one_of("ReplayBuffer()", "padding", padding, ("zero", "repeat"))
        self._make_columns(stack, channels_order)
        view = self._view(*read_returns(n_steps, gamma))
        self.n_steps, self.gamma = view.n_step, view.gamma

        columns = self._obs
        obs: Any = (
            {key: column.field(compression, padding) for key, column in columns.items()}
            if isinstance(columns, dict)
            else columns.field(compression, padding)
        )
        schema = {"obs": obs, "action": self._action.field(None, padding), **self._own_fields()}
        # A second learn() resets the environments and does not tell the replay buffer. With derived next observations
        # the reset is seen in the rows, so no n-step return, goal or stack crosses it.
        derived = optimize_memory_usage or view.n_step > 1 or view.hindsight is not None or self._stacks
        self._inner: sw.ReplayBuffer | None = None
        self._refusal = ""
        try:
            self._inner = sw.ReplayBuffer(
                self.buffer_size * n_envs,
                schema=schema,
                next_obs="derived" if derived else "stored",
                sampler=sampler,
                view=view,
                storage=storage,
                exist=exist,
                num_envs=n_envs,
                seed=int(np.random.randint(2**31 - 1)) if seed is None else seed,
            )
        except StorageError:
            path = None if storage is None else to_path(storage, "ReplayBuffer(): storage")
            if exist != "error" or path is None or not path.exists():
                raise
            # DQN.load makes a new buffer with the arguments of the saved model. A policy that only acts needs no rows,
            # and load_replay_buffer() replaces the buffer.
            self._refusal = (
                f"ReplayBuffer(): storage: {storage!r} exists. After DQN.load, continue with its rows by "
                "model.load_replay_buffer(...), or load with DQN.load(..., replay_buffer_kwargs={..., 'exist': "
                "'attach'}); for a new run give replay_buffer_kwargs 'exist': 'replace'"
            )
        self._stream: Any = None  # the writer, where the buffer must be able to end episodes itself
        self._untold = 0  # batches drawn by priority since rows last got new ones
        self._updates_seen = 0
        self.pos, self.full = 0, False
        if self._inner is not None:
            self._count_rows()

    def _view(self, n_steps: int, gamma: float) -> sw.Transitions:
        return sw.Transitions(n_steps, gamma)

    def _own_fields(self) -> dict[str, Any]:
        """Further fields of a row."""
        return {}

    @property
    def inner(self) -> sw.ReplayBuffer:
        """The buffer that holds the rows."""
        if self._inner is None:
            raise StorageError(self._refusal)
        return self._inner

    def _count_rows(self) -> None:
        """Sets ``pos`` and ``full`` as Stable-Baselines3 counts: in steps of all environments."""
        steps = len(self.inner) // self.n_envs
        self.full = steps >= self.buffer_size
        self.pos = 0 if self.full else steps

    def size(self) -> int:
        """Steps of all environments that the buffer holds."""
        return self.buffer_size if self.full else self.pos

    # ---- writing ------------------------------------------------------------------------------------------------

    def _make_columns(self, stack: Any, channels_order: Any) -> None:
        n_envs, dtype = self.n_envs, self.action_space.dtype
        self._stacking = stack, channels_order
        self._obs: Columns = read_obs_columns(self.observation_space, n_envs, stack, channels_order)
        self._stacks = max(c.stack for c in (self._obs.values() if isinstance(self._obs, dict) else (self._obs,))) > 1
        # As in Stable-Baselines3: its networks are float32.
        dtype = np.dtype(np.float32) if dtype == np.float64 else dtype
        wrapper = "give actions of the action space, or make the buffer with the environment's own spaces"
        self._action = Column("", (self.action_dim,), dtype, n_envs, mend=wrapper)
        self._reward = Column("", (), np.float32, n_envs, mend="scale the rewards in a wrapper of the environment")
        self._done = Column("", (), bool, n_envs, mend="give True or False, or 1 or 0")

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Adds one step of every environment; ``next_obs`` of an episode's last step is its final observation."""
        self._add(obs, next_obs, action, reward, done, infos, {})

    def _add(
        self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any, own: dict[str, Any]
    ) -> None:
        truncated = None
        if self.handle_timeout_termination:
            if isinstance(infos, dict):
                raise SchemaError(
                    "add(): infos: expected a list of dicts, one per environment, got a dict, which has no timeouts; "
                    "give the buffer handle_timeout_termination=False and add terminations as done"
                )
            if len(infos) != self.n_envs:
                raise SchemaError(f"add(): infos: expected a list of n_envs={self.n_envs} dicts, got {len(infos)}")
            for info in infos:
                if info.get("TimeLimit.truncated", False):
                    truncated = np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos])
                    break
        done = self._done.fit("done", done)
        if truncated is not None:
            done = done & ~truncated
        inner = self._inner
        if inner is None:
            inner = self.inner  # raises
        columns = self._obs
        now: Any
        after: Any
        if type(columns) is dict:
            now, after = _fit_all(columns, "obs", obs), _fit_all(columns, "next_obs", next_obs)
        else:
            now, after = columns.fit("obs", obs), columns.fit("next_obs", next_obs)  # type: ignore[union-attr]
        values = {
            "obs": now,
            "action": self._action.fit("action", action),
            "reward": self._reward.fit("reward", reward),
            "next_obs": after,
            "done": done,
            "truncated": truncated,
            **own,
        }
        try:
            (self._stream or inner).add(**values)
        except SchemaError as error:
            if not self._stacks:
                raise
            raise SchemaError(
                f"add(): obs: expected stacks of successive frames, oldest first, with padding={self._padding!r} at "
                f"the start of an episode, got others ({error}); give the buffer the stack=, channels_order= and "
                "padding= of the wrapper that stacks, or stack=1"
            ) from None
        state = self.__dict__  # __setattr__ below takes as long as the engine's add
        state["pos"] += 1
        if state["pos"] == self.buffer_size:
            self.full, self.pos = True, 0

    def extend(self, *args: Any) -> None:
        """Adds several steps: each argument is that of ``add`` with an axis of steps before."""
        for step in zip(*args, strict=True):
            self.add(*step)

    def reset(self) -> None:
        """Removes all rows."""
        self.inner.clear()
        self.pos, self.full = 0, False

    # ---- reading ------------------------------------------------------------------------------------------------

    def sample(  # type: ignore[override]
        self, batch_size: int, env: Any = None
    ) -> ReplayBufferSamples | DictReplayBufferSamples | PrioritizedSamples:
        """Draws a batch with the buffer's sampler.

        Args:
            batch_size: Number of rows.
            env: A ``VecNormalize`` that normalises observations and rewards.
        """
        if self._untold >= _UNTOLD_BATCHES:
            self._refuse_unless_told()
        batch = self._draw(batch_size)
        values: dict[str, Any] = {
            "observations": self._to_tensors(batch["obs"], env),
            "actions": self.to_torch(batch["action"], copy=False),
            "next_observations": self._to_tensors(batch["next_obs"], env),
            "dones": self.to_torch(batch["done"].astype(np.float32).reshape(-1, 1), copy=False),
            "rewards": self.to_torch(self._normalize_returns(batch["reward"].reshape(-1, 1), env), copy=False),
        }
        if "discount" in batch:
            values["discounts"] = self.to_torch(batch["discount"].reshape(-1, 1), copy=False)
        if "weights" in batch:
            weights = self.to_torch(batch["weights"].reshape(-1, 1), copy=False)
            indices = self.to_torch(batch["indices"], copy=False)
            self._untold += 1
            return PrioritizedSamples(**{"discounts": None, **values}, weights=weights, indices=indices)
        if isinstance(batch["obs"], dict):
            return DictReplayBufferSamples(**values)
        return ReplayBufferSamples(**values)

    def update_priorities(self, indices: Any, td_errors: Any) -> dict[str, int]:
        """Sets the priorities of rows to the absolute values of their TD errors.

        Args:
            indices: ``data.indices``.
            td_errors: One per row, (rows,) or (rows, 1), of either sign.

        Returns:
            ``{"applied": n, "stale": m}``; stale rows were overwritten since they were drawn.
        """
        if isinstance(td_errors, torch.Tensor):
            td_errors = td_errors.detach().float().cpu().numpy()
        errors = np.asarray(td_errors)
        if errors.ndim == 2 and errors.shape[1] == 1:
            errors = errors[:, 0]
        result = self.inner.update_priorities(indices, errors)
        self._untold = 0
        self._updates_seen += result["applied"] + result["stale"]
        return result

    def _refuse_unless_told(self) -> None:
        """Raises if no row got a new priority: an algorithm without support for priorities would train on biased
        batches and not report it."""
        stats = self.inner.stats()
        updates = stats["updates_applied"] + stats["updates_stale"]
        if updates == self._updates_seen:
            raise SchemaError(
                f"sample(): {_UNTOLD_BATCHES} batches were drawn by priority and no row got a new one; train with "
                "PrioritizedDQN of sharpwave.adapters.sb3, or in your own loop use data.weighted_mean(losses) and "
                "update_priorities(data.indices, td_errors); or give the buffer sampler=Uniform(). To look at rows "
                "only, draw with .inner.sample()"
            )
        self._updates_seen, self._untold = updates, 0  # updated through .inner, or by another process

    def _draw(self, batch_size: int) -> dict[str, Any]:
        return self.inner.sample(batch_size)

    def to_torch(self, array: np.ndarray[Any, Any], copy: bool = True) -> torch.Tensor:
        """The array as a tensor on the buffer's device."""
        return torch.tensor(array, device=self.device) if copy else torch.as_tensor(array, device=self.device)

    def _to_tensors(self, obs: Any, env: Any) -> Any:
        columns = self._obs
        if isinstance(columns, dict):
            if self._stacks:
                obs = {key: columns[key].join(part) for key, part in obs.items()}
        elif self._stacks:
            obs = columns.join(obs)
        if env is not None:
            obs = env.normalize_obs(obs)
        if isinstance(obs, dict):
            return {key: self.to_torch(part, copy=False) for key, part in obs.items()}
        return self.to_torch(obs, copy=False)

    def _normalize_returns(self, rewards: np.ndarray[Any, Any], env: Any) -> np.ndarray[Any, Any]:
        if env is None:
            return rewards
        if not env.norm_reward or self.n_steps == 1:
            normal: np.ndarray[Any, Any] = env.normalize_reward(rewards)
            return normal.astype(np.float32)
        # The sum of scaled rewards is the scaled sum, so this is exact unless a single reward is clipped. The bound is
        # the bound of a sum of clipped rewards.
        bound = env.clip_reward * self.n_steps
        scaled: np.ndarray[Any, Any] = np.clip(rewards / np.sqrt(env.ret_rms.var + env.epsilon), -bound, bound)
        return scaled.astype(np.float32)

    if not TYPE_CHECKING:  # a type checker would allow any name to be set

        def __setattr__(self, name: str, value: Any) -> None:
            if name in _ARRAYS:
                raise AttributeError(f"ReplayBuffer: {name}: the engine keeps the rows; write them with add()")
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _ARRAYS:
            raise AttributeError(f"ReplayBuffer: {name}: the engine keeps the rows; read them with .inner.rows()")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def dones(self) -> np.ndarray[Any, Any]:  # type: ignore[override]
        """Not used. A second ``learn`` with ``optimize_memory_usage`` writes to it; the rows show the reset already."""
        return np.zeros((self.buffer_size, self.n_envs), bool)

    # ---- life ---------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """For ``save_replay_buffer``: stores the snapshot of a buffer in memory, and the address of any other."""
        state = self.__dict__ | {"_stream": None}
        for name in ("_obs", "_action", "_reward", "_done"):
            del state[name]  # they follow from the spaces
        if self.inner.stats()["storage"] == "memory":
            with tempfile.TemporaryDirectory() as folder:
                self.inner.save(Path(folder, "replay"))
                state["_inner"] = Path(folder, "replay").read_bytes()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_columns(*self._stacking)
        if isinstance(state["_inner"], bytes):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "replay").write_bytes(state["_inner"])
                self._inner = sw.open(Path(folder, "replay"), view=self._view(self.n_steps, self.gamma))
        self._count_rows()


def _fit_all(columns: dict[str, Column], name: str, value: Any) -> dict[str, np.ndarray[Any, Any]]:
    if not isinstance(value, dict) or not value.keys() >= columns.keys():
        got = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise SchemaError(f"add(): {name}: expected a dict with {sorted(columns)}, got {got}")
    return {key: column.fit(name, value[key]) for key, column in columns.items()}
