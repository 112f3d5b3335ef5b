"""The distributions of a block as a DraftStep: that of a token's successor depends on its level alone."""

import torch

from decode.drafts.drafting import DraftStep
from decode.model.kv_cache import TreeNodes


def level_step(logits: torch.Tensor) -> DraftStep:
    """The DraftStep of a block with logits [B, K, V] at its K levels; its first call gives those of level 1.

    Chains drawn from it are drawn from a product of distributions, which is what q says of them, so every lossless rule
    stays exact.
    """
    level = 0

    def step(
        tokens: torch.Tensor, length: torch.Tensor, nodes: TreeNodes | None, above: torch.Tensor
    ) -> torch.Tensor:
        nonlocal level
        level += 1
        return logits[:, level, None].expand(-1, tokens.shape[1], -1)

    return step
