"""The schema of a row: fields with names, shapes and dtypes, nested as the environment's observations are."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, Literal, Union

import numpy as np

from . import _core
from ._core import Role
from .checks import set_once, told
from .errors import SchemaError

__all__ = ["Field", "Schema", "is_next"]

# Names with another meaning in batches or in add().
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
    "relabelled",
    "valid",
    "first",
    "place_indices",
    "return_indices",
    "stream",
    "episode",
}
_STANDARD = ("obs", "action", "reward", "next_obs", "done")
_MAX_DIMENSIONS = 8
_MAX_STACK = 256
_CODECS = {"lz4": _core.Codec.lz4, "zstd": _core.Codec.zstd}
_MAX_EXTENT = 2**62
# Why a field with one of these options cannot be mutable.
_WHY_NOT = {
    "stack": "makes values of the frames of several rows",
    "compression": "gives values different sizes",
    "ragged": "gives values different sizes",
}


class Field:
    """One array of a row.

    Args:
        shape: Shape of the value in one row; ``()`` is a number.
        dtype: Any NumPy dtype of fixed size.
        stack: Number of frames in a batch. A row stores one frame; ``add`` takes one frame or a whole stack. Batches
            have the shape (rows, stack, *shape), oldest frame first.
        padding: What stacks have before the first frame of an episode: ``"repeat"`` repeats the first frame, as
            Gymnasium's ``FrameStackObservation`` does by default; ``"zero"`` is frames of zeros, as ALE's vector
            environment has them.
        compression: Lossless: ``"lz4"`` (fast) or ``"zstd"`` (smaller).
        ragged: Values have different lengths; the first axis of ``shape`` is the greatest length. True gives batches
            ``{"values", "offsets"}``, ``"padded"`` gives ``{"values", "mask"}``.
        mutable: ``ReplayBuffer.write`` may give rows new values of this field. It takes twice the memory; see
            ``docs/decisions/0019-write-back.md``.

    Example:
        >>> Field((84, 84), "uint8", stack=4)
        Field((84, 84), 'uint8', stack=4)
    """

    __slots__ = ("compression", "dtype", "mutable", "padding", "ragged", "shape", "stack")
    __setattr__ = set_once

    def __init__(
        self,
        shape: tuple[int, ...] | int = (),
        dtype: Any = "float32",
        *,
        stack: int = 1,
        padding: Literal["repeat", "zero"] = "repeat",
        compression: Literal["lz4", "zstd"] | None = None,
        ragged: bool | Literal["padded"] = False,
        mutable: bool = False,
    ) -> None:
        self.shape = _read_shape(shape)
        self.dtype = _read_dtype(dtype)
        if isinstance(stack, bool) or not isinstance(stack, int) or not 1 <= stack <= _MAX_STACK:
            raise SchemaError(f"Field(): stack: expected a whole number, 1 to {_MAX_STACK}, got {stack!r}")
        if not isinstance(padding, str) or padding not in ("repeat", "zero"):
            raise SchemaError(f"Field(): padding: expected 'repeat' or 'zero', got {told(padding)}")
        if padding == "zero" and stack == 1:
            raise SchemaError("Field(): padding='zero' is for stacks of frames; give stack= the number of frames")
        if compression is not None and not (isinstance(compression, str) and compression in _CODECS):
            raise SchemaError(f"Field(): compression: expected 'lz4', 'zstd' or None, got {told(compression)}")
        if not isinstance(ragged, bool) and not (isinstance(ragged, str) and ragged == "padded"):
            raise SchemaError(f"Field(): ragged: expected True, 'padded' or False, got {told(ragged)}")
        if ragged and not self.shape:
            raise SchemaError("Field(): ragged: expected a shape whose first axis is the greatest length, got ()")
        if ragged and stack > 1:
            raise SchemaError("Field(): ragged: values of different lengths cannot be stacked; give stack=1")
        if stack > 1 and len(self.shape) >= _MAX_DIMENSIONS:
            raise SchemaError(
                f"Field(): stack: expected at most {_MAX_DIMENSIONS - 1} dimensions, got {len(self.shape)}"
            )
        if not isinstance(mutable, bool):
            raise SchemaError(f"Field(): mutable: expected True or False, got {told(mutable)}")
        for name, is_given in (("stack", stack > 1), ("compression", compression is not None), ("ragged", ragged)):
            if mutable and is_given:
                raise SchemaError(
                    f"Field(): mutable: a value that is written back has two places of a fixed size in the buffer, and "
                    f"{name}= {_WHY_NOT[name]}; leave out {name}= or mutable="
                )
        self.stack = stack
        self.padding = padding
        self.compression = compression
        self.ragged = ragged
        self.mutable = mutable

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if self.stack > 1:
            options["stack"] = self.stack
        if self.padding != "repeat":
            options["padding"] = self.padding
        if self.compression is not None:
            options["compression"] = self.compression
        if self.ragged:
            options["ragged"] = self.ragged
        if self.mutable:
            options["mutable"] = self.mutable
        return options

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self._options().items())
        return f"Field({self.shape}, {self.dtype.name!r}{options})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Field) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


Node = Union[Field, Mapping[str, "Node"], tuple["Node", ...]]  # noqa: UP007 - a forward reference has no |


def _read_shape(shape: Any) -> tuple[int, ...]:
    try:
        extents = tuple(operator.index(n) for n in (shape if isinstance(shape, (tuple, list)) else (shape,)))
    except TypeError:
        raise SchemaError(f"Field(): shape: expected a tuple of whole numbers, got {told(shape)}") from None
    if any(not 1 <= n <= _MAX_EXTENT for n in extents):
        raise SchemaError(f"Field(): shape: expected sizes of 1 to {_MAX_EXTENT}, got {extents}")
    if len(extents) > _MAX_DIMENSIONS:
        raise SchemaError(f"Field(): shape: expected at most {_MAX_DIMENSIONS} dimensions, got {len(extents)}")
    return extents


def _read_dtype(dtype: Any) -> np.dtype[Any]:
    read: np.dtype[Any]
    try:
        read = np.dtype(dtype)
    except (TypeError, ValueError):
        # str() of a torch dtype is "torch.float32".
        try:
            read = np.dtype(str(dtype).removeprefix("torch."))
        except (TypeError, ValueError, SyntaxError):
            raise SchemaError(f"Field(): dtype: expected a NumPy dtype, got {told(dtype)}") from None
    if read.hasobject or read.fields or read.subdtype or read.itemsize == 0:
        raise SchemaError(f"Field(): dtype: expected a plain dtype of fixed size, got {dtype!r}")
    if not read.isnative:
        raise SchemaError(f"Field(): dtype: expected native byte order, got {dtype!r}; give {read.newbyteorder('=')}")
    return read


class Schema:
    """The fields of a row, in the order in which ``add`` takes them.

    With ``derives_next`` the leaves under ``next_obs`` are not stored: their values are the ``obs`` of the next row.
    """

    def __init__(self, fields: Mapping[str, Node], derives_next: bool = False) -> None:
        _check_names(fields, "")
        order = [name for name in _STANDARD if name in fields]
        order += [name for name in fields if name not in _STANDARD]
        self.fields: dict[str, Node] = {name: fields[name] for name in order}
        self.derives_next = derives_next
        self.leaves: list[tuple[str, Field]] = []
        nodes = [self._number(name, name, self.fields[name]) for name in order]
        numbers = [i for i, (_, field) in enumerate(self.leaves) if field.shape == () and field.stack == 1]
        named = {name: i for i, (name, _) in enumerate(self.leaves)}
        self.dones = [i for i, (name, _) in enumerate(self.leaves) if _is_under(name, "done")]
        # Whether each agent has its own done: then a row ends its episode when all agents have ended.
        self.by_agent = self.dones != [] and (
            self.dones != [named.get("done")] or self.leaves[named["done"]][1].shape != ()
        )
        # The shape of this field tells how many rows an add brings. A plain number is chosen, because all of its axes
        # count rows.
        rewards = [i for i, (name, _) in enumerate(self.leaves) if _is_under(name, "reward")]
        self.rows_from = (rewards or numbers or [0])[0]
        self._nodes = nodes
        # For each leaf: its field in the table, its role in an example, the field with the older frames of its stack.
        self._kept = [name for name, _ in self.leaves if not (derives_next and is_next(name))]
        field_of = {name: i for i, name in enumerate(self._kept)}
        self._places: list[tuple[int, Role, int]] = []
        for name, field in self.leaves:
            now = name.removeprefix("next_") if is_next(name) else name
            if derives_next and is_next(name):
                self._places.append((field_of[now], Role.next, 0))
            elif is_next(name):
                if field.stack > 1 and (now not in named or self.leaves[named[now]][1] != field):
                    raise SchemaError(
                        f"schema: field {name!r}: its stack continues the stack of {now!r}; give both the same Field"
                    )
                self._places.append((field_of[name], Role.last, field_of.get(now, 0)))
            elif _is_under(name, "done"):
                self._places.append((field_of[name], Role.last, 0))
            else:
                self._places.append((field_of[name], Role.reward if _is_under(name, "reward") else Role.own, 0))
        self.ragged = [i for i, (_, field) in enumerate(self.leaves) if field.ragged]
        self.mutable = {name: i for i, (name, field) in enumerate(self.leaves) if field.mutable}
        self._check_mutable()

    def _check_mutable(self) -> None:
        """Refuses mutable fields whose values the buffer keeps elsewhere too."""
        for name in self.mutable:
            if _is_under(name, "done"):
                raise SchemaError(
                    f"schema: field {name!r}: it cannot be mutable: the ends of episodes are stored with the rows and "
                    "do not change"
                )
            if name == "stale":
                raise SchemaError("schema: field 'stale': a mutable field needs another name: write() has stale=")
            if self.derives_next and name.split("/")[0] in ("obs", "next_obs"):
                raise SchemaError(
                    f"schema: field {name!r}: it cannot be mutable with next_obs='derived': its value is also the next "
                    "observation of the row before; give next_obs='stored'"
                )

    @property
    def needs_order(self) -> bool:
        """Whether a row needs its neighbours: derived next observations and stacks do."""
        return self.derives_next or any(field.stack > 1 for _, field in self.leaves)

    @property
    def agents(self) -> list[tuple[int, int]]:
        """Leaves that belong together where each agent has its own done: that, and the agent's reward. Empty if rewards
        are not given for each agent."""
        named = {name: i for i, (name, _) in enumerate(self.leaves)}
        pairs = []
        for done in self.dones if self.by_agent else []:
            path, field = self.leaves[done]
            reward = named.get("reward" + path.removeprefix("done"), -1)
            if reward < 0 or self.leaves[reward][1].shape[: len(field.shape)] != field.shape:
                return []
            pairs.append((done, reward))
        return pairs

    def discount_shape(self, n_step: int) -> tuple[int, ...] | None:
        """Of the discounts of one example, as the engine gives them; None where it gives none."""
        if n_step == 1:
            return None
        if not self.by_agent:
            return ()
        fields = [self.leaves[done][1] for done in self.dones]
        is_nested = not isinstance(self.fields["done"], Field)
        return (sum(math.prod(field.shape) for field in fields),) if is_nested else fields[0].shape

    def split_discounts(self, discounts: Any) -> Any:
        """The discounts of a batch, nested as ``done`` is. Parts of one array."""
        if not self.by_agent or isinstance(self.fields["done"], Field):
            return discounts
        at = 0

        def part(node: Node) -> Any:
            nonlocal at
            if isinstance(node, tuple):
                return tuple(part(child) for child in node)
            if not isinstance(node, Field):
                return {name: part(child) for name, child in node.items()}
            first, at = at, at + math.prod(node.shape)
            return discounts[..., first:at].reshape(*discounts.shape[:-1], *node.shape)

        return part(self.fields["done"])

    def _number(self, name: str, path: str, node: Node) -> tuple[Any, ...]:
        if isinstance(node, Field):
            self.leaves.append((path, node))
            return (name, len(self.leaves) - 1)
        if isinstance(node, tuple):
            if any(isinstance(part, Field) and part.ragged for part in node):
                raise SchemaError(f"schema: field {path!r}: a tuple cannot have a ragged field; use a dict")
            return (name, "tuple", [self._number(str(i), f"{path}/{i}", part) for i, part in enumerate(node)])
        return (name, "dict", [self._number(key, f"{path}/{key}", part) for key, part in node.items()])

    @property
    def names(self) -> list[str]:
        """Top-level names, in the order of positional arguments."""
        return list(self.fields)

    def tree(
        self, *, n_step: int, weights: bool, relabelled: bool, truncated: bool, place_indices: bool, window: int
    ) -> _core.Tree:
        leaves = [
            (name, field.dtype, field.shape, field.stack, bool(field.ragged), *place)
            for (name, field), place in zip(self.leaves, self._places, strict=True)
        ]
        extras = self.discount_shape(n_step), weights, relabelled, truncated, place_indices
        return _core.Tree(self._nodes, leaves, self.dones, self.by_agent, self.rows_from, *extras, window)

    def engine_fields(self) -> list[_core.FieldLayout]:
        by_name = dict(self.leaves)
        fields = []
        for name in self._kept:
            f = by_name[name]
            fields.append(
                _core.FieldLayout(
                    name=name,
                    dtype=f.dtype.str,
                    item_bytes=f.dtype.itemsize,
                    shape=list(f.shape),
                    stack=f.stack,
                    pads_zero=f.padding == "zero",
                    codec=_CODECS.get(f.compression or "", _core.Codec.none),
                    is_ragged=bool(f.ragged),
                    gives_next=self.derives_next and (name == "obs" or name.startswith("obs/")),
                    is_mutable=f.mutable,
                    follows=self._kept.index(name.removeprefix("next_")) if is_next(name) and f.stack > 1 else -1,
                )
            )
        return fields

    def to_plain(self) -> dict[str, Any]:
        """The schema as JSON can store it."""
        plain = {name: _to_plain(node) for name, node in self.fields.items()}
        return {"fields": plain, "derives_next": self.derives_next}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Schema:
        return cls({name: _from_plain(node) for name, node in plain["fields"].items()}, bool(plain["derives_next"]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.to_plain() == other.to_plain()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Schema({self.fields!r})"


def is_next(path: str) -> bool:
    """Whether a leaf belongs to the next observation."""
    return path == "next_obs" or path.startswith("next_obs/")


def _is_under(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}/")


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
                raise SchemaError(f"schema: field {name!r}: the name is reserved for batches or add(); use another")
        _check_names(part, f"{path}/{name}" if path else str(name))


def _to_plain(node: Node) -> Any:
    if isinstance(node, Field):
        return [list(node.shape), node.dtype.str, node._options()]
    if isinstance(node, tuple):
        return {"tuple": [_to_plain(part) for part in node]}
    return {"dict": {name: _to_plain(part) for name, part in node.items()}}


def _from_plain(plain: Any) -> Node:
    if isinstance(plain, list):
        return Field(tuple(plain[0]), plain[1], **plain[2])
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
    """The schema of a transition: the user's fields, with next_obs, reward and done where they are missing."""
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
    if next_obs is not None and not (isinstance(next_obs, str) and next_obs in ("stored", "derived")):
        raise SchemaError(f"{where}: next_obs: expected 'stored', 'derived' or None, got {next_obs!r}")
    if next_obs is not None:
        if "obs" not in whole and (next_obs == "derived" or "next_obs" not in whole):
            raise SchemaError(f"{where}: next_obs: the schema has no 'obs' to copy; give next_obs=None")
        if next_obs == "derived" and whole.get("next_obs", whole["obs"]) != whole["obs"]:
            raise SchemaError(f"{where}: next_obs='derived': the schema's 'next_obs' differs from 'obs'; leave it out")
        whole.setdefault("next_obs", whole.get("obs", Field()))
    elif "next_obs" in whole:
        raise SchemaError(f"{where}: next_obs: the schema has the field; give next_obs='stored' or leave it out")
    whole.setdefault("reward", Field((), "float32"))
    whole.setdefault("done", Field((), "bool"))
    schema = Schema(whole, next_obs == "derived")
    for path, field in schema.leaves:
        if (_is_under(path, "reward") or _is_under(path, "done")) and field._options().keys() - {"mutable"}:
            raise SchemaError(f"{where}: schema: field {path!r}: expected a plain Field, got {field!r}")
    return schema


