"""Host-to-device transfer of the values of one call."""

from __future__ import annotations

from typing import Any

import numpy as np

from .columns import Torch

__all__ = ["Load"]


class Load:
    """The values of one call: those on the host are sent together, through pinned memory."""

    def __init__(self, place: Torch) -> None:
        self.place = place
        self.parts: list[Any] = []
        self.held: list[Any] = []  # keeps the memory until the kernels that read it are launched

    def put(self, value: Any) -> int:
        self.parts.append(value)
        return len(self.parts) - 1

    def tensors(self, *which: int) -> list[Any]:
        """These values as contiguous tensors at multiples of 16 bytes."""
        torch, device = self.place.torch, self.place.device
        made = []
        for at in which:
            part = self.parts[at]
            if isinstance(part, np.ndarray):
                part = torch.from_numpy(np.ascontiguousarray(part))
                part = part if device.type == "cpu" else part.pin_memory().to(device, non_blocking=True)
            part = part.contiguous()
            made.append(part.clone() if part.data_ptr() % 16 else part)
        self.held = made
        return made

    def addresses(self) -> list[int]:
        torch, device = self.place.torch, self.place.device
        hosts = [i for i, part in enumerate(self.parts) if isinstance(part, np.ndarray)]
        result = [0] * len(self.parts)
        for i, part in enumerate(self.parts):
            if i not in hosts:
                part = part.contiguous()
                if part.data_ptr() % 16:
                    part = part.clone()
                self.held.append(part)
                result[i] = part.data_ptr()
        if hosts:
            starts, total = [], 0
            for i in hosts:
                starts.append(total)
                total += -(-self.parts[i].nbytes // 16) * 16
            block = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
            memory = block.numpy()
            for i, start in zip(hosts, starts, strict=True):
                part = np.ascontiguousarray(self.parts[i])
                memory[start : start + part.nbytes] = part.reshape(-1).view(np.uint8)
            there = block if device.type == "cpu" else block.to(device, non_blocking=True)
            self.held.append(there)
            for i, start in zip(hosts, starts, strict=True):
                result[i] = there.data_ptr() + start
        return result
