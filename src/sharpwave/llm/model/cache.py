"""`KVCache`: keys and values of the tokens in each slot. Its memory is taken once."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import ModelConfig

__all__ = ["KVCache"]


class KVCache:
    """Keys and values, [layers, slots, key-value heads, context + 1, head_dim] each.

    One place more than the context: a decode step has the same shape whatever slots are idle, and idle slots write to
    place `context`, which no token reads.
    """

    def __init__(
        self,
        config: ModelConfig,
        slots: int,
        context: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, context + 1, config.head_dim)
        # Zeros: an idle slot attends to what is there, and its output must at least be finite.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.slots, self.context = slots, context
        self._every = torch.arange(slots, device=device)[:, None]

    @staticmethod
    def count_bytes(config: ModelConfig, slots: int, context: int, dtype: torch.dtype = torch.float32) -> int:
        """The memory that a cache takes."""
        places = config.num_hidden_layers * slots * config.num_key_value_heads * (context + 1)
        return 2 * places * config.head_dim * dtype.itemsize

    def write(self, layer: int, slot: int | None, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Puts keys and values [batch, heads, time, head_dim] at `positions` [batch, time].

        With `slot` the batch is one row and belongs to that slot; without, row i belongs to slot i.
        """
        rows = self._every if slot is None else self._every[slot : slot + 1]
        self.keys[layer][rows, :, positions] = keys.transpose(1, 2)
        self.values[layer][rows, :, positions] = values.transpose(1, 2)

    def read(self, layer: int, slot: int | None, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `length` places, without a copy."""
        keys, values = self.keys[layer], self.values[layer]
        if slot is not None:
            keys, values = keys[slot : slot + 1], values[slot : slot + 1]
        return keys[:, :, :length], values[:, :, :length]

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Copies the places from `start` to `end` of one slot to another."""
        self.keys[:, target, :, start:end] = self.keys[:, source, :, start:end]
        self.values[:, target, :, start:end] = self.values[:, source, :, start:end]
