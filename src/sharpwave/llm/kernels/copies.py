"""Keys and values of places of the cache, copied from slots to others: all copies and layers in one kernel."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = ["copy_places"]

_BLOCK = 64


@triton.jit
def _copy_places(
    keys,
    values,
    moves,
    layer_stride,
    slot_stride,
    head_stride,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    move = moves + tl.program_id(0) * 4
    of_head = (tl.program_id(1) // SHARED).to(tl.int64) * layer_stride + (tl.program_id(1) % SHARED) * head_stride
    source = of_head + tl.load(move) * slot_stride
    target = of_head + tl.load(move + 1) * slot_stride
    start = tl.load(move + 2).to(tl.int32)
    end = tl.load(move + 3).to(tl.int32)
    d = tl.arange(0, PADDED_DIM)
    for first in range(start, end, BLOCK):
        t = first + tl.arange(0, BLOCK)
        at = t[:, None] * DIM + d[None, :]
        used = (t < end)[:, None] & (d < DIM)[None, :]
        tl.store(keys + target + at, tl.load(keys + source + at, used, other=0.0), used)
        tl.store(values + target + at, tl.load(values + source + at, used, other=0.0), used)


def copy_places(keys: Any, values: Any, moves: Any) -> None:
    """Args:
    keys, values: The cache, [layers, slots, key-value heads, context + 1, dim] each.
    moves: Source, target, first place and end of each copy, [copies, 4] of int64. No target may be a source, or the
        target of another copy.
    """
    layers, _, shared, _, dim = keys.shape
    strides = keys.stride(0), keys.stride(1), keys.stride(2)
    wide = triton.next_power_of_2(dim)
    _copy_places[(len(moves), layers * shared)](keys, values, moves, *strides, shared, dim, wide, _BLOCK, num_warps=4)
