"""Batches as torch tensors: the same memory on the CPU, a copy on any other device."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..errors import SchemaError

__all__ = ["as_host_arrays", "to_torch"]


@functools.cache
def _target(device: Any) -> tuple[Any, Any]:
    """torch's ``from_numpy``, and the device to copy to; None for the CPU. Found once for each device."""
    try:
        import torch
    except ImportError:
        raise SchemaError('sample(): device: needs torch; pip install "sharpwave[torch]"') from None
    try:
        read = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise SchemaError(f"sample(): device: expected a torch device, got {device!r} ({error})") from None
    if read.type == "cuda" and not torch.cuda.is_available():
        raise SchemaError(f"sample(): device: torch finds no CUDA here, got {device!r}; give device='cpu'")
    return torch.from_numpy, None if read.type == "cpu" else read


def to_torch(batch: dict[str, Any], device: Any) -> dict[str, Any]:
    """A batch of NumPy arrays as tensors; on the CPU they share its memory."""
    from_numpy, target = _target(device)
    try:
        return {name: _convert(value, from_numpy, target) for name, value in batch.items()}
    except TypeError as error:
        raise SchemaError(f"sample(): device: torch has no dtype for one of the fields ({error})") from None


def _convert(value: Any, from_numpy: Any, target: Any) -> Any:
    if isinstance(value, dict):
        return {key: _convert(part, from_numpy, target) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_convert(part, from_numpy, target) for part in value)
    tensor = from_numpy(value)
    return tensor if target is None else tensor.to(target)


def as_host_arrays(out: Any, device: Any) -> Any:
    """NumPy views of the tensors in ``out``, for the engine to fill."""
    if _target(device)[1] is not None:
        raise SchemaError(f"sample(): out: is filled on the host; give device='cpu' or leave out one, got {device!r}")

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: convert(part) for key, part in value.items()}
        if isinstance(value, tuple):
            return tuple(convert(part) for part in value)
        return value if isinstance(value, np.ndarray) or not hasattr(value, "numpy") else value.numpy()

    return convert(out)
