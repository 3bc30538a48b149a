"""ApexRL's DistillationBuffer: upstream has the name and a page of documentation, and no code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sharpwave as sw
from sharpwave.errors import StorageError

__all__ = ["DistillationBuffer"]


class DistillationBuffer(sw.DistillationBuffer):
    """``sharpwave.DistillationBuffer`` with upstream's arguments. It always gives tensors, and batches are tuples.

    Args:
        capacity: Rows kept; the oldest are overwritten first.
        obs_shape: Of one observation.
        device: Where the tensors are.
        **options: As of ``sharpwave.DistillationBuffer``.
    """

    def __init__(self, capacity: int, obs_shape: Any, device: Any = "cpu", **options: Any) -> None:
        super().__init__(capacity, obs_shape=obs_shape, device="cpu" if device is None else device, **options)

    def sample(self, batch_size: int, **options: Any) -> tuple[Any, Any]:  # type: ignore[override]
        """``(obs, expert_actions)`` of rows drawn with replacement."""
        batch = super().sample(batch_size, **options)
        return batch["obs"], batch["action"]

    def batches(self, batch_size: int, epochs: int = 1, **options: Any) -> Iterator[tuple[Any, Any]]:  # type: ignore[override]
        """``(obs, expert_actions)`` of all rows in random order, each once in an epoch."""
        return ((batch["obs"], batch["action"]) for batch in super().batches(batch_size, epochs, **options))

    def steps(self, length: int = 1, **options: Any) -> Iterator[tuple[Any, Any, Any]]:  # type: ignore[override]
        """``(obs, expert_actions, dones)`` of all steps in the order in which they were added."""
        return ((batch["obs"], batch["action"], batch["done"]) for batch in super().steps(length, **options))

    @classmethod
    def load(cls, path: Any, device: Any = "cpu") -> DistillationBuffer:
        """Opens the file that ``save`` wrote."""
        opened = sw.open(path, device=device)
        if not isinstance(opened, sw.DistillationBuffer):
            opened.close()
            raise StorageError(f"load(): expected a DistillationBuffer in {str(path)!r}, got {type(opened).__name__}")
        made = cls._over(opened._rows, device)  # type: ignore[arg-type]
        assert isinstance(made, cls)
        return made
