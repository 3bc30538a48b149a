"""Handles: the serials that ``sample`` gives, by which rows are read and get new priorities."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import refuse_masked
from ..errors import SchemaError

__all__ = ["as_handles", "lap_positions"]


def as_handles(where: str, indices: Any, *, any_shape: bool = False) -> np.ndarray[Any, Any]:
    refuse_masked(f"{where}: indices", indices)
    try:
        array = np.asarray(indices.detach().cpu() if hasattr(indices, "detach") else indices)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SchemaError(
            f"{where}: indices: expected a list of whole numbers, got {type(indices).__name__} ({error})"
        ) from None
    if array.size == 0:
        array = array.astype(np.int64)
    if (array.ndim != 1 and not any_shape) or array.dtype.kind not in "iu":
        wanted = "whole numbers" if any_shape else "a list of whole numbers"
        raise SchemaError(f"{where}: indices: expected {wanted}, got {array.dtype} of {array.shape}")
    return np.require(array, np.int64, requirements=["C_CONTIGUOUS"])


def lap_positions(serials: np.ndarray[Any, Any], span: int, slots: int) -> np.ndarray[Any, Any]:
    """Positions of serials in the ring, counted without a gap. A lap of the ring has ``span`` serials and ``slots``
    rows: the serials behind the end of the last block are not used."""
    positions: np.ndarray[Any, Any] = serials // span * slots + np.minimum(serials % span, slots)
    return positions
