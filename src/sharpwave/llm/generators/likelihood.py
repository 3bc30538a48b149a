"""Log-probabilities of given tokens, and the check of such tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ...errors import SchemaError
from ..model.cache import KVCache
from ..model.transformer import Transformer
from .mends import Mends

__all__ = ["as_tokens", "check_tokens", "log_probabilities"]

_PIECE = 256  # tokens whose logits are in memory at a time


def as_tokens(ids: Any, where: str) -> np.ndarray[Any, Any]:
    """Some whole numbers as an array, without a cast. Raises SchemaError for anything else."""
    try:
        given = np.asarray(ids)
    except (ValueError, TypeError, RuntimeError) as error:  # lists of different lengths; tensors NumPy cannot read
        raise SchemaError(f"{where}: expected token ids, got {type(ids).__name__}: {error}") from None
    if given.ndim != 1 or not len(given) or given.dtype.kind not in "iu":
        raise SchemaError(f"{where}: ids of shape {given.shape} and dtype {given.dtype}, expected token ids")
    return given


def check_tokens(
    ids: Sequence[int] | np.ndarray[Any, Any], vocabulary: int, where: str, mends: Mends | None = None
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Token ids as an array. Raises SchemaError unless there are some and all are in the vocabulary."""
    given = as_tokens(ids, where)
    bad = (given < 0) | (given >= vocabulary)
    if bad.any():
        at = int(bad.argmax())
        mend = (Mends() if mends is None else mends).vocabulary
        raise SchemaError(f"{where}: ids[{at}]={given[at]}, expected 0 to {vocabulary - 1}; {mend}")
    return given.astype(np.int64)


@torch.no_grad()
def log_probabilities(
    model: Transformer, ids: np.ndarray[Any, np.dtype[np.int64]], size: int = _PIECE
) -> Iterator[list[float]]:
    """The model's log-probability of each token but the first, at temperature 1 and without filters, piece by piece.

    A piece feeds `size` tokens. Keys and values of earlier pieces are in a cache of its own, as long as `ids`. It is
    plain torch on every device, and reads no cache and writes to none of an engine.
    """
    count = len(ids) - 1  # the last token is not fed: nothing comes after it
    tokens = torch.from_numpy(ids).to(model.device)
    places = torch.arange(count, device=model.device)
    cache = KVCache(model.config, 1, count, dtype=model.dtype, device=model.device) if count else None
    for start in range(0, count, size):
        end = min(start + size, count)
        assert cache is not None
        hidden = model.extend(tokens[None, start:end], places[None, start:end], cache, slot=0, length=end)[0]
        found: list[float] = []
        for first in range(start, end, _PIECE):
            last = min(first + _PIECE, end)
            logs = model.logits(hidden[first - start : last - start]).float().log_softmax(-1)
            found += logs.gather(1, tokens[first + 1 : last + 1, None])[:, 0].tolist()
        yield found