def from_space(space: Any, where: str, call: str = "for_env()") -> Node:
    """The field or fields that hold one value of a Gymnasium space."""
    from gymnasium import spaces

    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        return Field(space.shape, space.dtype)
    if isinstance(space, spaces.Discrete):
        return Field((), space.dtype)
    if isinstance(space, spaces.Dict):
        return {name: from_space(part, f"{where}[{name!r}]", call) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(from_space(part, f"{where}[{i}]", call) for i, part in enumerate(space.spaces))
    raise SchemaError(
        f"{call}: {where}: expected Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple, got {space}; "
        "give a schema= of your own"
    )


def single_frames(node: Node, where: str, stack: int, padding: Any) -> Node:
    """The fields of one frame, for observations whose first axis is a stack of frames."""
    if isinstance(node, tuple):
        return tuple(single_frames(part, f"{where}[{i}]", stack, padding) for i, part in enumerate(node))
    if not isinstance(node, Field):
        return {name: single_frames(part, f"{where}[{name!r}]", stack, padding) for name, part in node.items()}
    frame = Field(node.shape[1:], node.dtype, stack=stack, padding=padding)  # checks both
    if node.shape[:1] != (stack,):
        raise SchemaError(
            f"for_env(): {where}: expected stack={stack} frames on the first axis, got shape {node.shape}; give the "
            "number of frames that the environment stacks, or a schema= of your own"
        )
    return frame
