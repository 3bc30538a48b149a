"""Layout: where the arrays of a trajectory are in its slab, the bytes of the trajectory in memory and in its file."""

from __future__ import annotations

import struct
import zlib
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from ..errors import SchemaError
from .torch_zip import ALIGN, header_bytes
from .trajectory import DTYPES, Leaf, Parts, place

__all__ = [
    "FORMATS",
    "NOT_HELD",
    "Layout",
    "capture",
    "checksum",
    "combine",
    "fits",
    "line_up",
    "plan",
    "reordered",
    "views",
]

FORMATS = ("pt", "safetensors", "pkl")
# safetensors has no name for it; torch cannot read pickles of these.
NOT_HELD = {"safetensors": {"C128"}, "pkl": {"U16", "U32", "U64", "F8_E4M3", "F8_E5M2"}}


class Layout(NamedTuple):
    """Where the leaves of a trajectory are in its slab. Trajectories of the same shape share one layout, and one record
    of the index.

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
        StorageError: A leaf ends behind the end of the slab.
        """
        places = [
            (offset, leaf.row_bytes, *self.stride(leaf, number), *place(leaf, self.steps, extra))
            for number, (leaf, offset, extra) in enumerate(zip(leaves, self.offsets, self.epochs, strict=True))
        ]
        return _core.SlabLayout(self.steps, self.envs, self.bytes, 0, places)

    def shape(self, leaf: Leaf, number: int) -> tuple[int, ...]:
        return (self.steps + self.epochs[number], self.envs, *leaf.shape)

    def leaf_bytes(self, leaf: Leaf, number: int) -> int:
        """Bytes of the rows of one leaf."""
        return (self.steps + self.epochs[number]) * self.envs * leaf.row_bytes

    def data_bytes(self, leaves: tuple[Leaf, ...]) -> int:
        """Bytes of all rows."""
        return sum(self.leaf_bytes(leaf, number) for number, leaf in enumerate(leaves))

    @property
    def is_mapped(self) -> bool:
        return self.format != "pkl" and not self.is_packed


def plan(
    where: str,
    format: str,
    leaves: tuple[Leaf, ...],
    steps: int,
    envs: int,
    epochs: tuple[int, ...],
    *,
    in_memory: bool = False,
) -> Layout:
    """The layout of a trajectory that is added.

    Args:
        in_memory: The slab is only in memory, and its arrays follow each other. A file of ``format`` may be written of
            them later, so the format's limits are checked.

    Raises:
        SchemaError: The format cannot hold a dtype, or so many bytes.
    """
    for leaf in leaves:
        if format in NOT_HELD and leaf.dtype in NOT_HELD[format]:
            raise SchemaError(
                f"{where}: {leaf}: {format} files cannot hold {DTYPES[leaf.dtype][1]}; give the buffer format='pt', or "
                "cast it"
            )
    return line_up(where, "safetensors" if in_memory else format, leaves, steps, envs, epochs)


def line_up(
    where: str, format: str, leaves: tuple[Leaf, ...], steps: int, envs: int, epochs: tuple[int, ...]
) -> Layout:
    """A layout whose leaves follow each other."""
    offsets, at = [], 0
    for number, (leaf, extra) in enumerate(zip(leaves, epochs, strict=True)):
        if format == "pt":  # every storage behind its own zip header, aligned as torch does
            at += header_bytes(number)
            at += -at % ALIGN
        offsets.append(at)
        at += (steps + extra) * envs * leaf.row_bytes
    if format == "pt" and at >= 2**32 - 2**20:
        raise SchemaError(
            f"{where}: a trajectory takes {at} bytes; 'pt' files hold less than 4 GiB: give the buffer "
            "format='safetensors', or add shorter trajectories"
        )
    return Layout(format, steps, envs, epochs, tuple(offsets), at)


def capture(parts: Parts, layout: Layout) -> np.ndarray[Any, Any]:
    """Copies the arrays into a new slab."""
    slab = np.empty(layout.bytes, np.uint8)  # not from the cache's huge pages: it is freed when it is written
    _core.copy_into_slab(slab, list(layout.offsets), parts.arrays)
    return slab


def combine(each: list[int]) -> int:
    """The checksum of a trajectory, made of the checksums of its leaves."""
    return zlib.crc32(struct.pack(f"<{len(each)}I", *each))


def checksum(slab: np.ndarray[Any, Any], leaves: tuple[Leaf, ...], layout: Layout) -> tuple[int, list[int]]:
    """The checksum of all data, and that of every leaf."""
    data = slab.data
    each = [
        zlib.crc32(data[offset : offset + layout.leaf_bytes(leaf, number)])
        for number, (leaf, offset) in enumerate(zip(leaves, layout.offsets, strict=True))
    ]
    return combine(each), each


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


def reordered(layout: Layout, order: list[int]) -> Layout:
    """The same layout for leaves in another order."""

    def turn(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(values[number] for number in order)

    return layout._replace(
        epochs=turn(layout.epochs),
        offsets=turn(layout.offsets),
        strides=None if layout.strides is None else turn(layout.strides),
    )


def fits(data_bytes: int, file_bytes: int) -> bool:
    """Whether a file of that size can hold rows of ``data_bytes``. Rows may be larger than the file: some fields are
    stored once for all environments."""
    return data_bytes <= 16 * file_bytes + 2**20
