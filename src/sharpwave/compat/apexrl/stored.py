"""Stored: a tensor that is a copy of stored rows, and refuses to be written to."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sharpwave.errors import SchemaError

__all__ = ["Stored"]

_IN_PLACE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITES = {"__setitem__", "__delitem__", "__set__", *(f"__i{verb}__" for verb in _IN_PLACE)}


class Stored(torch.Tensor):
    """Upstream's storage can be written to in place. A write to a copy of it would be lost: here it is an error."""

    @staticmethod
    def of(tensor: torch.Tensor, hint: str) -> Stored:
        stored = tensor.as_subclass(Stored)
        stored.__dict__["_hint"] = hint
        return stored

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        writes = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
        target = kwargs.get("out", args[0] if writes and args else None)
        if isinstance(target, Stored):
            raise SchemaError(f"{name}(): {target.__dict__.get('_hint', '')}")
        source = next((value for value in args if isinstance(value, Stored)), None)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if source is None:
                return result
            return _as_view(result, source)


def _as_view(result: Any, source: Stored) -> Any:
    """Results are plain tensors, except views of the copy."""
    if isinstance(result, (tuple, list)):
        return type(result)(_as_view(part, source) for part in result) if type(result) in (tuple, list) else result
    if isinstance(result, np.ndarray):
        result.flags.writeable = False
        return result
    if not isinstance(result, torch.Tensor) or result.is_sparse:
        return result
    if result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
        return Stored.of(result, source.__dict__.get("_hint", ""))
    return result.as_subclass(torch.Tensor)
