"""Pieces: the steps of each environment, cut where episodes ended, for recurrent networks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = ["Pieces"]


class Cut(NamedTuple):
    """Where the pieces of some environments go in a batch of shape (length, pieces)."""

    rows: np.ndarray[Any, Any]  # rows of the rollout, t * num_envs + n
    places: np.ndarray[Any, Any]  # where each of these rows goes in the flattened batch
    starts: np.ndarray[Any, Any]  # the row that starts each piece
    length: int


class Pieces:
    """The steps of each environment, cut behind each end of an episode.

    Args:
        ends: Which steps ended an episode, (steps, envs).
        counts: Which rows are steps of the policy; the others belong to no piece. None: all are.
    """

    def __init__(self, ends: np.ndarray[Any, Any], counts: np.ndarray[Any, Any] | None = None) -> None:
        counts = np.ones_like(ends) if counts is None else counts
        first = np.ones_like(ends)
        first[1:] = ends[:-1] | ~counts[:-1]
        self.counts, self.starts = counts.T, (first & counts).T  # (envs, steps)

    def of(self, envs: np.ndarray[Any, Any]) -> Cut:
        """The pieces of these environments."""
        counts, starts = self.counts[envs], self.starts[envs]
        env, step = np.nonzero(counts)
        is_start = starts[env, step]
        piece = np.cumsum(is_start) - 1
        begin = step[is_start][piece] if len(piece) else piece
        rows = step * len(self.counts) + envs[env]
        pieces = int(is_start.sum())
        length = int((step - begin).max()) + 1 if len(rows) else 0
        return Cut(rows, (step - begin) * pieces + piece, rows[is_start], length)
