"""A draft without a model: it copies what followed an earlier occurrence of the last n tokens (prompt lookup)."""

import torch

from decode.drafts.base import Draft, Proposal
from decode.verification.rules import NO_DRAFT


class NgramDraft(Draft):
    """Continues the longest suffix of `longest` … `shortest` tokens that occurs earlier; of several, the latest.

    Prompt lookup decoding (Saxena 2023), here over prompt and output, on the device, for all rows at once.
    """

    name = "ngram"

    def __init__(self, longest: int = 3, shortest: int = 1):
        self.longest, self.shortest = longest, shortest

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        rows, slots = history.shape
        place = torch.arange(slots, device=history.device)
        matched = torch.zeros(rows, slots, dtype=torch.long, device=history.device)
        alive = torch.ones(rows, slots, dtype=torch.bool, device=history.device)
        for n in range(1, self.longest + 1):
            # place e: an occurrence that ends just before e, so token e - n must equal the suffix's n-th from the end
            suffix = history.gather(1, (length - n).clamp_min(0)[:, None])
            shifted = torch.nn.functional.pad(history, (n, -n), value=NO_DRAFT)
            alive = alive & (shifted == suffix) & (length >= n)[:, None]
            matched = torch.where(alive, n, matched)
        known = (place < length[:, None]) & (matched >= self.shortest)
        score = torch.where(known, matched * slots + place, -1)
        best, end = score.max(1)
        source = end[:, None] + torch.arange(k, device=history.device)
        found = (best >= 0)[:, None] & (source < length[:, None])
        tokens = torch.where(found, history.gather(1, source.clamp_max(slots - 1)), NO_DRAFT)
        return Proposal(tokens, None)
