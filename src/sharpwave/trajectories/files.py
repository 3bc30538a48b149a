"""One file a trajectory: "pt" (torch's zip, written and read without torch), "safetensors", "pkl".

A slab is the bytes of a trajectory in memory, with every leaf at the same place as in the file: rows are gathered from
a mapped "pt" or "safetensors" file exactly as from memory. A "pkl" file has to be read whole, and unpickling runs
whatever it says: only with ``allow_pickle=True``. A file that holds NumPy arrays or permuted tensors has to be read
whole too (``Layout.is_packed``).
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from ..checks import one_of
from ..errors import SchemaError, SharpwaveError, StorageError
from ..files.new_file import write_pieces
from .torch_zip import ALIGN, Array, Storage, Stored, finish, header_bytes, locate_tensors
from .trajectory import (
    BITS,
    DTYPES,
    FIELDS,
    Leaf,
    Parts,
    Trajectory,
    check_names,
    count_rows,
    nest,
    place,
    read,
    rows_more,
    walk,
)

__all__ = [
    "FORMATS",
    "NOT_HELD",
    "Layout",
    "Located",
    "capture",
    "check_file",
    "locate",
    "plan",
    "read_whole",
    "views",
    "write",
]

FORMATS = ("pt", "safetensors", "pkl")
# safetensors has no name for it; torch cannot read pickles of these.
NOT_HELD = {"safetensors": {"C128"}, "pkl": {"U16", "U32", "U64", "F8_E4M3", "F8_E5M2"}}
_MOST_HEADER = 64 * 2**20
_MOST_NODES = 100_000  # of the nested dicts in a file
_PIECE = 1 << 20  # bytes that are read at once where a checksum is taken


class Layout(NamedTuple):
    """Where the leaves of a kind of trajectory stand in its slab. Equal ones are one record of the index.

    ``strides``: bytes from step to step and from environment to environment, for every leaf; None: rows follow each
    other. ``is_packed``: the file cannot be mapped; the slab that it is read into has this layout.
    """

    format: str
    steps: int
    envs: int
    epochs: tuple[int, ...]
    offsets: tuple[int, ...]
    bytes: int
    strides: tuple[tuple[int, int], ...] | None = None
    is_packed: bool = False

    def stride(self, leaf: Leaf, number: int) -> tuple[int, int]:
        return (self.envs * leaf.row_bytes, leaf.row_bytes) if self.strides is None else self.strides[number]

    def to_core(self, leaves: tuple[Leaf, ...]) -> _core.SlabLayout:
        """Raises:
        StorageError: A leaf ends behind the slab.
        """
        places = [
            (offset, leaf.row_bytes, *self.stride(leaf, number), *place(leaf, self.steps, extra))
            for number, (leaf, offset, extra) in enumerate(zip(leaves, self.offsets, self.epochs, strict=True))
        ]
        return _core.SlabLayout(self.steps, self.envs, self.bytes, 0, places)

    def shape(self, leaf: Leaf, number: int) -> tuple[int, ...]:
        return (self.steps + self.epochs[number], self.envs, *leaf.shape)

    def leaf_bytes(self, leaf: Leaf, number: int) -> int:
        """Of its rows, one after the other."""
        return (self.steps + self.epochs[number]) * self.envs * leaf.row_bytes

    def data_bytes(self, leaves: tuple[Leaf, ...]) -> int:
        """Of all rows: what they take in memory."""
        return sum(self.leaf_bytes(leaf, number) for number, leaf in enumerate(leaves))

    @property
    def is_mapped(self) -> bool:
        return self.format != "pkl" and not self.is_packed


class Located(NamedTuple):
    """What a file of somebody else's was found to hold."""

    leaves: tuple[Leaf, ...]
    layout: Layout
    start: int
    max_episode_length: int
    weights_id: str


def plan(
    format: str,
    leaves: tuple[Leaf, ...],
    steps: int,
    envs: int,
    epochs: tuple[int, ...],
    *,
    in_memory: bool = False,
) -> Layout:
    """The layout of trajectories that are written here.

    Args:
        in_memory: The arrays only follow each other; files of that format are written of them later, if at all.

    Raises:
        SchemaError: The format cannot hold a dtype, or so many bytes.
    """
    for leaf in leaves:
        if format in NOT_HELD and leaf.dtype in NOT_HELD[format]:
            raise SchemaError(
                f"add_trajectories(): {leaf}: {format} files cannot hold {DTYPES[leaf.dtype][1]}; give "
                "storage_format='pt', or cast it"
            )
    return _lined_up("safetensors" if in_memory else format, leaves, steps, envs, epochs)


