"""ApexRL's RolloutBuffer: ``sharpwave.RolloutBuffer`` by its names."""

from __future__ import annotations

from typing import Any

import torch

import sharpwave as sw
from sharpwave.checks import truth, whole
from sharpwave.errors import BufferFull, NotReady, SchemaError
from sharpwave.rows.columns import Torch

from .observations import as_tensordict, each, is_tree, read_spec

__all__ = ["RolloutBuffer"]

_MINIBATCH = (
    "observations",
    "privileged_observations",
    "actions",
    "old_log_probs",
    "advantages",
    "returns",
    "values",
)
_HEAD_ORDER = ("action_shape", "action_dtype", "device", "num_privileged_obs", "privileged_obs_shape")
_FIRST_ORDER = ("device", "num_privileged_obs")


class _Full(BufferFull, ValueError):
    """Upstream's class of the same mistake."""


class RolloutBuffer(sw.RolloutBuffer):
    """ApexRL's rollout buffer: ``sharpwave.RolloutBuffer`` with tensors, and upstream's further calls.

    After the first three, arguments may come in either order that upstream has had: ``device, num_privileged_obs``
    (8488801), or ``action_shape, action_dtype, device, num_privileged_obs, privileged_obs_shape`` (49815f4).

    Args:
        num_envs: Environments that step together.
        num_steps: Steps of a rollout.
        obs_shape: Of one observation: a shape (float32), a ``TensorLeafSpec``, or a nested dict of them.
        action_shape, action_dtype: Of one action; without them the first ``add`` decides.
        device: Where the tensors are; ``"cpu"`` by default.
        num_privileged_obs: Numbers in an observation that only the critic gets; 0: there is none.
        privileged_obs_shape: The same as a shape, a ``TensorLeafSpec`` or a nested dict of them. If given,
            ``num_privileged_obs`` is ignored.
        seed: Of ``minibatches``; ``get_minibatch`` draws by torch's own generator.
    """

    _flag_dtype = "float32"  # upstream's dones are numbers, and may be written to
    _privileged_argument = "num_privileged_obs="

    def __init__(self, num_envs: int, num_steps: int, obs_shape: Any, *args: Any, **options: Any) -> None:
        where = "RolloutBuffer()"
        seed = options.pop("seed", None)
        # A device is a string, a number or a torch.device; a shape is none of them.
        order = _HEAD_ORDER if args and isinstance(args[0], (tuple, list)) else _FIRST_ORDER
        if len(args) > len(order):
            raise SchemaError(f"{where}: expected at most {3 + len(order)} positional arguments, got {3 + len(args)}")
        for name, value in zip(order, args, strict=False):
            if name in options:
                raise SchemaError(f"{where}: {name}: given by position and by name; leave one out")
            options[name] = value
        unknown = [name for name in options if name not in _HEAD_ORDER]
        if unknown:
            raise SchemaError(f"{where}: {unknown[0]}: expected one of {', '.join(_HEAD_ORDER)}, seed")
        shape, dtype = options.get("action_shape"), options.get("action_dtype")
        privileged, count = options.get("privileged_obs_shape"), options.get("num_privileged_obs", 0)
        count = whole(where, "num_privileged_obs", count, 0)
        self._given = {"obs_shape": obs_shape, "privileged_obs_shape": privileged, "num_privileged_obs": count}
        # Upstream's newest form always gives the actions' dtype, and there the count alone declares nothing: its PPO
        # passes the environment's count without any privileged observations. Then the first add decides.
        self._privileged_is_open = privileged is None and count > 0 and dtype is not None
        if privileged is not None:
            privileged = read_spec(where, "privileged_obs_shape", privileged, torch.float32)
        elif count and not self._privileged_is_open:
            privileged = (count,)
        super().__init__(
            num_envs,
            num_steps,
            obs_shape=read_spec(where, "obs_shape", obs_shape, torch.float32),
            device="cpu" if options.get("device") is None else options["device"],
            privileged_obs_shape=privileged,
            action_shape=shape,
            action_dtype=dtype,
            seed=seed,
        )
        self._holds_last_rollout = False

    # ---- writing ----------------------------------------------------------------------------------------------

    def add(
        self,
        observations: Any,
        privileged_observations: Any = None,
        actions: Any = None,
        rewards: Any = None,
        dones: Any = None,
        values: Any = None,
        log_probs: Any = None,
        truncated: Any = None,
        final_values: Any = None,
        **extras: Any,
    ) -> None:
        """Adds one step of every environment. Tensors of another device are copied to the buffer's.

        Raises:
            ValueError: The rollout is full.
            SchemaError: Something is missing or does not fit. Nothing was written.
        """
        if self.is_full:
            raise _Full(f"Rollout buffer is full (capacity: {self.num_steps})")
        given: tuple[Any, ...] = (observations, privileged_observations, actions, rewards, dones, values, log_probs)
        given += (truncated, final_values)
        declares = self._privileged_is_open and privileged_observations is not None
        if declares:
            count = self._given["num_privileged_obs"]
            self._columns.declare(
                "privileged_observations", read_spec("add()", "num_privileged_obs", (count,), "float32")
            )
        try:
            super().add(*(self._here(value) for value in given), **extras)
        except BaseException:
            if declares:
                self._columns.forget("privileged_observations")
            raise
        self.__dict__["_privileged_is_open"] = False

    def _here(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(self.device)
        return each(value, self._here) if is_tree(value) else value

    def clear(self, *, reset: bool = False) -> None:
        """Begins the next rollout; advantages and returns are zero until they are computed again."""
        self._holds_last_rollout |= self._step > 0
        super().clear(reset=reset)
        self._columns.arrays["advantages"].zero_()
        self._columns.arrays["returns"].zero_()

    def to(self, device: Any) -> RolloutBuffer:
        """Moves every tensor; returns the buffer itself."""
        self._place = self._columns.place = Torch("to()", device, None)
        self._columns.arrays = {path: tensor.to(self.device) for path, tensor in self._columns.arrays.items()}
        self._columns.forget_views()
        return self

    # ---- reading ----------------------------------------------------------------------------------------------

    def get_all_data(self, *, normalize_advantages: bool = False) -> dict[str, Any]:
        """The whole rollout as one batch, ``num_steps * num_envs`` rows, row t * num_envs + n. No copies.

        Steps that were not added yet, and advantages that are not computed yet, are zeros.

        Args:
            normalize_advantages: Whether the batch has advantages of mean 0 and deviation 1 over all rows. Those are a
                copy; the stored advantages do not change.

        Raises:
            NotReady: Steps are missing, and their rows still hold the rollout before.
        """
        where = "get_all_data()"
        if self._step < self.num_steps and self._holds_last_rollout:
            raise NotReady(
                f"{where}: the rollout has {self._step} of {self.num_steps} steps, and the other rows are of the last "
                "rollout; add the others"
            )
        if "actions" not in self._columns.nodes:
            raise NotReady(f"{where}: the shape of actions is not known yet; add a step or give action_shape=")
        truth(where, "normalize_advantages", normalize_advantages)
        batch = {key: self._columns.tree(name, _flat) for name, key in self._names().items()}
        batch.setdefault("privileged_observations", None)
        if normalize_advantages:
            batch["advantages"] = self._place.normalize(batch["advantages"], None)
        rows = (self.num_steps * self.num_envs,)
        return {key: as_tensordict(value, rows) for key, value in batch.items()}

    def get_minibatch(self, batch_size: int) -> tuple[Any, ...]:
        """Rows drawn with replacement by torch's own generator: observations, privileged ones, actions, old
        log-probabilities, advantages, returns, values. ``minibatches`` gives each row once an epoch."""
        data = self.get_all_data()
        index = torch.randint(0, self.num_steps * self.num_envs, (batch_size,), device=self.device)
        taken = (each(data[name], lambda leaf: leaf[index]) for name in _MINIBATCH)
        return tuple(as_tensordict(value, (batch_size,)) for value in taken)

    # ---- facts ------------------------------------------------------------------------------------------------

    @property
    def obs_shape(self) -> Any:
        """As it was given."""
        return self._given["obs_shape"]

    @property
    def action_shape(self) -> tuple[int, ...] | None:
        """Of one action; None until the first add decides."""
        stored = self._columns.arrays.get("actions")
        return None if stored is None else tuple(stored.shape[2:])

    @property
    def action_dtype(self) -> torch.dtype | None:
        """Of actions; None until the first add decides."""
        stored = self._columns.arrays.get("actions")
        return None if stored is None else stored.dtype

    @property
    def num_privileged_obs(self) -> int:
        """As it was given."""
        return self._given["num_privileged_obs"]  # type: ignore[no-any-return]

    @property
    def privileged_obs_shape(self) -> Any:
        """As it was given."""
        return self._given["privileged_obs_shape"]

    def __getattr__(self, name: str) -> Any:
        columns = self.__dict__.get("_columns")
        if columns is not None and name == "privileged_observations" and name not in columns.nodes:
            return None
        stored = super().__getattr__(name)
        return as_tensordict(stored, columns.lead) if columns is not None else stored

    def __setattr__(self, name: str, value: Any) -> None:
        # check_settable() refuses unknown names only for a class that defines __setattr__ itself.
        columns = self.__dict__.get("_columns")
        super().__setattr__(name, self._here(value) if columns is not None and name in columns.nodes else value)


def _flat(array: torch.Tensor) -> torch.Tensor:
    return array.reshape(-1, *array.shape[2:])
