"""`Intake`: the requests of an engine, checked and numbered before they wait for a slot."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from ...checks import told, whole
from ...errors import SchemaError
from ..model.config import ModelConfig
from .answer import Request
from .likelihood import check_tokens
from .mends import Mends
from .sampling import Sampling

__all__ = ["Intake"]

Ids = np.ndarray[Any, np.dtype[np.int64]]


class Intake:
    """Makes requests, for any thread, and keeps those that wait for a slot.

    What it accepts fails no step: else the request of one sender could end the answers of others.

    Args:
        config: Of the engine's model.
        context: Tokens of prompt and answer together.
        tokenizer: None: stop strings are refused.
        seed: For requests without a seed.
        mends: Where users raise what is too small.

    Attributes:
        waiting: Requests without a slot, the oldest first. Any thread appends, only the engine's steps take out.
    """

    def __init__(self, config: ModelConfig, context: int, tokenizer: Any, seed: int, mends: Mends) -> None:
        self._vocabulary, self._ends, self._context = config.vocab_size, frozenset(config.eos_ids), context
        self._has_tokenizer, self._mends = tokenizer is not None, mends
        self._random = np.random.default_rng(whole("Engine()", "seed", seed, 0))
        self._numbers = 0
        self.waiting: deque[Request] = deque()
        self._lock = threading.Lock()

    def make(self, ids: Sequence[int] | Ids, sampling: Sampling, n: int) -> list[Request]:
        """Requests for `n` answers to a prompt.

        Raises:
            SchemaError: A token is not in the vocabulary, or prompt and answer do not fit.
        """
        prompt = self._check(ids, sampling)
        whole("submit()", "n", n)
        ends = frozenset(sampling.stop_ids) | (frozenset() if sampling.ignore_eos else self._ends)
        # A token is at least one byte; some more, because the first of them may be the rest of a character.
        window = max((len(one.encode()) for one in sampling.stop), default=-4) + 4
        made = []
        with self._lock:
            for member in range(n):
                given = sampling.seed
                seed = int(self._random.integers(2**63)) if given is None else (given + member) % 2**63
                made.append(Request(self._numbers, prompt, sampling, seed, ends, window))
                self._numbers += 1
        return made

    def withdraw(self, requests: Container[Request]) -> list[Request]:
        """Takes these out of the queue, in one pass however many they are, and returns those that were in it."""
        waiting = [self.waiting.popleft() for _ in range(len(self.waiting))]  # others are appended meanwhile
        self.waiting.extendleft(one for one in reversed(waiting) if one not in requests)
        return [one for one in waiting if one in requests]

    def _check(self, ids: Sequence[int] | Ids, sampling: Sampling) -> Ids:
        if not isinstance(sampling, Sampling):
            raise SchemaError(f"submit(): sampling={told(sampling)}, expected a Sampling; see Sampling.from_dict()")
        given = check_tokens(ids, self._vocabulary, "submit()", self._mends)
        if len(given) + sampling.max_tokens > self._context:
            raise SchemaError(
                f"submit(): a prompt of {len(given)} tokens and max_tokens={sampling.max_tokens} need "
                f"{len(given) + sampling.max_tokens} places, context={self._context}; shorten the prompt, lower "
                f"max_tokens or {self._mends.context}"
            )
        bad = [one for one in sampling.stop_ids if one >= self._vocabulary]
        if bad:
            raise SchemaError(f"submit(): stop_ids has {bad[0]}, expected token ids from 0 to {self._vocabulary - 1}")
        if sampling.stop and not self._has_tokenizer:
            raise SchemaError(f"submit(): stop={told(sampling.stop)} needs a tokenizer; give Engine(tokenizer=)")
        return given
