"""A draw from softmax(logits / temperature) for each row, in two kernels that read the logits once, and a part twice.

It inverts the cumulative distribution as `Sampler.draw` does, with the same random number, so both give the same token
up to rounding. Sums are in float64: over a large vocabulary a float32 sum is off by more than a rare token's chance.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...device.random import mix64

__all__ = ["draw"]

_CHUNK = 4096
_STEP = tl.constexpr(0x9E3779B97F4A7C15)


@triton.jit
def _weigh(logits, temperature, tops, masses, firsts, size, chunks, CHUNK: tl.constexpr):
    """Of each chunk of a row: the largest logit, where it is, and the sum of exp(logit - largest)."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = i < size
    x = tl.load(logits + row * size + i, inside, other=float("-inf")).to(tl.float32)
    heat = tl.load(temperature + row).to(tl.float32)
    x = x / tl.where(heat == 0, 1.0, heat)
    top = tl.max(x, 0)
    # Where all are -inf nothing has mass; exp(-inf - -inf) would be NaN.
    mass = tl.sum(tl.exp(x - tl.maximum(top, -1e30)).to(tl.float64), 0)
    first = tl.min(tl.where(inside & (x == top), i, size - 1), 0)
    tl.store(tops + row * chunks + chunk, top)
    tl.store(masses + row * chunks + chunk, mass)
    tl.store(firsts + row * chunks + chunk, first)


@triton.jit
def _choose(
    logits,
    temperature,
    seeds,
    counts,
    tops,
    masses,
    firsts,
    tokens,
    scores,
    size,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS)
    known = c < chunks
    top = tl.load(tops + row * chunks + c, known, other=float("-inf"))
    highest = tl.max(top, 0)
    mass = tl.load(masses + row * chunks + c, known, other=0.0) * tl.exp(top - highest).to(tl.float64)
    upto = tl.cumsum(mass, 0)
    total = tl.sum(tl.where(c == chunks - 1, upto, 0.0), 0)
    seed = mix64(tl.load(seeds + row).to(tl.uint64))
    word = mix64(seed + tl.load(counts + row).to(tl.uint64) * _STEP)
    aim = (word >> 11).to(tl.float64) * (1.0 / 9007199254740992.0) * total
    # The first chunk that passes the aim and has mass. NaN passes nothing, and the score below is NaN, too.
    chosen = tl.min(tl.where((upto > aim) & (mass > 0), c, chunks - 1), 0)
    rest = aim - tl.sum(tl.where(c == chosen, upto - mass, 0.0), 0)
    i = chosen * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * size + i, i < size, other=float("-inf")).to(tl.float32)
    heat = tl.load(temperature + row).to(tl.float32)
    x = x / tl.where(heat == 0, 1.0, heat)
    chance = tl.exp(x - highest).to(tl.float64)
    drawn = tl.min(tl.where((tl.cumsum(chance, 0) > rest) & (chance > 0), i, size), 0)
    # By rounding the aim may pass the sum of the chunk: then its last token that has a chance.
    last = tl.max(tl.where(chance > 0, i, 0), 0)
    drawn = tl.where(drawn == size, last, drawn)
    first = tl.load(firsts + row * chunks + c, known, other=size - 1)
    greedy = tl.min(tl.where(known & (top == highest), first, size - 1), 0)
    token = tl.where(heat == 0, greedy, drawn)
    logit = tl.load(logits + row * size + token).to(tl.float32) / tl.where(heat == 0, 1.0, heat)
    tl.store(tokens + row, token)
    tl.store(scores + row, (logit - highest) - tl.log(total).to(tl.float32))


def draw(logits: Any, temperature: Any, seeds: Any, counts: Any, tokens: Any, scores: Any) -> None:
    """Writes a token and its log-probability for each row of logits [rows, vocabulary]. Temperature 0 is greedy.

    Args:
        temperature: [rows], float64.
        seeds, counts: [rows], int64: together they give the random number.
        tokens, scores: [rows], int32 and float32.
    """
    rows, size = logits.shape
    chunk = min(_CHUNK, triton.next_power_of_2(size))
    chunks = triton.cdiv(size, chunk)
    device = logits.device
    tops = torch.empty((rows, chunks), device=device)
    masses = torch.empty((rows, chunks), dtype=torch.float64, device=device)
    firsts = torch.empty((rows, chunks), dtype=torch.int32, device=device)
    _weigh[(rows, chunks)](logits, temperature, tops, masses, firsts, size, chunks, chunk, num_warps=8)
    _choose[(rows,)](
        logits,
        temperature,
        seeds,
        counts,
        tops,
        masses,
        firsts,
        tokens,
        scores,
        size,
        chunks,
        chunk,
        triton.next_power_of_2(chunks),
        num_warps=8,
    )
