"""Trajectory: arrays of shape (steps, envs, ...), and the checks that they pass when they are added."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..errors import SchemaError

__all__ = [
    "BITS",
    "DTYPES",
    "FIELDS",
    "Bits",
    "Leaf",
    "Parts",
    "Trajectory",
    "aligned",
    "arrange",
    "check_names",
    "count_rows",
    "dtype_name",
    "nest",
    "place",
    "read",
    "rows_more",
    "to_device",
    "to_trajectory",
    "walk",
]

# By safetensors' names: NumPy's dtype, and torch's name. NumPy has no bfloat16 and no float8: their bits are kept as
# unsigned integers. safetensors has no name for complex128; "pt" files do.
DTYPES = {
    "C128": ("<c16", "complex128"),
    "C64": ("<c8", "complex64"),
    "F64": ("<f8", "float64"),
    "F32": ("<f4", "float32"),
    "F16": ("<f2", "float16"),
    "BF16": ("<u2", "bfloat16"),
    "F8_E4M3": ("|u1", "float8_e4m3fn"),
    "F8_E5M2": ("|u1", "float8_e5m2"),
    "I64": ("<i8", "int64"),
    "I32": ("<i4", "int32"),
    "I16": ("<i2", "int16"),
    "I8": ("|i1", "int8"),
    "U64": ("<u8", "uint64"),
    "U32": ("<u4", "uint32"),
    "U16": ("<u2", "uint16"),
    "U8": ("|u1", "uint8"),
    "BOOL": ("|b1", "bool"),
}
BITS = {"BF16": "int16", "F8_E4M3": "uint8", "F8_E5M2": "uint8"}  # torch's dtype in which their bits are kept
_FROM_NUMPY = {np.dtype(kind): name for name, (kind, _) in DTYPES.items() if name not in BITS}
_FROM_TORCH = {f"torch.{kind}": name for name, (_, kind) in DTYPES.items()}

_MOST_AXES = 30  # NumPy before 2.0 has 32, and a batch has one more than a row
_LEADING = frozenset({"terminations", "truncations", "dones"})  # one row more at the start of every epoch
_TRAILING = frozenset({"prev_values"})  # one row more at the end of every epoch
_SHARED = frozenset({"intervene_flags"})  # may have one column for all environments


@dataclass
class Trajectory:
    """A rollout of ``envs`` environments over ``steps`` steps: arrays or CPU tensors of shape ``(steps, envs, ...)``.

    It need not be one episode: it may hold several, or parts of some. Flags (``terminations``, ``truncations``,
    ``dones``) may have one more row at the start of every epoch (the flag at its reset), ``prev_values`` one more row
    at the end of every epoch (the bootstrap value). They are aligned to the other fields when rows are drawn.
    ``intervene_flags`` of shape ``(steps, 1, ...)`` hold for all environments and are stored once for each.

    Args:
        max_episode_length: The longest possible episode; information only.
        model_weights_id: Which weights chose the actions. It is part of the file's name.
        forward_inputs, curr_obs, next_obs: Dicts of arrays, nested to any depth.

    Example:
        >>> import numpy as np
        >>> import sharpwave as sw
        >>> obs = np.zeros((51, 8, 64), np.float32)
        >>> sw.Trajectory(actions=np.zeros((50, 8, 7), np.float32), rewards=np.zeros((50, 8), np.float32),
        ...               curr_obs={"state": obs[:-1]}, next_obs={"state": obs[1:]}).shape
        (50, 8)
    """

    max_episode_length: int = 0
    model_weights_id: str = ""
    actions: Any = None
    intervene_flags: Any = None
    rewards: Any = None
    terminations: Any = None
    truncations: Any = None
    dones: Any = None
    prev_logprobs: Any = None
    prev_values: Any = None
    versions: Any = None
    forward_inputs: dict[str, Any] = field(default_factory=dict)
    curr_obs: dict[str, Any] = field(default_factory=dict)
    next_obs: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """Steps and environments."""
        return count_rows("Trajectory", self)


FIELDS = tuple(
    name for name in Trajectory.__dataclass_fields__ if name not in ("max_episode_length", "model_weights_id")
)


class Bits(NamedTuple):
    """Values of a dtype that NumPy lacks (a key of ``BITS``), as an array of integers of the same size."""

    dtype: str
    array: np.ndarray[Any, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)


class Leaf(NamedTuple):
    """One array of every trajectory: its path in the nested dicts, and dtype and shape of a row."""

    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(DTYPES[self.dtype][0]).itemsize

    def __str__(self) -> str:
        return "/".join(self.path)


class Parts(NamedTuple):
    """The arrays of a trajectory: leaf i has ``steps + epochs[i]`` rows."""

    steps: int
    envs: int
    leaves: tuple[Leaf, ...]
    epochs: tuple[int, ...]
    arrays: list[np.ndarray[Any, Any]]


def read(where: str, trajectory: Any, drops: bool = False) -> Parts:
    """Checks the arrays of a trajectory. Contiguous arrays are not copied.

    Args:
        drops: Leaves out values without rows (lists, strings, arrays of one axis), as RLinf does; otherwise they are an
            error.

    Raises:
        SchemaError: It has neither rewards nor log-probabilities, or an array does not fit the others.
    """
    steps, envs = count_rows(where, trajectory)
    leaves: list[Leaf] = []
    epochs: list[int] = []
    arrays: list[np.ndarray[Any, Any]] = []
    for name in FIELDS:
        value = getattr(trajectory, name, None)
        if value is None:
            continue
        for path, part in walk(where, (name,), value):
            if drops and not (hasattr(part, "ndim") and hasattr(part, "dtype") and part.ndim >= 2):
                continue
            check_names(where, path)
            dtype, array = _to_array(where, path, part)
            if array.ndim > _MOST_AXES:
                raise SchemaError(f"{where}: {'/'.join(path)}: expected at most {_MOST_AXES} axes, got {array.ndim}")
            if name in _SHARED and array.ndim >= 2 and array.shape[:2] == (steps, 1):
                array = np.ascontiguousarray(np.broadcast_to(array, (steps, envs, *array.shape[2:])))
            extra = rows_more(where, path, array.shape, steps, envs)
            leaves.append(Leaf(path, dtype, array.shape[2:]))
            epochs.append(extra)
            arrays.append(array)
    return Parts(steps, envs, tuple(leaves), tuple(epochs), arrays)


def arrange(where: str, part: Parts, leaves: tuple[Leaf, ...], position: int) -> Parts:
    """The arrays in the order of the leaves. Other leaves are a SchemaError."""
    if part.leaves == leaves:
        return part
    there = {leaf.path: number for number, leaf in enumerate(part.leaves)}
    wanted = {leaf.path for leaf in leaves}
    name = f"{where}: trajectory {position} of this call"
    missing = ["/".join(path) for path in wanted - there.keys()]
    extra = ["/".join(path) for path in there.keys() - wanted]
    if missing or extra:
        problem = f"missing {', '.join(sorted(missing))}" if missing else f"unknown {', '.join(sorted(extra))}"
        raise SchemaError(f"{name}: {problem}; expected what the first one had: {', '.join(map(str, leaves))}")
    order = [there[leaf.path] for leaf in leaves]
    for leaf, number in zip(leaves, order, strict=True):
        got = part.leaves[number]
        if got != leaf:
            raise SchemaError(
                f"{name}: {leaf}: expected {DTYPES[leaf.dtype][1]} rows of shape {leaf.shape} as in the first one, got "
                f"{DTYPES[got.dtype][1]} of {got.shape}"
            )
    epochs = tuple(part.epochs[number] for number in order)
    return Parts(part.steps, part.envs, leaves, epochs, [part.arrays[number] for number in order])


def place(leaf: Leaf, steps: int, extra: int) -> tuple[int, int]:
    """Period and shift of a leaf that has ``extra`` more rows than steps (see core/trajectories/rows.h)."""
    return (steps // extra, int(leaf.path[0] in _LEADING)) if extra else (0, 0)


def aligned(name: str, array: Any, steps: int) -> Any:
    """The rows of a field that belong to its steps."""
    extra = array.shape[0] - steps
    if extra == 0:
        return array
    period, shift = place(Leaf((name,), "F32", ()), steps, extra)
    step = np.arange(steps)
    return array[step + step // period + shift]


def nest(leaves: tuple[Leaf, ...], values: list[Any]) -> dict[str, Any]:
    """The values of the leaves as nested dicts."""
    made: dict[str, Any] = {}
    for leaf, value in zip(leaves, values, strict=True):
        inside = made
        for key in leaf.path[:-1]:
            inside = inside.setdefault(key, {})
        inside[leaf.path[-1]] = value
    return made


def to_trajectory(leaves: tuple[Leaf, ...], values: list[Any], max_episode_length: int, weights_id: str) -> Trajectory:
    return Trajectory(max_episode_length, weights_id, **nest(leaves, values))


def to_device(dtype: str, array: Any, device: Any) -> Any:
    """The array itself where ``device`` is None, else a tensor on that device."""
    if device is None:
        return array
    import torch

    if dtype in BITS:
        bits = array.view(getattr(np, BITS[dtype]))
        tensor = torch.from_numpy(bits).view(getattr(torch, DTYPES[dtype][1]))
    else:
        tensor = torch.from_numpy(array)
    return tensor if device == "cpu" else tensor.to(device)


def dtype_name(dtype: np.dtype[Any]) -> str | None:
    """The name in ``DTYPES`` of a dtype of NumPy's; None: values of it cannot be kept."""
    return _FROM_NUMPY.get(dtype)


