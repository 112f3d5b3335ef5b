"""P-EAGLE: an EAGLE-3 head that drafts K tokens in one pass (arXiv 2602.01469).

Behind the last pair of a hidden state and a token follow K - 1 pairs of `mask_hidden`, which is trained, and the mask
token. The pair at place t predicts token t + 2, each mask the token after that.
"""

import torch

from decode.drafts import eagle
from decode.drafts.base import Proposal
from decode.drafts.blocks.levels import level_step
from decode.drafts.blocks.mask_token import check_mask_token
from decode.drafts.drafting import draft_tokens
from decode.drafts.eagle import EagleDraft
from decode.drafts.eagle_model import Eagle3Model
from decode.model.loading import Target
from decode.verification.tree import max_depth


class PEagleDraft(EagleDraft):
    """An EagleDraft whose masks lie behind the committed pairs in the KV cache, where the next pass overwrites them."""

    net: Eagle3Model

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        depth = max_depth(self.shape, k)
        tokens, states = self._committed_pairs(history, length)
        self.unread = k + 1
        masks = history.new_full((len(history), depth - 1), self.net.mask_token or 0)
        hidden = self.net.mask_hidden.expand(len(history), depth - 1, -1)
        inputs = self.net.init_state(torch.cat([states, hidden.to(states.dtype)], 1))
        self.kv_cache.slots.set_positions(length - 1 - tokens.shape[1], tokens.shape[1] + depth - 1)
        found = self._forward(inputs, torch.cat([tokens, masks], 1))[:, -depth:]
        logits = self._logits(found)
        step, first = level_step(logits), logits[:, 0]
        return draft_tokens(step, first, length, k, self.plan, self.request, self.vocab)


def load(path: str, target: Target, device: str, dtype: str) -> PEagleDraft:
    """A head from a folder or the Hub. UserError if it does not fit the target or tensors are missing."""
    net, _, family = eagle.load_net(path, target, device, dtype)
    assert isinstance(net, Eagle3Model)
    assert net.mask_token is not None  # the importer requires it
    check_mask_token(path, net.mask_token, target)
    return PEagleDraft(net, target, family)
