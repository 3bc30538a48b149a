"""Batches as torch tensors: the same memory on the CPU, a copy on any other device."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..checks import told
from ..errors import SchemaError

__all__ = ["TensorConverter", "as_host_arrays", "read_device", "to_host", "torch_converter"]


class TensorConverter:
    """Converts a batch to tensors on a device. The device is checked once."""

    def __init__(self, device: Any, dtypes: tuple[tuple[str, np.dtype[Any]], ...]) -> None:
        torch, self._target = read_device("sample(): device", device)
        for name, dtype in dtypes:
            try:
                torch.from_numpy(np.empty(0, dtype))
            except TypeError:
                raise SchemaError(f"sample(): device: torch has no dtype for field {name!r} ({dtype})") from None
        self._from_numpy, self.is_host = torch.from_numpy, self._target.type == "cpu"

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if not self.is_host:
            return self._convert(batch)  # type: ignore[no-any-return]
        from_numpy = self._from_numpy
        return {
            key: from_numpy(value) if type(value) is _ARRAY else self._convert(value) for key, value in batch.items()
        }

    def _convert(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._convert(part) for key, part in value.items()}
        if isinstance(value, tuple):
            return tuple(self._convert(part) for part in value)
        tensor = self._from_numpy(value)
        return tensor if self.is_host else tensor.to(self._target)


@functools.cache
def torch_converter(device: Any, dtypes: tuple[tuple[str, np.dtype[Any]], ...]) -> TensorConverter:
    return TensorConverter(device, dtypes)


_ARRAY = np.ndarray


def read_device(where: str, device: Any) -> tuple[Any, Any]:
    try:
        import torch
    except ImportError:
        raise SchemaError(f'{where}: needs torch; pip install "sharpwave[torch]"') from None
    try:
        read = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise SchemaError(f"{where}: expected a torch device, got {told(device)} ({error})") from None
    if read.type == "cuda" and not torch.cuda.is_available():
        raise SchemaError(f"{where}: torch finds no CUDA here, got {device!r}; give device='cpu'")
    try:
        torch.empty(0, device=read)
    except Exception as error:  # each back end of torch raises another class
        reason = str(error).splitlines()[0]
        raise SchemaError(f"{where}: torch cannot use {device!r} here ({reason}); give device='cpu'") from None
    return torch, read


def to_host(value: Any) -> Any:
    """A tensor of a GPU as one of the host: what is computed from batches on a GPU is there."""
    has_device = hasattr(value, "detach") and value.device.type not in ("cpu", "meta")
    return value.detach().cpu() if has_device else value


def as_host_arrays(out: Any, device: Any) -> Any:
    """NumPy views of the tensors in ``out``, for the engine to fill."""
    if read_device("sample(): device", device)[1].type != "cpu":
        raise SchemaError(f"sample(): out: is filled on the host; give device='cpu' or leave out out=, got {device!r}")

    def convert(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: convert(part) for key, part in value.items()}
        if isinstance(value, tuple):
            return tuple(convert(part) for part in value)
        if isinstance(value, np.ndarray) or not hasattr(value, "numpy"):
            return value
        if value.requires_grad:
            raise SchemaError("sample(): out: a tensor that requires grad cannot be filled; pass .detach()")
        return value.numpy()

    return convert(out)
