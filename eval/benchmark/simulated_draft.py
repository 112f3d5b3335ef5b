"""A simulated draft with a configured acceptance rate: it separates the engine's speed from a draft's quality.

It drafts the target's greedy answer, known from an earlier plain pass, or a token that is certainly wrong, at random
for each position. The target verifies as usual, so cost and text are real; only the draft's quality is made up.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from decode.drafts.base import Draft, DraftContext, Proposal
from decode.drafts.wrappers import DraftWrapper
from decode.engine.engine import decode
from decode.model.loading import Target
from decode.verification.rules import NO_DRAFT


class FreeDraft(Draft):
    """Costs nothing: drafts no token."""

    name = "free"

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        return Proposal(history.new_empty(len(length), 0), None)


class SimulatedDraft(DraftWrapper):
    """Position i is right with probability alpha[i] given that those before were (the last of `alpha` continues).

    A `cost` draft runs as usual and its proposal is discarded. Greedy chains only; needs `record_answers` first.
    """

    def __init__(self, alpha: Sequence[float], vocab_size: int, cost: Draft | None = None):
        super().__init__(cost or FreeDraft())
        self.name, self.context = "simulated", None
        self.alpha, self.vocab_size = list(alpha), vocab_size
        self.answers: dict[tuple[int, ...], list[int]] = {}

    def record_answers(
        self, target: Target, prompts: Sequence[list[int]], tokens: int, rows: int
    ) -> None:
        """Decodes greedy answers of `tokens` tokens, past EOS too: a round drafts beyond the end of an answer."""
        endless = replace(target, eos=frozenset())
        new = [list(p) for p in prompts if tuple(p) not in self.answers]
        if new:
            for output in decode(endless, None, new, max_new_tokens=tokens, rows=rows):
                self.answers[tuple(output.prompt_ids)] = output.output_ids

    def begin_batch(self, request: DraftContext) -> None:
        super().begin_batch(request)
        self.request = request
        self.answer_tokens = torch.empty(0, 0, dtype=torch.long)

    def prefill(
        self,
        row: torch.Tensor,
        prompts: torch.Tensor,
        length: torch.Tensor,
        features: torch.Tensor | None,
    ) -> None:
        super().prefill(row, prompts, length, features)
        if self.answer_tokens.numel() == 0:
            shape = (self.request.rows, self.request.size)
            self.answer_tokens = torch.full(shape, NO_DRAFT, device=prompts.device)
        for at, tokens, count in zip(row.tolist(), prompts.tolist(), length.tolist(), strict=True):
            answer = self.answers[tuple(tokens[:count])]
            more = count + len(answer) - self.answer_tokens.shape[1]
            if more > 0:
                pad = torch.nn.functional.pad
                self.answer_tokens = pad(self.answer_tokens, (0, more), value=NO_DRAFT)
            self.answer_tokens[at] = NO_DRAFT
            self.answer_tokens[at, count : count + len(answer)] = torch.tensor(answer)

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        """The answer's tokens with probability alpha, else wrong ones; none where the answer is not known."""
        self.inner.propose(history, length, k)
        alpha = [self.alpha[min(i, len(self.alpha) - 1)] for i in range(k)]
        coins = torch.tensor([[a, 1 - a] for a in alpha], device=length.device)
        right = self.request.choose(coins.expand(len(length), k, 2)) == 0
        place = length[:, None] + torch.arange(k, device=length.device)
        known = self.answer_tokens.gather(1, place.clamp_max(self.answer_tokens.shape[1] - 1))
        known = torch.where(place < self.answer_tokens.shape[1], known, NO_DRAFT)
        wrong = torch.where(known == NO_DRAFT, NO_DRAFT, (known + 1) % self.vocab_size)
        return Proposal(torch.where(right, known, wrong), None)


def simulated_names(drafts: Sequence[Draft | None]) -> str:
    """The names of the simulated drafts, which make tensors anew in each round: no graph can hold them. "" for none."""
    return ", ".join(one.name for one in drafts if isinstance(one, SimulatedDraft))
