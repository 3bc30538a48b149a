"""Columns: the arrays of ``add`` and of batches, in the shapes and dtypes of the environment's spaces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

import sharpwave as sw
from sharpwave.arrays import as_array
from sharpwave.checks import whole
from sharpwave.errors import SchemaError

__all__ = ["Column", "Columns", "action_size", "obs_shape", "read_obs_columns"]

Array = np.ndarray[Any, Any]


class Column:
    """One array: a value per environment in ``add``, a value per row in batches.

    A stacked column has k frames along one axis of the space's shape, as ``VecFrameStack`` makes them. The engine has
    the frames on an axis of their own, and stores one frame in each row.

    Args:
        key: Of a dict of observations, for messages; "" for other columns.
        shape: Shape of one value.
        n_envs: Environments that step together.
        stack: Frames in a value.
        axis: The axis that has the frames: 0 or -1.
        mend: What to do about a value that the dtype cannot hold.
    """

    __slots__ = ("_expected", "_frames", "_is_last", "_key", "_mend", "_size", "dtype", "shape", "stack")

    def __init__(
        self, key: str, shape: tuple[int, ...], dtype: Any, n_envs: int, *, stack: int = 1, axis: int = 0, mend: str
    ) -> None:
        self._key, self.shape, self.dtype, self.stack, self._mend = key, shape, np.dtype(dtype), stack, mend
        self._expected = (n_envs, *shape)
        self._size = math.prod(self._expected)
        self._is_last = axis == -1
        frame = list(shape)
        if stack > 1:
            frame[axis] //= stack
        self._frames = tuple(frame)

    def field(self, compression: Literal["lz4", "zstd"] | None, padding: str) -> sw.Field:
        """The field of a row that stores it."""
        options: dict[str, Any] = {"compression": compression}
        if self.stack > 1:
            options |= {"stack": self.stack, "padding": padding}
        return sw.Field(self._frames, self.dtype, **options)

    def fit(self, name: str, value: Any) -> Array:
        """A value per environment in the shape and dtype of the column. As in Stable-Baselines3, axes of length 1 may
        be missing or added, and actions may have any shape of the right size."""
        if type(value) is np.ndarray and value.dtype == self.dtype:
            if value.shape == self._expected:
                return value if self.stack == 1 else self._split(value)
            if name == "action" and value.size == self._size:
                return value.reshape(self._expected)
        array = self._fit(name, value)
        return array if self.stack == 1 else self._split(array)

    def _fit(self, name: str, value: Any) -> Array:
        expected, dtype = self._expected, self.dtype
        array = as_array(f"{name}{self._key}", value)
        if array.dtype.kind not in "biuf":
            raise SchemaError(f"add(): {name}{self._key}: expected numbers of shape {expected}, got {value!r:.80}")
        if array.shape != expected:
            if array.size != self._size or (name != "action" and _long_axes(array) != _long_axes(expected)):
                raise SchemaError(
                    f"add(): {name}{self._key}: expected shape {expected}, n_envs={expected[0]} values of the space's "
                    f"shape, got {array.shape}; make the buffer with the environment's own spaces and number of "
                    "environments"
                )
            array = array.reshape(expected)
        if array.dtype == dtype:
            return array
        with np.errstate(all="ignore"):
            cast = array.astype(dtype)
        # Rounding to a float is usual; any other change of a value is refused.
        if not (np.array_equal(np.isinf(cast), np.isinf(array)) if dtype.kind == "f" else (cast == array).all()):
            raise SchemaError(
                f"add(): {name}{self._key}: expected values that {dtype} can hold, got {array.dtype} with others; "
                f"{self._mend}"
            )
        return cast

    def _split(self, value: Array) -> Array:
        """The frames on an axis of their own, after the axis of environments."""
        n_envs, *shape = value.shape
        if not self._is_last:
            return value.reshape(n_envs, self.stack, *self._frames)
        return np.moveaxis(value.reshape(n_envs, *shape[:-1], self.stack, self._frames[-1]), -2, 1)

    def join(self, batch: Array) -> Array:
        """The inverse, for a batch of the engine."""
        if self.stack == 1:
            return batch
        if self._is_last:
            batch = np.moveaxis(batch, 1, -2)
        return batch.reshape(len(batch), *self.shape)


Columns = Column | dict[str, Column]


def _long_axes(array: Any) -> list[int]:
    return [n for n in getattr(array, "shape", array) if n != 1]


def obs_shape(space: spaces.Space[Any]) -> Any:
    """The shape of an observation as Stable-Baselines3 gives it to networks; for a dict a dict of them."""
    if isinstance(space, spaces.Dict):
        return {name: obs_shape(part) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Discrete):
        return (1,)
    if isinstance(space, spaces.MultiDiscrete):
        return (len(space.nvec),)
    if isinstance(space, (spaces.Box, spaces.MultiBinary)):
        return space.shape
    raise SchemaError(
        "ReplayBuffer(): observation_space: expected Box, Discrete, MultiDiscrete, MultiBinary, or a Dict of them, got "
        f"{space}; flatten it with a wrapper of the environment"
    )


def action_size(space: spaces.Space[Any]) -> int:
    """The numbers of an action."""
    if isinstance(space, spaces.Discrete):
        return 1
    if isinstance(space, (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)):
        return math.prod(space.shape)
    raise SchemaError(
        f"ReplayBuffer(): action_space: expected Box, Discrete, MultiDiscrete or MultiBinary, got {space}; flatten it "
        "with a wrapper of the environment"
    )


def read_obs_columns(
    space: spaces.Space[Any],
    n_envs: int,
    stack: int | Mapping[str, int],
    channels_order: Literal["first", "last"] | None,
) -> Columns:
    """The columns of observations: one, or a dict of them."""
    mend = "scale or round them in a wrapper of the environment, or give the space another dtype"

    def column(key: str, part: spaces.Space[Any], frames: int) -> Column:
        shape = obs_shape(part)
        frames = whole("ReplayBuffer()", f"stack{key}", frames, 1, 256)
        axis = 0 if frames == 1 else _stack_axis(f"stack{key}", shape, frames, channels_order)
        return Column(key, shape, part.dtype, n_envs, stack=frames, axis=axis, mend=mend)

    if not isinstance(space, spaces.Dict):
        if isinstance(stack, Mapping):
            raise SchemaError(f"ReplayBuffer(): stack: expected a whole number for {space}, got {dict(stack)}")
        return column("", space, stack)
    if isinstance(stack, Mapping):
        unknown = sorted(set(stack) - set(space.spaces))
        if unknown:
            raise SchemaError(
                f"ReplayBuffer(): stack: expected keys of the observation space, {sorted(space.spaces)}, got {unknown}"
            )
    else:
        stack = dict.fromkeys(space.spaces, stack)
    return {key: column(f"[{key!r}]", part, stack.get(key, 1)) for key, part in space.spaces.items()}


def _stack_axis(name: str, shape: tuple[int, ...], stack: int, order: Literal["first", "last"] | None) -> int:
    """The axis of a shape that has the frames: that of an image's channels, or the last one."""
    fits = {"first": bool(shape) and shape[0] % stack == 0, "last": bool(shape) and shape[-1] % stack == 0}
    if order is None and len(shape) == 3 and fits["first"] and fits["last"]:
        if shape[0] == shape[-1]:
            raise SchemaError(
                f"ReplayBuffer(): {name}: the first or the last axis of {shape} may have the {stack} frames; give "
                "channels_order='first' or 'last'"
            )
        order = "first" if shape[0] < shape[-1] else "last"
    elif order is None:
        order = "first" if len(shape) == 3 and fits["first"] else "last"
    if not fits[order]:
        raise SchemaError(
            f"ReplayBuffer(): {name}: expected {stack} frames on the {order} axis of an observation, got shape "
            f"{shape}; give the number of frames that VecFrameStack stacks, and its channels_order"
        )
    return 0 if order == "first" else -1
