"""Attention through torch's flex_attention, which evaluates a mask inside its kernel. NO GPU HAS RUN THIS YET.

On CUDA the kernel and the search for empty blocks are compiled. Elsewhere both run as torch's own reference, which
keeps all scores and has no gradient: it serves the tests, which compare it with dense masks.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from decode.model.masking.masks import AttentionMask


@cache
def compiled(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """`function` compiled for shapes that change on CUDA, as it is elsewhere."""
    return torch.compile(function, dynamic=True) if device_type == "cuda" else function


def block_mask(mask: AttentionMask, window: int | None) -> BlockMask:
    """The mask as flex_attention takes it: its function, and the blocks of 128 x 128 in which anything is seen.

    Made once for all layers with the same window.
    """

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return mask.visible(row, query, key, window)

    if window not in mask.block_masks:
        rows, queries, keys = mask.shape
        create = compiled(create_block_mask, mask.device.type)
        mask.block_masks[window] = create(mask_mod, rows, None, queries, keys, device=mask.device)
    found: BlockMask = mask.block_masks[window]
    return found


def attend_flex(
    query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask, scale: float | None
) -> tuple[Tensor, Tensor]:
    """(out [B, H, Q, Dv], log-sum-exp of the scores [B, H, Q]) of query [B, H, Q, D] over key, value [B, Hkv, S, D].

    H is a multiple of Hkv. Gradients flow through both. Scores of a query that sees nothing have -inf.
    """
    attend = compiled(flex_attention, query.device.type)
    out, aux = attend(
        query, key, value, block_mask=blocks, scale=scale, enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out, aux.lse


def add_own_keys(out: Tensor, lse: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over more keys: out [B, H, Q, Dv] in its share of it, and the weights [B, H, Q, U] of the new keys.

    `lse` [B, H, Q] is the log-sum-exp of the scores behind `out`; `scores` [B, H, Q, U] are those of the new keys.
    """
    total = torch.cat([lse[..., None], scores.to(lse.dtype)], -1).logsumexp(-1, keepdim=True)
    return out * (lse[..., None] - total).exp().to(out.dtype), (scores - total).exp().to(out.dtype)
