"""Random items: which of them are held out depends on the prompt alone, never on the seed."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from ...checks import whole
from ...errors import SchemaError
from ..items import Item, Items

__all__ = ["draw_items", "share_right"]

_HELD_OUT = 10  # one of so many
_IN_VAIN = 1000  # draws without a new item, at least, after which there are no others


def draw_items(
    count: int | None,
    default: int,
    seed: int,
    draw: Callable[[np.random.Generator], dict[str, Any]],
    held_out: bool,
) -> Items:
    """Different items, drawn at random. Items with the same prompt are on the same side.

    Args:
        count: How many. None for `default`, or all that there are where they are fewer.
    """
    wanted = default if count is None else whole("task", "held_out" if held_out else "count", count)
    random = np.random.default_rng([seed, held_out])
    found: dict[str, dict[str, Any]] = {}
    in_vain = 0
    while in_vain < max(_IN_VAIN, 20 * len(found)):
        item = draw(random)
        in_vain += 1
        is_held_out = zlib.crc32(item["prompt"].encode()) % _HELD_OUT == 0
        if is_held_out == held_out and repr(item) not in found:
            found[repr(item)], in_vain = item, 0
        if len(found) == wanted:
            break
    if len(found) == wanted or (count is None and found):
        items: list[Item] = [{"id": f"{place}", **one} for place, one in enumerate(found.values())]
        return Items(items)
    side = "held_out" if held_out else "count"
    raise SchemaError(f"task: {side}: expected at most about {len(found)}, the different items there are, got {count}")


def share_right(said: str, wanted: str) -> float:
    """The share of places that are right. Too long an answer is as wrong as one that is too short."""
    right = sum(map(str.__eq__, said, wanted))
    return right / max(len(said), len(wanted), 1)
