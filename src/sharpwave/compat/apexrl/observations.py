"""Observations as ApexRL has them: one tensor, or a tree of tensors by name (dicts, TensorDicts)."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from sharpwave.errors import SchemaError
from sharpwave.schema import Field, Node

__all__ = ["TensorLeafSpec", "as_tensordict", "each", "is_tree", "read_spec", "to_host"]


class TensorLeafSpec:
    """Shape and dtype of one tensor in an observation.

    Equal to any object with the same shape and dtype: checkpoints that hold ApexRL's own class are compared with
    buffers that were given this one, and the other way round.

    Example:
        >>> import torch
        >>> from sharpwave.compat.apexrl import TensorLeafSpec
        >>> TensorLeafSpec((3, 84, 84), torch.uint8)
        TensorLeafSpec(shape=(3, 84, 84), dtype=torch.uint8)
    """

    __slots__ = ("dtype", "shape")

    shape: tuple[int, ...]
    dtype: Any

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "dtype", dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"TensorLeafSpec: {name!r} cannot be changed; make another TensorLeafSpec")

    def __eq__(self, other: object) -> bool:
        if not _is_leaf_spec(other):
            return NotImplemented
        return (self.shape, self.dtype) == (tuple(other.shape), other.dtype)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype))

    def __repr__(self) -> str:
        return f"TensorLeafSpec(shape={self.shape}, dtype={self.dtype})"

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorLeafSpec, (self.shape, self.dtype)


def _is_leaf_spec(spec: Any) -> bool:
    return hasattr(spec, "shape") and hasattr(spec, "dtype")


def is_tree(value: Any) -> bool:
    # TensorDicts are no Mappings: iterating over one goes along its batch, and `in` is refused.
    return isinstance(value, Mapping) or hasattr(value, "items")


def each(value: Any, of: Callable[[Any], Any]) -> Any:
    """``of(leaf)`` for each leaf, in plain dicts; None stays None."""
    if is_tree(value):
        return {key: each(part, of) for key, part in value.items()}
    return None if value is None else of(value)


def to_host(what: str, value: Any) -> Any:
    """An observation as NumPy arrays, in plain dicts."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return np.asarray(leaf)
        leaf = leaf.detach().cpu()
        try:
            # NumPy has no bfloat16; float32 holds all of its numbers.
            return (leaf.float() if leaf.dtype is torch.bfloat16 else leaf).numpy()
        except TypeError:
            raise SchemaError(f"{what}: expected a dtype that NumPy has too, got {leaf.dtype}; convert it") from None

    return each(value, convert)


def read_spec(where: str, name: str, spec: Any, dtype: Any) -> Node:
    """A shape, a leaf spec, or a dict of them by name, as fields. Shapes without a dtype get that one."""
    if is_tree(spec):
        return {key: read_spec(where, f"{name}[{key!r}]", part, dtype) for key, part in spec.items()}
    if isinstance(spec, Field):
        return spec
    try:
        return Field(spec.shape, spec.dtype) if _is_leaf_spec(spec) else Field(spec, dtype)
    except SchemaError as error:
        raise SchemaError(f"{where}: {name}: {error}") from None


@functools.cache
def _tensordict() -> Any:
    # ApexRL needs it, so its projects have it. Without it upstream takes dicts, too.
    try:
        return importlib.import_module("tensordict").TensorDict
    except ImportError:
        return None


def as_tensordict(value: Any, batch_size: tuple[int, ...]) -> Any:
    """Upstream's type of nested observations: a TensorDict where that package is installed, else the dict."""
    if not isinstance(value, dict):
        return value
    parts = {key: as_tensordict(part, batch_size) for key, part in value.items()}
    return parts if _tensordict() is None else _tensordict()(parts, batch_size=batch_size)
