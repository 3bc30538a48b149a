"""A replay buffer for Stable-Baselines3, and for programs that use its buffers as CleanRL does.

    from sharpwave.adapters.sb3 import ReplayBuffer

    model = DQN("MlpPolicy", env, replay_buffer_class=ReplayBuffer, replay_buffer_kwargs={"sampler": sw.Prioritized()})

The algorithms' losses know nothing of priorities. So with ``Prioritized`` the rewards of a batch are a tensor that
remembers which rows it came from, and so is every target computed from it. The loss that compares such a target with
an estimate is the one place where TD errors are known: there each row's loss is multiplied by its weight, and the
errors become the rows' new priorities.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

try:
    import stable_baselines3
    from stable_baselines3.common import buffers
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'{error}: pip install "sharpwave[sb3]"', name=error.name) from None
import torch
from gymnasium import spaces
from torch.nn import functional

import sharpwave as sw
from sharpwave.errors import SchemaError

__all__ = ["ReplayBuffer"]

_LOSSES = frozenset((functional.mse_loss, functional.smooth_l1_loss, functional.huber_loss, functional.l1_loss))
_UNTOLD_BATCHES = 10  # in a row, that no loss was made of: by then nobody is only looking
_ARRAYS = {"observations", "next_observations", "actions", "rewards", "timeouts"}


class ReplayBuffer(buffers.ReplayBuffer):
    """Stable-Baselines3's replay buffer over ``sharpwave.ReplayBuffer``, which ``.inner`` holds.

    Takes the place of its ``ReplayBuffer``, ``DictReplayBuffer`` and ``NStepReplayBuffer``. All settings combine.

    Args:
        buffer_size: Rows kept, over all environments.
        observation_space, action_space: Of one environment.
        device: Where batches go; rows stay in host memory.
        n_envs: Environments that step together.
        optimize_memory_usage: Keeps each observation once; the batches are the same.
        handle_timeout_termination: Reads ``TimeLimit.truncated`` from ``infos``: such an end does not count as done.
        sampler: ``sw.Uniform()``, the default, or ``sw.Prioritized()``. By priority, losses are weighted and give rows
            their priorities, if they are mse_loss, smooth_l1_loss, huber_loss or l1_loss of torch.
        n_steps: Most steps of an example.
        gamma: Discount of one step, where ``n_steps`` is above 1; give that of the algorithm.
        compression: Of observations: ``"lz4"`` or ``"zstd"``.
        storage, exist: Where rows live, as for ``sharpwave.ReplayBuffer``.
        seed: Of the draws. None takes one from NumPy's global stream, which the algorithm's own ``seed`` fixes.

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
        n_steps: int = 1,
        gamma: float = 0.99,
        compression: Literal["lz4", "zstd"] | None = None,
        storage: str | None = None,
        exist: Literal["error", "replace", "attach"] = "error",
        seed: int | None = None,
    ) -> None:
        # Past ReplayBuffer's own constructor, which allocates its arrays.
        super(buffers.ReplayBuffer, self).__init__(buffer_size, observation_space, action_space, device, n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        view = sw.Transitions(n_steps, gamma)
        self._n_steps = view.n_step
        if view.n_step > 1 and "discounts" not in ReplayBufferSamples._fields:
            raise SchemaError(
                f"ReplayBuffer(): n_steps: expected 1 with Stable-Baselines3 {stable_baselines3.__version__}, whose "
                f"losses take no discounts, got {n_steps}; pip install -U stable-baselines3"
            )

        def field(space: spaces.Space[Any], shape: tuple[int, ...]) -> sw.Field:
            return sw.Field(shape, space.dtype, compression=compression)

        obs: sw.Field | dict[str, sw.Field]
        if isinstance(observation_space, spaces.Dict):
            shapes: Any = self.obs_shape
            obs = {name: field(observation_space[name], shape) for name, shape in shapes.items()}
        else:
            obs = field(observation_space, self.obs_shape)
        action = sw.Field((self.action_dim,), self._maybe_cast_dtype(action_space.dtype))
        self.inner = sw.ReplayBuffer(
            self.buffer_size * n_envs,
            schema={"obs": obs, "action": action},
            # Nobody tells a replay buffer that learn() was called anew and has reset the environments. Rows that
            # keep observations once see it, so that no n-step return runs over the cut.
            next_obs="derived" if optimize_memory_usage or view.n_step > 1 else "stored",
            sampler=sampler,
            view=view,
            storage=storage,
            exist=exist,
            num_envs=n_envs,
            seed=int(np.random.randint(2**31 - 1)) if seed is None else seed,
        )
        self._drawn: _Drawn | None = None
        self._untold = 0
        self._count_rows()

    def _count_rows(self) -> None:
        """Place and size as Stable-Baselines3 counts them, in steps of all environments."""
        steps = len(self.inner) // self.n_envs
        self.full = steps >= self.buffer_size
        self.pos = 0 if self.full else steps

    # ---- writing ------------------------------------------------------------------------------------------------

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Adds one step of every environment; ``next_obs`` of an episode's last step is its final observation."""
        truncated = None
        if self.handle_timeout_termination:
            if isinstance(infos, dict):
                raise SchemaError(
                    "add(): infos: expected a list of dicts, one an environment, got a dict, which tells no timeouts; "
                    "give the buffer handle_timeout_termination=False and add terminations as done"
                )
            truncated = np.array([bool(info.get("TimeLimit.truncated", False)) for info in infos])
            done = np.logical_and(done, ~truncated)
        self.inner.add(
            obs=self._lay(obs),
            action=np.reshape(action, (self.n_envs, self.action_dim)),
            reward=np.asarray(reward, np.float32),
            next_obs=self._lay(next_obs),
            done=np.asarray(done, bool),
            truncated=truncated,
        )
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full, self.pos = True, 0

    def _lay(self, obs: Any) -> Any:
        """Discrete observations as arrays of one number, which is how Stable-Baselines3 gives them to networks."""
        if isinstance(self.observation_space, spaces.Dict):
            return {
                name: np.reshape(obs[name], (self.n_envs, 1)) if isinstance(space, spaces.Discrete) else obs[name]
                for name, space in self.observation_space.spaces.items()
            }
        return np.reshape(obs, (self.n_envs, 1)) if isinstance(self.observation_space, spaces.Discrete) else obs

    def reset(self) -> None:
        """Forgets every row."""
        self.inner.clear()
        super().reset()

    # ---- reading ------------------------------------------------------------------------------------------------

    def sample(  # type: ignore[override]
        self, batch_size: int, env: Any = None
    ) -> ReplayBufferSamples | DictReplayBufferSamples:
        """Draws rows as the sampler says.

        Args:
            batch_size: How many.
            env: A ``VecNormalize`` whose statistics observations and rewards are normalised by.
        """
        if self._drawn is not None:
            self._untold = 0 if self._drawn.losses else self._untold + 1
        if self._untold == _UNTOLD_BATCHES:
            warnings.warn(
                f"sample(): {_UNTOLD_BATCHES} batches were drawn by priority, no loss gave their rows new ones; use "
                "mse_loss, smooth_l1_loss, huber_loss or l1_loss of torch on targets made of their rewards, or give "
                "the buffer sampler=Uniform()",
                RuntimeWarning,
                stacklevel=2,
            )
        batch = self.inner.sample(batch_size)
        rewards = self.to_torch(self._normalize_returns(batch["reward"].reshape(-1, 1), env), copy=False)
        if "weights" in batch:
            self._drawn = _Drawn(self.inner, batch["indices"], self.to_torch(batch["weights"], copy=False))
            rewards = rewards.as_subclass(_DrawnRewards)
            rewards.drawn = self._drawn
        values: dict[str, Any] = {
            "observations": self._to_tensors(self._normalize_obs(batch["obs"], env)),
            "actions": self.to_torch(batch["action"], copy=False),
            "next_observations": self._to_tensors(self._normalize_obs(batch["next_obs"], env)),
            "dones": self.to_torch(batch["done"].astype(np.float32).reshape(-1, 1), copy=False),
            "rewards": rewards,
        }
        if "discount" in batch:
            values["discounts"] = self.to_torch(batch["discount"].reshape(-1, 1), copy=False)
        if isinstance(batch["obs"], dict):
            return DictReplayBufferSamples(**values)
        return ReplayBufferSamples(**values)

    def _to_tensors(self, obs: Any) -> Any:
        if isinstance(obs, dict):
            return {name: self.to_torch(part, copy=False) for name, part in obs.items()}
        return self.to_torch(obs, copy=False)

    def _normalize_returns(self, rewards: np.ndarray[Any, Any], env: Any) -> np.ndarray[Any, Any]:
        if env is None or not env.norm_reward or self._n_steps == 1:
            return self._normalize_reward(rewards, env)  # type: ignore[no-any-return]
        # A sum of scaled rewards is the scaled sum, and this is exact unless a single reward is clipped. The bound is
        # that of a sum of clipped ones.
        bound = env.clip_reward * self._n_steps
        scaled: np.ndarray[Any, Any] = np.clip(rewards / np.sqrt(env.ret_rms.var + env.epsilon), -bound, bound)
        return scaled.astype(np.float32)

    def __getattr__(self, name: str) -> Any:
        if name in _ARRAYS:
            raise AttributeError(f"ReplayBuffer: {name}: the engine keeps the rows; read them with .inner.rows()")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def dones(self) -> np.ndarray[Any, Any]:  # type: ignore[override]
        """Never read. A second ``learn`` with ``optimize_memory_usage`` marks a cut here, which the rows see anyway."""
        return np.zeros((self.buffer_size, self.n_envs), bool)

    # ---- life ---------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """For ``save_replay_buffer``: a buffer in memory goes as its snapshot, any other as its address."""
        state = self.__dict__ | {"_drawn": None}
        if self.inner.stats()["storage"] == "memory":
            with tempfile.TemporaryDirectory() as folder:
                self.inner.save(Path(folder, "replay"))
                state["inner"] = Path(folder, "replay").read_bytes()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(state["inner"], bytes):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "replay").write_bytes(state["inner"])
                self.inner = sw.open(Path(folder, "replay"))
        self._count_rows()