def _lined_up(format: str, leaves: tuple[Leaf, ...], steps: int, envs: int, epochs: tuple[int, ...]) -> Layout:
    offsets, at = [], 0
    for number, (leaf, extra) in enumerate(zip(leaves, epochs, strict=True)):
        if format == "pt":  # every storage behind its own zip header, aligned as torch does
            at += header_bytes(number)
            at += -at % ALIGN
        offsets.append(at)
        at += (steps + extra) * envs * leaf.row_bytes
    if format == "pt" and at >= 2**32 - 2**20:
        raise SchemaError(
            f"add_trajectories(): a trajectory of {at} bytes; 'pt' files hold less than 4 GiB: give "
            "storage_format='safetensors', or shorter trajectories"
        )
    return Layout(format, steps, envs, epochs, tuple(offsets), at)


def capture(parts: Parts, layout: Layout) -> np.ndarray[Any, Any]:
    """A slab with copies of the arrays."""
    slab = np.empty(layout.bytes, np.uint8)  # not of the cache's memory: it lives until it is written
    _core.copy_into_slab(slab, list(layout.offsets), parts.arrays)
    return slab


def _combine(each: list[int]) -> int:
    """The checksum of a trajectory, of those of its leaves."""
    return zlib.crc32(struct.pack(f"<{len(each)}I", *each))


def checksum(slab: np.ndarray[Any, Any], leaves: tuple[Leaf, ...], layout: Layout) -> tuple[int, list[int]]:
    """Of all data, and of every leaf's."""
    data = slab.data
    each = [
        zlib.crc32(data[offset : offset + layout.leaf_bytes(leaf, number)])
        for number, (leaf, offset) in enumerate(zip(leaves, layout.offsets, strict=True))
    ]
    return _combine(each), each


def views(slab: np.ndarray[Any, Any], leaves: tuple[Leaf, ...], layout: Layout) -> list[np.ndarray[Any, Any]]:
    """Every leaf as an array of its own shape over the slab; bfloat16 and float8 as their bits."""
    made = []
    for number, (leaf, offset) in enumerate(zip(leaves, layout.offsets, strict=True)):
        shape, dtype = layout.shape(leaf, number), np.dtype(DTYPES[leaf.dtype][0])
        if 0 in shape:
            made.append(np.empty(shape, dtype))
            continue
        inner = np.empty((1, 1, *leaf.shape), dtype).strides[2:]
        strides = *layout.stride(leaf, number), *inner
        made.append(np.ndarray(shape, dtype, slab.data, offset, strides))
    return made


def write(
    path: Path, slab: np.ndarray[Any, Any], leaves: tuple[Leaf, ...], layout: Layout, max_length: int, weights_id: str
) -> tuple[int, int, int]:
    """Writes a slab: the whole file or none, and never over another one.

    Returns:
        Where the slab starts in the file, the file's size, and the data's checksum.
    """
    crc, each = checksum(slab, leaves, layout)
    facts = {"max_episode_length": max_length, "model_weights_id": weights_id}
    start, parts = 0, list[Any]()
    if layout.format == "pt":
        shapes = [layout.shape(leaf, number) for number, leaf in enumerate(leaves)]
        parts = [slab, finish(slab, leaves, shapes, layout.offsets, each, facts)]
    elif layout.format == "safetensors":
        head = _safetensors_head(leaves, layout, max_length, weights_id)
        start, parts = len(head), [head, slab]
    else:
        parts = [_pickled(slab, leaves, layout, facts)]
    made = _core.NewFile(str(path))
    write_pieces(made, parts)
    made.publish(replace=False, sync=False)  # a power cut may take it, which its size or checksum tells
    return start, made.size, crc


# ---- safetensors -----------------------------------------------------------------------------------------------------


def _escape(path: tuple[str, ...]) -> str:
    return "/".join(key.replace("%", "%25").replace("/", "%2F") for key in path)


def _unescape(name: str) -> tuple[str, ...]:
    return tuple(key.replace("%2F", "/").replace("%25", "%") for key in name.split("/"))


