"""Runs every shape of rounds once before decoding is timed, so that nothing is compiled or tuned while a clock runs."""

import copy
from collections.abc import Sequence
from itertools import islice

from torch import Tensor

from decode.drafts.base import Draft, Proposal
from decode.drafts.wrappers import DraftWrapper, TwoSourceDraft
from decode.engine.engine import SpeculativeEngine
from decode.engine.modes import CAPTURED
from decode.model.vision import ImageInputs
from decode.verification.rules import NO_DRAFT

ROUNDS = 3


def one_batch_per_shape(
    engine: SpeculativeEngine, batches: Sequence[list[list[int]]], max_new_tokens: int
) -> list[int]:
    """The numbers of the batches, each decoded at once, that are the first of their shape (rows, slots a row)."""
    shapes: dict[tuple[int, int], int] = {}
    for number, prompts in enumerate(batches):
        rows = max(len(prompts), engine.least_rows)
        shapes.setdefault((rows, engine.num_slots(prompts, max_new_tokens, rows)), number)
    return list(shapes.values())


def share_buffers(
    engines: Sequence[SpeculativeEngine],
    batches: Sequence[list[list[int]]],
    max_new_tokens: int,
) -> None:
    """Gives the target of these engines K/V buffers for whatever they decode of the batches, each decoded at once.

    A CUDA graph is of its buffers: without this those of the engines would move as the engines take turns.
    """
    captured = [engine for engine in engines if engine.mode in CAPTURED]
    if captured:
        rows = max(map(len, batches))
        slots = [e.num_slots(b, max_new_tokens, rows) for e in captured for b in batches]
        captured[0].target.runner.allocate(rows, max(slots))
    for engine in captured:
        engine.least_rows = rows


def run_first_rounds(
    engine: SpeculativeEngine,
    prompts: list[list[int]],
    max_new_tokens: int,
    images: Sequence[ImageInputs | None] | None = None,
) -> None:
    """Prefill and a few rounds of decoding these prompts with their images, in buffers for `max_new_tokens`.

    Where compiled code drops the columns of a chain without any draft (`drop_empty_columns`), rounds with and without
    drafts have different shapes. Both run then, whatever the draft finds in these prompts.
    """
    engines, draft = [engine], engine.draft
    compiled_on_cpu = engine.mode == "compiled" and engine.device.type == "cpu"
    if (
        compiled_on_cpu
        and draft is not None
        and draft.shape is None
        and draft.reads.aux_layers is None
    ):
        for drafts in (True, False):
            other = copy.copy(engine)
            other.draft = ForcedDraft(draft, drafts)
            engines.append(other)
    for one in engines:
        records = one.speculate(prompts, max_new_tokens=max_new_tokens, images=images)
        for _ in islice(records, (1 + ROUNDS) * len(prompts)):
            pass


class ForcedDraft(DraftWrapper):
    """`inner`, but every token of its proposals is a draft, or none. They are not compiled; those of `inner` are."""

    def __init__(self, inner: Draft, drafts: bool):
        super().__init__(inner)
        self.runs = "host"
        self.drafts = drafts
        self.proposals: list[Proposal] = []

    def propose(self, history: Tensor, length: Tensor, k: int) -> Proposal:
        if len(self.proposals) == 1 and isinstance(self.inner, TwoSourceDraft):
            # As in a round of copied tokens: the next one has code of its own, which reads them.
            self.inner.skip(history, length, k)
            proposal = self.proposals[0]
        else:
            proposal = self.inner.propose(history, length, k)
        self.proposals.append(proposal)
        tokens = (
            proposal.tokens.clamp_min(0) if self.drafts else proposal.tokens.clamp_max(NO_DRAFT)
        )
        return Proposal(tokens, proposal.q, finite=proposal.finite)
