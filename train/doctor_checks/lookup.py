"""Whether answers copy their prompts or themselves so much that a lookup drafts them without any training."""

from collections.abc import Sequence

import torch

from decode.drafts.lookup import NgramDraft
from train.doctor_checks.findings import Tally
from train.doctor_checks.rows import SeenRow

DRAFT_LENGTH = 4
LEAST_TAU = 1.95
"""From about two tokens a round on, a draft has to be good to do better than a lookup that costs nothing."""
MOST_ANSWERS, MOST_TOKENS = 64, 512
"""Answers that are looked at, and tokens of each: some milliseconds an answer."""
ROWS = 128  # places of an answer that are looked up together


class LookupCheck:
    """Decodes the answers once more, drafted for by an n-gram: their tokens are known, so no target is asked."""

    def __init__(self, tally: Tally):
        self.tally, self.draft = tally, NgramDraft()
        self.answers = self.emitted = self.rounds = 0

    def add(self, row: SeenRow) -> None:
        for start, end in row.spans if not row.is_window else ():
            if self.answers < MOST_ANSWERS:
                self.answers += 1
                end = min(end, start + MOST_TOKENS)
                self.emitted += max(0, end - start - 1)  # prefill gives the first token
                self.rounds += rounds_of(row.ids[:end], start + 1, self.draft)

    @property
    def tau(self) -> float | None:
        return self.emitted / self.rounds if self.rounds else None

    def finish(self) -> None:
        if self.tau is not None and self.tau >= LEAST_TAU:
            kind = "answers copy their prompts"
            self.tally.report(kind, self.answers, self.answers, ngram_tau=self.tau)

    def facts(self) -> dict[str, str | int]:
        shown = "–" if self.tau is None else f"{self.tau:.2f} ({self.answers:,} answers)"
        return {f"τ of an n-gram, K = {DRAFT_LENGTH}": shown}


def rounds_of(ids: Sequence[int], start: int, draft: NgramDraft) -> int:
    """Rounds that greedy decoding of ids[start:] takes with this draft, each of up to DRAFT_LENGTH tokens."""
    text = torch.tensor(ids)
    proposed: list[list[int]] = []  # after each of the tokens from `start` on
    for first in range(start, len(ids), ROWS):
        lengths = torch.arange(first, min(first + ROWS, len(ids)))
        history = text.expand(len(lengths), -1)
        proposed += draft.propose(history, lengths, DRAFT_LENGTH).tokens.tolist()
    at, rounds = start, 0
    while at < len(ids):
        taken = 0
        for token, real in zip(proposed[at - start], ids[at:], strict=False):
            if token != real:
                break
            taken += 1
        at, rounds = at + taken + 1, rounds + 1
    return rounds
