"""The target's own first layers as draft (self-speculation): nothing to train, nothing to save."""

import torch

from decode.drafts.base import Draft, DraftContext, Proposal
from decode.drafts.drafting import build_tree_plan, decoder_step, draft_tokens
from decode.model.loading import Target
from decode.verification.tree import TreeShape


class EarlyExitDraft(Draft):
    """The first `layers` layers, final norm and head of the target (LayerSkip, Elhoushi et al. 2024).

    They use the target's own KV cache: it holds all committed tokens already, and verification overwrites what the
    draft wrote for drafted tokens. Useful for targets that were trained for early exit; acceptance is low on others.
    """

    name = "early-exit"

    def __init__(self, target: Target, layers: int, shape: TreeShape = None):
        self.target, self.layers, self.shape = target, layers, shape

    def begin_batch(self, request: DraftContext) -> None:
        self.request = request
        self.plan = build_tree_plan(self.shape, self.target.decoder.device)
        self.decoder = self.target.decoder.first_layers(self.layers)

    def reserve(self, size: int) -> None:
        self.decoder = self.target.decoder.first_layers(self.layers)

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        last = history.gather(1, length[:, None] - 1)
        logits = self.decoder.step(last, length - 1)[:, -1]
        return draft_tokens(decoder_step(self.decoder), logits, length, k, self.plan, self.request)
