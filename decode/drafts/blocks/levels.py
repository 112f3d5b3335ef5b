"""Reads a block's precomputed logits level by level, so that chains and trees can be drawn from it."""

from collections.abc import Callable

import torch

from decode.drafts.drafting import DraftStep
from decode.model.kv_cache import TreeNodes


def level_step(
    logits: torch.Tensor, correction: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> DraftStep:
    """The DraftStep of a block with logits [B, K, V] at its K levels; its first call gives those of level 1.

    `correction` maps tokens [B, T] to what is added to the logits of their successors. q is then the corrected
    distribution, else a product of independent ones: that which tokens were drawn from, so every lossless rule stays
    exact.
    """
    level = 0

    def step(
        tokens: torch.Tensor, length: torch.Tensor, nodes: TreeNodes | None, above: torch.Tensor
    ) -> torch.Tensor:
        nonlocal level
        level += 1
        found = logits[:, level, None].expand(-1, tokens.shape[1], -1)
        return found if correction is None else found + correction(tokens)

    return step
