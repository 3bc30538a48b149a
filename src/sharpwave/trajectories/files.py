"""One file a trajectory: "pt" (torch's zip, written and read without torch), "safetensors", "pkl".

A slab is the bytes of a trajectory in memory, with every leaf at the same place as in the file: rows are gathered from
a mapped "pt" or "safetensors" file exactly as from memory. A "pkl" file has to be read whole, and unpickling runs
whatever it says: only with ``allow_pickle=True``.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from ..checks import one_of
from ..errors import SchemaError, StorageError
from .trajectory import DTYPES, Leaf, Parts, Trajectory, place, read

__all__ = ["FORMATS", "Layout", "Located", "capture", "checksum", "locate", "plan", "unpickle", "views", "write"]

FORMATS = ("pt", "safetensors", "pkl")
_ALIGN = 64
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_DAY_ONE = 33  # 1980-01-01, where zip's time begins
_STORAGES = {
    "F64": "DoubleStorage",
    "F32": "FloatStorage",
    "F16": "HalfStorage",
    "BF16": "BFloat16Storage",
    "I64": "LongStorage",
    "I32": "IntStorage",
    "I16": "ShortStorage",
    "I8": "CharStorage",
    "U8": "ByteStorage",
    "BOOL": "BoolStorage",
}
_MOST_HEADER = 64 * 2**20


class Layout(NamedTuple):
    """Where the leaves of a kind of trajectory stand in its slab. Equal ones are one line of the index."""

    format: str
    steps: int
    envs: int
    epochs: tuple[int, ...]
    offsets: tuple[int, ...]
    bytes: int

    def to_core(self, leaves: tuple[Leaf, ...]) -> _core.SlabLayout:
        places = [
            (offset, leaf.row_bytes, *place(leaf, self.steps, extra))
            for leaf, offset, extra in zip(leaves, self.offsets, self.epochs, strict=True)
        ]
        return _core.SlabLayout(self.envs, self.bytes, 0, places)

    def leaf_bytes(self, leaf: Leaf, number: int) -> int:
        return (self.steps + self.epochs[number]) * self.envs * leaf.row_bytes


class Located(NamedTuple):
    """What a file of somebody else's was found to hold."""

    leaves: tuple[Leaf, ...]
    layout: Layout
    start: int
    max_episode_length: int
    weights_id: str


def plan(format: str, leaves: tuple[Leaf, ...], steps: int, envs: int, epochs: tuple[int, ...]) -> Layout:
    """The layout of trajectories that are written here."""
    offsets, at = [], 0
    for number, (leaf, extra) in enumerate(zip(leaves, epochs, strict=True)):
        if format == "pt":  # every storage behind its own zip header, aligned as torch does
            at += _LOCAL.size + len(_name(number))
            at += -at % _ALIGN
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


def checksum(slab: np.ndarray[Any, Any], leaves: tuple[Leaf, ...], layout: Layout) -> tuple[int, list[int]]:
    """Of all data, and of every leaf's."""
    data = slab.data
    each = [
        zlib.crc32(data[offset : offset + layout.leaf_bytes(leaf, number)])
        for number, (leaf, offset) in enumerate(zip(leaves, layout.offsets, strict=True))
    ]
    return zlib.crc32(struct.pack(f"<{len(each)}I", *each)), each


def views(slab: np.ndarray[Any, Any], leaves: tuple[Leaf, ...], layout: Layout) -> list[np.ndarray[Any, Any]]:
    """Every leaf as an array of its own shape over the slab; bfloat16 as its bits."""
    made = []
    for number, (leaf, offset) in enumerate(zip(leaves, layout.offsets, strict=True)):
        part = slab[offset : offset + layout.leaf_bytes(leaf, number)]
        shape = (layout.steps + layout.epochs[number], layout.envs, *leaf.shape)
        made.append(
            part.view(DTYPES[leaf.dtype][0]).reshape(shape) if part.size else np.empty(shape, DTYPES[leaf.dtype][0])
        )
    return made


def write(
    path: Path, slab: np.ndarray[Any, Any], leaves: tuple[Leaf, ...], layout: Layout, max_length: int, weights_id: str
) -> tuple[int, int, int]:
    """Writes a slab: the whole file or none.

    Returns:
        Where the slab starts in the file, the file's size, and the data's checksum.
    """
    crc, each = checksum(slab, leaves, layout)
    start = 0
    if layout.format == "pt":
        parts = [slab, _finish_pt(slab, leaves, layout, each, max_length, weights_id)]
    elif layout.format == "safetensors":
        head = _safetensors_head(leaves, layout, max_length, weights_id)
        start, parts = len(head), [head, slab]
    else:
        parts = [_pickled(slab, leaves, layout, max_length, weights_id)]
    return start, write_whole(path, parts), crc