def _safetensors_head(leaves: tuple[Leaf, ...], layout: Layout, max_length: int, weights_id: str) -> bytes:
    table: dict[str, Any] = {
        "__metadata__": {"format": "pt", "max_episode_length": str(max_length), "model_weights_id": weights_id}
    }
    for number, (leaf, offset) in enumerate(zip(leaves, layout.offsets, strict=True)):
        ends = [offset, offset + layout.leaf_bytes(leaf, number)]
        table[_escape(leaf.path)] = {
            "dtype": leaf.dtype,
            "shape": list(layout.shape(leaf, number)),
            "data_offsets": ends,
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    return struct.pack("<Q", len(text)) + text


def _locate_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, Storage], int]:
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - 8
        head = file.read(8)
        size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= size <= min(_MOST_HEADER, left):
            raise StorageError("its header has no possible length: not a safetensors file")
        table = json.loads(file.read(size))
    if not isinstance(table, dict):
        raise StorageError(f"expected an object as its header, got {type(table).__name__}")
    facts = table.pop("__metadata__", {})
    tree: dict[str, Any] = {"model_weights_id": facts.get("model_weights_id", "")}
    tree["max_episode_length"] = int(facts.get("max_episode_length", 0))
    storages = {}
    for name, entry in table.items():
        inside, shape, (begin, end) = tree, tuple(entry["shape"]), entry["data_offsets"]
        numbers = (*shape, begin, end)
        if any(type(number) is not int or not 0 <= number <= left for number in numbers) or begin > end:
            raise StorageError(f"{name}: no possible shape or offsets: {str(entry)[:80]}")
        for key in _unescape(name)[:-1]:
            inside = inside.setdefault(key, {})
        strides = [1]
        for extent in reversed(shape[1:]):
            strides.insert(0, strides[0] * extent)
        storages[name] = Storage(begin, end - begin, 0)
        inside[_unescape(name)[-1]] = Stored(entry["dtype"], name, 0, shape, tuple(strides[: len(shape)]))
    return tree, storages, 8 + size


# ---- pkl -------------------------------------------------------------------------------------------------------------


def _pickled(slab: np.ndarray[Any, Any], leaves: tuple[Leaf, ...], layout: Layout, facts: dict[str, Any]) -> bytes:
    """A dict of tensors where torch is installed, as RLinf has it; of arrays otherwise."""
    values: list[Any] = [np.array(view) for view in views(slab, leaves, layout)]
    try:
        import torch
    except ModuleNotFoundError:
        pass
    else:
        kinds = [getattr(torch, DTYPES[leaf.dtype][1]) for leaf in leaves]
        values = [
            torch.from_numpy(value.view(getattr(np, BITS[leaf.dtype]))).view(kind)
            if leaf.dtype in BITS
            else torch.from_numpy(value)
            for value, kind, leaf in zip(values, kinds, leaves, strict=True)
        ]
    return pickle.dumps(nest(leaves, values) | facts, protocol=4)


def unpickle(where: str, path: Path, allow_pickle: bool, leaves: tuple[Leaf, ...] = ()) -> Trajectory:
    if not allow_pickle:
        raise StorageError(
            f"{where}: {path.name} is a pickle, and loading one runs what it says; give allow_pickle=True if you "
            "trust it"
        )
    with path.open("rb") as file:
        found = pickle.load(file)
    if not isinstance(found, dict):
        raise StorageError(f"expected a dict, got {type(found).__name__}")
    fields = {name: value for name, value in found.items() if name in Trajectory.__dataclass_fields__}
    made = Trajectory(**{name: value for name, value in fields.items() if value is not None})
    values = made.prev_values
    if values is not None and hasattr(values, "reshape"):
        made.prev_values = values.reshape(_with_axes(tuple(values.shape), *count_rows(where, made), leaves))
    return made


# ---- files of others -------------------------------------------------------------------------------------------------


class _Shape:
    """Stands for an array in count_rows(): a shape without data."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


class _Found(NamedTuple):
    """A leaf of a file: a tensor with (steps, envs) in front, or an array that stands in the pickle."""

    leaf: Leaf
    extra: int
    value: Stored | Array
    shape: tuple[int, ...]


def _with_axes(shape: tuple[int, ...], steps: int, envs: int, leaves: tuple[Leaf, ...]) -> tuple[int, ...]:
    """The shape of values. RLinf saves those with more rows than steps as it caches them: both axes in one. With one
    environment the two forms may look the same: what the folder's other files have decides."""
    wanted = next((leaf.shape for leaf in leaves if leaf.path == ("prev_values",)), None)
    if len(shape) and (shape[1:2] != (envs,) or shape[0] > 2 * steps or (envs == 1 and shape[1:] == wanted)):
        rows, left = divmod(shape[0], envs)
        if left == 0 and rows > steps:
            return (rows, envs, *shape[1:])
    return shape


