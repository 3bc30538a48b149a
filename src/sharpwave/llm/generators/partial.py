"""`Partial`: the tokens that an answer has so far, and what is left to ask for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .answer import Answer
from .sampling import Sampling

__all__ = ["Partial"]


@dataclass
class Partial:
    """An answer that comes in parts: several chunks of one server, or several servers one after the other."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop: str | None = None  # None: it goes on
    matched: int | str | None = None

    def add(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += [version] * len(tokens)

    def extend(self, later: Partial) -> None:
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.versions += later.versions
        self.stop, self.matched = later.stop, later.matched

    def end_where_due(self, sampling: Sampling) -> bool:
        """Sets `stop` where the settings alone say that nothing is left to ask for. Returns whether they do."""
        if self.tokens and self.tokens[-1] in sampling.stop_ids:
            self.stop, self.matched = "stop", self.tokens[-1]
        elif len(self.tokens) >= sampling.max_tokens:
            self.stop, self.matched = "length", None
        else:
            return False
        return True

    def rest(self, sampling: Sampling) -> Sampling:
        """The settings for the tokens that are missing.

        The seed changes: with the old one the same random numbers would be used again, and the new tokens would not be
        independent draws.
        """
        if not self.tokens:
            return sampling
        seed = sampling.seed
        if seed is not None:
            seed = (seed * 0x5851F42D4C957F2D + len(self.tokens)) % 2**63
        return replace(sampling, max_tokens=sampling.max_tokens - len(self.tokens), seed=seed)

    def answer(self) -> Answer:
        return Answer(self.tokens, self.logprobs, self.versions, self.stop or "abort", self.matched)
