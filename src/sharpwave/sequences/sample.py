"""SequenceSample: sequences of any length, packed without padding, with an id a datum."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..checks import whole
from ..errors import SchemaError
from . import packs, safetensors
from .column import (
    Column,
    concatenate,
    dtype_from_name,
    dtype_name,
    equal,
    fits_exactly,
    is_tensor,
    read_lens,
    read_list,
)
from .frozen import FrozenDict, FrozenList

__all__ = ["SequenceSample"]

_WHERE = "SequenceSample()"
_FROM = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}  # by the kind of a dtype, the kinds of JSON numbers that it takes


class SequenceSample:
    """One or more data, each with an id and, per key, any number of sequences of any length.

    The values of a key are one array: data one after the other, their sequences one after the other, no padding. A
    sample is never changed: every operation returns another one, which shares the arrays where it can.

    Args:
        ids: One a datum, all different; kept as text.
        seqlens: Per key, a list over data of lists over sequences of lengths. ``[3, 5]`` is short for ``[[3], [5]]``.
        data: Per key, a NumPy array or a torch tensor of shape (sum of all lengths, ...), or None: only described.
        trailing_shapes: Per key, the shape behind the first axis; taken from the data where there are any.
        dtypes: Per key; taken from the data where there are any.
        metadata: Per name, a list with one entry a datum: anything that JSON holds.
        keys: The keys, where you want them checked.

    Raises:
        SchemaError: Ids repeat, or keys, lengths, shapes or dtypes do not agree.

    Example:
        >>> import numpy as np
        >>> import sharpwave as sw
        >>> prompts = sw.SequenceSample(ids=["a", "b"], seqlens={"input_ids": [3, 2]}, data={"input_ids": np.arange(5)})
        >>> [part.ids for part in prompts.unpack()]
        [['a'], ['b']]
    """

    __slots__ = ("_columns", "_ids", "_keys", "_metadata")
    _fewest_ids = 1

    def __init__(
        self,
        ids: Iterable[Any],
        seqlens: Mapping[str, Any],
        data: Mapping[str, Any] | None = None,
        *,
        trailing_shapes: Mapping[str, Any] | None = None,
        dtypes: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        keys: Iterable[str] | None = None,
    ) -> None:
        listed = [str(one) for one in (ids if isinstance(ids, str) else read_list(_WHERE, "ids", ids))]
        _check_dict("seqlens", seqlens)
        if data is not None:
            _check_dict("data", data)
        if not (trailing_shapes is dtypes is metadata is None):
            for what, given in (("trailing_shapes", trailing_shapes), ("dtypes", dtypes), ("metadata", metadata)):
                if given is not None:
                    _check_dict(what, given)
        if len(listed) < self._fewest_ids:
            raise SchemaError(f"{_WHERE}: ids: expected at least one")
        _unique("ids", listed)
        names = list(seqlens)
        if keys is not None:
            expected = _names(_WHERE, keys)
            _unique("keys", expected)
            _same_keys("seqlens", expected, names)
        if data is not None:
            _same_keys("data", names, data)
        if trailing_shapes is not None:
            _same_keys("trailing_shapes", names, trailing_shapes)
        if dtypes is not None:
            _same_keys("dtypes", names, dtypes)
        columns = {}
        for key in names:
            lens = read_lens(_WHERE, key, seqlens[key], len(listed))
            shape = None if trailing_shapes is None else trailing_shapes[key]
            dtype = None if dtypes is None else dtypes[key]
            columns[key] = _column(key, lens, None if data is None else data[key], shape, dtype)
        kept = {name: _entries(name, values, len(listed)) for name, values in metadata.items()} if metadata else {}
        self._set(listed, columns, kept)

    @classmethod
    def _make(cls, ids: list[str], columns: dict[str, Column], metadata: dict[str, list[Any]]) -> SequenceSample:
        """Without the checks: the parts come from samples that were checked."""
        made = cls.__new__(cls)
        made._set(ids, columns, metadata)
        return made

    def _set(self, ids: list[str], columns: dict[str, Column], metadata: dict[str, list[Any]]) -> None:
        self._ids, self._columns, self._metadata = ids, columns, metadata
        self._keys: frozenset[str] | None = None

    # ---- what it holds -----------------------------------------------------------------------------------------------

    @property
    def ids(self) -> list[str]:
        return FrozenList(self._ids)

    @property
    def keys(self) -> frozenset[str]:
        if self._keys is None:
            self._keys = frozenset(self._columns)
        return self._keys

    @property
    def seqlens(self) -> dict[str, list[list[int]]]:
        lens = {key: FrozenList(FrozenList(row) for row in column.lens) for key, column in self._columns.items()}
        return FrozenDict(lens, "seqlens")

    @property
    def data(self) -> dict[str, Any] | None:
        """None where no key has values."""
        if all(column.data is None for column in self._columns.values()) and self._columns:
            return None
        return FrozenDict({key: column.data for key, column in self._columns.items()}, "data")

    @property
    def trailing_shapes(self) -> dict[str, tuple[int, ...] | None]:
        return FrozenDict({key: column.shape for key, column in self._columns.items()}, "trailing_shapes")

    @property
    def dtypes(self) -> dict[str, Any]:
        return FrozenDict({key: column.dtype for key, column in self._columns.items()}, "dtypes")

    @property
    def metadata(self) -> dict[str, list[Any]]:
        return FrozenDict({name: FrozenList(values) for name, values in self._metadata.items()}, "metadata")

    @property
    def tokens(self) -> int:
        """Of the key with the most of them: what the sample weighs in a token budget."""
        return max((column.tokens for column in self._columns.values()), default=0)

    @property
    def nbytes(self) -> int:
        return sum(column.data.nbytes for column in self._columns.values() if column.data is not None)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, key: str) -> Any:
        """The packed values of a key."""
        return self._column(key, "[]").data

    def __contains__(self, key: object) -> bool:
        return key in self._columns

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SequenceSample):
            return NotImplemented
        if self._ids != other._ids or self.keys != other.keys or self._metadata != other._metadata:
            return False
        pairs = [(column, other._columns[key]) for key, column in self._columns.items()]
        return all(one[0] == two[0] and one[2:] == two[2:] and equal(one.data, two.data) for one, two in pairs)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        keys = ", ".join(f"{key}: {column.tokens}" for key, column in sorted(self._columns.items()))
        return f"SequenceSample({len(self)} data; {keys})"

    # ---- other samples -----------------------------------------------------------------------------------------------

    @classmethod
    def gather(cls, samples: Sequence[SequenceSample], keys: Iterable[str] | None = None) -> SequenceSample:
        """All data of several samples in one, in order.

        Args:
            samples: At least one.
            keys: Which keys; those of the first sample unless told.

        Raises:
            SchemaError: A key is missing in one of them, or its dtype or shape differs, or ids repeat.
        """
        if not isinstance(samples, Sequence) or not all(isinstance(sample, SequenceSample) for sample in samples):
            raise SchemaError(f"gather(): samples: expected a list of SequenceSamples, got {samples!r:.100}")
        if not samples:
            raise SchemaError("gather(): expected at least one sample")
        first = samples[0]
        ids = [one for sample in samples for one in sample._ids]
        _unique("ids", ids, "gather()")
        columns = {}
        for key in first._columns if keys is None else _names("gather()", keys):
            parts = [sample._column(key, "gather()") for sample in samples]
            head = parts[0]
            for part, sample in zip(parts, samples, strict=True):
                alike = part.shape == head.shape and part.dtype == head.dtype
                if not alike or (part.data is None) != (head.data is None):
                    raise SchemaError(
                        f"gather(): key {key!r} of {sample._ids[0]!r}: expected {_said(head)} as {first._ids[0]!r} has,"
                        f" got {_said(part)}"
                    )
            lens = [row for part in parts for row in part.lens]
            columns[key] = Column(lens, concatenate([part.data for part in parts]), head.shape, head.dtype)
        names = list(dict.fromkeys(name for sample in samples for name in sample._metadata))
        metadata = {
            name: [value for sample in samples for value in sample._metadata.get(name) or [None] * len(sample)]
            for name in names
        }
        return cls._make(ids, columns, metadata)

    def split(self, sizes: int | Sequence[int]) -> list[SequenceSample]:
        """Contiguous parts; their arrays are views of this sample's.

        Args:
            sizes: How many data each part has; a whole number asks for so many parts, as equal as can be.
        """
        return packs.split(self, sizes)

    def unpack(self) -> list[SequenceSample]:
        """One sample a datum."""
        return packs.split(self, [1] * len(self))

    def split_by_tokens(
        self, max_tokens: int | None = None, min_parts: int = 1
    ) -> tuple[list[SequenceSample], list[int], list[int]]:
        """Parts with a bound on their tokens, as even as ``ffd_allocate`` makes them.

        Args:
            max_tokens: Most tokens of a part, by the key that has the most of them; None for no bound.
            min_parts: Fewest parts.

        Returns:
            The parts; ``forward``, the data's places in the order of the parts; ``backward``, which undoes it:
            ``SequenceSample.gather(parts).reorder(backward)`` is this sample again.

        Raises:
            SchemaError: One datum alone has more than ``max_tokens``, or there are fewer data than parts.
        """
        return packs.split_by_tokens(self, max_tokens, min_parts)

    def reorder(self, order: Sequence[int]) -> SequenceSample:
        """The data in another order: datum ``order[i]`` comes i-th."""
        order = [whole("reorder()", "order", at, 0) for at in read_list("reorder()", "order", order)]
        if sorted(order) != list(range(len(self))):
            raise SchemaError(f"reorder(): expected each of 0 to {len(self) - 1} once, got {order!r}")
        parts = self.unpack()
        return self.gather([parts[at] for at in order], keys=self._columns)

    def select(self, keys: Iterable[str]) -> SequenceSample:
        """Only these keys."""
        names = _names("select()", keys)
        return self._make(self._ids, {key: self._column(key, "select()") for key in names}, self._metadata)

    def update(self, other: SequenceSample) -> SequenceSample:
        """This sample with the keys and metadata of another one of the same ids; where both have a key, the other's.

        Raises:
            SchemaError: The ids differ.
        """
        if not isinstance(other, SequenceSample):
            raise SchemaError(f"update(): expected a SequenceSample, got {type(other).__name__}")
        if self._ids != other._ids:
            raise SchemaError(f"update(): expected the ids {_some(self._ids)}, got {_some(other._ids)}")
        metadata = {**self._metadata, **other._metadata} if other._metadata else self._metadata
        return self._make(self._ids, {**self._columns, **other._columns}, metadata)

    def meta(self) -> SequenceSample:
        """The same without values."""
        columns = {key: column._replace(data=None) for key, column in self._columns.items()}
        return self._make(self._ids, columns, self._metadata)

    def remap(self, names: Mapping[str, str]) -> SequenceSample:
        """The same with other names for some keys: ``{"old": "new"}``."""
        if not isinstance(names, Mapping) or not all(isinstance(name, str) for name in names.values()):
            raise SchemaError(f"remap(): names: expected new names by old ones, got {names!r:.100}")
        for key in names:
            self._column(key, "remap()")
        renamed = [names.get(key, key) for key in self._columns]
        _unique("keys", renamed, "remap()")
        columns = dict(zip(renamed, self._columns.values(), strict=True))
        return self._make(self._ids, columns, self._metadata)

    # ---- padded forms ------------------------------------------------------------------------------------------------

    def pad(self, key: str, value: Any = 0, length: int | None = None) -> tuple[Any, Any]:
        """A key's sequences side by side: (sequences, longest, ...), and a mask that is True where values are.

        Args:
            value: What fills the rest.
            length: Of the padded axis; the longest sequence's unless told.
        """
        return packs.pad(self._column(key, "pad()"), key, value, length)

    @classmethod
    def pack(cls, ids: Iterable[Any], padded: Mapping[str, Any], mask: Any) -> SequenceSample:
        """From arrays of shape (data, longest, ...), one sequence a datum; ``mask`` is True where values are."""
        return packs.pack(cls, ids, padded, mask)

    # ---- files -------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """What ``json.dumps`` takes; values become lists."""
        return {
            "ids": self.ids,
            "seqlens": self.seqlens,
            "trailing_shapes": {
                key: None if column.shape is None else list(column.shape) for key, column in self._columns.items()
            },
            "dtypes": {key: dtype_name(column.dtype) for key, column in self._columns.items()},
            "data": {
                key: None if column.data is None else column.data.tolist() for key, column in self._columns.items()
            },
            "metadata": self.metadata,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SequenceSample:
        """What ``to_json`` gave."""
        where = "from_json()"
        if not isinstance(document, Mapping):
            raise SchemaError(f"{where}: expected what to_json() gives, got {type(document).__name__}")
        try:
            dtypes = {key: dtype_from_name(where, name) for key, name in document["dtypes"].items()}
            shapes = {key: None if s is None else tuple(s) for key, s in document["trailing_shapes"].items()}
            data = {key: _listed(where, values, dtypes[key], shapes[key]) for key, values in document["data"].items()}
            ids, seqlens, metadata = document["ids"], document["seqlens"], document["metadata"]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, SchemaError):
                raise
            raise SchemaError(f"{where}: expected what to_json() gives, got {type(error).__name__}: {error}") from None
        return cls(ids=ids, seqlens=seqlens, data=data, trailing_shapes=shapes, dtypes=dtypes, metadata=metadata)

    def to_bytes(self) -> bytes:
        """The sample as the bytes of a safetensors file."""
        return b"".join(safetensors.encode(self))

    @classmethod
    def from_bytes(cls, raw: Any) -> SequenceSample:
        """What ``to_bytes`` gave; NumPy arrays look into ``raw`` and are read-only, tensors are copies.

        Raises:
            StorageError: Damaged, cut short, or not written by ``to_bytes``.
        """
        return safetensors.decode(raw)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a safetensors file; a file that was there is replaced whole, or stays."""
        safetensors.save(self, _path("save()", path))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SequenceSample:
        """What ``save`` wrote."""
        return safetensors.load(_path("load()", path))

    def _column(self, key: str, where: str) -> Column:
        column = self._columns.get(key) if isinstance(key, str) else None
        if column is None:
            has = ", ".join(sorted(self._columns)) or "none"
            raise SchemaError(f"{where}: key {key!r} is not in {_some(self._ids)}; it has the keys {has}")
        return column


