"""``SequenceSample`` with upstream's method names; the in-place ones change this object, as there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import sharpwave as sw
from sharpwave.errors import SchemaError
from sharpwave.sequences import packing

__all__ = ["MicroBatchSpec", "SequenceSample", "SequenceSplitSpec", "ffd_allocate"]

# The lengths of upstream's key names, given the length L of the sequences.
_ONE = (
    "seq_no_eos_mask", "loss_mask", "rewards", "base_scores", "task_ids", "version_start", "version_end", "birth_time",
    "greedy_seqlens", "scores", "prompt_lens",
)  # fmt: skip
_ALL = (
    "input_ids", "packed_seq", "seq", "packed_logits_mask", "logits_mask", "prompt_mask", "greedy_prompt_mask",
    "packed_input_ids", "greedy_packed_input_ids", "values", "packed_prompts",
)  # fmt: skip
_ALL_BUT_ONE = (
    "packed_logprobs", "prox_logp", "proximal_logprobs", "logprobs", "packed_ref_logprobs", "ref_logprobs", "old_logp",
    "ref_logp", "advantages", "ppo_loss_mask", "kl_rewards", "returns",
)  # fmt: skip


class _Unplaceable(SchemaError, RuntimeError):
    """Upstream's class of the same mistake."""


@dataclass
class MicroBatchSpec:
    """At least ``n_mbs`` parts, none over ``max_tokens_per_mb``."""

    n_mbs: int = 1
    max_tokens_per_mb: int = int(1e12)

    @classmethod
    def new(cls, mb_spec: MicroBatchSpec, **changes: Any) -> MicroBatchSpec:
        return cls(**{"n_mbs": mb_spec.n_mbs, "max_tokens_per_mb": mb_spec.max_tokens_per_mb, **changes})


@dataclass
class SequenceSplitSpec:
    """Contiguous parts, by sizes or by (start, end)."""

    partitions: list[tuple[int, int]] | None = None
    sizes: list[int] | None = None

    def __post_init__(self) -> None:
        if self.sizes is None:
            if self.partitions is None:
                raise SchemaError("SequenceSplitSpec(): expected partitions= or sizes=")
            end = 0
            for start, stop in self.partitions:
                if start != end or stop <= start:
                    raise SchemaError(
                        f"SequenceSplitSpec(): expected contiguous, non-empty parts, got {self.partitions}"
                    )
                end = stop
            self.sizes = [stop - start for start, stop in self.partitions]
        ends = np.cumsum(self.sizes).tolist()
        partitions = list(zip([0, *ends[:-1]], ends, strict=True))
        if self.partitions is not None and [tuple(part) for part in self.partitions] != partitions:
            raise SchemaError(f"SequenceSplitSpec(): sizes {self.sizes} and partitions {self.partitions} differ")
        self.partitions = partitions


def ffd_allocate(values: Sequence[int], capacity: int, min_groups: int) -> list[list[int]]:
    """``sharpwave``'s, with upstream's class of errors.

    Raises:
        RuntimeError: An item over the capacity, or fewer items than groups.
    """
    try:
        return packing.ffd_allocate(values, capacity, min_groups)
    except SchemaError as error:
        raise _Unplaceable(str(error)) from None


