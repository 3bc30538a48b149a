"""`TokenBatch`: a batch of a SequenceBuffer as flat columns, checked before a learner uses it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import SchemaError
from ..sequences.sample import SequenceSample
from ..sequences.staleness import FRESH

__all__ = ["TokenBatch"]

Array = np.ndarray[Any, Any]
IDS, MASK, REWARDS, GROUP = "input_ids", "loss_mask", "rewards", "group"


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Columns with one value a token, sequences one after the other.

    A value at a token belongs to that token: `logprobs` has the log-probability of the token given those before it,
    `values` the value of the state in which it was chosen. Where `learned` is False, floating point columns are 0.

    Attributes:
        names: The id of each sequence's datum.
        lens: Tokens of each sequence.
        groups: A number for each sequence; sequences of one prompt have the same.
        learned: Which tokens are learned from: the key `loss_mask`.
        fresh: Which of them are not too old: the key `fresh` of a buffer with `stale="mask"`, else all.
        columns: By key.
    """

    names: list[str]
    lens: Array
    groups: Array
    learned: Array
    fresh: Array
    columns: dict[str, Array]

    @classmethod
    def read(cls, where: str, batch: SequenceSample, keys: Iterable[str], optional: Iterable[str] = ()) -> TokenBatch:
        """Reads and checks. `keys` must be there, `optional` may; `rewards` has one value a sequence or one a token.

        Raises:
            SchemaError: A key is missing, its lengths are not those of `input_ids`, or a learned token has NaN.
        """
        wanted = {IDS, MASK, *keys}
        missing = sorted(wanted - batch.keys)
        if missing:
            raise SchemaError(
                f"{where}: the batch lacks {', '.join(missing)}; put or amend them, or add them to the "
                "consumer's inputs"
            )
        by_datum = batch.seqlens[IDS]
        names = [name for name, row in zip(batch.ids, by_datum, strict=True) for _ in row]
        lens = np.array([length for row in by_datum for length in row], np.int64)
        if not lens.all():
            raise SchemaError(f"{where}: {names[int(lens.argmin())]!r} has a sequence without tokens")
        columns = {}
        for key in sorted(wanted | (set(optional) & batch.keys)):
            columns[key] = _rewards(where, batch, lens) if key == REWARDS else _column(where, batch, key)
        learned = columns.pop(MASK).astype(bool)
        starts = np.cumsum(lens) - lens
        early = np.flatnonzero(learned[starts])
        if len(early):
            raise SchemaError(
                f"{where}: {names[early[0]]!r}: {MASK} is True on the first token of a sequence, which is predicted "
                "from nothing; set it False"
            )
        made = cls(names, lens, _groups(batch, by_datum), learned, _fresh(where, batch, learned), columns)
        made._check_finite(where)
        return made

    def _check_finite(self, where: str) -> None:
        for key, column in self.columns.items():
            if column.dtype.kind != "f":
                continue
            bad = ~np.isfinite(column) & (self.learned if key != REWARDS else True)
            if bad.any():
                at = int(bad.argmax())
                name = self.names[int(np.searchsorted(np.cumsum(self.lens), at, side="right"))]
                raise SchemaError(
                    f"{where}: {name!r}: {key} is {column[at]} at token {at} of the batch; "
                    f"{int(bad.sum())} values of {key} are not finite"
                )
            if key != REWARDS:
                column[~self.learned] = 0

    @cached_property
    def sequence_of(self) -> Array:
        """The number of each token's sequence."""
        return np.repeat(np.arange(len(self.lens)), self.lens)

    @property
    def sequence_rewards(self) -> Array:
        """The sum of each sequence's rewards."""
        return np.bincount(self.sequence_of, self.columns[REWARDS], len(self.lens))


def _column(where: str, batch: SequenceSample, key: str) -> Array:
    lens, expected = batch.seqlens[key], batch.seqlens[IDS]
    if lens != expected:
        at = next(at for at, pair in enumerate(zip(lens, expected, strict=True)) if pair[0] != pair[1])
        raise SchemaError(
            f"{where}: {batch.ids[at]!r}: {key} has lengths {list(lens[at])}, "
            f"{IDS} {list(expected[at])}; "
            "each token needs one value"
        )
    column = _array(batch[key])
    if column.ndim != 1:
        raise SchemaError(f"{where}: {key}: expected one value a token, got shape {column.shape}")
    return column


def _array(values: Any) -> Array:
    """A copy that may be written to; floats as float32."""
    if hasattr(values, "detach"):
        values = values.detach()
        values = (values.float() if values.is_floating_point() else values).cpu().numpy()
    array: Array = np.array(values)
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def _rewards(where: str, batch: SequenceSample, lens: Array) -> Array:
    """Rewards of tokens. One reward a sequence belongs to its last token."""
    given = batch.seqlens[REWARDS]
    if given == batch.seqlens[IDS] and int(lens.max(initial=0)) > 1:
        return _column(where, batch, REWARDS).astype(np.float32)
    for name, row, sequences in zip(batch.ids, given, batch.seqlens[IDS], strict=True):
        if list(row) != [1] * len(sequences) and list(row) != [len(sequences)]:
            raise SchemaError(
                f"{where}: {name!r}: {REWARDS} has lengths {list(row)} for {len(sequences)} sequences; "
                "expected one reward a sequence, or one a token"
            )
    rewards = np.zeros(int(lens.sum()), np.float32)
    rewards[np.cumsum(lens) - 1] = _array(batch[REWARDS]).reshape(-1)
    return rewards


def _groups(batch: SequenceSample, by_datum: Any) -> Array:
    """Sequences of one datum are a group; data with the same `metadata["group"]` are one group, too."""
    names = batch.metadata.get(GROUP) or [None] * len(batch)
    labels = [("datum", at) if name is None else ("group", str(name)) for at, name in enumerate(names)]
    numbers: dict[Any, int] = {}
    each = [numbers.setdefault(label, len(numbers)) for label in labels]
    return np.repeat(np.array(each, np.int64), [len(row) for row in by_datum])


def _fresh(where: str, batch: SequenceSample, learned: Array) -> Array:
    if FRESH not in batch:
        return learned
    if batch.seqlens[FRESH] == batch.seqlens[IDS]:
        fresh = _column(where, batch, FRESH)
    else:  # the buffer gives one a datum where samples have no versions
        fresh = np.repeat(_array(batch[FRESH]), [sum(row) for row in batch.seqlens[IDS]])
    kept: Array = learned & fresh.astype(bool)
    return kept
