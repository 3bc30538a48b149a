"""Handles: the serials that ``sample`` gives, by which rows are read and get new priorities."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import refuse_masked
from ..errors import SchemaError

__all__ = ["MOST_SOURCES", "as_handles", "lap_positions", "mark_source", "serials_of", "sources_of"]

# A handle of a batch from several buffers has the number of its buffer, plus 1, in the bits above the serial (see
# docs/format.md). So a buffer takes such a handle for a row that it does not have.
_SERIAL_BITS = 50
MOST_SOURCES = 2**12 - 1


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


def mark_source(handles: Any, source: int) -> None:
    """Writes the number of a buffer into the serials of its rows. Places without a row have negative numbers, which
    stay."""
    if handles.ndim == 1:
        handles |= (source + 1) << _SERIAL_BITS
    else:
        handles[handles >= 0] |= (source + 1) << _SERIAL_BITS


def sources_of(handles: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The numbers of the buffers; -1 where the handle is of a single buffer."""
    sources: np.ndarray[Any, Any] = (handles >> _SERIAL_BITS) - 1
    return sources


def serials_of(handles: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    serials: np.ndarray[Any, Any] = handles & ((1 << _SERIAL_BITS) - 1)
    return serials


def lap_positions(serials: np.ndarray[Any, Any], span: int, slots: int) -> np.ndarray[Any, Any]:
    """Positions of serials in the ring, counted without a gap. A lap of the ring has ``span`` serials and ``slots``
    rows: the serials behind the end of the last block are not used."""
    positions: np.ndarray[Any, Any] = serials // span * slots + np.minimum(serials % span, slots)
    return positions