def _check_dict(what: str, given: Any) -> None:
    if type(given) is not dict and not isinstance(given, Mapping):
        raise SchemaError(f"{_WHERE}: {what}: expected a dict by key, got {given!r:.100}")
    for key in given:
        if not isinstance(key, str):
            raise SchemaError(f"{_WHERE}: {what}: expected text as keys, got {list(given)!r:.100}")


def _column(key: str, lens: list[list[int]], data: Any, shape: Any, dtype: Any) -> Column:
    """The column of these values, or why they do not fit."""
    if shape is None and dtype is None and type(data) is np.ndarray:  # what most samples are made of
        total = lens[0][0] if len(lens) == 1 and len(lens[0]) == 1 else sum(map(sum, lens))
        held = data.shape
        if held and held[0] == total and not data.dtype.hasobject:
            return Column(lens, data, held[1:], data.dtype)
    where = f"{_WHERE}: data[{key!r}]"
    want = None
    if shape is not None:
        want = tuple(whole(where, "trailing_shapes", one, 0) for one in read_list(where, "trailing_shapes", shape))
    if isinstance(dtype, (str, type)):
        dtype = dtype_from_name(where, dtype)
    elif dtype is not None and not isinstance(dtype, np.dtype) and not str(dtype).startswith("torch."):
        raise SchemaError(f"{where}: dtypes: expected a NumPy or torch dtype, got {dtype!r}")
    if data is None:
        return Column(lens, None, want, dtype)
    if not isinstance(data, np.ndarray) and not is_tensor(data):
        raise SchemaError(f"{where}: expected a NumPy array or a torch tensor, got {type(data).__name__}")
    if isinstance(data, np.ma.MaskedArray):
        raise SchemaError(f"{where}: expected values without a mask, which would be lost; take filled() of it")
    if isinstance(data, np.ndarray) and data.dtype.hasobject:
        raise SchemaError(f"{where}: expected numbers, got Python objects")
    total = sum(map(sum, lens))
    trailing = tuple(data.shape[1:])
    if len(data.shape) < 1 or data.shape[0] != total or (want is not None and trailing != want):
        rest = "..." if want is None else ", ".join(map(str, want))
        raise SchemaError(f"{where}: expected shape ({total}, {rest}), the sum of its seqlens, got {tuple(data.shape)}")
    if dtype is not None and data.dtype != dtype:
        raise SchemaError(f"{where}: expected {dtype} as dtypes[{key!r}] says, got {data.dtype}")
    return Column(lens, data, trailing, data.dtype)