def locate(where: str, path: Path, allow_pickle: bool = False, leaves: tuple[Leaf, ...] = ()) -> Located:
    """Finds the leaves of a file that somebody else wrote, without reading them (a pickle is read).

    Args:
        leaves: Of the folder's other files.

    Raises:
        StorageError: It is damaged, or not a trajectory.
    """
    format = path.suffix[1:]
    one_of(where, "format", format, FORMATS)
    with _told(where, path):
        if format == "pkl":
            found = unpickle(where, path, allow_pickle, leaves)
            parts = read(where, found, drops=True)
            layout = plan(format, parts.leaves, parts.steps, parts.envs, parts.epochs)
            _check_size(path, parts.leaves, layout)
            return Located(parts.leaves, layout, 0, *_facts(vars(found)))
        tree, storages, start = (*locate_tensors(path), 0) if format == "pt" else _locate_safetensors(path)
        own, layout = _lay_out(where, path, format, tree, storages, start, leaves)
        return Located(own, layout, start, *_facts(tree))


def _facts(tree: dict[str, Any]) -> tuple[int, str]:
    length, name = tree.get("max_episode_length") or 0, tree.get("model_weights_id") or ""
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or not 0 <= length < 2**63:
        raise StorageError(f"max_episode_length: expected a whole number, got {str(length)[:60]!r}")
    return int(length), str(name)


class _told:
    """Whatever zipfile, json, struct and pickle raise on bytes that are not theirs is a StorageError that names the
    file."""

    def __init__(self, where: str, path: Path) -> None:
        self._where, self._path = where, path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, FileNotFoundError):
            return
        begins = f"{self._where}: {self._path}: "
        if isinstance(error, SharpwaveError):
            text = str(error).removeprefix(f"{self._where}: ")
            raise StorageError(text if text.startswith(str(self._path)) else begins + text) from None
        if isinstance(error, OSError):
            raise StorageError(begins + (error.strerror or str(error))) from None
        raise StorageError(f"{begins}not a trajectory: {type(error).__name__}: {str(error)[:200]}") from None


def _check_depth(tree: dict[str, Any]) -> None:
    """Dicts may name each other many times: a small file would be walked for ever."""
    left, waiting = _MOST_NODES, [tree]
    while waiting:
        left -= 1
        if left < 0:
            raise StorageError(f"its dicts have more than {_MOST_NODES} places")
        waiting += [part for part in waiting.pop().values() if isinstance(part, dict)]


def _find(where: str, tree: dict[str, Any], leaves: tuple[Leaf, ...]) -> tuple[int, int, Iterator[_Found]]:
    """Steps, environments, and the leaves of a described file."""
    _check_depth(tree)
    shaped = Trajectory()
    for name in ("prev_logprobs", "rewards"):
        value = tree.get(name)
        setattr(shaped, name, _Shape(value.shape) if isinstance(value, (Stored, Array)) else value)
    steps, envs = count_rows(where, shaped)

    def each() -> Iterator[_Found]:
        for name in FIELDS:
            for keys, value in () if tree.get(name) is None else walk(where, (name,), tree[name]):
                if not isinstance(value, (Stored, Array)) or not value.shape:
                    continue  # nothing that rows could be drawn from
                shape = value.shape
                if name == "prev_values":
                    shape = _with_axes(shape, steps, envs, leaves)
                if len(shape) < 2:
                    continue
                if value.dtype not in DTYPES:
                    raise StorageError(f"{'/'.join(keys)}: dtype {value.dtype!r} is none that is kept here: refused")
                check_names(where, keys)
                if name == "intervene_flags" and shape[:2] == (steps, 1):
                    extra, row = 0, shape[2:]
                else:
                    extra, row = rows_more(where, keys, shape, steps, envs), shape[2:]
                yield _Found(Leaf(keys, value.dtype, row), extra, value, shape)

    return steps, envs, each()


