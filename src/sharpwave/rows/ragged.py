"""Batches as users see them: ragged fields in the form of the schema, discounts by agent."""

from __future__ import annotations

from typing import Any

import numpy as np

from .protocol import Batch
from .spec import RowSpec

__all__ = ["spread"]


def spread(spec: RowSpec, batch: Batch) -> Batch:
    """Ragged fields, padded by the engine, concatenated with offsets, or padded with a mask; discounts by agent."""
    schema = spec.schema
    if spec.splits_discounts and "discount" in batch:
        batch["discount"] = schema.split_discounts(batch["discount"])
    if not schema.ragged:
        return batch
    for leaf, lengths in zip(schema.ragged, batch.pop("lengths"), strict=True):
        path, field = schema.leaves[leaf]
        *nest, last = path.split("/")
        holder: Any = batch
        for key in nest:
            holder = holder[int(key)] if isinstance(holder, tuple) else holder[key]
        values = holder[last]
        lead = values.shape[: values.ndim - len(field.shape)]  # examples, or examples and places
        mask = (np.arange(field.shape[0]) < lengths[:, None]).reshape(*lead, field.shape[0])
        if field.ragged == "padded":
            holder[last] = {"values": values, "mask": mask}
        else:
            offsets = np.zeros(len(lengths) + 1, np.int64)
            np.cumsum(lengths, out=offsets[1:])
            holder[last] = {"values": values[mask], "offsets": offsets}
    return batch