def count_rows(where: str, trajectory: Any) -> tuple[int, int]:
    for name in ("prev_logprobs", "rewards"):
        value = getattr(trajectory, name, None)
        if value is None:
            continue
        shape = tuple(getattr(value, "shape", ()))
        if len(shape) < 2 or 0 in shape[:2]:
            raise SchemaError(f"{where}: {name}: expected shape (steps, envs, ...), both at least 1, got {shape}")
        return int(shape[0]), int(shape[1])
    raise SchemaError(f"{where}: a trajectory has neither rewards nor prev_logprobs, by which its steps are counted")


def check_names(where: str, path: tuple[str, ...]) -> None:
    """Names are written as UTF-8, which cannot encode a lone surrogate."""
    try:
        "/".join(path).encode()
    except UnicodeEncodeError:
        raise SchemaError(f"{where}: {path!r}: expected names that UTF-8 can hold") from None


def walk(where: str, path: tuple[str, ...], value: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, part in value.items():
        if not isinstance(key, str):
            raise SchemaError(f"{where}: {'/'.join(path)}: expected names as keys, got {key!r}")
        if part is not None:
            yield from walk(where, (*path, key), part)


def _to_array(where: str, path: tuple[str, ...], value: Any) -> tuple[str, np.ndarray[Any, Any]]:
    dtype: str | None
    if isinstance(value, Bits):
        dtype, array = value.dtype, value.array
    elif isinstance(value, np.ndarray):
        dtype = _FROM_NUMPY.get(value.dtype)
        array = value
    elif hasattr(value, "detach") and hasattr(value, "device"):  # a torch tensor
        name = "/".join(path)
        if value.device.type != "cpu":
            raise SchemaError(f"{where}: {name}: expected a tensor on the CPU, got one on {value.device}; pass .cpu()")
        dtype = _FROM_TORCH.get(str(value.dtype))
        if value.requires_grad:
            value = value.detach()
        if dtype in BITS:
            import torch

            value = value.contiguous().view(getattr(torch, BITS[dtype]))
        elif dtype is not None and dtype.startswith("C"):
            value = value.resolve_conj()
        try:
            array = value.resolve_neg().numpy() if dtype else np.empty(0)
        except (TypeError, RuntimeError) as error:
            raise SchemaError(f"{where}: {name}: {error}") from None
    else:
        raise SchemaError(f"{where}: {'/'.join(path)}: expected an array or a tensor, got {type(value).__name__}")
    if isinstance(value, np.ma.MaskedArray):
        raise SchemaError(
            f"{where}: {'/'.join(path)}: a masked array would lose its mask; pass .filled(...) or two fields"
        )
    if dtype is None:
        raise SchemaError(
            f"{where}: {'/'.join(path)}: expected one of {', '.join(kind for _, kind in DTYPES.values())}, "
            f"got {value.dtype}; cast it"
        )
    return dtype, array if array.flags.c_contiguous else np.ascontiguousarray(array)


def rows_more(where: str, path: tuple[str, ...], shape: tuple[int, ...], steps: int, envs: int) -> int:
    """How many more rows than steps an array has: none, or one for every epoch."""
    if len(shape) >= 2 and shape[0] == steps and shape[1] == envs:
        return 0
    name = "/".join(path)
    if len(shape) < 2 or shape[1] != envs:
        raise SchemaError(f"{where}: {name}: expected shape ({steps}, {envs}, ...), got {shape}")
    extra = shape[0] - steps
    if extra < 0 or path[0] not in _LEADING | _TRAILING:
        raise SchemaError(f"{where}: {name}: expected {steps} rows as the rewards have, got {shape[0]}")
    if steps % extra:
        raise SchemaError(
            f"{where}: {name}: expected {steps} rows and one more for every epoch, got {shape[0]}: {steps} steps do "
            f"not make {extra} epochs of the same length"
        )
    return extra
