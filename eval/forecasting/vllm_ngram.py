"""vLLM's n-gram drafts: which of several matches it takes differs from ours, and so does what is accepted."""

import torch

from decode.drafts.base import Draft, Proposal
from decode.verification.rules import NO_DRAFT


class VllmNgramDraft(Draft):
    """Continues the longest suffix of `longest` … `shortest` tokens that occurs earlier; of several, the first.

    As vLLM 0.32 does (vllm/v1/spec_decode/ngram_proposer.py; its prompt_lookup_max and prompt_lookup_min). It copies no
    token that the text does not have yet, so chains may be shorter than K.
    """

    name = "vllm-ngram"

    def __init__(self, longest: int, shortest: int):
        self.longest, self.shortest = longest, shortest

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        tokens = torch.full((len(history), k), NO_DRAFT, device=history.device)
        for row, (line, count) in enumerate(zip(history.tolist(), length.tolist(), strict=True)):
            found = self.continuation(line[:count], k)
            tokens[row, : len(found)] = torch.tensor(found, device=history.device)
        return Proposal(tokens, None)

    def continuation(self, text: list[int], k: int) -> list[int]:
        """Up to k tokens that followed the match; [] without one."""
        for n in range(min(self.longest, len(text) - 1), self.shortest - 1, -1):
            suffix = text[-n:]
            for start in range(len(text) - n):
                if text[start : start + n] == suffix:
                    return text[start + n : start + n + k]
        return []
