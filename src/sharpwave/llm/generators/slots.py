"""`Slots`: what each slot of an engine is making: tokens, log-probabilities and versions, and where it ends."""

from __future__ import annotations

from typing import Any

import numpy as np

from .answer import Request

__all__ = ["Slots"]

Ids = np.ndarray[Any, np.dtype[np.int64]]
Scores = np.ndarray[Any, np.dtype[np.float32]]


class Slots:
    """One row a slot, so that a step costs a few operations on arrays, however many slots there are.

    Attributes:
        ids: Prompt and answer.
        count: Tokens in `ids`; 0 where the slot is idle.
        ready: First tokens of them whose keys and values are in the cache.
        first: Tokens of the prompt.
    """

    def __init__(self, slots: int, context: int) -> None:
        self.ids = np.zeros((slots, context + 1), np.int64)
        self.count, self.ready, self.first = np.zeros((3, slots), np.int64)
        self._scores = np.zeros((slots, context + 1), np.float32)
        self._versions = np.zeros((slots, context + 1), np.int64)
        self._most = np.zeros(slots, np.int64)  # of `count`
        self._stop_ids = np.full((slots, 1), -1, np.int64)  # as many columns as the longest list of a request
        self._is_read = np.zeros(slots, bool)  # stop strings: the text decides

    def begin(self, slot: int, request: Request, ready: int) -> None:
        size, stops = len(request.prompt), sorted(request.stop_ids)
        self.ids[slot, :size] = request.prompt
        self.count[slot] = self.first[slot] = size
        self.ready[slot] = ready
        self._most[slot] = size + request.sampling.max_tokens
        if len(stops) > self._stop_ids.shape[1]:
            added = np.full((len(self._stop_ids), len(stops) - self._stop_ids.shape[1]), -1, np.int64)
            self._stop_ids = np.concatenate([self._stop_ids, added], axis=1)
        self._stop_ids[slot] = -1
        self._stop_ids[slot, : len(stops)] = stops
        self._is_read[slot] = bool(request.sampling.stop)
        request.begin(self, slot)

    def end(self, slot: int) -> None:
        self.count[slot] = 0

    def is_ready(self, slot: int) -> bool:
        """Whether only the last token is not in the cache: the decode step feeds it."""
        return bool(self.ready[slot] == self.count[slot] - 1)

    def decoding(self) -> Ids:
        """The slots that are ready."""
        return np.flatnonzero(self.ready == self.count - 1)

    def filling(self) -> Ids:
        """The slots whose prompts are not in the cache yet."""
        return np.flatnonzero((self.count > 0) & (self.ready != self.count - 1))

    def take(self, slots: Ids, tokens: Ids, scores: Scores, version: int) -> Ids:
        """One token for each of these slots. One whose score is not finite is not taken.

        Returns:
            Which of them have ended, or may have.
        """
        at = self.count[slots]
        self.ids[slots, at], self._scores[slots, at], self._versions[slots, at] = tokens, scores, version
        is_good = np.isfinite(scores)
        self.count[slots] = at + is_good
        is_stop = (self._stop_ids[slots] == tokens[:, None]).any(axis=1)
        found: Ids = np.flatnonzero(is_stop | ~is_good | (at + 1 >= self._most[slots]) | self._is_read[slots])
        return found

    def count_made(self, slot: int) -> int:
        return int(self.count[slot] - self.first[slot])

    def made(self, slot: int, start: int, end: int) -> tuple[list[int], list[float], list[int]]:
        """Tokens of the answer, their log-probabilities and versions."""
        first = int(self.first[slot])
        part = slice(first + start, first + end)
        return self.ids[slot, part].tolist(), self._scores[slot, part].tolist(), self._versions[slot, part].tolist()
