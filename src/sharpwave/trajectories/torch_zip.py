"""torch's zip file ("pt"): written so that it begins with a slab, read without torch and without running its pickle."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..errors import StorageError
from .trajectory import DTYPES, Leaf

__all__ = ["ALIGN", "Array", "Storage", "Stored", "finish", "header_bytes", "locate_tensors"]

ALIGN = 64
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_DAY_ONE = 33  # 1980-01-01, the first day that a zip file can name
_STORAGES = {
    "C128": "ComplexDoubleStorage",
    "C64": "ComplexFloatStorage",
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
_FROM_STORAGE = {storage: dtype for dtype, storage in _STORAGES.items()}
_FROM_TORCH = {kind: dtype for dtype, (_, kind) in DTYPES.items()}
_UNTYPED = "untyped"  # a storage whose dtype is given with the tensor
_MOST_PICKLE = 64 * 2**20
_MOST_EXTENT, _MOST_AXES = 2**48, 30


# ---- writing ---------------------------------------------------------------------------------------------------------


def _name(number: int) -> bytes:
    return b"archive/data/%d" % number


def header_bytes(number: int) -> int:
    """Bytes of the zip header in front of a leaf's data, without the padding."""
    return _LOCAL.size + len(_name(number))


def finish(
    slab: np.ndarray[Any, Any],
    leaves: tuple[Leaf, ...],
    shapes: Sequence[tuple[int, ...]],
    offsets: tuple[int, ...],
    crcs: list[int],
    facts: dict[str, Any],
) -> bytes:
    """Fills the zip headers between the leaves, and returns the bytes that follow the slab. The pickle is written last
    and not first, as torch does: so the offsets of the leaves depend on their shapes only."""
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

    for number, (shape, leaf, offset) in enumerate(zip(shapes, leaves, offsets, strict=True)):
        name = _name(number)
        size = int(np.prod(shape[:2], dtype=np.int64)) * leaf.row_bytes
        gap = offset - end - _LOCAL.size - len(name)
        pad = b"FB" + struct.pack("<H", gap - 4) + b"Z" * (gap - 4) if gap >= 4 else b"\0" * gap
        head = local(name, size, crcs[number], gap) + pad
        slab[end:offset] = np.frombuffer(head, np.uint8)
        describe(name, size, crcs[number], end)
        end = offset + size
    records = {
        b"archive/data.pkl": _pickled(leaves, shapes, facts),
        b"archive/byteorder": b"little",
        b"archive/version": b"3\n",
    }
    for name, data in records.items():
        crc = zlib.crc32(data)
        describe(name, len(data), crc, end + tail.tell())
        tail.write(local(name, len(data), crc, 0) + data)
    at, listed = end + tail.tell(), central.getvalue()
    return tail.getvalue() + listed + _END.pack(b"PK\5\6", 0, 0, count, count, len(listed), at, 0)


def _pickled(leaves: tuple[Leaf, ...], shapes: Sequence[tuple[int, ...]], facts: dict[str, Any]) -> bytes:
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
        dtype, shape = leaves[number].dtype, shapes[number]
        strides: list[int] = []
        step = 1
        for size in reversed(shape):
            strides.insert(0, step)
            step *= size
        # torch has no storage class for the newer dtypes: their storages are counted in bytes.
        typed = dtype in _STORAGES
        storage = f"ctorch\n{_STORAGES[dtype]}\n" if typed else "ctorch.storage\nUntypedStorage\n"
        length = step if typed else step * np.dtype(DTYPES[dtype][0]).itemsize
        persistent = b"(" + text("storage") + storage.encode() + text(str(number)) + text("cpu") + whole(length) + b"tQ"
        sizes = b"(" + b"".join(map(whole, shape)) + b"t(" + b"".join(map(whole, strides)) + b"t"
        hooks = b"\x89ccollections\nOrderedDict\n)R"
        call = b"_rebuild_tensor_v2\n(" if typed else b"_rebuild_tensor_v3\n("
        kind = b"" if typed else f"ctorch\n{DTYPES[dtype][1]}\n".encode()
        return b"ctorch._utils\n" + call + persistent + b"K\0" + sizes + hooks + kind + b"tR"

    def nested(tree: dict[str, Any]) -> bytes:
        items = (text(key) + (nested(part) if isinstance(part, dict) else tensor(part)) for key, part in tree.items())
        return b"}(" + b"".join(items) + b"u"

    tree: dict[str, Any] = {}
    for number, leaf in enumerate(leaves):
        inside = tree
        for key in leaf.path[:-1]:
            inside = inside.setdefault(key, {})
        inside[leaf.path[-1]] = number
    said = b"".join(
        text(key) + (text(value) if isinstance(value, str) else whole(value)) for key, value in facts.items()
    )
    return b"\x80\x02" + nested(tree)[:-1] + said + b"u."


