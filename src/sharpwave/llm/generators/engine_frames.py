"""What is in the frames between `ProcessGenerator` and the process of its engine: arrays and JSON."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...errors import SchemaError
from .answer import Answer
from .likelihood import as_tokens
from .sampling import Sampling

__all__ = ["pack_answers", "pack_ids", "unpack_answers", "unpack_ids"]

_REQUEST = struct.Struct("<Iq")  # bytes of its JSON, seed
_NO_SEED = -1
_MOST_ID = 2**63 - 1
_ANSWER = struct.Struct("<QIH")  # number of the call, tokens, bytes of its JSON


def pack_ids(ids: Any, sampling: Sampling, where: str) -> bytes:
    """Raises SchemaError where ids are no whole numbers, or too large to be sent; the engine checks the rest."""
    tokens = as_tokens(ids, where)
    if tokens.dtype == np.uint64 and tokens.max() > _MOST_ID:
        raise SchemaError(f"{where}: a token id of {tokens.max()}, expected one of the vocabulary")
    text = _text_of(sampling.seeded(None))
    seed = _NO_SEED if sampling.seed is None else sampling.seed
    return _REQUEST.pack(len(text), seed) + text + tokens.astype(np.int64).tobytes()


def unpack_ids(body: bytes) -> tuple[np.ndarray[Any, np.dtype[np.int64]], Sampling]:
    size, seed = _REQUEST.unpack_from(body)
    end = _REQUEST.size + size
    sampling = _sampling_of(body[_REQUEST.size : end])
    return np.frombuffer(body, np.int64, offset=end), sampling if seed == _NO_SEED else sampling.seeded(seed)


@functools.lru_cache(64)
def _text_of(sampling: Sampling) -> bytes:
    return json.dumps(vars(sampling)).encode()


@functools.lru_cache(64)
def _sampling_of(text: bytes) -> Sampling:
    """Requests of a run differ in their seed only, and the checks take longer than the rest of a request."""
    return Sampling(**json.loads(text))


@functools.lru_cache(64)
def _text_of_stop(stop: str, matched: int | str | None) -> bytes:
    return json.dumps([stop, matched]).encode()


@functools.lru_cache(64)
def _stop_of(text: bytes) -> tuple[str, int | str | None]:
    stop, matched = json.loads(text)
    return stop, matched


def pack_answers(answers: list[tuple[int, Answer]]) -> bytes:
    parts = []
    for number, answer in answers:
        said = _text_of_stop(answer.stop, answer.matched)
        parts += [
            _ANSWER.pack(number, len(answer.tokens), len(said)),
            said,
            np.array(answer.tokens, np.int64).tobytes(),
            np.array(answer.logprobs, np.float32).tobytes(),
            np.array(answer.versions, np.int64).tobytes(),
        ]
    return b"".join(parts)


def unpack_answers(body: bytes) -> Iterator[tuple[int, Answer]]:
    at = 0
    while at < len(body):
        number, count, size = _ANSWER.unpack_from(body, at)
        at += _ANSWER.size
        stop, matched = _stop_of(body[at : at + size])
        at += size
        columns: list[list[Any]] = []
        for dtype in (np.int64, np.float32, np.int64):
            column: np.ndarray[Any, Any] = np.frombuffer(body, dtype, count, at)
            columns.append(column.tolist())
            at += column.nbytes
        tokens, logprobs, versions = columns
        yield number, Answer(tokens, logprobs, versions, stop, matched)
