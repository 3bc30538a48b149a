"""Columns: one array for each field, all with the same leading axes, on the host or on a device.

Rollouts are stored this way: advantages are computed over whole columns, and no other process shares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import _core
from ..arrays import narrow, refuse_masked
from ..checks import told
from ..errors import SchemaError
from ..schema import Field, Node

__all__ = ["Columns", "Host", "Place", "Torch", "leaves_of", "place_of", "read_names", "read_node"]


def place_of(where: str, device: Any, seed: int | None) -> Place:
    """NumPy arrays where ``device`` is None, tensors on it otherwise."""
    return Host(seed) if device is None else Torch(where, device, seed)


class Host:
    """NumPy arrays."""

    kind = "a NumPy array"
    takes_tensors = False

    def __init__(self, seed: int | None) -> None:
        self.stream = np.random.default_rng(seed)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        return np.zeros(shape, dtype)

    def memory(self, array: Any) -> np.ndarray[Any, Any] | None:
        """The array's memory for the engine to write to; None where it is not on the host."""
        return array  # type: ignore[no-any-return]

    def written(self, arrays: list[Any]) -> None:
        """After the engine wrote to them."""

    def read(self, what: str, value: Any) -> Any:
        if hasattr(value, "detach") and hasattr(value, "device"):
            raise SchemaError(f"{what}: expected {self.kind}, got a torch tensor; give the buffer device='cpu'")
        if type(value) is not _ARRAY:
            refuse_masked(what, value)
        try:
            array = np.asarray(value)
        except (ValueError, TypeError) as error:
            raise SchemaError(f"{what}: expected an array, got {type(value).__name__} ({error})") from None
        if array.dtype.kind not in "biuf":
            raise SchemaError(f"{what}: expected numbers, got {array.dtype}")
        return array

    def dtype_of(self, array: Any) -> np.dtype[Any]:
        """The NumPy dtype of an array of this place."""
        return array.dtype  # type: ignore[no-any-return]

    def fits(self, array: Any, dtype: np.dtype[Any]) -> bool:
        """Whether every value keeps its meaning: no fraction is cut off, no whole number wraps."""
        given = self.dtype_of(array)
        if given.kind == "c":
            return False
        if given.kind == "b" or dtype.kind == "f":
            return True
        return dtype.kind != "b" and given.kind in "iu" and np.can_cast(given, dtype, "safe")

    def truths(self, what: str, array: Any) -> Any:
        if array.dtype == bool:
            return array
        if array.dtype.kind == "f" and np.isnan(array).any():
            raise SchemaError(f"{what}: expected 0 or 1, or truth values, got NaN")
        return array != 0

    def is_wider(self, array: Any, dtype: np.dtype[Any]) -> bool:
        """Whether the array may hold numbers that are too large for a float dtype."""
        return dtype.kind == "f" and bool(array.dtype.itemsize > dtype.itemsize)

    def narrow(self, what: str, array: Any, dtype: np.dtype[Any]) -> Any:
        """The array, if its values stay finite in that narrower float dtype; otherwise an error."""
        limit = _LARGEST.get(dtype, 0.0)
        if (
            array.size
            and np.maximum.reduce(array, axis=None) <= limit
            and np.minimum.reduce(array, axis=None) >= -limit
        ):
            return array
        return narrow(what, array, dtype)  # a number is NaN, infinite, or too large

    def copy(self, to: list[Any], values: list[Any]) -> None:
        for target, value in zip(to, values, strict=True):
            target[...] = value

    def permutation(self, count: int) -> Any:
        return self.stream.permutation(count)

    def host_permutation(self, count: int) -> np.ndarray[Any, Any]:
        """As a NumPy array on every device, for computations on the host."""
        return self.stream.permutation(count)

    def integers(self, most: int, count: int) -> Any:
        return self.stream.integers(most, size=count)

    def take(self, array: Any, index: Any) -> Any:
        return array.take(index, axis=0)

    def index(self, numbers: np.ndarray[Any, Any]) -> Any:
        return numbers

    def to_host(self, *arrays: Any) -> list[np.ndarray[Any, Any]]:
        """Arrays of one shape and dtype as NumPy arrays, with one wait for the device. On the CPU they may share the
        memory."""
        return list(arrays)

    def from_host(self, array: np.ndarray[Any, Any]) -> Any:
        """A NumPy array as an array of this place; on the CPU over the same memory."""
        return array

    def normalize(self, values: Any, mask: Any) -> Any:
        """Values of mean 0 and deviation 1 (with n - 1) over the rows of the mask. 0 outside of it, and if there are
        fewer than two rows."""
        counted = values if mask is None else values[mask]
        if counted.size < 2:
            return np.zeros_like(values)
        off = values - counted.mean(dtype=np.float64)
        normal = (off / (counted.std(ddof=1, dtype=np.float64) + 1e-8)).astype(values.dtype)
        return normal if mask is None else self.where(mask, normal)

    def where(self, mask: Any, values: Any) -> Any:
        return np.where(mask, values, values.dtype.type(0))


