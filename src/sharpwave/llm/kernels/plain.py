"""The kernels in plain torch: slow, obvious, and what the others are compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model.rope import rotate

__all__ = ["add_and_norm", "attend", "copy_places", "draw", "gate", "pick", "place_heads", "random_of"]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(weight.dtype)


def add_and_norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    if added is not None:
        x += added
    return _norm(x, weight, eps)


def place_heads(
    projected: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    angles: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    places: Tensor,
) -> Tensor:
    shared, context, dim = keys.shape[1], keys.shape[2] - 1, keys.shape[3]
    heads = projected.view(len(projected), -1, dim)
    count = heads.shape[1] - 2 * shared
    q, k, v = heads.split((count, shared, shared), dim=1)
    if norms is not None:
        q, k = _norm(q, norms[0], eps), _norm(k, norms[1], eps)
    cos, sin = (table[places.clamp(max=context - 1)][:, None] for table in angles)
    used = places < context
    keys[slots[used], :, places[used]] = rotate(k, cos, sin)[used]
    values[slots[used], :, places[used]] = v[used]
    return rotate(q, cos, sin)


def attend(queries: Tensor, keys: Tensor, values: Tensor, slots: Tensor, places: Tensor) -> Tensor:
    rows, _, dim = queries.shape
    shared, context = keys.shape[1], keys.shape[2] - 1
    seen = torch.zeros_like(queries)
    for row in range(rows):
        length = int(places[row]) + 1
        if length <= context:
            k, v = keys[slots[row], :, :length].float(), values[slots[row], :, :length].float()
            q = queries[row].view(shared, -1, dim).float()
            chances = (q @ k.transpose(1, 2) * dim**-0.5).softmax(-1)
            seen[row] = (chances @ v).view(-1, dim).to(queries.dtype)
    return seen.view(rows, -1)


def copy_places(keys: Tensor, values: Tensor, moves: Tensor) -> None:
    for source, target, start, end in moves.tolist():
        keys[:, target, :, start:end] = keys[:, source, :, start:end]
        values[:, target, :, start:end] = values[:, source, :, start:end]


def gate(both: Tensor) -> Tensor:
    first, second = both.chunk(2, dim=-1)
    return F.silu(first) * second


def draw(logits: Tensor, temperature: Tensor, seeds: Tensor, counts: Tensor, tokens: Tensor, scores: Tensor) -> None:
    greedy = temperature == 0
    logits = logits.float() / torch.where(greedy, 1.0, temperature).float()[:, None]
    logs = logits.log_softmax(-1)
    chances = logs.double().exp()
    drawn = torch.where(greedy, logits.argmax(-1), pick(chances, chances.sum(-1), random_of(seeds, counts)))
    tokens.copy_(drawn)
    scores.copy_(logs.gather(1, drawn[:, None])[:, 0])


def pick(chances: Tensor, mass: Tensor, random: Tensor) -> Tensor:
    """The first place where the cumulative sum passes random * mass; its chance is above 0."""
    sums = chances.cumsum(-1)
    aim = torch.minimum(random * mass, torch.nextafter(torch.minimum(mass, sums[:, -1]), torch.zeros_like(mass)))
    return torch.searchsorted(sums, aim[:, None], right=True)[:, 0].clamp(max=chances.shape[-1] - 1)


def random_of(seeds: Tensor, counts: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) from (seed, count), by SplitMix64: no state, so no order of calls matters."""
    return _shifted(_mixed(_mixed(seeds) + counts * _signed(0x9E3779B97F4A7C15)), 11).double() * 2.0**-53


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Right, filled with zeros: torch has no unsigned 64-bit arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
