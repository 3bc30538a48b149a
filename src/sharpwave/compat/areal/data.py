"""``SequenceSample`` with upstream's method names; the in-place ones change this object, as there."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import make_dataclass
from typing import Any

import numpy as np

import sharpwave as sw
from sharpwave.errors import SchemaError
from sharpwave.sequences import packs

from .specs import MicroBatchSpec, SequenceSplitSpec, Unplaceable, ffd_allocate
from .stored import Stored

__all__ = ["MicroBatchSpec", "SequenceSample", "SequenceSplitSpec", "ffd_allocate"]

# The lengths of upstream's key names, given the length L of the sequences.
_ONE = (
    "seq_no_eos_mask", "greedy_seq_no_eos_mask", "loss_mask", "rewards", "greedy_rewards", "base_scores", "task_ids",
    "version_start", "version_end", "birth_time", "greedy_seqlens", "scores", "prompt_lens",
)  # fmt: skip
_ALL = (
    "input_ids", "packed_seq", "seq", "packed_logits_mask", "logits_mask", "prompt_mask", "greedy_prompt_mask",
    "packed_input_ids", "greedy_packed_input_ids", "values", "packed_prompts",
)  # fmt: skip
_ALL_BUT_ONE = (
    "packed_logprobs", "prox_logp", "proximal_logprobs", "logprobs", "packed_ref_logprobs", "ref_logprobs", "old_logp",
    "ref_logp", "advantages", "ppo_loss_mask", "kl_rewards", "returns",
)  # fmt: skip
_FIELDS = ("keys", "trailing_shapes", "dtypes", "ids", "seqlens", "data", "metadata")


class _KeysDiffer(SchemaError, KeyError):
    """Upstream's class of the same mistake."""

    __str__ = Exception.__str__