class _Drawn:
    """Which rows a batch was made of, and what its losses said about them."""

    def __init__(self, inner: sw.ReplayBuffer, indices: np.ndarray[Any, Any], weights: torch.Tensor) -> None:
        self.inner, self.indices, self.weights = inner, indices, weights
        self.losses = 0
        self.errors = torch.zeros_like(weights)

    def weigh(self, loss: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """The loss with every row's part multiplied by its weight. Its errors become priorities on the way."""
        each = loss(*args, **{**kwargs, "reduction": "none"})
        if each.shape[:1] != self.weights.shape:
            return loss(*args, **kwargs)
        given = dict(zip(("input", "target"), args, strict=False)) | kwargs
        errors = (given["input"] - given["target"]).detach().abs()
        # Twin critics each have an error: a row's priority is their mean.
        self.errors += errors.reshape(len(self.weights), -1).mean(dim=1)
        self.losses += 1
        self.inner.update_priorities(self.indices, (self.errors / self.losses).cpu().numpy())
        each = each * self.weights.reshape(-1, *[1] * (each.ndim - 1))
        reduction = kwargs.get("reduction", "mean")
        return each if reduction == "none" else each.sum() if reduction == "sum" else each.mean()


class _DrawnRewards(torch.Tensor):
    """Rewards that remember their batch, and pass it on to everything computed from them."""

    drawn: _Drawn | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        drawn = next((part.drawn for part in _leaves((args, kwargs)) if isinstance(part, cls)), None)
        if func in _LOSSES and drawn is not None:
            with torch._C.DisableTorchFunctionSubclass():
                return drawn.weigh(func, args, kwargs)
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        for part in _leaves(result):
            if isinstance(part, cls):
                part.drawn = drawn
        return result


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value
