"""What goes over the socket between `ProcessGenerator` and the process of its engine: frames of numbers and JSON."""

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

__all__ = ["Frames", "frame", "pack_answers", "pack_ids", "unpack_answers", "unpack_ids"]

_HEAD = struct.Struct("<IBQ")  # bytes behind the head, kind, number of the call
_MOST_BYTES = 1 << 30
_REQUEST = struct.Struct("<Iq")  # bytes of its JSON, seed
_NO_SEED = -1
_MOST_ID = 2**63 - 1
_ANSWER = struct.Struct("<QIH")  # number of the call, tokens, bytes of its JSON


def frame(kind: int, number: int, body: bytes = b"") -> bytes:
    return _HEAD.pack(len(body), kind, number) + body


class Frames:
    """Cuts what arrives into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def push(self, arrived: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Kind, number and body of every frame that is complete."""
        self._bytes += arrived
        at = 0
        while len(self._bytes) - at >= _HEAD.size:
            size, kind, number = _HEAD.unpack_from(self._bytes, at)
            if size > _MOST_BYTES:
                raise ValueError(f"a frame of {size} bytes, expected at most {_MOST_BYTES}")
            if len(self._bytes) - at < _HEAD.size + size:
                break
            at += _HEAD.size + size
            yield kind, number, bytes(self._bytes[at - size : at])
        del self._bytes[:at]


def pack_ids(ids: Any, sampling: Sampling) -> bytes:
    """Raises SchemaError where ids are no whole numbers, or too large to be sent; the engine checks the rest."""
    tokens = as_tokens(ids, "generate()")
    if tokens.dtype == np.uint64 and tokens.max() > _MOST_ID:
        raise SchemaError(f"generate(): a token id of {tokens.max()}, expected one of the vocabulary")
    text = json.dumps({**vars(sampling), "seed": None}).encode()
    seed = _NO_SEED if sampling.seed is None else sampling.seed
    return _REQUEST.pack(len(text), seed) + text + tokens.astype(np.int64).tobytes()


def unpack_ids(body: bytes) -> tuple[np.ndarray[Any, np.dtype[np.int64]], Sampling]:
    size, seed = _REQUEST.unpack_from(body)
    end = _REQUEST.size + size
    sampling = _sampling_of(body[_REQUEST.size : end])
    return np.frombuffer(body, np.int64, offset=end), sampling if seed == _NO_SEED else sampling.seeded(seed)


@functools.lru_cache(64)
def _sampling_of(text: bytes) -> Sampling:
    """Requests of a run differ in their seed only, and the checks take longer than the rest of a request."""
    return Sampling(**json.loads(text))


def pack_answers(answers: list[tuple[int, Answer]]) -> bytes:
    parts = []
    for number, answer in answers:
        said = json.dumps([answer.stop, answer.matched]).encode()
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
        stop, matched = json.loads(body[at : at + size])
        at += size
        columns: list[list[Any]] = []
        for dtype in (np.int64, np.float32, np.int64):
            column: np.ndarray[Any, Any] = np.frombuffer(body, dtype, count, at)
            columns.append(column.tolist())
            at += column.nbytes
        tokens, logprobs, versions = columns
        yield number, Answer(tokens, logprobs, versions, stop, matched)