# ---- reading ---------------------------------------------------------------------------------------------------------


class Storage(NamedTuple):
    """Where the bytes of tensors are in a file, and their checksum; 0: the writer gave none."""

    offset: int
    bytes: int
    crc: int


class Stored(NamedTuple):
    """The description of a tensor in a file. Offset and strides are in elements."""

    dtype: str
    key: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Array:
    """A NumPy array inside the pickle: its bytes are in the pickle, not in a storage."""

    __slots__ = ("data", "dtype", "is_fortran", "shape")

    def __init__(self) -> None:
        self.dtype, self.data, self.is_fortran = "", b"", False
        self.shape: tuple[int, ...] = ()

    def take(self, state: Any) -> None:
        _, shape, kind, self.is_fortran, self.data = state
        if not isinstance(kind, _Dtype) or not isinstance(self.data, bytes):
            raise StorageError("a NumPy array of objects: refused")
        self.dtype, self.shape = kind.name(), _extents(shape)

    def to_numpy(self) -> np.ndarray[Any, Any]:
        order: Any = "F" if self.is_fortran else "C"
        return np.frombuffer(self.data, DTYPES[self.dtype][0]).reshape(self.shape, order=order)


class _Dtype:
    """A dtype that NumPy pickled: its letter and size, then its byte order."""

    __slots__ = ("kind", "order")

    def __init__(self, kind: str) -> None:
        self.kind, self.order = kind, "|"

    def take(self, state: Any) -> None:
        if state[2:5] != (None, None, None):
            raise StorageError("a NumPy array of records: refused")
        self.order = state[1]

    def name(self) -> str:
        dtype = np.dtype(f"{'<' if self.order == '|' else self.order}{self.kind}") if self._is_plain() else None
        for name, (kind, _) in DTYPES.items():
            if dtype is not None and np.dtype(kind) == dtype and name not in ("BF16", "F8_E4M3", "F8_E5M2"):
                return name
        raise StorageError(f"a NumPy array of dtype {self.order}{self.kind}: refused; it is none that is kept here")

    def _is_plain(self) -> bool:
        return isinstance(self.kind, str) and self.kind[:1] in "biufc" and self.kind[1:].isdecimal()


def _extents(values: Any) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)) or len(values) > _MOST_AXES:
        raise StorageError(f"expected a shape of at most {_MOST_AXES} axes, got {str(values)[:60]}")
    if any(type(value) is not int or not 0 <= value <= _MOST_EXTENT for value in values):
        raise StorageError(f"expected whole numbers as a shape, got {str(values)[:60]}")
    return tuple(values)