class _Stored(dict[str, Any]):
    """What ``data`` and ``metadata`` give: a write goes into the sample, or is refused; as upstream's plain dicts."""

    def __init__(self, values: dict[str, Any], store: Callable[[str, Any], None], drop: Callable[[str], None]) -> None:
        super().__init__(values)
        self._store, self._drop = store, drop

    def __setitem__(self, name: str, values: Any) -> None:
        self._store(name, values)
        super().__setitem__(name, values)

    def __delitem__(self, name: str) -> None:
        self._drop(name)
        super().__delitem__(name)

    def update(self, *others: Any, **values: Any) -> None:
        for name, value in dict(*others, **values).items():
            self[name] = value

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def pop(self, name: str, *default: Any) -> Any:
        if name not in self and default:
            return default[0]
        value = self[name]
        del self[name]
        return value

    def popitem(self) -> tuple[str, Any]:
        name = next(reversed(self))
        return name, self.pop(name)

    def clear(self) -> None:
        for name in list(self):
            del self[name]

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class SequenceSample(sw.SequenceSample):
    """``sharpwave.SequenceSample`` with upstream's names. ``data`` may be NumPy arrays or tensors."""

    __slots__ = ()

    @property
    def bs(self) -> int:
        return len(self)

    @property
    def data(self) -> dict[str, Any] | None:
        """Values by key. ``x.data[key] = values`` stores: other values of the same lengths, or None."""
        held = super().data
        return None if held is None else _Stored(held, self._set_data, self._del_key)

    @property
    def metadata(self) -> dict[str, list[Any]]:
        """Lists by name. ``x.metadata[name] = values`` stores: a list with one entry a datum."""
        return _Stored(super().metadata, self._set_metadata, self._del_metadata)

    def _set_data(self, key: str, values: Any) -> None:
        if key not in self._columns:
            raise SchemaError(
                f"data[{key!r}]: a new key needs its seqlens; update_() with SequenceSample(ids, {{{key!r}: seqlens}}, "
                f"{{{key!r}: values}})"
            )
        made = SequenceSample(self._ids, {key: self._columns[key].lens}, {key: values})
        self._set(self._ids, {**self._columns, **made._columns}, self._metadata)

    def _del_key(self, key: str) -> None:
        self._column(key, "data")
        columns = {name: column for name, column in self._columns.items() if name != key}
        self._set(self._ids, columns, self._metadata)

    def _set_metadata(self, name: str, values: Any) -> None:
        made = SequenceSample(self._ids, {}, metadata={name: values})
        self._set(self._ids, self._columns, {**self._metadata, **made._metadata})

    def _del_metadata(self, name: str) -> None:
        if name not in self._metadata:
            raise KeyError(name)
        kept = {held: values for held, values in self._metadata.items() if held != name}
        self._set(self._ids, self._columns, kept)

    @classmethod
    def from_default(
        cls, seqlens: list[Any], ids: Iterable[Any], data: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
    ) -> SequenceSample:
        """Lengths per key from its name, given the length of each datum's one sequence.

        Raises:
            NotImplementedError: A name that upstream does not know.
        """
        lens = [sum(one) if isinstance(one, (list, tuple)) else int(one) for one in seqlens]
        by_key: dict[str, list[list[int]]] = {}
        for key in data:
            if key in _ONE:
                by_key[key] = [[1] for _ in lens]
            elif key in _ALL:
                by_key[key] = [[n] for n in lens]
            elif key in _ALL_BUT_ONE:
                by_key[key] = [[n - 1] for n in lens]
            else:
                raise NotImplementedError(f"from_default(): no known lengths of key {key!r}; use the constructor")
        return cls(ids, by_key, data, metadata=metadata)

    def split_with_spec(self, spec: SequenceSplitSpec) -> list[SequenceSample]:
        return packing.split(self, spec.sizes or [])  # type: ignore[return-value]

    def split(self, mb_spec: Any) -> Any:
        """Micro-batches by tokens, with the order of the data in them and the way back.

        Takes a MicroBatchSpec; anything else is ``sharpwave``'s own ``split``.
        """
        if not isinstance(mb_spec, MicroBatchSpec):
            return packing.split(self, mb_spec)
        try:
            parts, forward, backward = packing.split_by_tokens(self, mb_spec.max_tokens_per_mb, mb_spec.n_mbs)
        except SchemaError as error:
            raise _Unplaceable(str(error)) from None
        return parts, np.array(forward), np.array(backward)

    @staticmethod
    def reorder_output(output: Any, expected_seqlens: list[list[int]], forward: Any, backward: Any) -> Any:
        """A packed array in the order of micro-batches, back in the order of the data.

        Args:
            expected_seqlens: Of the data, in their own order.
        """
        count = len(expected_seqlens)
        for what, order in (("forward", forward), ("backward", backward)):
            if sorted(int(at) for at in order) != list(range(count)):
                raise SchemaError(f"reorder_output(): {what}: expected each of 0 to {count - 1} once, got {order!r}")
        if any(int(forward[int(place)]) != at for at, place in enumerate(backward)):
            raise SchemaError("reorder_output(): backward: expected the inverse of forward")
        lens = [sum(expected_seqlens[int(at)]) for at in forward]
        if len(output) != sum(lens):
            raise SchemaError(
                f"reorder_output(): output: expected {sum(lens)} values, the sum of expected_seqlens, got {len(output)}"
            )
        ends = np.cumsum(lens).tolist()
        starts = [0, *ends[:-1]]
        pieces = [output[starts[at] : ends[at]] for at in backward]
        if isinstance(output, np.ndarray):
            return np.concatenate(pieces)
        import torch

        return torch.cat(pieces)

    def update_(self, other: sw.SequenceSample) -> None:
        """``update``, in place."""
        self._become(self.update(other))

    def remap_keys_(self, remap: Mapping[str, str]) -> None:
        """``remap``, in place; keys that are not here are passed over."""
        self._become(self.remap({old: new for old, new in remap.items() if old in self}))

    def to_device(self, device: Any) -> SequenceSample:
        """Moves every tensor, in place; returns the sample itself."""
        columns = {
            key: column if not hasattr(column.data, "to") else column._replace(data=column.data.to(device))
            for key, column in self._columns.items()
        }
        self._set(self._ids, columns, self._metadata)
        return self

    def cuda(self) -> SequenceSample:
        return self.to_device("cuda")

    def as_json_compatible(self) -> dict[str, Any]:
        return self.to_json()

    @classmethod
    def from_json_compatible(cls, data: Mapping[str, Any]) -> sw.SequenceSample:
        return cls.from_json(data)

    def _become(self, other: sw.SequenceSample) -> None:
        self._set(other._ids, other._columns, other._metadata)
