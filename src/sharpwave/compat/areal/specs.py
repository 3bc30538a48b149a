"""How samples are cut: ``MicroBatchSpec``, ``SequenceSplitSpec`` and ``ffd_allocate`` by upstream's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharpwave.errors import SchemaError
from sharpwave.sequences import packs

__all__ = ["MicroBatchSpec", "SequenceSplitSpec", "Unplaceable", "ffd_allocate"]


class Unplaceable(SchemaError, RuntimeError):
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
        ends = np.cumsum(self.sizes, dtype=np.int64).tolist()
        partitions = list(zip([0, *ends[:-1]], ends, strict=True)) if ends else []
        if self.partitions is not None and [tuple(part) for part in self.partitions] != partitions:
            raise SchemaError(f"SequenceSplitSpec(): sizes {self.sizes} and partitions {self.partitions} differ")
        self.partitions = partitions


def ffd_allocate(values: Sequence[int], capacity: int, min_groups: int) -> list[list[int]]:
    """``sharpwave``'s, with upstream's class of errors.

    Raises:
        RuntimeError: An item over the capacity, or fewer items than groups.
    """
    try:
        return packs.ffd_allocate(values, capacity, min_groups)
    except SchemaError as error:
        raise Unplaceable(str(error)) from None
