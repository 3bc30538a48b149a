"""What a row holds: fields with names, shapes and dtypes, nested as the environment's observations are."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Union

import numpy as np

from . import _core
from .errors import SchemaError

__all__ = ["Field", "Schema"]

# Names that batches and add() use for something else.
_RESERVED = {
    "indices",
    "weights",
    "probabilities",
    "discount",
    "terminated",
    "truncated",
    "mask",
    "priority",
    "timeout",
}
_STANDARD = ("obs", "action", "reward", "next_obs", "done")
_MAX_DIMENSIONS = 8
_MAX_EXTENT = 2**62


class Field:
    """One array of a row.

    Args:
        shape: Shape in one row; ``()`` is a number.
        dtype: Any NumPy dtype of fixed size.

    Example:
        >>> Field((84, 84), "uint8")
        Field((84, 84), 'uint8')
    """

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: tuple[int, ...] | int = (), dtype: Any = "float32") -> None:
        self.shape = _read_shape(shape)
        self.dtype = _read_dtype(dtype)

    def __repr__(self) -> str:
        return f"Field({self.shape}, {self.dtype.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Field) and (self.shape, self.dtype) == (other.shape, other.dtype)

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype))


Node = Union[Field, Mapping[str, "Node"], tuple["Node", ...]]  # noqa: UP007 - a forward reference has no |


def _read_shape(shape: Any) -> tuple[int, ...]:
    try:
        extents = tuple(operator.index(n) for n in (shape if isinstance(shape, (tuple, list)) else (shape,)))
    except TypeError:
        raise SchemaError(f"Field(): shape: expected a tuple of whole numbers, got {shape!r}") from None
    if any(not 1 <= n <= _MAX_EXTENT for n in extents):
        raise SchemaError(f"Field(): shape: expected sizes of 1 to {_MAX_EXTENT}, got {extents}")
    if len(extents) > _MAX_DIMENSIONS:
        raise SchemaError(f"Field(): shape: expected at most {_MAX_DIMENSIONS} dimensions, got {len(extents)}")
    return extents


def _read_dtype(dtype: Any) -> np.dtype[Any]:
    read: np.dtype[Any]
    try:
        read = np.dtype(dtype)
    except TypeError:
        # torch dtypes name themselves "torch.float32".
        try:
            read = np.dtype(str(dtype).removeprefix("torch."))
        except TypeError:
            raise SchemaError(f"Field(): dtype: expected a NumPy dtype, got {dtype!r}") from None
    if read.hasobject or read.fields or read.subdtype or read.itemsize == 0:
        raise SchemaError(f"Field(): dtype: expected a plain dtype of fixed size, got {dtype!r}")
    if not read.isnative:
        raise SchemaError(f"Field(): dtype: expected native byte order, got {dtype!r}; give {read.newbyteorder('=')}")
    return read


class Schema:
    """The fields of a row in the order in which ``add`` takes them, and the tree that the engine reads them by."""

    def __init__(self, fields: Mapping[str, Node]) -> None:
        _check_names(fields, "")
        order = [name for name in _STANDARD if name in fields]
        order += [name for name in fields if name not in _STANDARD]
        self.fields: dict[str, Node] = {name: fields[name] for name in order}
        self.leaves: list[tuple[str, Field]] = []
        nodes = [self._number(name, name, self.fields[name]) for name in order]
        numbers = [i for i, (_, field) in enumerate(self.leaves) if field.shape == ()]
        named = {name: i for i, (name, _) in enumerate(self.leaves)}
        self.done = named.get("done", -1)
        # Of the fields that are plain numbers, one tells how many rows an add brings: their rank is unmistakable.
        self.rows_from = named.get("reward", numbers[0] if numbers else 0)
        self._nodes = nodes

    def _number(self, name: str, path: str, node: Node) -> tuple[Any, ...]:
        if isinstance(node, Field):
            self.leaves.append((path, node))
            return (name, len(self.leaves) - 1)
        if isinstance(node, tuple):
            return (name, "tuple", [self._number(str(i), f"{path}/{i}", part) for i, part in enumerate(node)])
        return (name, "dict", [self._number(key, f"{path}/{key}", part) for key, part in node.items()])

    @property
    def names(self) -> list[str]:
        """Top-level names, in the order of positional arguments."""
        return list(self.fields)

    def tree(self) -> _core.Tree:
        leaves = [(name, field.dtype, field.shape) for name, field in self.leaves]
        return _core.Tree(self._nodes, leaves, self.done, self.rows_from)

    def engine_fields(self) -> list[tuple[str, str, int, list[int]]]:
        return [(name, f.dtype.str, f.dtype.itemsize, list(f.shape)) for name, f in self.leaves]

    def to_plain(self) -> dict[str, Any]:
        """The schema as plain data, for the description that a file carries."""
        return {name: _to_plain(node) for name, node in self.fields.items()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Schema:
        return cls({name: _from_plain(node) for name, node in plain.items()})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.to_plain() == other.to_plain()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Schema({self.fields!r})"


def _check_names(node: Node, path: str) -> None:
    if isinstance(node, Field):
        return
    if isinstance(node, tuple):
        parts: list[tuple[Any, Node]] = list(enumerate(node))
    elif isinstance(node, Mapping):
        parts = list(node.items())
    else:
        raise SchemaError(f"schema: field '{path}': expected a Field, a dict or a tuple of them, got {node!r}")
    if not parts:
        raise SchemaError(f"schema: {f'field {path!r}' if path else 'a row'} needs at least one field, got none")
    for name, part in parts:
        if not isinstance(node, tuple):
            if not isinstance(name, str) or not name or "/" in name or not name.isprintable():
                raise SchemaError(f"schema: expected names without '/', got {name!r}")
            if not path and name in _RESERVED:
                raise SchemaError(f"schema: field {name!r}: the name is taken by batches or add(); give another")
        _check_names(part, f"{path}/{name}" if path else str(name))


def _to_plain(node: Node) -> Any:
    if isinstance(node, Field):
        return [list(node.shape), node.dtype.str]
    if isinstance(node, tuple):
        return {"tuple": [_to_plain(part) for part in node]}
    return {"dict": {name: _to_plain(part) for name, part in node.items()}}


def _from_plain(plain: Any) -> Node:
    if isinstance(plain, list):
        return Field(tuple(plain[0]), plain[1])
    if "tuple" in plain:
        return tuple(_from_plain(part) for part in plain["tuple"])
    return {name: _from_plain(part) for name, part in plain["dict"].items()}


def transitions(
    fields: Mapping[str, Node] | None,
    *,
    obs_shape: Any,
    obs_dtype: Any,
    action_shape: Any,
    action_dtype: Any,
    next_obs: str | None,
) -> Schema:
    """The schema of a transition: the user's fields, and what a transition must have besides."""
    where = "ReplayBuffer()"
    if fields is None:
        if obs_shape is None:
            raise SchemaError(f"{where}: expected schema= or obs_shape=, got neither")
        fields = {"obs": Field(obs_shape, obs_dtype), "action": Field(action_shape, action_dtype)}
    elif obs_shape is not None:
        raise SchemaError(f"{where}: expected schema= or obs_shape=, got both; put the shape into the schema")
    elif not isinstance(fields, Mapping):
        raise SchemaError(f"{where}: schema: expected a dict of fields, got {fields!r}")
    whole: dict[str, Node] = dict(fields)
    if next_obs == "stored":
        if "next_obs" not in whole:
            if "obs" not in whole:
                raise SchemaError(f"{where}: next_obs: the schema has no 'obs' to copy; give next_obs=None")
            whole["next_obs"] = whole["obs"]
    elif next_obs is not None:
        raise SchemaError(f"{where}: next_obs: expected 'stored' or None, got {next_obs!r}")
    elif "next_obs" in whole:
        raise SchemaError(f"{where}: next_obs: the schema has the field; give next_obs='stored' or leave it out")
    whole.setdefault("reward", Field((), "float32"))
    whole.setdefault("done", Field((), "bool"))
    for name in ("reward", "done"):
        node = whole[name]
        if not isinstance(node, Field):
            raise SchemaError(f"{where}: schema: field {name!r}: expected a Field, got {node!r}")
    done = whole["done"]
    if isinstance(done, Field) and done.shape != ():
        raise SchemaError(f"{where}: schema: field 'done': expected shape (), got {done.shape}")
    return Schema(whole)


def from_space(space: Any, where: str) -> Node:
    """The field or fields that hold one value of a Gymnasium space."""
    from gymnasium import spaces

    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        return Field(space.shape, space.dtype)
    if isinstance(space, spaces.Discrete):
        return Field((), space.dtype)
    if isinstance(space, spaces.Dict):
        return {name: from_space(part, f"{where}[{name!r}]") for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(from_space(part, f"{where}[{i}]") for i, part in enumerate(space.spaces))
    raise SchemaError(
        f"for_env(): {where}: expected Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple, got {space}; "
        "give a schema= of your own"
    )
