"""`Transformer`: a decoder-only model of the Llama and Qwen family, for generators and learners alike.

Parameters have the names of Hugging Face's checkpoints, so a state dict is a checkpoint and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from ...errors import SchemaError
from .cache import KVCache
from .config import ModelConfig
from .rope import RotaryPositions, rotate
from .visibility import Visible, dense_visibility, flex, flex_visibility

__all__ = ["Transformer"]


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(self.weight.dtype)


class _Where:
    """What every layer of one call shares: angles, the mask, and the places in the cache."""

    def __init__(self, cos: Tensor, sin: Tensor, mask: Visible | None) -> None:
        self.cos, self.sin, self.mask = cos[:, None], sin[:, None], mask
        self.cache: KVCache | None = None
        self.slot: int | None = None
        self.length = 0
        self.positions: Tensor | None = None


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        inner, shared = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, inner, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, shared, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, shared, bias=config.qkv_bias)
        self.o_proj = nn.Linear(inner, config.hidden_size, bias=config.attention_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.qk_norm, self.is_grouped = config.qk_norm, inner != shared

    def forward(self, x: Tensor, where: _Where) -> Tensor:
        batch, time, _ = x.shape
        heads = (batch, time, -1, self.head_dim)
        q, k, v = self.q_proj(x).view(heads), self.k_proj(x).view(heads), self.v_proj(x).view(heads)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q.transpose(1, 2), where.cos, where.sin), rotate(k.transpose(1, 2), where.cos, where.sin)
        v = v.transpose(1, 2)
        if where.cache is not None:
            assert where.positions is not None
            where.cache.write(self.layer, where.slot, where.positions, k, v)
            k, v = where.cache.read(self.layer, where.slot, where.length)
        if isinstance(where.mask, BlockMask):
            y = flex(q, k, v, where.mask, self.is_grouped).transpose(1, 2).reshape(batch, time, -1)
        elif time == 1 and where.mask is not None:
            # The heads of a group as queries of one key-value head: keys are read once, and never repeated in memory.
            grouped = q.view(batch, k.shape[1], -1, self.head_dim)
            y = F.scaled_dot_product_attention(grouped, k, v, attn_mask=where.mask).view(batch, 1, -1)
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=where.mask, is_causal=where.mask is None, enable_gqa=self.is_grouped
            )
            y = y.transpose(1, 2).reshape(batch, time, -1)
        return self.o_proj(y)  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config, layer), MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, where: _Where) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), where)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class _Body(nn.Module):
    """What Hugging Face calls `model`: everything below the head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryPositions(config)


class Transformer(nn.Module):
    """A decoder-only language model.

    Attributes:
        packed_attention: How packed rows are computed: `"dense"` with a mask of all pairs of tokens, `"flex"` with
            PyTorch's flex attention, which leaves out the pairs of different sequences and needs CUDA to train.
        recomputes_layers: Whether activations of layers are computed again in the backward pass instead of kept.

    Example:
        >>> from sharpwave.llm.model import small_model
        >>> model = small_model()
        >>> model(torch.tensor([[1, 2, 3]])).shape[:2]
        torch.Size([1, 3])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.packed_attention: Literal["dense", "flex"] = "dense"
        self.recomputes_layers = False
        self.model = _Body(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    def forward(self, ids: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Logits [batch, time, vocabulary] of whole sequences.

        Args:
            ids: Token ids, [batch, time].
            mask: Which sequence of its row each token belongs to, [batch, time]: 0 is padding, and tokens with the same
                number see each other. So the usual mask of zeros and ones is a padded batch, and 1, 1, 2, 2, 2, 0 packs
                two sequences into a row. None: each row is one sequence.
            positions: Position of each token in its sequence, [batch, time]. None: counted from the mask.
        """
        return self.logits(self.hidden(ids, mask, positions))

    def hidden(self, ids: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """What the head reads, [batch, time, hidden_size]. A learner applies `logits` to pieces of it."""
        _check_shapes(ids, mask, positions)
        if positions is None:
            positions = _count(ids, mask)
        visible: Visible | None = None
        if mask is not None:
            visible = flex_visibility(mask) if self.packed_attention == "flex" else dense_visibility(mask)
        cos, sin = self.model.rotary(positions, self.dtype)
        return self._run(ids, _Where(cos, sin, visible))

    def extend(
        self, ids: Tensor, positions: Tensor, cache: KVCache, *, slot: int | None = None, length: int | None = None
    ) -> Tensor:
        """The same over a cache: writes the tokens' keys and values, and gives what the head reads.

        Args:
            ids: Token ids: [1, time] for one slot, or [slots, 1] for a step of all of them.
            positions: Position of each token, of the same shape. `cache.context` marks a row as idle.
            cache: Holds the keys and values of all earlier positions of the slots.
            slot: The slot that the row belongs to; None for all slots.
            length: Places of the cache to look at, at least 1 + the largest position that is not idle. None: all.
        """
        length = cache.context if length is None else length
        # An idle row's place is behind the context; its angle must not stretch the others' (dynamic scaling).
        cos, sin = self.model.rotary(positions.clamp(max=cache.context - 1), self.dtype)
        where = _Where(cos, sin, (torch.arange(length, device=ids.device) <= positions[..., None])[:, None])
        where.cache, where.slot, where.length, where.positions = cache, slot, length, positions
        return self._run(ids, where)

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return F.linear(hidden, head.weight)

    def _run(self, ids: Tensor, where: _Where) -> Tensor:
        # Layers add to a sum in float32, whatever the weights are. Rounded to bfloat16 twice a layer, it would be the
        # largest part of how far log-probabilities that were computed in two ways lie apart.
        x = self.model.embed_tokens(ids).float()
        recomputes = self.recomputes_layers and torch.is_grad_enabled()
        for layer in self.model.layers:
            if recomputes:  # nothing is random, and reading a random state cannot be captured in a graph
                x = checkpoint(layer, x, where, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, where)
        return self.model.norm(x)  # type: ignore[no-any-return]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of a checkpoint."""
        for name, parameter in self.named_parameters():
            yield name, parameter.detach()

    @torch.no_grad()
    def fill_randomly(self, seed: int = 0) -> Transformer:
        """Fresh weights, as Llama and Qwen start: normal with `initializer_range`, norms 1, biases 0."""
        source = torch.Generator("cpu").manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                drawn = torch.randn(parameter.shape, generator=source) * self.config.initializer_range
                parameter.copy_(drawn)
        return self


def _check_shapes(ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> None:
    if ids.dim() != 2:
        raise SchemaError(f"Transformer(): ids of shape {tuple(ids.shape)}, expected [batch, time]")
    for name, given in (("mask", mask), ("positions", positions)):
        if given is not None and given.shape != ids.shape:
            raise SchemaError(f"Transformer(): {name} of shape {tuple(given.shape)}, ids of {tuple(ids.shape)}")


def _count(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Positions: each run of equal numbers in the mask counts from 0."""
    places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    if mask is None:
        return places
    begins = torch.ones_like(mask, dtype=torch.bool)
    begins[:, 1:] = mask[:, 1:] != mask[:, :-1]
    return places - torch.where(begins, places, 0).cummax(dim=1).values
