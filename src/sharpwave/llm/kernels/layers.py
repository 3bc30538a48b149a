"""What is between the matrix products of a layer, one kernel each: sums with norms, heads with their places, SwiGLU."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

__all__ = ["add_and_norm", "gate", "place_heads"]


@triton.jit
def _add_and_norm(x, added, weight, out, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    i = tl.arange(0, BLOCK)
    inside = i < size
    dtype = out.dtype.element_ty
    wide = tl.load(x + row + i, inside, other=0.0)
    if added is not None:
        wide += tl.load(added + row + i, inside, other=0.0).to(tl.float32)
        tl.store(x + row + i, wide, inside)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    # Rounded before the weight, as the model does it.
    scaled = wide.to(dtype).to(tl.float32) * tl.load(weight + i, inside, other=0.0).to(tl.float32)
    tl.store(out + row + i, scaled.to(dtype), inside)


@triton.jit
def _place_heads(
    projected,
    q_weight,
    k_weight,
    cos,
    sin,
    queries,
    keys,
    values,
    slots,
    places,
    context,
    slot_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each head of queries and of keys and values; the two halves of a head turn together."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    half: tl.constexpr = DIM // 2
    i = tl.arange(0, BLOCK)
    inside = i < half
    dtype = projected.dtype.element_ty
    at = projected + (row * (HEADS + 2 * SHARED) + head) * DIM + i
    low = tl.load(at, inside, other=0.0).to(tl.float32)
    high = tl.load(at + half, inside, other=0.0).to(tl.float32)
    if q_weight is not None:
        scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / DIM + eps)
        of_query = inside & (head + tl.zeros_like(i) < HEADS)
        of_key = inside & (head + tl.zeros_like(i) >= HEADS)
        for_low = tl.load(q_weight + i, of_query, other=0.0) + tl.load(k_weight + i, of_key, other=0.0)
        for_high = tl.load(q_weight + half + i, of_query, other=0.0) + tl.load(k_weight + half + i, of_key, other=0.0)
        low = (low * scale).to(dtype).to(tl.float32) * for_low.to(tl.float32)
        high = (high * scale).to(dtype).to(tl.float32) * for_high.to(tl.float32)
    place = tl.load(places + row)
    angle = tl.minimum(place, context - 1) * DIM + i
    by_cos = tl.load(cos + angle, inside, other=0.0).to(tl.float32)
    by_sin = tl.load(sin + angle, inside, other=0.0).to(tl.float32)
    turned_low = (low * by_cos - high * by_sin).to(dtype)
    turned_high = (high * by_cos + low * by_sin).to(dtype)
    if head < HEADS:
        query = queries + (row * HEADS + head) * DIM + i
        tl.store(query, turned_low, inside)
        tl.store(query + half, turned_high, inside)
    else:
        used = inside & (place + tl.zeros_like(i) < context)
        to = tl.load(slots + row).to(tl.int64) * slot_stride + (head - HEADS) * head_stride + place * DIM + i
        tl.store(keys + to, turned_low, used)
        tl.store(keys + to + half, turned_high, used)
        of_value = at + SHARED * DIM
        tl.store(values + to, tl.load(of_value, used, other=0.0), used)
        tl.store(values + to + half, tl.load(of_value + half, used, other=0.0), used)


@triton.jit
def _gate(both, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    dtype = both.dtype.element_ty
    x = tl.load(both + row * 2 * size + i, inside, other=0.0).to(tl.float32)
    silu = (x / (1.0 + tl.exp(-x))).to(dtype).to(tl.float32)
    up = tl.load(both + row * 2 * size + size + i, inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + i, (silu * up).to(dtype), inside)


def add_and_norm(x: Any, added: Any, weight: Any, eps: float) -> Any:
    """Adds to x [rows, size] of float32 in place (None: nothing) and gives its RMS norm in the weight's dtype."""
    rows, size = x.shape
    out = torch.empty_like(x, dtype=weight.dtype)
    block = triton.next_power_of_2(size)
    _add_and_norm[(rows,)](x, added, weight, out, size, eps, block, num_warps=min(8, max(1, block // 256)))
    return out


def place_heads(
    projected: Any,
    norms: tuple[Any, Any] | None,
    eps: float,
    angles: tuple[Any, Any],
    keys: Any,
    values: Any,
    slots: Any,
    places: Any,
) -> Any:
    """Queries [rows, heads, dim] with their norm and rotation; keys and values go into the cache.

    Args:
        projected: Queries, keys and values of each row side by side.
        norms: Weights of the norms of queries and keys, where the model has them.
        angles: cos and sin of each place, [context, dim] each.
        keys, values: One layer of the cache.
        slots, places: Of each row, [rows] of int64; a row at place `context` is idle and writes nothing.
    """
    rows, shared, dim = len(projected), keys.shape[1], keys.shape[3]
    heads = projected.shape[1] // dim - 2 * shared
    queries = torch.empty((rows, heads, dim), dtype=projected.dtype, device=projected.device)
    _place_heads[(rows, heads + shared)](
        projected,
        *(norms or (None, None)),
        *angles,
        queries,
        keys,
        values,
        slots,
        places,
        keys.shape[2] - 1,
        keys.stride(0),
        keys.stride(1),
        eps,
        heads,
        shared,
        dim,
        triton.next_power_of_2(dim // 2),
        num_warps=1,
    )
    return queries


def gate(both: Any) -> Any:
    """silu(first half) * second half, [rows, size] of [rows, 2 * size]."""
    rows, size = both.shape[0], both.shape[1] // 2
    out = torch.empty((rows, size), dtype=both.dtype, device=both.device)
    block = min(1024, triton.next_power_of_2(size))
    _gate[(rows, triton.cdiv(size, block))](both, out, size, block)
    return out
