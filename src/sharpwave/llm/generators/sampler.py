"""`Sampler`: draws one token for each slot, on the device, with a counter-based random number for each."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.plain import pick, random_of
from .sampling import Sampling

__all__ = ["Sampler"]

_NEUTRAL = Sampling()


class Sampler:
    """The settings of every slot as tensors. A draw has one fixed shape, whatever slots are idle."""

    def __init__(self, slots: int, device: torch.device | str = "cpu") -> None:
        # Set on the host and sent together before a draw: a write to the device for each setting would cost more.
        self._host = (torch.zeros(3, slots, dtype=torch.double), torch.zeros(3, slots, dtype=torch.long))
        self._written = tuple(one.numpy() for one in self._host)
        self._sent = tuple(one.to(device) for one in self._host)  # on a CPU the same memory
        self._is_filtered = [False] * slots
        self._has_changed = True
        for slot in range(slots):
            self.set(slot, _NEUTRAL, 0)

    @property
    def temperature(self) -> Tensor:
        return self._sent[0][0]

    @property
    def seed(self) -> Tensor:
        return self._sent[1][0]

    @property
    def is_filtering(self) -> bool:
        """Whether any slot has top-k, top-p or min-p."""
        return any(self._is_filtered)

    def set(self, slot: int, sampling: Sampling, seed: int) -> None:
        numbers, whole = self._written
        numbers[:, slot] = sampling.temperature, sampling.top_p, sampling.min_p
        whole[:, slot] = seed, sampling.top_k, sampling.is_filtered
        self._is_filtered[slot] = sampling.is_filtered
        self._has_changed = True

    def clear(self, slot: int) -> None:
        """The slot is idle. What is drawn for it is not looked at, but filters would sort the vocabulary for it."""
        if self._is_filtered[slot]:
            self.set(slot, _NEUTRAL, 0)

    def send(self) -> None:
        """Puts settings that have changed onto the device. A CUDA graph draws with what was sent before it."""
        if self._has_changed:
            for sent, host in zip(self._sent, self._host, strict=True):
                # From memory that is not pinned it is copied aside at once: the host may write to it again.
                sent.copy_(host, non_blocking=True)
        self._has_changed = False

    def draw(self, logits: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and log-probabilities of logits [slots, vocabulary].

        `counts` [slots] is how many tokens each answer has: with the seed it gives the random number. The
        log-probability is that of the distribution that was drawn from, after temperature and filters; for
        temperature 0 it is the model's own.
        """
        self.send()
        temperature, filtering = self.temperature.float(), self._sent[1][2] != 0
        greedy = temperature == 0
        logits = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
        logs = logits.log_softmax(-1)
        # In double: over 150,000 tokens a float's cumulative sum is off by more than a rare token's probability.
        chances = logs.double().exp()
        random = random_of(self.seed, counts)
        tokens, mass = pick(chances, chances.sum(-1), random), None
        if self.is_filtering:
            filtered, mass = self._draw_filtered(chances, random)
            tokens = torch.where(filtering, filtered, tokens)
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
        found = logs.gather(1, tokens[:, None])[:, 0]
        if mass is not None:
            found = torch.where(filtering, found - mass.log().float(), found)
        return tokens, found

    def _draw_filtered(self, chances: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
        """Every filter keeps the first so many of the sorted tokens, so the smallest count holds for all of them."""
        top_p, min_p, top_k = self._sent[0][1], self._sent[0][2], self._sent[1][1]
        ordered, order = chances.sort(stable=True, dim=-1, descending=True)
        sums = ordered.cumsum(-1)
        every = ordered.shape[-1]
        kept = torch.where(top_k > 0, top_k.clamp(max=every), every)
        among = sums.gather(1, kept[:, None] - 1)[:, 0]
        reached = ((sums - ordered) < (top_p * among)[:, None]).sum(-1)
        kept = torch.minimum(kept, torch.where(top_p < 1, reached, every))
        likely = (ordered >= (min_p * ordered[:, 0])[:, None]).sum(-1)
        kept = torch.minimum(kept, likely).clamp(min=1)
        mass = sums.gather(1, kept[:, None] - 1)[:, 0]
        return order.gather(1, pick(ordered, mass, random)[:, None])[:, 0], mass
