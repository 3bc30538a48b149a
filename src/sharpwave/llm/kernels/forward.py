"""`FusedForward`: the model over a cache, a row a token, in few kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model.cache import KVCache
from ..model.transformer import Transformer

__all__ = ["FusedForward"]


class FusedForward:
    """The same numbers as `Transformer.extend`, for rows that belong to any slots: ten kernels a layer.

    A decode step has a row for each slot, a piece of prompts a row for each of its tokens. Several rows may be of one
    slot: all keys and values of a layer are written before its attention reads them. A row at place `context` is idle.

    The projections that read the same input become one matrix product: their weights move into one tensor, of which the
    model's parameters are views from then on. So new weights that are copied into the parameters are here, too.

    Args:
        model: Its parameters are moved, see above.
        cache: Keys and values are read from and written to it.
        kernels: The module `fused` or `plain`.
    """

    def __init__(self, model: Transformer, cache: KVCache, kernels: Any) -> None:
        self._model, self._cache, self._kernels = model, cache, kernels
        every = torch.arange(cache.context, device=model.device)
        self._angles = tuple(table.contiguous() for table in model.model.rotary(every, model.dtype))
        self._layers: list[Any] = list(model.model.layers)
        self._packed = []
        for layer in self._layers:
            attention, mlp = layer.self_attn, layer.mlp
            heads = _pack([attention.q_proj, attention.k_proj, attention.v_proj])
            self._packed.append((heads, _pack([mlp.gate_proj, mlp.up_proj])))

    def __call__(self, ids: Tensor, slots: Tensor, places: Tensor) -> Tensor:
        """What the head reads, [rows, hidden_size], for token ids, slots and places of [rows] each."""
        kernels, cache = self._kernels, self._cache
        model: Any = self._model.model
        x = model.embed_tokens(ids).float()  # layers add to it in float32, as in `Transformer`
        added = None
        for number, (layer, (heads, gates)) in enumerate(zip(self._layers, self._packed, strict=True)):
            attention, mlp = layer.self_attn, layer.mlp
            keys, values = cache.keys[number], cache.values[number]
            norms = (attention.q_norm.weight, attention.k_norm.weight) if attention.qk_norm else None
            eps = layer.input_layernorm.eps
            normed = kernels.add_and_norm(x, added, layer.input_layernorm.weight, eps)
            projected = F.linear(normed, *heads)
            queries = kernels.place_heads(projected, norms, eps, self._angles, keys, values, slots, places)
            added = attention.o_proj(kernels.attend(queries, keys, values, slots, places))
            normed = kernels.add_and_norm(x, added, layer.post_attention_layernorm.weight, eps)
            added = mlp.down_proj(kernels.gate(F.linear(normed, *gates)))
        return kernels.add_and_norm(x, added, model.norm.weight, model.norm.eps)  # type: ignore[no-any-return]


def _pack(parts: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weights and biases side by side, each part a view of them."""
    weight = torch.cat([part.weight.detach() for part in parts])
    bias = torch.cat([part.bias.detach() for part in parts]) if parts[0].bias is not None else None
    sizes = [len(part.weight) for part in parts]
    for whole, name in ((weight, "weight"), (bias, "bias")):
        if whole is not None:
            for part, view in zip(parts, whole.split(sizes), strict=True):
                getattr(part, name).data = view
    return weight, bias
