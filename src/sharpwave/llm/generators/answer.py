"""`Answer`: what a generator gives; `Request`: an answer on its way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .sampling import Sampling

__all__ = ["Answer", "Request"]


@dataclass(frozen=True)
class Answer:
    """Tokens of an answer, each with its log-probability and the version of the weights that made it.

    `stop` is "stop" (then `matched` is the id or the string), "length", "abort", or "error" where the model gave NaN. A
    stop id is the last of the tokens.
    """

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    stop: str
    matched: int | str | None = None


@dataclass(eq=False)
class Request:
    """One answer on its way. `answer` is None until it is done; the lists grow meanwhile."""

    number: int
    prompt: np.ndarray[Any, np.dtype[np.int64]]
    sampling: Sampling
    seed: int
    stop_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    answer: Answer | None = None

    def finish(self, stop: str, matched: int | str | None = None) -> None:
        self.answer = Answer(self.tokens, self.logprobs, self.versions, stop, matched)
