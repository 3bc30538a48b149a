"""A replay buffer for Stable-Baselines3, and for programs that use its buffers as CleanRL does.

    from sharpwave.adapters.sb3 import ReplayBuffer, prioritized

    model = DQN("MlpPolicy", env, replay_buffer_class=ReplayBuffer)
    model = prioritized(DQN)(
        "MlpPolicy", env, replay_buffer_class=ReplayBuffer, replay_buffer_kwargs={"sampler": sw.Prioritized()}
    )

With ``Prioritized`` the loss must be weighted, and the TD errors must become the rows' priorities. The algorithms of
Stable-Baselines3 do neither, so ``prioritized`` makes a subclass that does both inside their own ``train``. In your own
loop use ``data.weighted_mean(...)`` and ``update_priorities(data.indices, td_errors)``.
"""

from __future__ import annotations

import functools
import math
import tempfile
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeVar

import numpy as np

try:
    import stable_baselines3
    from stable_baselines3 import DQN, SAC, TD3
    from stable_baselines3.common import buffers
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'{error}: pip install "sharpwave[sb3]"', name=error.name) from None
import torch
from gymnasium import spaces
from torch.nn import functional

import sharpwave as sw
from sharpwave.address import to_path
from sharpwave.arrays import as_array
from sharpwave.errors import SchemaError, StorageError

__all__ = ["PrioritizedSamples", "ReplayBuffer", "prioritized"]

_UNTOLD_BATCHES = 10  # batches that may be drawn without any call of update_priorities
_ARRAYS = {"observations", "next_observations", "actions", "rewards", "timeouts"}
_Algorithm = TypeVar("_Algorithm", bound=type)


class PrioritizedSamples(NamedTuple):
    """A batch drawn by priority: the fields of Stable-Baselines3's batches, and two more. Every column is (rows, 1)."""

    observations: Any
    actions: torch.Tensor
    next_observations: Any
    dones: torch.Tensor
    rewards: torch.Tensor
    discounts: torch.Tensor | None
    weights: torch.Tensor
    """Importance weights, to multiply the rows' losses by."""
    indices: torch.Tensor
    """Serial numbers of the rows, (rows,), for ``update_priorities``."""

    def weighted_mean(self, losses: torch.Tensor) -> torch.Tensor:
        """The mean of the rows' losses, each multiplied by its weight.

        Args:
            losses: One per row, (rows,) or (rows, 1). (The plain product of a (rows,) loss and the (rows, 1) weights
                would be a matrix.)
        """
        if losses.shape not in (self.weights.shape, self.weights.shape[:1]):
            raise SchemaError(
                f"weighted_mean(): losses: expected shape {tuple(self.weights.shape)} or "
                f"{tuple(self.weights.shape[:1])}, one loss per row, got {tuple(losses.shape)}; give the loss "
                "reduction='none'"
            )
        return (losses.reshape(self.weights.shape) * self.weights).mean()