class Torch(Host):
    """Tensors on one device. Nothing here waits for it."""

    takes_tensors = True

    def __init__(self, where: str, device: Any, seed: int | None) -> None:
        from .tensors import read_device

        self.torch, self.device = read_device(f"{where}: device", device)
        # torch names a device with its number when a tensor is made.
        self.device = self.torch.empty(0, device=self.device).device
        self.kind = f"a tensor on {self.device}"
        self.strided = self.torch.strided
        self.count_writes: Any = None
        if self.device.type == "cpu":
            try:
                self.torch.autograd.graph.increment_version([self.torch.empty(0)])
                self.count_writes = self.torch.autograd.graph.increment_version
            except (AttributeError, TypeError):  # older versions of torch
                pass
        self.stream = np.random.default_rng(seed)
        self.generator = self.torch.Generator(self.device)
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)

    def __getstate__(self) -> dict[str, Any]:
        return {"device": str(self.device), "stream": self.stream, "generator": self.generator.get_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__("unpickling", state["device"], None)  # type: ignore[misc]
        self.stream = state["stream"]
        self.generator.set_state(state["generator"])

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        with self.torch.inference_mode(False):  # else the tensor could not be written to outside of that mode
            return self.torch.zeros(shape, dtype=self._dtype(dtype), device=self.device)

    def memory(self, array: Any) -> np.ndarray[Any, Any] | None:
        return array.numpy() if array is not None and self.count_writes is not None else None

    def written(self, arrays: list[Any]) -> None:
        # As torch's own writes do: a graph that needs the old values then raises an error.
        self.count_writes(arrays)

    def _dtype(self, dtype: np.dtype[Any]) -> Any:
        try:
            return self.torch.from_numpy(np.empty(0, dtype)).dtype
        except TypeError:
            raise SchemaError(f"torch has no dtype for {dtype}") from None

    def read(self, what: str, value: Any) -> Any:
        if not isinstance(value, self.torch.Tensor):
            if self.device.type != "cpu":
                raise SchemaError(
                    f"{what}: expected {self.kind}, got {type(value).__name__}; pass torch.as_tensor(value, "
                    f"device={str(self.device)!r})"
                )
            array = np.ascontiguousarray(super().read(what, value))
            if array.dtype == np.longdouble:
                array = narrow(what, array, np.dtype(np.float64))
            return self.torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
        if value.device != self.device:
            raise SchemaError(
                f"{what}: expected {self.kind}, got one on {value.device}; pass .to({str(self.device)!r})"
            )
        if value.layout is not self.strided:
            raise SchemaError(f"{what}: expected a dense tensor of numbers, got {told(value)}")
        return value.detach() if value.requires_grad else value

    def dtype_of(self, array: Any) -> np.dtype[Any]:
        return np.dtype(str(array.dtype).removeprefix("torch.").replace("bfloat16", "float32"))

    def truths(self, what: str, array: Any) -> Any:
        # The copy into a bool tensor compares with 0. On a GPU NaN becomes True: a check would wait for the device.
        is_float = array.dtype is not self.torch.bool and array.dtype.is_floating_point
        if is_float and self.device.type == "cpu" and bool(array.isnan().any()):
            raise SchemaError(f"{what}: expected 0 or 1, or truth values, got NaN")
        return array

    def narrow(self, what: str, array: Any, dtype: np.dtype[Any]) -> Any:
        # On a GPU a number that is too large becomes infinite: a check would wait for the device.
        if self.device.type == "cpu" and array.dtype is self.torch.float64:
            super().narrow(what, array.numpy(), dtype)
        return array

    def is_wider(self, array: Any, dtype: np.dtype[Any]) -> bool:
        return self.device.type == "cpu" and dtype.kind == "f" and array.dtype.itemsize > dtype.itemsize

    def copy(self, to: list[Any], values: list[Any]) -> None:
        # One launch for all float32 values; most fields are float32.
        plain: list[tuple[Any, Any]] = []
        for target, value in zip(to, values, strict=True):
            if value.dtype is target.dtype is self.torch.float32:
                plain.append((target, value))
            else:
                target.copy_(value)
        if plain:
            self.torch._foreach_copy_(*map(list, zip(*plain, strict=True)))

    def permutation(self, count: int) -> Any:
        return self.torch.randperm(count, generator=self.generator, device=self.device)

    def integers(self, most: int, count: int) -> Any:
        return self.torch.randint(most, (count,), generator=self.generator, device=self.device)

    def take(self, array: Any, index: Any) -> Any:
        return array.index_select(0, index)

    def index(self, numbers: np.ndarray[Any, Any]) -> Any:
        made = self.torch.from_numpy(np.ascontiguousarray(numbers))
        if self.device.type == "cpu":
            return made
        return made.pin_memory().to(self.device, non_blocking=True)

    def to_host(self, *arrays: Any) -> list[np.ndarray[Any, Any]]:
        return list((self.torch.stack(arrays) if len(arrays) > 1 else arrays[0][None]).cpu().numpy())

    def from_host(self, array: np.ndarray[Any, Any]) -> Any:
        with self.torch.inference_mode(False):
            return self.torch.from_numpy(array).to(self.device)

    def normalize(self, values: Any, mask: Any) -> Any:
        if mask is None:
            if values.numel() < 2:
                return self.torch.zeros_like(values)
            return (values - values.mean()) / (values.std() + 1e-8)
        # The number of rows stays on the device: reading it would wait.
        count = mask.sum()
        center = self.torch.where(mask, values, 0).sum() / count.clamp(min=1)
        off = self.torch.where(mask & (count > 1), values - center, 0)
        return off / ((off * off).sum() / (count - 1).clamp(min=1)).sqrt().add(1e-8)

    def where(self, mask: Any, values: Any) -> Any:
        return self.torch.where(mask, values, 0)


Place = Host


def read_names(where: str, name: str, fields: Any) -> Mapping[str, Any]:
    """Fields by name; None is an empty dict."""
    if fields is None:
        return {}
    if not isinstance(fields, Mapping) or not all(isinstance(key, str) for key in fields):
        raise SchemaError(f"{where}: {name}: expected a dict of shapes or Fields by name, got {told(fields)}")
    for key in fields:
        if not key or "/" in key:
            raise SchemaError(f"{where}: {name}: expected names without '/', got {key!r}")
    return fields


def read_node(where: str, name: str, node: Any, dtype: Any = "float32") -> Node:
    """A field, or a dict of them. A shape becomes a field of that dtype."""
    if isinstance(node, Mapping):
        if not node:
            raise SchemaError(f"{where}: {name}: expected at least one field, got none")
        for key in node:
            if not isinstance(key, str) or not key or "/" in key:
                raise SchemaError(f"{where}: {name}: expected names without '/', got {key!r}")
        return {key: read_node(where, f"{name}/{key}", part, dtype) for key, part in node.items()}
    if isinstance(node, Field):
        if node._options():
            raise SchemaError(f"{where}: {name}: expected a plain Field, got {node!r}")
        return node
    try:
        return Field(node, dtype)
    except SchemaError as error:
        raise SchemaError(f"{where}: {name}: {error}") from None


_ARRAY = np.ndarray
_LARGEST = {np.dtype(kind): float(np.finfo(kind).max) for kind in (np.float16, np.float32)}
_FLAGS = ("dones", "truncated", "done")  # these take numbers too: everything but 0 is True
_VIEWS = ("rows", "accepted", "wide", "writer")
_MOST_ROWS = 4096  # columns with more rows do not keep a view of each


class Columns:
    """Arrays by the path of their field: ``obs``, ``obs/image``."""

    def __init__(self, place: Place, lead: tuple[int, ...]) -> None:
        self.place, self.lead = place, lead
        self.nodes: dict[str, Node] = {}
        self.arrays: dict[str, Any] = {}
        self.forget_views()

    def forget_views(self) -> None:
        self.rows: dict[str, list[Any]] = {}  # the arrays' memory, cut along the first axis
        self.accepted: dict[str, tuple[Any, ...]] = {}  # lead, shape and dtype of the last value that was accepted
        self.wide: set[str] = set()  # fields whose accepted dtype is wider: the numbers are checked each time
        self.writer: tuple[_core.StepWriter, list[Any]] | None = None  # and the arrays that it writes to

    def __getstate__(self) -> dict[str, Any]:
        # A copied view would no longer share the memory of its array.
        return {name: value for name, value in self.__dict__.items() if name not in _VIEWS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.forget_views()

    def declare(self, name: str, node: Node) -> None:
        made = {
            path: self.place.zeros((*self.lead, *field.shape), field.dtype) for path, field in leaves_of(name, node)
        }
        self.arrays.update(made)
        self.nodes[name] = node
        self.writer = None

    def forget(self, name: str) -> None:
        self.writer = None
        if name in self.nodes:
            for path, _ in leaves_of(name, self.nodes.pop(name)):
                self.arrays.pop(path, None)
                self.rows.pop(path, None)
                self.accepted.pop(path, None)

    def tree(self, name: str, of: Any) -> Any:
        """``of(array)`` for each array of a field, nested as it is."""
        return self._build(name, self.nodes[name], of)

    # A method: a function that calls itself from inside another one keeps all it uses alive until a garbage collection.
    def _build(self, path: str, node: Node, of: Any) -> Any:
        if isinstance(node, Field):
            return of(self.arrays[path])
        assert isinstance(node, Mapping)
        return {key: self._build(f"{path}/{key}", part, of) for key, part in node.items()}

    def check(self, where: str, name: str, value: Any, lead: tuple[int, ...]) -> list[tuple[str, Any]]:
        """The arrays of a value, with their paths; an error if it does not fit the field."""
        checked = []
        place = self.place
        for path, field, part in _match(where, name, self.nodes[name], value):
            what = f"{where}: {path}"
            array = place.read(what, part)
            if self.accepted.get(path) == (lead, array.shape, array.dtype):
                checked.append((path, place.narrow(what, array, field.dtype) if path in self.wide else array))
                continue
            shape = (*lead, *field.shape)
            given = tuple(array.shape)
            # One number for each environment may also have the shape (num_envs, 1).
            if given != shape and (field.shape or given != (*shape, 1)):
                raise SchemaError(f"{what}: expected shape {shape}, got {given}")
            if path in _FLAGS:
                array = place.truths(what, array)
            elif not place.fits(array, field.dtype):
                raise SchemaError(
                    f"{what}: expected {field.dtype}, got {array.dtype}, and the cast would lose meaning; "
                    "convert it, or give the field that dtype"
                )
            else:
                is_wider = place.is_wider(array, field.dtype)
                if given == shape:
                    self.accepted[path] = lead, array.shape, array.dtype
                    (self.wide.add if is_wider else self.wide.discard)(path)
                array = place.narrow(what, array, field.dtype) if is_wider else array
            checked.append((path, array if given == shape else array.reshape(shape)))
        return checked

    def use_writer(self, names: list[str | None]) -> None:
        """Makes ``put_at_once`` take the values of these fields, in this order; None where no value may be. It takes
        no nested ones."""
        columns: list[tuple[Any, bool] | None] = []
        for name in names:
            array = None if name is None else self.place.memory(self.arrays.get(name))
            if name is not None and array is None:
                return
            columns.append(None if array is None else (array, name in _FLAGS))
        written = [self.arrays[name] for name in names if name is not None]
        self.writer = _core.StepWriter(columns, self.place.takes_tensors), written

    def put_at_once(self, at: int, values: tuple[Any, ...]) -> bool:
        """Copies usual values into one row of each array. False if one of them needs ``check``: nothing was written."""
        if self.writer is None or not self.writer[0].put(at, values):
            return False
        self.place.written(self.writer[1])
        return True

    def put(self, at: int, checked: list[tuple[str, Any]]) -> None:
        """Copies the values into one row of each array."""
        self.place.copy([self._row(path, at) for path, _ in checked], [array for _, array in checked])

    def _row(self, path: str, at: int) -> Any:
        if self.lead[0] > _MOST_ROWS:
            return self.arrays[path][at]
        if path not in self.rows:
            self.rows[path] = list(self.arrays[path])
        return self.rows[path][at]


def leaves_of(path: str, node: Node) -> list[tuple[str, Field]]:
    """The fields of a node with their paths."""
    if isinstance(node, Field):
        return [(path, node)]
    assert isinstance(node, Mapping)
    return [leaf for key, part in node.items() for leaf in leaves_of(f"{path}/{key}", part)]


def _match(where: str, path: str, node: Node, value: Any) -> list[tuple[str, Field, Any]]:
    if isinstance(node, Field):
        return [(path, node, value)]
    assert isinstance(node, Mapping)
    if not isinstance(value, Mapping):
        keys = ", ".join(node)
        raise SchemaError(f"{where}: {path}: expected a dict with {keys}, got {type(value).__name__}")
    unknown, missing = [key for key in value if key not in node], [key for key in node if key not in value]
    if unknown or missing:
        problem = f"unknown {unknown}" if unknown else f"missing {missing}"
        raise SchemaError(f"{where}: {path}: expected the keys {', '.join(node)}, got {problem}")
    return [leaf for key, part in node.items() for leaf in _match(where, f"{path}/{key}", part, value[key])]
