"""`ValueModel`: the transformer with a head that gives one number a token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .config import ModelConfig
from .transformer import Transformer

__all__ = ["ValueModel"]


class ValueModel(nn.Module):
    """A transformer whose head gives the value of each state, for PPO.

    Args:
        config: Of the transformer. It has no head over the vocabulary.

    Example:
        >>> from sharpwave.llm.model import small_model
        >>> values = ValueModel.like(small_model())
        >>> values(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        # Tied: without a head of its own, which no value would train.
        self.config = config.replace(tie_word_embeddings=True)
        self.transformer = Transformer(self.config)
        self.value_head = nn.Linear(config.hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @classmethod
    @torch.no_grad()
    def like(cls, model: Transformer) -> ValueModel:
        """Starts from the weights of a language model; its values are 0."""
        made = cls(model.config).to(device=model.device, dtype=model.dtype)
        given = dict(model.named_parameters())
        for name, parameter in made.transformer.named_parameters():
            parameter.copy_(given[name])
        return made

    @property
    def device(self) -> torch.device:
        return self.transformer.device

    def forward(self, ids: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """The value of the state behind each token, [batch, time]. Arguments as of `Transformer`."""
        return self.values(self.transformer.hidden(ids, mask, positions))

    def values(self, hidden: Tensor) -> Tensor:
        return self.value_head(hidden)[..., 0]  # type: ignore[no-any-return]