class ReplayBuffer(buffers.ReplayBuffer):
    """A replay buffer for Stable-Baselines3 that stores its rows in a ``sharpwave.ReplayBuffer``, its ``.inner``.

    Replaces ``ReplayBuffer``, ``DictReplayBuffer`` and ``NStepReplayBuffer``. All settings can be combined.

    Args:
        buffer_size: Rows kept, over all environments.
        observation_space, action_space: Spaces of one environment.
        device: Device of the batches; rows stay in host memory.
        n_envs: Environments that step together.
        optimize_memory_usage: Stores each observation once; batches are the same.
        handle_timeout_termination: Reads ``TimeLimit.truncated`` from ``infos``: a truncated step is not done.
        sampler: ``sw.Uniform()``, the default, or ``sw.Prioritized()``, which needs ``prioritized(DQN)`` or a loop that
            calls ``update_priorities``: after ten batches without new priorities ``sample`` raises.
        n_steps: Largest number of steps in an example.
        gamma: Discount per step. Required where ``n_steps`` is above 1: give the gamma of the algorithm, which the
            buffer cannot see.
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
        n_steps: int = 1,
        gamma: float | None = None,
        compression: Literal["lz4", "zstd"] | None = None,
        storage: str | None = None,
        exist: Literal["error", "replace", "attach"] = "error",
        seed: int | None = None,
    ) -> None:
        # Skips the constructor of ReplayBuffer, which would allocate arrays.
        super(buffers.ReplayBuffer, self).__init__(buffer_size, observation_space, action_space, device, n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        view = sw.Transitions(n_steps, 0.99 if gamma is None else gamma)
        self._n_steps = view.n_step
        if view.n_step > 1 and gamma is None:
            raise SchemaError(
                f"ReplayBuffer(): gamma: n_steps={n_steps} needs the algorithm's discount, which the buffer cannot "
                f'see; give replay_buffer_kwargs={{"n_steps": {n_steps}, "gamma": ...}} the gamma of the algorithm'
            )
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
        self._inner: sw.ReplayBuffer | None = None
        self._refusal = ""
        try:
            self._inner = sw.ReplayBuffer(
                self.buffer_size * n_envs,
                schema={"obs": obs, "action": action},
                # A second learn() resets the environments and does not tell the replay buffer. With derived next
                # observations the reset is seen in the rows, so no n-step return crosses it.
                next_obs="derived" if optimize_memory_usage or view.n_step > 1 else "stored",
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
        self._drawn: _Drawn | None = None
        self._untold = 0  # batches drawn by priority since rows last got new ones
        self._updates_seen = 0
        self._fits = self._make_fits()
        self.pos, self.full = 0, False
        if self._inner is not None:
            self._count_rows()

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

    # ---- writing ------------------------------------------------------------------------------------------------

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Adds one step of every environment; ``next_obs`` of an episode's last step is its final observation."""
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
        fits = self._fits
        done = self._fit("done", done, fits["done"])
        if truncated is not None:
            done = done & ~truncated
        inner = self._inner
        if inner is None:
            inner = self.inner  # raises
        inner.add(
            obs=self._fit("obs", obs, fits["obs"]),
            action=self._fit("action", action, fits["action"]),
            reward=self._fit("reward", reward, fits["reward"]),
            next_obs=self._fit("next_obs", next_obs, fits["obs"]),
            done=done,
            truncated=truncated,
        )
        state = self.__dict__  # __setattr__ below takes as long as the engine's add
        state["pos"] += 1
        if state["pos"] == self.buffer_size:
            self.full, self.pos = True, 0

    def _make_fits(self) -> dict[str, Any]:
        """The shape and dtype of each argument of ``add``; for a dict of observations a dict of them."""
        shapes: Any = self.obs_shape
        space = self.observation_space

        def fit(shape: tuple[int, ...], dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
            return (self.n_envs, *shape), np.dtype(dtype)

        return {
            "obs": {name: fit(shapes[name], part.dtype) for name, part in space.items()}
            if isinstance(space, spaces.Dict)
            else fit(shapes, space.dtype),
            "action": fit((self.action_dim,), self._maybe_cast_dtype(self.action_space.dtype)),
            "reward": fit((), np.float32),
            "done": fit((), bool),
        }

    def _fit(self, name: str, value: Any, fit: Any) -> Any:
        """One value per environment, in the space's shape and dtype. As in Stable-Baselines3, axes of length 1 may be
        missing or added."""
        if isinstance(fit, dict):
            if not isinstance(value, dict) or not value.keys() >= fit.keys():
                got = sorted(value) if isinstance(value, dict) else type(value).__name__
                raise SchemaError(f"add(): {name}: expected a dict with {sorted(fit)}, got {got}")
            return {key: self._fit(f"{name}[{key!r}]", value[key], part) for key, part in fit.items()}
        expected, dtype = fit
        if type(value) is np.ndarray and value.dtype == dtype:
            if value.shape == expected:
                return value
            if name == "action" and value.size == math.prod(expected):  # as Stable-Baselines3 does
                return value.reshape(expected)
        array = as_array(name, value)
        if array.dtype.kind not in "biuf":
            raise SchemaError(f"add(): {name}: expected numbers of shape {expected}, got {value!r:.80}")
        if array.shape != expected:
            squeezed = tuple(n for n in array.shape if n != 1)
            reshapes = name == "action" and array.size == math.prod(expected)
            if squeezed != tuple(n for n in expected if n != 1) and not reshapes:
                raise SchemaError(
                    f"add(): {name}: expected shape {expected}, n_envs={self.n_envs} values of the space's shape, got "
                    f"{array.shape}; make the buffer with the environment's own spaces and number of environments"
                )
            array = array.reshape(expected)
        if array.dtype == dtype:
            return array
        with np.errstate(all="ignore"):
            cast = array.astype(dtype)
        # Rounding to a float is usual; any other change of a value is refused.
        is_float = cast.dtype.kind == "f"
        if not (np.array_equal(np.isinf(cast), np.isinf(array)) if is_float else (cast == array).all()):
            raise SchemaError(
                f"add(): {name}: expected values that {cast.dtype}, the dtype of the space, can hold, got "
                f"{array.dtype} with others; scale or round them in a wrapper of the environment, or give the "
                "space another dtype"
            )
        return cast

    def reset(self) -> None:
        """Removes all rows."""
        self.inner.clear()
        super().reset()

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
        batch = self.inner.sample(batch_size)
        values: dict[str, Any] = {
            "observations": self._to_tensors(self._normalize_obs(batch["obs"], env)),
            "actions": self.to_torch(batch["action"], copy=False),
            "next_observations": self._to_tensors(self._normalize_obs(batch["next_obs"], env)),
            "dones": self.to_torch(batch["done"].astype(np.float32).reshape(-1, 1), copy=False),
            "rewards": self.to_torch(self._normalize_returns(batch["reward"].reshape(-1, 1), env), copy=False),
        }
        if "discount" in batch:
            values["discounts"] = self.to_torch(batch["discount"].reshape(-1, 1), copy=False)
        if "weights" in batch:
            weights = self.to_torch(batch["weights"].reshape(-1, 1), copy=False)
            indices = self.to_torch(batch["indices"], copy=False)
            self._drawn = _Drawn(indices, weights)
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
                "prioritized(DQN) of sharpwave.adapters.sb3, or in your own loop use data.weighted_mean(losses) and "
                "update_priorities(data.indices, td_errors); or give the buffer sampler=Uniform(). To look at rows "
                "only, draw with .inner.sample()"
            )
        self._updates_seen, self._untold = updates, 0  # updated through .inner, or by another process

    def _to_tensors(self, obs: Any) -> Any:
        if isinstance(obs, dict):
            return {name: self.to_torch(part, copy=False) for name, part in obs.items()}
        return self.to_torch(obs, copy=False)

    def _normalize_returns(self, rewards: np.ndarray[Any, Any], env: Any) -> np.ndarray[Any, Any]:
        if env is None or not env.norm_reward or self._n_steps == 1:
            return self._normalize_reward(rewards, env)  # type: ignore[no-any-return]
        # The sum of scaled rewards is the scaled sum, so this is exact unless a single reward is clipped. The bound is
        # the bound of a sum of clipped rewards.
        bound = env.clip_reward * self._n_steps
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
        state = self.__dict__ | {"_drawn": None}
        del state["_fits"]  # follows from the spaces
        if self.inner.stats()["storage"] == "memory":
            with tempfile.TemporaryDirectory() as folder:
                self.inner.save(Path(folder, "replay"))
                state["_inner"] = Path(folder, "replay").read_bytes()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fits = self._make_fits()
        if isinstance(state["_inner"], bytes):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "replay").write_bytes(state["_inner"])
                self._inner = sw.open(Path(folder, "replay"))
        self._count_rows()


