"""The function that a user gives with ``map=``: it changes each batch before the iterator returns it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..checks import told
from ..errors import SchemaError
from .protocol import Batch, BatchMap

__all__ = ["read_map"]


def read_map(where: str, given: Any) -> BatchMap | None:
    """The function, with a check of its result; None where there is none."""
    if given is None:
        return None
    if not callable(given):
        raise SchemaError(f"{where}: map: expected a function of a batch, got {told(given)}")
    change: Callable[[Batch], Any] = given

    def run(batch: Batch) -> Batch:
        changed = change(batch)
        if not isinstance(changed, dict):
            raise SchemaError(f"{where}: map: expected a function that returns a dict, got {told(changed)} from it")
        return changed

    return run
