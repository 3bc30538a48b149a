"""Pinned host memory for batches on their way to a GPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

__all__ = ["PinnedMemory", "views_of"]


class PinnedMemory:
    """Arrays in one block of pinned memory: NumPy arrays on the host; after ``send``, tensors on the device."""

    def __init__(
        self,
        specs: dict[Any, tuple[tuple[int, ...], np.dtype[Any]]],
        device: torch.device,
        shifts: dict[Any, int] | None = None,
    ) -> None:
        self.device = device
        self.event: Any = None  # when it has happened, the block may be written to again
        self.starts: dict[Any, int] = {}
        total = 0
        for name, (shape, dtype) in specs.items():
            shift = (shifts or {}).get(name, 0)
            self.starts[name] = total + shift
            total += -(-(math.prod(shape) * dtype.itemsize + shift) // 64) * 64
        self.block = torch.empty(max(total, 64), dtype=torch.uint8, pin_memory=device.type == "cuda")
        memory = self.block.numpy()
        self.arrays = {}
        self.views = []
        for name, (shape, dtype) in specs.items():
            size = math.prod(shape) * dtype.itemsize
            start = self.starts[name]
            self.arrays[name] = memory[start : start + size].view(dtype).reshape(shape)
            strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
            self.views.append(
                (name, torch.from_numpy(np.empty(0, dtype)).dtype, shape, strides, start // dtype.itemsize)
            )

    def address(self, name: Any) -> int:
        return self.block.data_ptr() + self.starts[name]

    def send(self) -> torch.Tensor:
        there = self.block.to(self.device, non_blocking=True)
        return there.clone() if there is self.block else there


def views_of(block: torch.Tensor, views: list[Any]) -> dict[Any, torch.Tensor]:
    """Tensors in a block of bytes, each from (name, dtype, shape, strides, offset). To autograd they are not views of
    one another: one may be changed in place before the backward pass through another."""
    by_dtype: dict[torch.dtype, torch.Tensor] = {}
    made = {}
    for name, dtype, shape, strides, offset in views:
        if dtype not in by_dtype:
            by_dtype[dtype] = block.view(dtype)
        made[name] = by_dtype[dtype].as_strided(shape, strides, offset).data
    return made