def _lay_out(
    where: str,
    path: Path,
    format: str,
    tree: dict[str, Any],
    storages: dict[str, Storage],
    start: int,
    others: tuple[Leaf, ...],
) -> tuple[tuple[Leaf, ...], Layout]:
    size = path.stat().st_size
    steps, envs, every = _find(where, tree, others)
    leaves, epochs, offsets, strides = list[Leaf](), list[int](), list[int](), list[tuple[int, int]]()
    end, is_packed, is_dense = 0, False, True
    for found in every:
        leaf, value = found.leaf, found.value
        leaves.append(leaf)
        epochs.append(found.extra)
        if isinstance(value, Array):
            is_packed = True
            continue
        item = np.dtype(DTYPES[leaf.dtype][0]).itemsize
        inner, step, env = _split_strides(found, envs)
        wanted, at = list[int](), 1
        for extent in reversed(leaf.shape):
            wanted.insert(0, at)
            at *= extent
        is_packed |= any(
            have != want for have, want, extent in zip(inner, wanted, leaf.shape, strict=True) if extent > 1
        )
        storage = storages[value.key]
        offset = storage.offset + value.offset * item
        rows = steps + found.extra
        last = sum((extent - 1) * stride for extent, stride in zip(leaf.shape, inner, strict=True) if extent)
        ends = offset + ((rows - 1) * step + (envs - 1) * env + last + 1) * item if leaf.row_bytes else offset
        if ends > storage.offset + storage.bytes or start + storage.offset + storage.bytes > size:
            raise StorageError(f"{leaf}: ends behind the end of its storage")
        is_dense &= step * item == envs * leaf.row_bytes and env * item == leaf.row_bytes
        offsets.append(offset)
        strides.append((step * item, env * item))
        end = max(end, ends)
    known = tuple(leaves)
    if is_packed:
        # Read whole, into a slab whose leaves follow each other.
        layout = _lined_up("pkl", known, steps, envs, tuple(epochs))._replace(format=format, is_packed=True)
    else:
        layout = Layout(format, steps, envs, tuple(epochs), tuple(offsets), end, None if is_dense else tuple(strides))
    _check_size(path, known, layout)
    return known, layout


def _split_strides(found: _Found, envs: int) -> tuple[tuple[int, ...], int, int]:
    """Strides inside of a row, from step to step, and from environment to environment, in elements."""
    value = found.value
    assert isinstance(value, Stored)
    dense = int(np.prod(found.leaf.shape, dtype=np.int64))
    if found.shape != value.shape:  # steps and environments in one axis
        return value.strides[1:], value.strides[0] * envs, value.strides[0]
    step, env = value.strides[:2]
    if value.shape[1] == 1:
        env = 0 if envs > 1 else dense
    if value.shape[0] == 1:
        step = envs * dense
    return value.strides[2:], step, env


def _check_size(path: Path, leaves: tuple[Leaf, ...], layout: Layout) -> None:
    """A tensor may say that its rows are all the same bytes: a small file would then fill the memory of the cache."""
    size = path.stat().st_size
    if not fits(layout.data_bytes(leaves), size):
        raise StorageError(f"its rows are {layout.data_bytes(leaves)} bytes, and the file has {size}: refused")


def fits(data_bytes: int, file_bytes: int) -> bool:
    """Whether rows of so many bytes can come out of a file; some are in it once and count for all environments."""
    return data_bytes <= 16 * file_bytes + 2**20


# ---- reading whole files, and checking them --------------------------------------------------------------------------


def read_whole(
    where: str,
    path: Path,
    leaves: tuple[Leaf, ...],
    layout: Layout,
    start: int,
    size: int,
    crc: int | None,
    allow_pickle: bool,
) -> np.ndarray[Any, Any]:
    """The slab of a file, in memory and checked.

    Raises:
        StorageError: The file is damaged, or not what the index says.
    """
    with _told(where, path):
        if layout.format == "pkl":
            return _arranged(read(where, unpickle(where, path, allow_pickle, leaves), drops=True), leaves, layout)
        with path.open("rb", buffering=0) as file:
            _check_file_size(file.fileno(), size)
            if layout.is_packed:
                return _unpacked(where, path, file.fileno(), leaves, layout)
            slab = np.empty(layout.bytes, np.uint8)
            _read_into(file.fileno(), slab.data, start)
        if crc is not None and layout.strides is None:
            if checksum(slab, leaves, layout)[0] != crc:
                raise StorageError("damaged: its checksum is not the index's")
        else:
            check_file(where, path, leaves, layout, start, size, crc)
        return slab


