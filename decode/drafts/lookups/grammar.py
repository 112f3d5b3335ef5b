"""The draft that drafts nothing itself: under a grammar the engine adds the tokens that it forces."""

import torch

from decode.drafts.base import Draft, Proposal


class GrammarDraft(Draft):
    """Forced tokens alone: a round verifies all that the grammar allows no choice about. Without a grammar its rounds
    are plain steps."""

    name = "grammar"

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        return Proposal(history[:, :0], None)
