"""Samples of agents as bytes, between processes of one run: the keys and dtypes of `to_sample`, and nothing else."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from ..errors import SchemaError
from ..sequences.column import Column
from ..sequences.sample import SequenceSample

__all__ = ["pack_sample", "unpack_sample"]

# The widest first, so that each column begins at a multiple of its width.
_TOKENS = {"input_ids": np.int64, "versions": np.int64, "logprobs": np.float32, "loss_mask": np.bool_}
_HEAD = struct.Struct("<I")  # bytes of the JSON behind it: the id, and tokens of each sequence
_ALIGNED = 8


def pack_sample(sample: SequenceSample) -> bytes:
    """Of one sample. `SequenceSample.to_bytes` takes any, and several times as long."""
    (key,), (lens,) = sample.ids, sample.seqlens["input_ids"]
    head = json.dumps([key, list(lens)]).encode()
    head += b" " * (-(_HEAD.size + len(head) + 4 * len(lens)) % _ALIGNED)
    rewards = np.asarray(sample["rewards"], np.float32).tobytes()
    columns = [np.asarray(sample[name], dtype).tobytes() for name, dtype in _TOKENS.items()]
    return b"".join([_HEAD.pack(len(head)), head, rewards, *columns])


def unpack_sample(body: bytes) -> SequenceSample:
    """Raises SchemaError where the bytes are not as many as its head says."""
    own = bytearray(body)  # arrays over it may be written to, as those of other samples
    (size,) = _HEAD.unpack_from(own)
    at = _HEAD.size + size
    key, lens = json.loads(own[_HEAD.size : at])
    tokens = sum(lens)
    expected = at + tokens * sum(np.dtype(one).itemsize for one in _TOKENS.values()) + 4 * len(lens)
    if len(own) != expected:
        raise SchemaError(f"finish(): {key!r} has {len(own)} bytes, expected {expected}")
    rewards = np.frombuffer(own, np.float32, len(lens), at)
    at += rewards.nbytes
    columns: dict[str, Column] = {}
    for name, dtype in _TOKENS.items():
        values: np.ndarray[Any, Any] = np.frombuffer(own, dtype, tokens, at)
        columns[name] = Column([lens], values, (), values.dtype)
        at += values.nbytes
    columns["rewards"] = Column([[1] * len(lens)], rewards, (), rewards.dtype)
    return SequenceSample._make([key], columns, {})