def _listed(where: str, values: Any, dtype: Any, shape: tuple[int, ...] | None) -> Any:
    """The array of a JSON list: every number as it stands there, or an error."""
    if values is None:
        return None
    try:
        if not isinstance(values, list):
            raise TypeError(f"got {type(values).__name__}")
        plain = np.array(values)
        if plain.dtype.kind == "f" and _kind(dtype) == "u":
            whole_numbers = np.array(values, object)  # beyond 2**63 NumPy reads whole numbers as fractions
            if {type(one) for one in whole_numbers.reshape(-1)} == {int}:
                plain = whole_numbers.astype(np.uint64)
        if not plain.size:
            plain = np.zeros((0, *(shape or ())), bool)
        elif plain.dtype.kind not in _FROM[_kind(dtype)]:
            raise ValueError(f"got {plain.dtype}")
        plain = plain.reshape(-1, *(shape or ()))
        finite = plain[np.isfinite(plain)]
        for number in (finite.min(), finite.max()) if finite.size else ():
            if not fits_exactly(dtype, number):
                raise ValueError(f"got {number!r}")
        if isinstance(dtype, np.dtype):
            made: Any = plain.astype(dtype)
            back = made
        else:
            import torch

            made = torch.from_numpy(plain).to(dtype)
            back = made.double().numpy() if made.is_floating_point() else plain
        if plain.dtype.kind in "iu" and not np.array_equal(back.astype(plain.dtype), plain):
            raise ValueError("got whole numbers that it does not hold exactly")
        return made
    except (ValueError, TypeError, OverflowError, KeyError) as error:
        raise SchemaError(f"{where}: data: expected a list of {dtype} of trailing shape {shape}: {error}") from None