class _Drawn(NamedTuple):
    indices: torch.Tensor
    weights: torch.Tensor


@functools.cache
def prioritized(algorithm: _Algorithm) -> _Algorithm:
    """A subclass of DQN, SAC, TD3 or DDPG of Stable-Baselines3 that trains with prioritized replay.

    It runs the algorithm's own ``train`` with weighted critic losses. A row's new priority is the mean of its absolute
    TD errors over the critics. The actor's loss stays an unweighted mean, as is common.

    Args:
        algorithm: The class. A class that overrides ``train`` is refused; its author can use
            ``data.weighted_mean(losses)`` and ``update_priorities(data.indices, td_errors)``.

    Example:
        >>> from stable_baselines3 import DQN
        >>> model = prioritized(DQN)(
        ...     "MlpPolicy",
        ...     "CartPole-v1",
        ...     replay_buffer_class=ReplayBuffer,
        ...     replay_buffer_kwargs={"sampler": sw.Prioritized()},
        ... )
    """
    own: Any = getattr(algorithm, "train", None)
    name = getattr(algorithm, "__name__", repr(algorithm))
    if own not in (DQN.train, SAC.train, TD3.train):
        raise SchemaError(
            f"prioritized({name}): expected DQN, SAC, TD3 or DDPG with the train() of Stable-Baselines3, whose losses "
            "are known; in a train() of your own use data.weighted_mean(losses) and "
            "replay_buffer.update_priorities(data.indices, td_errors)"
        )

    def train(self: Any, *args: Any, **kwargs: Any) -> None:
        losses = _WeightedLosses(f"prioritized({name})", self)
        # The same code with another F: only in this function is torch.nn.functional replaced by the weighted losses.
        names = {**own.__globals__, "F": losses}
        weighted = types.FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
        weighted(self, *args, **kwargs)
        losses.check_all_told()

    return type(f"Prioritized{name}", (algorithm,), {"train": train, "__doc__": algorithm.__doc__})  # type: ignore[return-value]


