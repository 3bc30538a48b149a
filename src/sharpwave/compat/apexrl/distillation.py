"""DistillationBuffer: upstream has the name alone."""

from __future__ import annotations

from typing import Any

import sharpwave as sw

__all__ = ["DistillationBuffer"]


class DistillationBuffer(sw.DistillationBuffer):
    """``sharpwave.DistillationBuffer`` with tensors wherever it is."""

    def __init__(self, capacity: int, obs_shape: Any, device: Any = "cpu", **options: Any) -> None:
        super().__init__(capacity, obs_shape, device, **options)

    @classmethod
    def load(cls, path: Any, device: Any = "cpu") -> sw.DistillationBuffer:
        """What ``save`` wrote, as tensors."""
        return super().load(path, device)
