"""Batches as torch tensors: the same memory on the CPU, a copy on any other device."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import SchemaError

__all__ = ["as_host_arrays", "to_torch"]


def _read_device(device: Any) -> Any:
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
    return read


def to_torch(batch: dict[str, Any], device: Any) -> dict[str, Any]:
    """A batch of NumPy arrays as tensors; on the CPU they share its memory."""
    import torch

    target = _read_device(device)

    def convert(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {key: convert(part, f"{name}/{key}") for key, part in value.items()}
        if isinstance(value, tuple):
            return tuple(convert(part, f"{name}/{i}") for i, part in enumerate(value))
        try:
            tensor = torch.from_numpy(value)
        except TypeError:
            raise SchemaError(f"sample(): device: torch has no dtype for field {name!r} ({value.dtype})") from None
        return tensor if target.type == "cpu" else tensor.to(target)

    return {name: convert(value, name) for name, value in batch.items()}


def as_host_arrays(out: Any, device: Any) -> Any:
    """NumPy views of the tensors in ``out``, for the engine to fill."""
    if _read_device(device).type != "cpu":
        raise SchemaError(f"sample(): out: is filled on the host; give device='cpu' or leave out one, got {device!r}")

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: convert(part) for key, part in value.items()}
        if isinstance(value, tuple):
            return tuple(convert(part) for part in value)
        return value if isinstance(value, np.ndarray) or not hasattr(value, "numpy") else value.numpy()

    return convert(out)