class _WeightedLosses:
    """The two losses that the algorithms use, weighted with the weights of the batch drawn last."""

    def __init__(self, where: str, model: Any) -> None:
        self._where = where
        self._buffer: ReplayBuffer = model.replay_buffer
        if not isinstance(self._buffer, ReplayBuffer):
            raise SchemaError(
                f"{where}: replay_buffer_class: expected ReplayBuffer of sharpwave.adapters.sb3, got "
                f"{type(self._buffer).__name__}"
            )
        self._critics = model.critic.n_critics if hasattr(model, "critic") else 1
        self._drawn: _Drawn | None = None
        self._errors: list[torch.Tensor] = []
        self._untold = self._buffer._untold

    def mse_loss(self, estimates: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._weigh(functional.mse_loss, estimates, targets)

    def smooth_l1_loss(self, estimates: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self._weigh(functional.smooth_l1_loss, estimates, targets)

    def _weigh(self, loss: Any, estimates: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        drawn = self._buffer._drawn
        if drawn is None:
            raise SchemaError(
                f"{self._where}: sampler: expected sw.Prioritized(), got another; give replay_buffer_kwargs="
                '{"sampler": sw.Prioritized()}, or train with the algorithm itself'
            )
        if drawn is not self._drawn:
            self._drawn, self._errors = drawn, []
        if estimates.shape != drawn.weights.shape or targets.shape != drawn.weights.shape:
            self._refuse_version()
        self._errors.append((estimates - targets).detach().abs())
        if len(self._errors) == self._critics:
            self._buffer.update_priorities(drawn.indices, torch.stack(self._errors).mean(dim=0))
        elif len(self._errors) > self._critics:
            self._refuse_version()
        return (loss(estimates, targets, reduction="none") * drawn.weights).mean()

    def check_all_told(self) -> None:
        if self._buffer._untold > self._untold:
            self._refuse_version()

    def __getattr__(self, name: str) -> Any:
        self._refuse_version()

    def _refuse_version(self) -> NoReturn:
        raise SchemaError(
            f"{self._where}: Stable-Baselines3 {stable_baselines3.__version__} computes its losses in a way that this "
            "adapter does not know, so rows cannot get their priorities; install another version, or give the buffer "
            "sampler=Uniform()"
        )
