"""The specification of a Mix, slow and obvious: weights, probabilities and counts of a batch from several buffers.

The target of the mixture: a buffer is drawn by its share s, then one of its N rows, each as likely as the other: s / N.
Row i is drawn with s * P(i), where P is what the buffer's own sampler says. The importance weight is the quotient of
the two, to the power beta: ((s / N) / (s * P(i))) ** beta = (N * P(i)) ** -beta. The shares cancel: they are intended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import sharpwave as sw


@dataclass
class Source:
    """One buffer of the mixture, as plain numbers."""

    sampler: Any
    priorities: np.ndarray  # of all rows, by their number
    share: float

    @property
    def probabilities(self) -> np.ndarray:
        """Of each row, in a draw of this buffer."""
        rows = len(self.priorities)
        if not isinstance(self.sampler, sw.Prioritized):
            return np.full(rows, 1 / rows)
        masses = (self.priorities + self.sampler.eps) ** self.sampler.alpha
        if masses.sum() == 0:
            return np.full(rows, 1 / rows)
        return (1 - self.sampler.mix) * masses / masses.sum() + self.sampler.mix / rows

    @property
    def raw_weights(self) -> np.ndarray:
        """Before normalisation."""
        if not isinstance(self.sampler, sw.Prioritized):
            return np.ones(len(self.priorities))
        return (len(self.priorities) * self.probabilities) ** -float(self.sampler.beta)


def expected(sources: list[Source], source: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Weights and probabilities of a batch whose examples are these rows of these buffers."""
    newest = [sources[b].sampler.newest for b in source]
    # Rows that ``newest`` adds come at the start of a buffer's part. They are certain, and their weight is 1.
    place = [int((source[:i] == b).sum()) for i, b in enumerate(source)]
    is_newest = np.array([at < count for at, count in zip(place, newest, strict=True)])
    raw = np.array([sources[b].raw_weights[i] for b, i in zip(source, row, strict=True)])
    chances = np.array([sources[b].probabilities[i] for b, i in zip(source, row, strict=True)])
    shares = np.array([sources[b].share for b in source])
    kinds = {s.sampler.normalize for s in sources if isinstance(s.sampler, sw.Prioritized)}
    assert len(kinds) == 1
    largest = 1.0
    if kinds == {"batch"}:
        largest = raw[~is_newest].max() if not is_newest.all() else 1.0
    elif kinds == {"buffer"}:
        drawn = {b for b, new in zip(source.tolist(), is_newest, strict=True) if not new}
        largest = max((sources[b].raw_weights.max() for b in drawn), default=1.0)
    return np.where(is_newest, 1.0, raw / largest), shares * np.where(is_newest, 1.0, chances)
