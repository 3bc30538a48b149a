"""`Answer`: what a generator gives; `Request`: an answer on its way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .sampling import Sampling

__all__ = ["Answer", "Request"]


@dataclass(frozen=True)
class Answer:
    """Tokens of an answer, each with its log-probability and the version of the weights that made it.

    `stop` is "stop" (then `matched` is the id or the string), "length", "abort", or "error" where the model gave NaN or
    the tokenizer could not decode what is searched for stop strings. A stop id is the last of the tokens.
    """

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    stop: str
    matched: int | str | None = None


class Rows(Protocol):
    """Where the tokens of a request are while it has a slot."""

    def count_made(self, slot: int) -> int: ...

    def made(self, slot: int, start: int, end: int) -> tuple[list[int], list[float], list[int]]: ...


@dataclass(eq=False)
class Request:
    """One answer on its way. `answer` is None until it is done; until then its tokens are in the rows of a slot."""

    number: int
    prompt: np.ndarray[Any, np.dtype[np.int64]]
    sampling: Sampling
    seed: int
    stop_ids: frozenset[int]
    window: int = 0  # last tokens whose text may have a stop string that ends in the newest of them
    answer: Answer | None = None
    _place: tuple[Rows, int] | None = None

    def begin(self, rows: Rows, slot: int) -> None:
        self._place = (rows, slot)

    @property
    def count(self) -> int:
        """Tokens of the answer so far. For the thread that makes them."""
        if self.answer is not None:
            return len(self.answer.tokens)
        return 0 if self._place is None else self._place[0].count_made(self._place[1])

    @property
    def tokens(self) -> list[int]:
        """The tokens so far. For the thread that makes them."""
        return self.part(0, self.count)[0]

    def part(self, start: int, end: int) -> tuple[list[int], list[float], list[int]]:
        """Tokens, log-probabilities and versions from `start` to `end`, which have been made. For any thread."""
        place = self._place
        if self.answer is None and place is not None:
            found = place[0].made(place[1], start, end)
            if self.answer is None:  # else the slot may have been another request's already
                return found
        if self.answer is None:
            return [], [], []
        return self.answer.tokens[start:end], self.answer.logprobs[start:end], self.answer.versions[start:end]

    def finish(self, stop: str, matched: int | str | None = None) -> None:
        self.answer = Answer(*self.part(0, self.count), stop, matched)