def write_whole(path: Path, parts: list[Any], sync: bool = False) -> int:
    """A file with these bytes under that name, in one step; returns its size."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        try:
            size = write_all(file, parts)
            if sync:
                os.fsync(file)
        finally:
            os.close(file)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return size


def write_all(file: int, parts: list[Any]) -> int:
    left = [memoryview(part).cast("B") for part in parts if len(part)]
    size = sum(len(part) for part in left)
    while left:
        done = os.writev(file, left)
        while left and done >= len(left[0]):
            done -= len(left.pop(0))
        if left and done:
            left[0] = left[0][done:]
    return size


# ---- pt --------------------------------------------------------------------------------------------------------------


def _name(number: int) -> bytes:
    return b"archive/data/%d" % number


def _finish_pt(
    slab: np.ndarray[Any, Any],
    leaves: tuple[Leaf, ...],
    layout: Layout,
    crcs: list[int],
    max_length: int,
    weights_id: str,
) -> bytes:
    """Fills the zip headers between the leaves, and returns what comes behind them. The pickle stands last, not first
    as torch has it: the places of leaves then depend on nothing but their shapes."""
    tail, central, end = io.BytesIO(), io.BytesIO(), 0
    count = 0

    def describe(name: bytes, size: int, crc: int, at: int) -> None:
        nonlocal count
        count += 1
        central.write(
            _CENTRAL.pack(b"PK\1\2", 0, 0, 0, 0, 0, _DAY_ONE, crc, size, size, len(name), 0, 0, 0, 0, 0, at) + name
        )

    def local(name: bytes, size: int, crc: int, extra: int) -> bytes:
        return _LOCAL.pack(b"PK\3\4", 0, 0, 0, 0, _DAY_ONE, crc, size, size, len(name), extra) + name

    for number, (leaf, offset) in enumerate(zip(leaves, layout.offsets, strict=True)):
        name, size = _name(number), layout.leaf_bytes(leaf, number)
        gap = offset - end - _LOCAL.size - len(name)
        pad = b"FB" + struct.pack("<H", gap - 4) + b"Z" * (gap - 4) if gap >= 4 else b"\0" * gap
        head = local(name, size, crcs[number], gap) + pad
        slab[end:offset] = np.frombuffer(head, np.uint8)
        describe(name, size, crcs[number], end)
        end = offset + size
    records = {
        b"archive/data.pkl": _pt_pickle(leaves, layout, max_length, weights_id),
        b"archive/byteorder": b"little",
        b"archive/version": b"3\n",
    }
    for name, data in records.items():
        crc = zlib.crc32(data)
        describe(name, len(data), crc, end + tail.tell())
        tail.write(local(name, len(data), crc, 0) + data)
    at, listed = end + tail.tell(), central.getvalue()
    return tail.getvalue() + listed + _END.pack(b"PK\5\6", 0, 0, count, count, len(listed), at, 0)


def _pt_pickle(leaves: tuple[Leaf, ...], layout: Layout, max_length: int, weights_id: str) -> bytes:
    """A dict of tensors as torch pickles it, protocol 2."""

    def text(value: str) -> bytes:
        data = value.encode()
        return b"X" + struct.pack("<I", len(data)) + data

    def whole(value: int) -> bytes:
        if 0 <= value < 256:
            return b"K" + bytes([value])
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(data)]) + data

    def tensor(number: int) -> bytes:
        leaf = leaves[number]
        shape = (layout.steps + layout.epochs[number], layout.envs, *leaf.shape)
        strides: list[int] = []
        step = 1
        for size in reversed(shape):
            strides.insert(0, step)
            step *= size
        storage = f"ctorch\n{_STORAGES[leaf.dtype]}\n".encode()
        persistent = b"(" + text("storage") + storage + text(str(number)) + text("cpu") + whole(step) + b"tQ"
        sizes = b"(" + b"".join(map(whole, shape)) + b"t(" + b"".join(map(whole, strides)) + b"t"
        hooks = b"\x89ccollections\nOrderedDict\n)R"
        return b"ctorch._utils\n_rebuild_tensor_v2\n(" + persistent + b"K\0" + sizes + hooks + b"tR"

    def nested(tree: dict[str, Any]) -> bytes:
        items = (text(key) + (nested(part) if isinstance(part, dict) else tensor(part)) for key, part in tree.items())
        return b"}(" + b"".join(items) + b"u"

    tree: dict[str, Any] = {}
    for number, leaf in enumerate(leaves):
        inside = tree
        for key in leaf.path[:-1]:
            inside = inside.setdefault(key, {})
        inside[leaf.path[-1]] = number
    facts = text("max_episode_length") + whole(max_length) + text("model_weights_id") + text(weights_id)
    return b"\x80\x02" + nested(tree)[:-1] + facts + b"u."


class _Stored(NamedTuple):
    """A tensor that was described, not made."""

    dtype: str
    key: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def is_contiguous(self) -> bool:
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != step:
                return False
            step *= size
        return True


def _describe(storage: tuple[str, str], offset: int, shape: Any, strides: Any, *_: Any) -> _Stored:
    return _Stored(storage[0], storage[1], offset, tuple(shape), tuple(strides))


class _Describer(pickle.Unpickler):
    """Reads torch's pickle of tensors and plain values. It knows these names and no others: nothing is run."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _describe
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in _STORAGES.values():
            return next(dtype for dtype, storage in _STORAGES.items() if storage == name)
        raise StorageError(f"names {module}.{name}, which is neither a tensor nor a plain value: refused")

    def persistent_load(self, pid: Any) -> Any:
        return pid[1], str(pid[2])  # dtype and key of a storage


