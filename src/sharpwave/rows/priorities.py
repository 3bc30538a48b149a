"""Priorities as users give them: one for each row, or the errors at the places of windows."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import priorities as read_priorities
from ..arrays import refuse_masked
from ..errors import SchemaError
from ..views import View, Windows
from .handles import as_handles
from .tensors import to_host

__all__ = ["one_each", "read_update", "window_priorities"]


def read_update(view: View, handles: Any, priorities: Any, mask: Any) -> tuple[Any, Any]:
    """The arguments of ``update_priorities`` as serials and float32 numbers, one each."""
    where = "update_priorities()"
    refuse_masked(f"{where}: indices", handles)
    refuse_masked(f"{where}: priorities", priorities)
    priorities, mask = to_host(priorities), to_host(mask)
    serials = as_handles(where, handles)
    if mask is None:
        priorities = one_each(priorities, len(serials))
    if isinstance(view, Windows) and np.ndim(priorities) == 2:
        priorities = window_priorities(where, view, priorities, mask)
    elif mask is not None:
        raise SchemaError(f"{where}: mask: expected with Windows() and one error a place, shape (windows, places)")
    return serials, read_priorities(where, "priorities", priorities, (len(serials),))


def one_each(priorities: Any, count: int) -> Any:
    """Priorities of shape (n, 1), as critics give errors, in the shape (n,); any others as they are."""
    try:
        shape = np.shape(priorities) if isinstance(priorities, (list, tuple)) else getattr(priorities, "shape", ())
    except ValueError:  # of different lengths
        return priorities
    if tuple(shape) != (count, 1):
        return priorities
    return priorities.reshape(count) if hasattr(priorities, "reshape") else [item for (item,) in priorities]


def window_priorities(where: str, view: Windows, errors: Any, mask: Any) -> np.ndarray[Any, Any]:
    """One priority per window: eta times the largest error among the places learnt from, plus the rest times their
    mean."""
    shape = tuple(np.shape(errors))
    if mask is None:
        raise SchemaError(
            f"{where}: got errors of shape {shape}; give mask=batch['mask'] with them, or one priority per window"
        )
    learnt = np.asarray(mask.cpu() if hasattr(mask, "cpu") else mask)
    if learnt.shape != shape or learnt.dtype != bool:
        raise SchemaError(f"{where}: mask: expected bool of shape {shape}, got {learnt.dtype} of {learnt.shape}")
    counts = learnt.sum(axis=1)
    if not counts.all():
        raise SchemaError(f"{where}: mask: expected a True in every window, got none in window {counts.argmin()}")
    raw = errors.detach().cpu() if hasattr(errors, "detach") else errors
    sizes = np.where(learnt, np.abs(np.asarray(raw, np.float64)), 0.0)
    eta = view.priority_eta
    mixed: np.ndarray[Any, Any] = eta * sizes.max(axis=1) + (1 - eta) * sizes.sum(axis=1) / counts
    return mixed