def check_file(
    where: str, path: Path, leaves: tuple[Leaf, ...], layout: Layout, start: int, size: int, crc: int | None
) -> None:
    """Reads a file that is to be mapped and compares its data with its checksum: the index's, or for a "pt" file of
    another program the zip's own. safetensors files of other programs have none; there the header is compared.

    Costs one read of the file: 0.7 ms for 1 MB from the page cache. Reading, not mapping: a file that is cut meanwhile
    is an error.

    Raises:
        StorageError: It is damaged, or not what the index says.
    """
    with _told(where, path), path.open("rb", buffering=0) as file:
        _check_file_size(file.fileno(), size)
        if crc is not None and layout.strides is None:
            each = [
                _crc_of(file.fileno(), start + offset, layout.leaf_bytes(leaf, number))
                for number, (leaf, offset) in enumerate(zip(leaves, layout.offsets, strict=True))
            ]
            if _combine(each) != crc:
                raise StorageError("damaged: its checksum is not the index's")
            return
        tree, storages, begin = (*locate_tensors(path), 0) if layout.format == "pt" else _locate_safetensors(path)
        found, now = _lay_out(where, path, layout.format, tree, storages, begin, leaves)
        at = {leaf: number for number, leaf in enumerate(found)}
        if (
            set(at) != set(leaves)
            or begin != start
            or now.bytes != layout.bytes
            or reordered(now, [at[leaf] for leaf in leaves]) != layout
        ):
            raise StorageError("its tensors are not what the index says")
        for key, storage in storages.items():
            if storage.crc and _crc_of(file.fileno(), storage.offset, storage.bytes) != storage.crc:
                raise StorageError(f"damaged: storage {key} does not have its checksum")


def reordered(layout: Layout, order: list[int]) -> Layout:
    """The same layout for leaves in another order."""

    def turn(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(values[number] for number in order)

    return layout._replace(
        epochs=turn(layout.epochs),
        offsets=turn(layout.offsets),
        strides=None if layout.strides is None else turn(layout.strides),
    )


def _check_file_size(file: int, size: int) -> None:
    found = os.fstat(file).st_size
    if found != size:
        raise StorageError(f"expected {size} bytes, got {found}")


def _read_into(file: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        got = os.preadv(file, [data[done:]], at + done)
        if not got:
            raise StorageError(f"it ends at byte {at + done}")
        done += got


def _crc_of(file: int, at: int, size: int) -> int:
    crc = 0
    piece = memoryview(bytearray(min(size, _PIECE)))
    while size:
        part = piece[: min(size, _PIECE)]
        _read_into(file, part, at)
        crc = zlib.crc32(part, crc)
        at += len(part)
        size -= len(part)
    return crc


def _arranged(parts: Parts, leaves: tuple[Leaf, ...], layout: Layout) -> np.ndarray[Any, Any]:
    order = [parts.leaves.index(leaf) if leaf in parts.leaves else -1 for leaf in leaves]
    epochs = tuple(parts.epochs[number] for number in order)
    if -1 in order or epochs != layout.epochs or (parts.steps, parts.envs) != (layout.steps, layout.envs):
        raise StorageError("its arrays are not what the index says")
    return capture(parts._replace(leaves=leaves, epochs=epochs, arrays=[parts.arrays[at] for at in order]), layout)


def _unpacked(where: str, path: Path, file: int, leaves: tuple[Leaf, ...], layout: Layout) -> np.ndarray[Any, Any]:
    """The slab of a file with NumPy arrays or permuted tensors in it."""
    tree, storages = locate_tensors(path)
    _lay_out(where, path, layout.format, tree, storages, 0, leaves)  # all sizes are checked
    steps, envs, every = _find(where, tree, leaves)
    raw: dict[str, np.ndarray[Any, Any]] = {}
    made = []
    for found in every:
        dtype = np.dtype(DTYPES[found.leaf.dtype][0])
        shape = (steps + found.extra, envs, *found.leaf.shape)
        if isinstance(found.value, Array):
            array = np.broadcast_to(found.value.to_numpy().reshape(found.shape), shape)
        else:
            key = found.value.key
            if key not in raw:
                storage = storages[key]
                raw[key] = np.empty(storage.bytes, np.uint8)
                _read_into(file, raw[key].data, storage.offset)
                if storage.crc and zlib.crc32(raw[key].data) != storage.crc:
                    raise StorageError(f"damaged: storage {key} does not have its checksum")
            inner, step, env = _split_strides(found, envs)
            strides = tuple(stride * dtype.itemsize for stride in (step, env, *inner))
            array = (
                np.empty(shape, dtype)
                if 0 in shape
                else np.ndarray(shape, dtype, raw[key].data, found.value.offset * dtype.itemsize, strides)
            )
        made.append((found.leaf, found.extra, np.ascontiguousarray(array)))
    parts = Parts(
        steps, envs, tuple(leaf for leaf, _, _ in made), tuple(extra for _, extra, _ in made), [a for _, _, a in made]
    )
    return _arranged(parts, leaves, layout)
