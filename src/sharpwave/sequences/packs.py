"""Packs of sequences: samples cut into parts by count or by tokens, and converted between packed and padded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import whole
from ..errors import SchemaError
from .column import Column, fits_exactly, is_tensor, read_list

if TYPE_CHECKING:
    from .sample import SequenceSample

__all__ = ["ffd_allocate", "pack", "pad", "split", "split_by_tokens"]


def split(sample: SequenceSample, sizes: int | Sequence[int]) -> list[SequenceSample]:
    count = len(sample)
    if isinstance(sizes, (int, np.integer)):
        parts = whole("split()", "sizes", sizes, 1, count)
        sizes = [count // parts + (at < count % parts) for at in range(parts)]
    sizes = [whole("split()", "sizes", size) for size in read_list("split()", "sizes", sizes)]
    if sum(sizes) != count:
        raise SchemaError(f"split(): sizes: expected parts of at least 1 datum, {count} in all, got {list(sizes)!r}")
    ends = list(accumulate(sizes))
    starts = [0, *ends][: len(ends)]
    by_key: list[tuple[str, list[Column]]] = []
    for key, (lens, data, shape, dtype) in sample._columns.items():
        places = [0, *accumulate(map(sum, lens))]
        by_key.append(
            (
                key,
                [
                    Column(lens[a:b], None if data is None else data[places[a] : places[b]], shape, dtype)
                    for a, b in zip(starts, ends, strict=True)
                ],
            )
        )
    ids, metadata, make = sample._ids, sample._metadata, sample._make
    return [
        make(
            ids[a:b],
            {key: columns[at] for key, columns in by_key},
            {name: values[a:b] for name, values in metadata.items()} if metadata else {},
        )
        for at, (a, b) in enumerate(zip(starts, ends, strict=True))
    ]


def split_by_tokens(
    sample: SequenceSample, max_tokens: int | None, min_parts: int
) -> tuple[list[SequenceSample], list[int], list[int]]:
    heaviest = max(sample._columns.values(), key=lambda column: column.tokens, default=None)
    lens = [1] * len(sample) if heaviest is None else [sum(row) for row in heaviest.lens]
    groups = ffd_allocate(lens, max_tokens, min_parts)
    forward = list(chain.from_iterable(groups))
    backward = [0] * len(forward)
    for place, datum in enumerate(forward):
        backward[datum] = place
    parts = sample.unpack()
    keys = list(sample._columns)
    return [sample.gather([parts[datum] for datum in group], keys) for group in groups], forward, backward


def ffd_allocate(lens: Sequence[int], capacity: int | None, min_groups: int = 1) -> list[list[int]]:
    """Items into groups: longest first, each to the group with the fewest items of those that can take it.

    A new group is opened while there are fewer than ``min_groups``, or when none can take the item. Even counts come
    before even sums: a step waits for as many sequences as for tokens. Groups are sorted, inside and among each other.

    Args:
        lens: One an item.
        capacity: Most that the items of a group add up to; None for no bound.
        min_groups: Fewest groups.

    Raises:
        SchemaError: An item alone is over the capacity, or there are fewer items than groups.
    """
    where = "ffd_allocate()"
    min_groups = whole(where, "min_groups", min_groups)
    capacity = None if capacity is None else whole(where, "capacity", capacity, 0)
    lens = [whole(where, "lens", one, 0) for one in read_list(where, "lens", lens)]
    if len(lens) < min_groups:
        raise SchemaError(f"{where}: expected at least {min_groups} items, one a group, got {len(lens)}")
    if capacity is not None and lens and max(lens) > capacity:
        at = int(np.argmax(lens))
        raise SchemaError(f"{where}: item {at} has {lens[at]}, the capacity is {capacity}; raise it or cut the item")
    groups: list[list[int]] = []
    sums: list[int] = []
    for item in sorted(range(len(lens)), key=lambda at: (-lens[at], at)):
        fits = [g for g, held in enumerate(sums) if capacity is None or held + lens[item] <= capacity]
        if len(groups) < min_groups or not fits:
            groups.append([item])
            sums.append(lens[item])
            continue
        chosen = min(fits, key=lambda g: (len(groups[g]), sums[g]))
        groups[chosen].append(item)
        sums[chosen] += lens[item]
    return sorted(sorted(group) for group in groups)


def pad(column: Column, key: str, value: Any, length: int | None) -> tuple[Any, Any]:
    if column.data is None:
        raise SchemaError(f"pad(): key {key!r} is only described; there are no values to pad")
    lens = np.array([n for row in column.lens for n in row], np.int64)
    longest = int(lens.max(initial=0))
    width = longest if length is None else whole("pad()", "length", length, longest)
    if not fits_exactly(column.dtype, value):
        raise SchemaError(f"pad(): value: expected a number that {column.dtype} of key {key!r} holds, got {value!r}")
    mask = np.arange(width) < lens[:, None]
    if is_tensor(column.data):
        import torch

        there = torch.from_numpy(mask).to(column.data.device)
        out = torch.full((*mask.shape, *(column.shape or ())), value, dtype=column.dtype, device=column.data.device)
        out[there] = column.data
        return out, there
    padded = np.full((*mask.shape, *(column.shape or ())), value, column.dtype)
    padded[mask] = column.data
    return padded, mask


def pack(kind: type[SequenceSample], ids: Iterable[Any], padded: Mapping[str, Any], mask: Any) -> SequenceSample:
    if not isinstance(padded, Mapping):
        raise SchemaError(f"pack(): padded: expected arrays by key, got {type(padded).__name__}")
    for key, values in [("mask", mask), *padded.items()]:
        if not isinstance(values, np.ndarray) and not is_tensor(values):
            raise SchemaError(f"pack(): {key}: expected a NumPy array or a torch tensor, got {type(values).__name__}")
    if str(mask.dtype).removeprefix("torch.") != "bool" or len(mask.shape) != 2:
        raise SchemaError(f"pack(): mask: expected truth values (data, longest), got {mask.dtype} {tuple(mask.shape)}")
    lens = [int(n) for n in mask.sum(-1)]
    for row, n in enumerate(lens):
        if not bool(mask[row, :n].all()):
            raise SchemaError(f"pack(): mask: expected values first and padding behind them, not so in row {row}")
    for key, values in padded.items():
        if tuple(values.shape[:2]) != tuple(mask.shape):
            raise SchemaError(f"pack(): key {key!r}: expected shape {tuple(mask.shape)} first, got {values.shape}")
    data = {key: values[_as_mask(mask, values)] for key, values in padded.items()}
    return kind(ids=ids, seqlens=dict.fromkeys(data, lens), data=data)


def _as_mask(mask: Any, values: Any) -> Any:
    """The mask as an array where the values are one, and a tensor where they are."""
    if is_tensor(mask) == is_tensor(values):
        return mask
    if is_tensor(mask):
        return mask.cpu().numpy()
    import torch

    return torch.from_numpy(mask).to(values.device)
