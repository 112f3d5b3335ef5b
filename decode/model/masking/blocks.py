"""Attention of a block of queries at a time: memory is linear in the length of a text."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from decode.model.masking.masks import AttentionMask, key_index, take_keys

BLOCK = 512
"""Queries whose mask and scores are in memory at once."""
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(query [B, Hkv, G * n, D], key [B, Hkv, m, D], value [B, Hkv, m, Dv], mask [B, 1, G * n, m]) ->
[B, Hkv, G * n, Dv]."""


def attend_in_blocks(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    window: int | None,
) -> Tensor:
    """[B, Hkv, G, Q, Dv] of query [B, Hkv, G, Q, D] over key and value [B, Hkv, S, D] where `mask` allows it.

    Only keys that a block may see are read. Backward computes each block again, so that neither its mask nor its
    scores are kept: at any time memory holds those of one block, BLOCK x S values.
    """
    pieces = []
    for start in range(0, query.shape[3], BLOCK):
        some = query[:, :, :, start : start + BLOCK]
        ranges = mask.key_ranges(start, start + some.shape[3], window)
        pieces.append(recomputed(_block, attend, some, key, value, mask, window, start, ranges))
    return torch.cat(pieces, 3)


def recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    """`function(*inputs)`, of which backward keeps the inputs alone: it computes the rest again."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False)


def run_now(function: Callable[..., Any], *inputs: Any) -> Any:
    """`function(*inputs)`, which keeps for backward what it needs: the other choice beside `recomputed`."""
    return function(*inputs)


def _block(
    attend: Attend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    window: int | None,
    start: int,
    ranges: list[tuple[int, int]],
) -> Tensor:
    """[B, Hkv, G, n, Dv] of the n queries from `start` on."""
    groups, count = query.shape[2:4]
    queries = torch.arange(start, start + count, device=query.device)
    allow = mask.at(queries, key_index(ranges, query.device), window)
    packed = query.flatten(2, 3)
    out = attend(
        packed,
        take_keys(key, ranges),
        take_keys(value, ranges),
        allow.repeat(1, groups, 1)[:, None],
    )
    return out.unflatten(2, (groups, count))
