"""Attention of single tokens over the cache: each row is one token, with the slot and the place it is at.

The heads that share a key-value head are one tile, so keys and values are read once. A program reads one part of a
row's places; where there are several parts, a second kernel adds them up. Lengths are read from memory, so a CUDA graph
serves every length, and parts behind a row's end return at once.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["attend", "count_parts"]

_LEAST = 256  # a part has at least so many places: fewer are not worth a program
_MOST_PARTS = 32
_OPERANDS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _span(place, context, PARTS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr):
    """The places that a row looks at, and how many of them a part has. An idle row (place = context) looks at none."""
    length = tl.where(place < context, place + 1, 0).to(tl.int32)
    each = tl.maximum(tl.cdiv(tl.cdiv(length, PARTS), BLOCK) * BLOCK, LEAST)
    return length, each


@triton.jit
def _attend(
    queries,
    keys,
    values,
    slots,
    places,
    out,
    sums,
    context,
    slot_stride,
    head_stride,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    PARTS: tl.constexpr,
    OPERAND: tl.constexpr,
):
    row = tl.program_id(0)
    shared = tl.program_id(1)
    part = tl.program_id(2)
    length, each = _span(tl.load(places + row), context, PARTS, BLOCK, LEAST)
    begin = part * each
    end = tl.minimum(begin + each, length)
    if (PARTS == 1) | (begin < end):
        g = tl.arange(0, PADDED_GROUP)
        d = tl.arange(0, PADDED_DIM)
        head = row * HEADS + shared * GROUP + g
        here = (g < GROUP)[:, None] & (d < DIM)[None, :]
        query = tl.load(queries + head[:, None] * DIM + d[None, :], here, other=0.0).to(OPERAND)
        base = tl.load(slots + row).to(tl.int64) * slot_stride + shared * head_stride
        best = tl.full((PADDED_GROUP,), float("-inf"), tl.float32)
        total = tl.zeros((PADDED_GROUP,), tl.float32)
        found = tl.zeros((PADDED_GROUP, PADDED_DIM), tl.float32)
        for first in range(begin, end, BLOCK):
            t = first + tl.arange(0, BLOCK)
            held = t < end
            at = base + t * DIM
            key = tl.load(keys + at[None, :] + d[:, None], held[None, :] & (d < DIM)[:, None], other=0.0)
            score = tl.dot(query, key.to(OPERAND), input_precision="ieee") * scale
            score = tl.where(held[None, :], score, float("-inf"))
            most = tl.maximum(best, tl.max(score, 1))
            weight = tl.exp2(score - most[:, None])
            shrunk = tl.exp2(best - most)
            value = tl.load(values + at[:, None] + d[None, :], held[:, None] & (d < DIM)[None, :], other=0.0)
            found = found * shrunk[:, None] + tl.dot(weight.to(OPERAND), value.to(OPERAND), input_precision="ieee")
            total = total * shrunk + tl.sum(weight, 1)
            best = most
        if PARTS == 1:
            # By length, not by the total: a total that is NaN must stay NaN.
            found = tl.where(length > 0, found / total[:, None], 0.0)
            tl.store(out + head[:, None] * DIM + d[None, :], found.to(out.dtype.element_ty), here)
        else:
            # `sums` has for each head and part: the weighted values, their largest score, their total weight.
            into = sums + (head * PARTS + part) * (DIM + 2)
            tl.store(into[:, None] + d[None, :], found, here)
            tl.store(into + DIM, best, g < GROUP)
            tl.store(into + DIM + 1, total, g < GROUP)


@triton.jit
def _add_parts(
    sums,
    places,
    out,
    context,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0)
    head = row * HEADS + tl.program_id(1)
    length, each = _span(tl.load(places + row), context, PARTS, BLOCK, LEAST)
    d = tl.arange(0, PADDED_DIM)
    # Vectors of one: in a loop Triton keeps scalars apart from vectors.
    best = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    found = tl.zeros((PADDED_DIM,), tl.float32)
    for part in range(0, tl.cdiv(length, each)):
        at = sums + (head * PARTS + part) * (DIM + 2)
        its_best = tl.load(at + DIM + tl.arange(0, 1))
        most = tl.maximum(best, its_best)
        shrunk = tl.exp2(best - most)
        share = tl.exp2(its_best - most)
        found = found * shrunk + tl.load(at + d, d < DIM, other=0.0) * share
        total = total * shrunk + tl.load(at + DIM + 1 + tl.arange(0, 1)) * share
        best = most
    found = tl.where(length > 0, found / total, 0.0)
    tl.store(out + head * DIM + d, found.to(out.dtype.element_ty), d < DIM)


@functools.lru_cache(64)
def count_parts(rows: int, shared: int, context: int, processors: int) -> int:
    """Parts of a row: enough to occupy every processor where rows are few, and to bound the time of the longest row."""
    wanted = max(math.ceil(4 * processors / (rows * shared)), math.ceil(context / 4096))
    return max(1, min(wanted, math.ceil(context / _LEAST), _MOST_PARTS))


def attend(
    queries: Any, keys: Any, values: Any, slots: Any, places: Any, parts: int | None = None, least: int = _LEAST
) -> Any:
    """What each row's heads see, [rows, heads * dim].

    Args:
        queries: [rows, heads, dim].
        keys, values: One layer of the cache, [slots, key-value heads, context + 1, dim].
        slots, places: Of each row, [rows] of int64. Place `context` marks a row as idle: it sees zeros.
        parts, least: Parts of a row at most, and places of a part at least. None: chosen for the device.
    """
    rows, heads, dim = queries.shape
    shared, context = keys.shape[1], keys.shape[2] - 1
    if parts is None:
        parts = count_parts(rows, shared, context, _processors(queries.device))
    out = torch.empty((rows, heads * dim), dtype=queries.dtype, device=queries.device)
    sums = torch.empty((rows * heads * parts * (dim + 2)) if parts > 1 else 1, device=queries.device)
    wide = triton.next_power_of_2(max(dim, 16))
    block = 32 if wide > 128 or queries.dtype is torch.float32 else 64
    # Triton's interpreter, which runs the kernels on a CPU, cannot multiply matrices of bfloat16.
    is_narrow = queries.dtype is torch.float16 or (queries.dtype is torch.bfloat16 and queries.is_cuda)
    operand = _OPERANDS[queries.dtype] if is_narrow else tl.float32
    _attend[(rows, shared, parts)](
        queries,
        keys,
        values,
        slots,
        places,
        out,
        sums,
        context,
        keys.stride(0),
        keys.stride(1),
        dim**-0.5 * math.log2(math.e),
        heads,
        heads // shared,
        dim,
        max(16, triton.next_power_of_2(heads // shared)),  # the least tile of a matrix product
        wide,
        block,
        least,
        parts,
        operand,
        num_warps=4,
        num_stages=2,
    )
    if parts > 1:
        _add_parts[(rows, heads)](sums, places, out, context, heads, dim, wide, block, least, parts, num_warps=1)
    return out


@functools.lru_cache(16)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
