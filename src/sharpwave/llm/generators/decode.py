"""`Decode`: how an engine runs its model over the cache. `EagerDecode` is plain torch; on a GPU it is `GraphDecode`."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import torch

from ..model.cache import KVCache
from ..model.transformer import Transformer
from .sampler import Sampler

__all__ = ["Decode", "EagerDecode", "Ids", "Meanwhile", "Scores", "decode_of", "nothing"]

Ids = np.ndarray[Any, np.dtype[np.int64]]
Scores = np.ndarray[Any, np.dtype[np.float32]]
Meanwhile = Callable[[], None]

# The part of the cache that a step looks at grows in pieces of this size: few shapes, little to look at.
_LENGTH_STEP = 64


def nothing() -> None:
    """For `Decode.step`, where there is nothing else to do."""


class Decode(Protocol):
    """Runs a model over a cache. `fill` and `copy` take effect in the order of the calls, at the latest in `flush`.

    Its caller makes `stream` the current one.
    """

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """None: whatever stream is the current one."""
        ...

    def fill(self, slot: int, start: int, ids: Ids) -> None:
        """Computes keys and values of these tokens, at the places from `start` on."""
        ...

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copies keys and values of the places from `start` to `end` of one slot to another."""
        ...

    def flush(self) -> None:
        """Computes what `fill` has put off."""
        ...

    def step(self, ids: Ids, places: Ids, counts: Ids, meanwhile: Meanwhile = nothing) -> tuple[Ids, Scores]:
        """Feeds one token to each slot and draws the next: tokens and log-probabilities, [slots] each.

        Args:
            ids: The token of each slot, [slots].
            places: Its place; the context marks a slot as idle, and what is drawn for it means nothing.
            counts: How many tokens its answer has: with the seed of the slot it gives the random number.
            meanwhile: Called once, while a GPU computes; on a CPU before.
        """
        ...


class EagerDecode:
    """Plain torch, one operation after the other."""

    stream: torch.cuda.Stream | None = None

    def __init__(self, model: Transformer, cache: KVCache, sampler: Sampler) -> None:
        self._model, self._cache, self._sampler = model, cache, sampler

    def fill(self, slot: int, start: int, ids: Ids) -> None:
        end, device = start + len(ids), self._model.device
        places = torch.arange(start, end, device=device)[None]
        self._model.extend(torch.from_numpy(ids[None]).to(device), places, self._cache, slot=slot, length=end)

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        self._cache.copy(source, target, start, end)

    def flush(self) -> None:
        pass

    def step(self, ids: Ids, places: Ids, counts: Ids, meanwhile: Meanwhile = nothing) -> tuple[Ids, Scores]:
        meanwhile()
        context, device = self._cache.context, self._model.device
        longest = int(places[places < context].max(initial=0)) + 1
        length = min(context, math.ceil(longest / _LENGTH_STEP) * _LENGTH_STEP)
        fed, at, drawn = (torch.from_numpy(array).to(device) for array in (ids[:, None], places[:, None], counts))
        hidden = self._model.extend(fed, at, self._cache, length=length)
        tokens, scores = self._sampler.draw(self._model.logits(hidden[:, 0]), drawn)
        return tokens.cpu().numpy(), scores.cpu().numpy()


def decode_of(model: Transformer, cache: KVCache, sampler: Sampler, chunk: int) -> Decode:
    """The fastest way for the model's device. `chunk`: as many tokens are filled between two flushes at most."""
    if model.device.type == "cuda" and find_spec("triton") is not None:
        from ..kernels import fused
        from .graph_decode import GraphDecode

        return GraphDecode(model, cache, sampler, chunk, fused)
    return EagerDecode(model, cache, sampler)