def _kind(dtype: Any) -> str:
    """NumPy's letter."""
    if isinstance(dtype, np.dtype):
        return dtype.kind
    return "b" if str(dtype) == "torch.bool" else "f" if dtype.is_floating_point else "i"


def _entries(name: str, values: Any, count: int) -> list[Any]:
    """The metadata of a name."""
    if not isinstance(values, (list, tuple)) or len(values) != count:
        raise SchemaError(f"{_WHERE}: metadata[{name!r}]: expected a list of {count}, one an id, got {values!r:.100}")
    return list(values)


def _names(where: str, keys: Any) -> list[str]:
    names = read_list(where, "keys", keys)
    if not all(isinstance(name, str) for name in names):
        raise SchemaError(f"{where}: keys: expected text, got {names!r:.100}")
    return names


def _path(where: str, path: Any) -> Path:
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
        raise SchemaError(f"{where}: path: expected a path, got {path!r}")
    return Path(path)


def _unique(what: str, names: list[str], where: str = _WHERE) -> None:
    if len(names) > 1 and len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SchemaError(f"{where}: {what}: expected each once, got {twice!r} more than once")


def _same_keys(what: str, expected: list[str], got: Iterable[str]) -> None:
    if set(expected) != set(got):
        raise SchemaError(f"{_WHERE}: {what}: expected the keys {sorted(expected)}, got {sorted(got)}")


def _some(ids: list[str]) -> str:
    return f"{ids[:3]!r}" if len(ids) <= 3 else f"{ids[:3]!r} and {len(ids) - 3} more"


def _said(column: Column) -> str:
    values = "" if column.data is not None else " without values"
    return f"{column.dtype} of trailing shape {column.shape}{values}"
