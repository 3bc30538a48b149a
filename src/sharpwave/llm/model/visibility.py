"""Which tokens of packed rows see each other: a mask for PyTorch's own attention, or blocks for flex attention."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

__all__ = ["Visible", "dense_visibility", "flex", "flex_visibility"]

Visible = Tensor | BlockMask

_BLOCK = 128


def dense_visibility(segments: Tensor) -> Tensor:
    """[batch, 1, time, time]: earlier tokens of the same sequence. Padding sees padding, so no row is empty (NaN).

    Memory grows with the square of the time. It is the specification that `flex_visibility` is compared with.
    """
    same = segments[:, :, None] == segments[:, None, :]
    return same.tril()[:, None]


def flex_visibility(segments: Tensor) -> BlockMask:
    """The same as blocks of 128 x 128 tokens. Blocks in which no token sees another are not computed.

    Equal numbers must be neighbours, as they are in packed rows: then the ends of two blocks say what is between them.
    `create_block_mask` would look at all pairs of tokens, which takes as long as the attention of a small model.
    """
    batch, time = segments.shape

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (segments[row, query] == segments[row, key])

    blocks = F.pad(segments, (0, -time % _BLOCK)).view(batch, 1, -1, _BLOCK)
    first, last = blocks[..., 0], blocks[..., -1]
    count = blocks.shape[2]
    is_earlier = torch.ones(count, count, dtype=torch.bool, device=segments.device).tril(-1)
    some = (first[..., :, None] == last[..., None, :]) & is_earlier
    every = (last[..., :, None] == first[..., None, :]) & is_earlier
    # A block on the diagonal is always needed, and never whole: tokens do not see later ones.
    some = (some & ~every) | torch.eye(count, dtype=torch.bool, device=segments.device)
    return BlockMask.from_kv_blocks(
        *_in_order(some), *_in_order(every), BLOCK_SIZE=_BLOCK, mask_mod=sees, seq_lengths=(time, time)
    )


def _in_order(needed: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries needs, and their numbers before those of the others."""
    order = needed.int().argsort(dim=-1, descending=True, stable=True)
    return needed.sum(-1, dtype=torch.int32), order.int()


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def flex(q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask, enable_gqa: bool) -> Tensor:
    # Without the compiler it computes every block, which is for tests on a CPU only. Inside of a compiled layer it is
    # compiled with the layer.
    attend = _compiled() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
    # Under autocast the rotation of q and k gives float32; unlike PyTorch's other attention, this one does not convert.
    return attend(q.to(v.dtype), k.to(v.dtype), v, block_mask=blocks, enable_gqa=enable_gqa)  # type: ignore[no-any-return]
