"""Which tokens of packed rows see each other: a mask for PyTorch's own attention, or blocks for flex attention."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

__all__ = ["Visible", "dense_visibility", "flex", "flex_visibility"]

Visible = Tensor | BlockMask


def dense_visibility(segments: Tensor) -> Tensor:
    """[batch, 1, time, time]: earlier tokens of the same sequence. Padding sees padding, so no row is empty (NaN).

    Memory grows with the square of the time. It is the specification that `flex_visibility` is compared with.
    """
    same = segments[:, :, None] == segments[:, None, :]
    return same.tril()[:, None]


def flex_visibility(segments: Tensor) -> BlockMask:
    """The same as blocks of 128 x 128 tokens. Blocks in which no token sees another are not computed."""
    batch, time = segments.shape

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (segments[row, query] == segments[row, key])

    return create_block_mask(sees, batch, None, time, time, device=segments.device)


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def flex(q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask, enable_gqa: bool) -> Tensor:
    # Without the compiler it computes every block, which is for tests on a CPU only. Inside of a compiled layer it is
    # compiled with the layer.
    attend = _compiled() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
    # Under autocast the rotation of q and k gives float32; unlike PyTorch's other attention, this one does not convert.
    return attend(q.to(v.dtype), k.to(v.dtype), v, block_mask=blocks, enable_gqa=enable_gqa)  # type: ignore[no-any-return]