class SequenceSample(sw.SequenceSample):
    """``sharpwave.SequenceSample`` with upstream's names, argument order and in-place methods.

    ``dataclasses.fields``, ``asdict`` and ``replace`` know upstream's seven fields. ``data`` may be NumPy arrays or
    tensors; ``keys``, ``trailing_shapes`` and ``dtypes`` may be left out, and come from the data.

    Args:
        seqlens: As of ``sharpwave.SequenceSample``; rows and lengths may be tensors too.
        ids: Upstream allows none at all, and so does this class.
    """

    __slots__ = ()
    __dataclass_fields__ = make_dataclass("Fields", _FIELDS).__dataclass_fields__  # type: ignore[attr-defined]
    _fewest_ids = 0

    def __init__(
        self,
        keys: Iterable[str] | None = None,
        trailing_shapes: Mapping[str, Any] | None = None,
        dtypes: Mapping[str, Any] | None = None,
        ids: Iterable[Any] = (),
        seqlens: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(seqlens, Mapping):
            expected = set(seqlens) if keys is None or isinstance(keys, str) else set(keys)
            for what, given in (
                ("seqlens", seqlens),
                ("trailing_shapes", trailing_shapes),
                ("dtypes", dtypes),
                ("data", data),
            ):
                if isinstance(given, Mapping) and set(given) != expected:
                    raise _KeysDiffer(
                        f"SequenceSample(): {what}: expected the keys {sorted(map(str, expected))}, "
                        f"got {sorted(map(str, given))}"
                    )
            seqlens = {key: _plain(lens) for key, lens in seqlens.items()}
        super().__init__(
            ids,
            {} if seqlens is None else seqlens,
            data,
            trailing_shapes=trailing_shapes,
            dtypes=dtypes,
            metadata=metadata,
            keys=keys,
        )

    @property
    def bs(self) -> int:
        return len(self)

    @property
    def data(self) -> dict[str, Any] | None:
        """Values by key. ``x.data[key] = values`` stores: other values of the same lengths, or None."""
        held = super().data
        return None if held is None else Stored(held, self._set_data, self._del_key)

    @data.setter
    def data(self, values: Mapping[str, Any] | None) -> None:
        """Other values of the same keys and lengths, or None: then the sample only describes them."""
        if values is None:
            self._become(self.meta())
            return
        made = SequenceSample(ids=self._ids, seqlens=self.seqlens, data=values, metadata=self._metadata)
        self._become(made)

    @property
    def metadata(self) -> dict[str, list[Any]]:
        """Lists by name. ``x.metadata[name] = values`` stores: a list with one entry a datum."""
        return Stored(super().metadata, self._set_metadata, self._del_metadata)

    @metadata.setter
    def metadata(self, values: Mapping[str, Any]) -> None:
        """Other metadata: a list with one entry a datum by name."""
        made = SequenceSample(ids=self._ids, seqlens={}, metadata=values)
        self._set(self._ids, self._columns, made._metadata)

    def _set_data(self, key: str, values: Any) -> None:
        if key not in self._columns:
            raise SchemaError(
                f"data[{key!r}]: a new key needs its seqlens; update_() with SequenceSample(ids=ids, "
                f"seqlens={{{key!r}: seqlens}}, data={{{key!r}: values}})"
            )
        made = SequenceSample(ids=self._ids, seqlens={key: self._columns[key].lens}, data={key: values})
        self._set(self._ids, {**self._columns, **made._columns}, self._metadata)

    def _del_key(self, key: str) -> None:
        self._column(key, "data")
        columns = {name: column for name, column in self._columns.items() if name != key}
        self._set(self._ids, columns, self._metadata)

    def _set_metadata(self, name: str, values: Any) -> None:
        made = SequenceSample(ids=self._ids, seqlens={}, metadata={name: values})
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
        lens = [one[0] if isinstance(one, list) and len(one) == 1 else one for one in _plain(list(seqlens))]
        for one in lens:
            if isinstance(one, bool) or not isinstance(one, int):
                raise SchemaError(f"from_default(): seqlens: expected one length a datum, got {one!r}")
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
        return cls(ids=ids, seqlens=by_key, data=data, metadata=metadata)

    @classmethod
    @contextmanager
    def disable_validation(cls) -> Iterator[None]:
        """Upstream leaves its checks out inside of this. Here they are cheap, and stay on: nothing changes."""
        yield

    def split_with_spec(self, spec: SequenceSplitSpec) -> list[SequenceSample]:
        return packs.split(self, spec.sizes or [])  # type: ignore[return-value]

    def _get_split_key(self) -> str:
        """The key with the most tokens; the first of them where several have as many."""
        if not self._columns:
            raise SchemaError("split(): expected a sample with at least one key")
        return max(self._columns, key=lambda key: self._columns[key].tokens)

    def split_with_lengths(
        self, mb_spec: Any, lens: Iterable[int]
    ) -> tuple[list[SequenceSample], list[int], np.ndarray[Any, np.dtype[np.int64]]]:
        """Micro-batches by lengths that you give, with the order of the data in them and the way back.

        Args:
            mb_spec: A MicroBatchSpec, ours or upstream's.
            lens: One a datum.

        Raises:
            RuntimeError: A length over ``max_tokens_per_mb``, or fewer data than ``n_mbs``.
        """
        given = _plain(list(lens))
        if len(given) != len(self):
            raise SchemaError(f"split_with_lengths(): lens: expected {len(self)}, one a datum, got {len(given)}")
        groups = ffd_allocate(given, mb_spec.max_tokens_per_mb, mb_spec.n_mbs)
        forward = [datum for group in groups for datum in group]
        backward = np.empty(len(forward), np.int64)
        backward[forward] = np.arange(len(forward))
        parts = self.unpack()
        keys = list(self._columns)
        made: Any = [self.gather([parts[datum] for datum in group], keys) for group in groups]
        return made, forward, backward

    def split(self, mb_spec: Any) -> Any:
        """Micro-batches by tokens, with the order of the data in them and the way back.

        Takes a MicroBatchSpec, ours or upstream's; anything else is ``sharpwave``'s own ``split``.
        """
        if not hasattr(mb_spec, "n_mbs"):
            return packs.split(self, mb_spec)
        return self.split_with_lengths(mb_spec, [sum(row) for row in self._columns[self._get_split_key()].lens])

    def synced_data_parallel_split(self, mb_spec: Any, group: Any = None) -> list[SequenceSample]:
        """Micro-batches by tokens, as many as on every other rank of the group: the most that one of them needs.

        Every rank calls it. Each round is one reduction of two numbers.

        Args:
            group: A torch process group; AReaL's data-parallel group where ``realhf`` runs in this process, else
                torch's default one. Without torch.distributed there is one rank.

        Raises:
            RuntimeError: A rank cannot split its data so. All ranks raise.
        """
        constants = sys.modules.get("realhf.base.constants")
        if group is None and constants is not None:
            group = constants.data_parallel_group()
        spec = mb_spec
        while True:
            try:
                parts, error = self.split(spec)[0], None
            except SchemaError as wrong:
                parts, error = [], wrong
            most, fewest = _most_and_fewest(len(parts), group)
            if error is not None or fewest == 0:
                raise Unplaceable(f"synced_data_parallel_split(): {error or 'another rank could not split its data'}")
            if most == fewest:
                return parts  # type: ignore[no-any-return]
            spec = MicroBatchSpec.new(spec, n_mbs=most)

    @staticmethod
    def shuffled(sample: SequenceSample, seed: int | None = None) -> SequenceSample:
        """The data in a random order; one seed gives one order, the same as upstream's.

        Args:
            seed: AReaL's next shuffle seed where ``realhf`` runs in this process, else one of the operating system's.
        """
        if seed is None:
            seeding = sys.modules.get("realhf.base.seeding")
            seed = int(np.random.SeedSequence().generate_state(1)[0]) if seeding is None else seeding.get_shuffle_seed()
        order = np.arange(len(sample))
        np.random.RandomState(seed).shuffle(order)
        return sample.reorder(order.tolist())  # type: ignore[return-value]

    @staticmethod
    def reorder_output(x: Any, expected_seqlens: list[list[int]], forward_indices: Any, backward_indices: Any) -> Any:
        """A packed array in the order of micro-batches, back in the order of the data.

        Args:
            x: A NumPy array or a tensor.
            expected_seqlens: Of the data, in their own order.
        """
        count = len(expected_seqlens)
        for what, order in (("forward_indices", forward_indices), ("backward_indices", backward_indices)):
            if sorted(int(at) for at in order) != list(range(count)):
                raise SchemaError(f"reorder_output(): {what}: expected each of 0 to {count - 1} once, got {order!r}")
        if any(int(forward_indices[int(place)]) != at for at, place in enumerate(backward_indices)):
            raise SchemaError("reorder_output(): backward_indices: expected the inverse of forward_indices")
        lens = [sum(_plain(expected_seqlens[int(at)])) for at in forward_indices]
        if len(x) != sum(lens):
            raise SchemaError(
                f"reorder_output(): x: expected {sum(lens)} values, the sum of expected_seqlens, got {len(x)}"
            )
        ends = np.cumsum(lens).tolist()
        starts = [0, *ends[:-1]]
        pieces = [x[starts[at] : ends[at]] for at in backward_indices]
        if isinstance(x, np.ndarray):
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

    def cpu(self) -> SequenceSample:
        return self.to_device("cpu")

    def as_json_compatible(self) -> dict[str, Any]:
        return {**self.to_json(), "keys": list(self._columns)}

    @classmethod
    def from_json_compatible(cls, data: Mapping[str, Any]) -> SequenceSample:
        """What ``as_json_compatible`` gave, here or upstream."""
        made: Any = cls.from_json(data)
        if set(data.get("keys", made._columns)) != set(made._columns):
            raise _KeysDiffer(
                f"from_json_compatible(): keys: expected {sorted(made._columns)}, got {sorted(map(str, data['keys']))}"
            )
        return made  # type: ignore[no-any-return]

    def _become(self, other: sw.SequenceSample) -> None:
        self._set(other._ids, other._columns, other._metadata)


def _plain(lens: Any) -> Any:
    """Lengths without the tensors and arrays that hold some of them."""
    if hasattr(lens, "tolist"):
        return lens.tolist()
    return [_plain(one) for one in lens] if isinstance(lens, (list, tuple)) else lens


def _most_and_fewest(count: int, group: Any) -> tuple[int, int]:
    """The largest and the smallest count of all ranks."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return count, count
    import torch

    # NCCL reduces nothing that is in host memory.
    device = "cuda" if distributed.get_backend(group) == "nccl" else "cpu"
    both = torch.tensor([count, -count], device=device)
    distributed.all_reduce(both, op=distributed.ReduceOp.MAX, group=group)
    return int(both[0]), -int(both[1])
