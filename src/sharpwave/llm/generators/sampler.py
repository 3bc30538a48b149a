"""`Sampler`: draws one token for each slot, on the device, with a counter-based random number for each."""

from __future__ import annotations

import torch
from torch import Tensor

from .sampling import Sampling

__all__ = ["Sampler"]


class Sampler:
    """The settings of every slot as tensors. A draw has one fixed shape, whatever slots are idle."""

    def __init__(self, slots: int, device: torch.device | str = "cpu") -> None:
        self._temperature = torch.ones(slots, device=device)
        self._top_k = torch.zeros(slots, dtype=torch.long, device=device)
        self._top_p = torch.ones(slots, dtype=torch.double, device=device)
        self._min_p = torch.zeros(slots, dtype=torch.double, device=device)
        self._seed = torch.zeros(slots, dtype=torch.long, device=device)
        self._filtered = torch.zeros(slots, dtype=torch.bool, device=device)
        self._is_filtered = [False] * slots

    def set(self, slot: int, sampling: Sampling, seed: int) -> None:
        self._temperature[slot] = sampling.temperature
        self._top_k[slot], self._top_p[slot], self._min_p[slot] = sampling.top_k, sampling.top_p, sampling.min_p
        self._seed[slot] = seed
        self._filtered[slot] = sampling.is_filtered
        self._is_filtered[slot] = sampling.is_filtered

    def clear(self, slot: int) -> None:
        self.set(slot, Sampling(), 0)

    def draw(self, logits: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities of logits [slots, vocabulary].

        `counts` [slots] is how many tokens each answer has: with the seed it gives the random number. The
        log-probability is that of the distribution that was drawn from, after temperature and filters; for
        temperature 0 it is the model's own.
        """
        greedy = self._temperature == 0
        logits = logits.float() / torch.where(greedy, 1.0, self._temperature)[:, None]
        logs = logits.log_softmax(-1)
        # In double: over 150,000 tokens a float's cumulative sum is off by more than a rare token's probability.
        chances = logs.double().exp()
        random = _random(self._seed, counts)
        tokens, mass = _pick(chances, chances.sum(-1), random), None
        if any(self._is_filtered):
            filtered, mass = self._draw_filtered(chances, random)
            tokens = torch.where(self._filtered, filtered, tokens)
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
        found = logs.gather(1, tokens[:, None])[:, 0]
        if mass is not None:
            found = torch.where(self._filtered, found - mass.log().float(), found)
        return tokens, found

    def _draw_filtered(self, chances: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
        """Every filter keeps the first so many of the sorted tokens, so the smallest count holds for all of them."""
        ordered, order = chances.sort(stable=True, dim=-1, descending=True)
        sums = ordered.cumsum(-1)
        every = ordered.shape[-1]
        kept = torch.where(self._top_k > 0, self._top_k.clamp(max=every), every)
        among = sums.gather(1, kept[:, None] - 1)[:, 0]
        reached = ((sums - ordered) < (self._top_p * among)[:, None]).sum(-1)
        kept = torch.minimum(kept, torch.where(self._top_p < 1, reached, every))
        likely = (ordered >= (self._min_p * ordered[:, 0])[:, None]).sum(-1)
        kept = torch.minimum(kept, likely).clamp(min=1)
        mass = sums.gather(1, kept[:, None] - 1)[:, 0]
        return order.gather(1, _pick(ordered, mass, random)[:, None])[:, 0], mass


def _pick(chances: Tensor, mass: Tensor, random: Tensor) -> Tensor:
    """The first place where the cumulative sum passes random * mass; its chance is above 0."""
    sums = chances.cumsum(-1)
    aim = torch.minimum(random * mass, torch.nextafter(torch.minimum(mass, sums[:, -1]), torch.zeros_like(mass)))
    return torch.searchsorted(sums, aim[:, None], right=True)[:, 0].clamp(max=chances.shape[-1] - 1)


def _random(seeds: Tensor, counts: Tensor) -> Tensor:
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