def _locate_pt(path: Path) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """The pickled dict with descriptions of tensors in it, and offset and size of every storage."""
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        storages, pickled = {}, None
        for info in archive.infolist():
            tail = info.filename.partition("/")[2]
            if tail == "data.pkl" and info.file_size <= _MOST_HEADER:
                pickled = archive.read(info)
            if not tail.startswith("data/"):
                continue
            if info.compress_type != zipfile.ZIP_STORED:
                raise StorageError("its tensors are compressed: torch writes none such")
            file.seek(info.header_offset)
            head = _LOCAL.unpack(file.read(_LOCAL.size))
            storages[tail[5:]] = info.header_offset + _LOCAL.size + head[9] + head[10], info.file_size
    if pickled is None:
        raise StorageError("has no data.pkl: not a file of torch.save")
    tree = _Describer(io.BytesIO(pickled)).load()
    if not isinstance(tree, dict):
        raise StorageError(f"expected a dict of tensors, got {type(tree).__name__}")
    return tree, storages


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
        shape = [layout.steps + layout.epochs[number], layout.envs, *leaf.shape]
        ends = [offset, offset + layout.leaf_bytes(leaf, number)]
        table[_escape(leaf.path)] = {"dtype": leaf.dtype, "shape": shape, "data_offsets": ends}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    return struct.pack("<Q", len(text)) + text


def _locate_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, tuple[int, int]], int]:
    with path.open("rb") as file:
        head = file.read(8)
        size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= size <= _MOST_HEADER:
            raise StorageError("its header has no possible length: not a safetensors file")
        table = json.loads(file.read(size))
    facts = table.pop("__metadata__", {})
    tree: dict[str, Any] = {"model_weights_id": facts.get("model_weights_id", "")}
    tree["max_episode_length"] = int(facts.get("max_episode_length", 0))
    storages = {}
    for name, entry in table.items():
        inside, shape = tree, tuple(entry["shape"])
        for key in _unescape(name)[:-1]:
            inside = inside.setdefault(key, {})
        strides = tuple(int(np.prod(shape[at + 1 :], dtype=np.int64)) for at in range(len(shape)))
        begin, end = entry["data_offsets"]
        storages[name] = begin, end - begin
        inside[_unescape(name)[-1]] = _Stored(entry["dtype"], name, 0, shape, strides)
    return tree, storages, 8 + size


# ---- pkl -------------------------------------------------------------------------------------------------------------


