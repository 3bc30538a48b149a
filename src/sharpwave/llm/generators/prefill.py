"""`prefill`: the part of a step that brings prompts into the cache, each shared beginning once."""

from __future__ import annotations

from collections.abc import Iterable

from .decode import Decode
from .held_tokens import HeldTokens
from .slots import Slots

__all__ = ["prefill"]


def prefill(
    prompts: Iterable[int], slots: Slots, held: HeldTokens, decode: Decode, budget: int, version: int
) -> tuple[int, int]:
    """Computes keys and values of prompts, or copies those that another slot holds.

    Args:
        prompts: The slots to fill, the oldest request first.
        slots: Their tokens.
        held: What the cache holds.
        decode: Computes.
        budget: Tokens to compute at most.
        version: Of the weights.

    Returns:
        Tokens computed and copied.
    """
    left, copied = budget, 0
    for slot in prompts:
        if left == 0:  # the others wait for the next step, so that a step looks at few of many prompts
            break
        copied += _copy_shared(slot, slots, held, decode, version)
        if slots.is_ready(slot):
            continue
        start = int(slots.ready[slot])
        end = min(int(slots.count[slot]) - 1, start + left)
        decode.fill(slot, start, slots.ids[slot, start:end])
        held.put(slot, start, slots.ids[slot, start:end], version)
        slots.ready[slot] = end
        left -= end - start
    decode.flush()
    return budget - left, copied


def _copy_shared(slot: int, slots: Slots, held: HeldTokens, decode: Decode, version: int) -> int:
    """Takes over what another slot holds of this one's tokens."""
    ids, ready = slots.ids[slot, : slots.count[slot] - 1], int(slots.ready[slot])
    source, end = held.longest(ids, version, range(len(slots.count)))
    if source == slot or end <= ready:
        return 0
    start = min(ready, held.count(slot, ids, version)) if ready else 0
    decode.copy(source, slot, start, end)
    held.drop(slot, start)
    held.put(slot, start, slots.ids[slot, start:end], version)
    slots.ready[slot] = end
    return end - start
