"""A small language model with recurrent layers as draft: chains of sampled or most probable tokens."""

import torch

from decode.common.errors import UserError
from decode.drafts.base import Draft, DraftContext, Proposal
from decode.drafts.drafting import decoder_step, draft_tokens
from decode.model.compatibility import position_limit
from decode.model.kv_cache import StaticKVCache
from decode.model.recurrent.hybrid_cache import States, copy_states, rows_of, set_rows
from decode.model.recurrent.recurrent_runner import RecurrentRunner, group_by


class RecurrentDraft(Draft):
    """Keeps the states after each row's committed tokens, and drafts from a copy of them.

    A proposal begins by reading the tokens that were committed since the last one, the rows with equally many in one
    forward. So nothing is read twice, and rejected drafts are never in the states that are kept.
    """

    def __init__(self, runner: RecurrentRunner, name: str = "causal"):
        self.runner, self.name = runner, name
        self.context = position_limit(runner.config)

    def begin_batch(self, request: DraftContext) -> None:
        """UserError for trees: there is one state a row."""
        if self.shape is not None:
            raise UserError(
                f"draft {self.name!r} has recurrent layers and drafts chains only: give it no tree"
            )
        self.request = request
        self.runner.allocate(request.rows, request.size)
        self.kept: States = copy_states(self.runner.cache.states())
        self.known = torch.zeros(request.rows, dtype=torch.long, device=self.runner.device)

    def can_grow(self) -> bool:
        return self.runner.can_grow

    def kv_caches(self) -> list[StaticKVCache]:
        return [self.runner.cache]

    def prefill(
        self,
        row: torch.Tensor,
        prompts: torch.Tensor,
        length: torch.Tensor,
        features: torch.Tensor | None,
    ) -> None:
        self.runner.prefill(prompts, length, row)
        set_rows(self.kept, row, rows_of(self.runner.cache.states(), row))
        self.known[row] = length

    def reserve(self, size: int) -> None:
        self.runner.reserve(size)

    def propose(self, history: torch.Tensor, length: torch.Tensor, k: int) -> Proposal:
        logits = self._read_committed(history, length)
        step = decoder_step(self.runner)
        return draft_tokens(step, logits, length, k, None, self.request)

    def _read_committed(self, history: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] after the last committed token; zeros in rows that have ended, whose drafts are not used."""
        runner = self.runner
        runner.cache.set_states(copy_states(self.kept))
        logits = torch.zeros(len(length), runner.vocab_size, device=runner.device)
        for count, members in group_by((length - self.known).tolist()).items():
            if count == 0:
                continue
            row = torch.tensor(members, device=runner.device)
            start = self.known[row]
            place = start[:, None] + torch.arange(count, device=runner.device)
            read = runner.read_rows(history[row].gather(1, place), start, row)
            logits[row] = read.to(logits.dtype)
        self.kept, self.known = copy_states(runner.cache.states()), length.clone()
        return logits