def _pickled(
    slab: np.ndarray[Any, Any], leaves: tuple[Leaf, ...], layout: Layout, max_length: int, weights_id: str
) -> bytes:
    """A dict of tensors where torch is installed, as RLinf has it; of arrays otherwise."""
    from .trajectory import nest

    values: list[Any] = [np.array(view) for view in views(slab, leaves, layout)]
    try:
        import torch
    except ModuleNotFoundError:
        pass
    else:
        kinds = [getattr(torch, DTYPES[leaf.dtype][1]) for leaf in leaves]
        values = [
            torch.from_numpy(value.view(np.int16)).view(kind) if leaf.dtype == "BF16" else torch.from_numpy(value)
            for value, kind, leaf in zip(values, kinds, leaves, strict=True)
        ]
    facts = {"max_episode_length": max_length, "model_weights_id": weights_id}
    return pickle.dumps(nest(leaves, values) | facts, protocol=4)


def unpickle(where: str, path: Path, allow_pickle: bool) -> Trajectory:
    if not allow_pickle:
        raise StorageError(
            f"{where}: {path.name} is a pickle, and loading one runs what it says; give allow_pickle=True if you "
            "trust it"
        )
    with path.open("rb") as file:
        found = pickle.load(file)
    fields = {name: value for name, value in found.items() if name in Trajectory.__dataclass_fields__}
    return Trajectory(**{name: value for name, value in fields.items() if value is not None})


# ---- files of others -------------------------------------------------------------------------------------------------


def locate(where: str, path: Path, allow_pickle: bool = False) -> Located:
    """Finds the leaves of a file that somebody else wrote, without reading them (a pickle is read).

    Raises:
        StorageError: It is damaged, or not a trajectory.
    """
    format = path.suffix[1:]
    one_of(where, "format", format, FORMATS)
    try:
        if format == "pkl":
            found = unpickle(where, path, allow_pickle)
            parts = read(where, found, drops=True)
            layout = plan(format, parts.leaves, parts.steps, parts.envs, parts.epochs)
            return Located(parts.leaves, layout, 0, int(found.max_episode_length), str(found.model_weights_id))
        if format == "pt":
            tree, storages = _locate_pt(path)
            return _check_located(where, path, format, tree, storages, 0)
        return _check_located(where, path, format, *_locate_safetensors(path))
    except FileNotFoundError:
        raise
    except StorageError as error:
        raise StorageError(f"{where}: {path}: {error}") from None
    except Exception as error:  # whatever zipfile, json and pickle raise on bytes that are not theirs
        raise StorageError(f"{where}: {path}: not a trajectory: {type(error).__name__}: {error}") from None


class _Shape:
    """Stands for an array in read(): a shape and a dtype without data."""

    def __init__(self, stored: _Stored) -> None:
        self.stored, self.shape, self.ndim = stored, stored.shape, len(stored.shape)


def _check_located(
    where: str, path: Path, format: str, tree: dict[str, Any], storages: dict[str, tuple[int, int]], start: int
) -> Located:
    from .trajectory import FIELDS, _check, _count, _walk

    size = path.stat().st_size
    shaped = Trajectory()
    for name in FIELDS:
        value = tree.get(name)
        setattr(shaped, name, _Shape(value) if isinstance(value, _Stored) else value)
    steps, envs = _count(where, shaped)
    leaves, epochs, offsets, end = [], [], [], 0
    for name in FIELDS:
        for keys, stored in () if tree.get(name) is None else _walk(where, (name,), tree[name]):
            if not isinstance(stored, _Stored) or len(stored.shape) < 2:
                continue  # nothing that rows could be drawn from
            if stored.dtype not in DTYPES or not stored.is_contiguous() or stored.offset < 0 or min(stored.shape) < 0:
                raise StorageError(f"{'/'.join(keys)}: expected a contiguous tensor, got {stored}")
            leaf = Leaf(keys, stored.dtype, stored.shape[2:])
            extra = _check(where, keys, stored.shape, steps, envs)
            begin, length = storages[stored.key]
            offset = begin + stored.offset * np.dtype(DTYPES[leaf.dtype][0]).itemsize
            bytes_ = (steps + extra) * envs * leaf.row_bytes
            if offset + bytes_ > begin + length or start + begin + length > size:
                raise StorageError(f"{'/'.join(keys)}: ends behind the end of its storage")
            leaves.append(leaf)
            epochs.append(extra)
            offsets.append(offset)
            end = max(end, offset + bytes_)
    layout = Layout(format, steps, envs, tuple(epochs), tuple(offsets), end)
    facts = int(tree.get("max_episode_length") or 0), str(tree.get("model_weights_id") or "")
    return Located(tuple(leaves), layout, start, *facts)