def _describe(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Stored:
    """_rebuild_tensor_v2: storage, offset, shape, strides, requires_grad, hooks, and flags of views."""
    dtype, key = storage
    if dtype == _UNTYPED:
        raise StorageError("a tensor without a dtype: refused")
    return _tensor(dtype, key, offset, shape, strides, rest[2:3])


def _describe_v3(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> Stored:
    """_rebuild_tensor_v3: the dtype follows the hooks."""
    return _tensor(rest[2], storage[1], offset, shape, strides, rest[3:4])


def _tensor(dtype: Any, key: Any, offset: Any, shape: Any, strides: Any, flags: tuple[Any, ...]) -> Stored:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise StorageError(f"a tensor of dtype {dtype!r}: refused; it is none that is kept here")
    if flags and isinstance(flags[0], dict) and any(flags[0].values()):
        raise StorageError(f"a tensor whose values are computed when it is read ({', '.join(flags[0])}): refused")
    made = Stored(dtype, str(key), _extents([offset])[0], _extents(shape), _extents(strides))
    if len(made.shape) != len(made.strides):
        raise StorageError("a tensor with more strides than axes, or fewer")
    return made


class _Describer(pickle._Unpickler):  # type: ignore[name-defined,misc,unused-ignore]
    """Reads torch's pickle of tensors, arrays and plain values. It accepts only the names and opcodes of these, and
    runs no code of the file. The unpickler in C is not used: it allocates memory for the highest memo index that a file
    names."""

    _OPCODES = (
        "PROTO STOP MARK POP POP_MARK FRAME NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT "
        "BINUNICODE SHORT_BINUNICODE BINBYTES SHORT_BINBYTES EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST "
        "APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL "
        "STACK_GLOBAL REDUCE BINPERSID"
    )
    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = {
        code: pickle._Unpickler.dispatch[code]  # type: ignore[attr-defined,unused-ignore]
        for code in (getattr(pickle, name)[0] for name in _OPCODES.split())
    }

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._may_encode = len(data)  # bytes; each is in the pickle once

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            module = "numpy.multiarray"
        known: dict[tuple[str, str], Any] = {
            ("torch._utils", "_rebuild_tensor_v2"): _describe,
            ("torch._utils", "_rebuild_tensor_v3"): _describe_v3,
            ("torch.storage", "UntypedStorage"): _UNTYPED,
            ("collections", "OrderedDict"): lambda: {},
            ("numpy.multiarray", "_reconstruct"): lambda *_: Array(),
            ("numpy.multiarray", "scalar"): _scalar,
            ("numpy", "ndarray"): "ndarray",
            ("numpy", "dtype"): lambda kind, *_: _Dtype(kind),
            ("_codecs", "encode"): self._encode,
        }
        if (module, name) in known:
            return known[module, name]
        if module == "torch" and name in _FROM_STORAGE:
            return _FROM_STORAGE[name]
        if module == "torch" and name in _FROM_TORCH:
            return _FROM_TORCH[name]
        raise StorageError(f"names {module}.{name}, which is neither a tensor nor a plain value: refused")

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key = pid[:3]
        if kind != "storage" or dtype not in (*DTYPES, _UNTYPED):
            raise StorageError(f"names the storage {str(pid)[:60]}: refused")
        return dtype, str(key)

    def _encode(self, text: Any, codec: Any) -> bytes:
        if codec != "latin1" or not isinstance(text, str):
            raise StorageError("encodes what is not bytes: refused")
        self._may_encode -= len(text)
        if self._may_encode < 0:
            raise StorageError("holds the same bytes many times: refused")
        return text.encode("latin1")

    def load_build(self) -> None:
        state = self.stack.pop()
        made = self.stack[-1]
        if not isinstance(made, (Array, _Dtype)):
            raise StorageError("sets the state of something that is no array: refused")
        made.take(state)

    dispatch[pickle.BUILD[0]] = load_build


def _scalar(kind: Any, data: Any) -> Any:
    if not isinstance(kind, _Dtype) or not isinstance(data, bytes):
        raise StorageError("a NumPy scalar of something that is no number: refused")
    return np.frombuffer(data, DTYPES[kind.name()][0])[0].item()


def locate_tensors(path: Path) -> tuple[dict[str, Any], dict[str, Storage]]:
    """The pickled dict, with descriptions in place of tensors, and every storage by its key."""
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        size = os.fstat(file.fileno()).st_size
        storages, pickled = {}, None
        for info in archive.infolist():
            tail = info.filename.partition("/")[2]
            if tail == "data.pkl":
                if info.file_size > _MOST_PICKLE or info.file_size > size:
                    raise StorageError(f"its pickle has {info.file_size} bytes; at most {_MOST_PICKLE} are read")
                pickled = archive.read(info)
            if tail == "byteorder" and info.file_size < 16 and archive.read(info) == b"big":
                raise StorageError("its tensors are big-endian; save it on a little-endian machine")
            if not tail.startswith("data/"):
                continue
            if info.compress_type != zipfile.ZIP_STORED:
                raise StorageError("its tensors are compressed: torch writes none such")
            file.seek(info.header_offset)
            head = _LOCAL.unpack(file.read(_LOCAL.size))
            begin = info.header_offset + _LOCAL.size + head[9] + head[10]
            if begin + info.file_size > size:
                raise StorageError(f"storage {tail[5:]} ends behind the end of the file")
            storages[tail[5:]] = Storage(begin, info.file_size, info.CRC)
    if pickled is None:
        raise StorageError("has no data.pkl: not a file of torch.save")
    tree = _Describer(pickled).load()
    if not isinstance(tree, dict):
        raise StorageError(f"expected a dict of tensors, got {type(tree).__name__}")
    return tree, storages
