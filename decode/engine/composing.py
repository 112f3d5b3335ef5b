"""Drafts composed of others: a lookup in front, chains that end by confidence, drafting beside the target's pass, and
learning from it."""

from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.drafts.mirror import MirrorConfig, MirrorDraft
from decode.drafts.registry import DRAFT_FAMILIES
from decode.drafts.wrappers import ConfidentDraft, TwoSourceDraft
from decode.engine.learning import LearningDraft
from decode.model.loading import Target


def add_lookup(draft: Draft | None, lookup: str, min_match: int, target: Target) -> Draft:
    """`draft` with the family `lookup` in front, which drafts where its match has at least `min_match` tokens.

    UserError unless `lookup` copies from the text and `draft` does not.
    """
    lookups = {f.name: f.create_lookup for f in DRAFT_FAMILIES.values() if f.create_lookup}
    if lookup not in lookups:
        raise UserError(f"lookup {lookup!r} is unknown: give {' or '.join(lookups)}")
    if draft is None or draft.name in lookups:
        name = "none" if draft is None else draft.name
        raise UserError(
            f"draft {name!r} has no model for a lookup in front: give another or no lookup"
        )
    if isinstance(draft, ConfidentDraft):
        raise UserError("a lookup belongs inside: add it to the draft before confidence")
    if isinstance(draft, MirrorDraft):
        raise UserError("mirror drafts before a lookup could look: give one of both")
    return TwoSourceDraft(lookups[lookup](min_match), draft, target.runner.vocab_size)


def add_confidence(draft: Draft | None, confidence: float) -> ConfidentDraft:
    """`draft` with chains that end by confidence. UserError for a draft without a model."""
    name = "none" if draft is None else draft.name
    family = DRAFT_FAMILIES.get(name)
    if draft is None or (family is not None and family.create_lookup is not None):
        raise UserError(f"draft {name!r} has no model whose passes confidence could save: drop it")
    if isinstance(draft, MirrorDraft):
        raise UserError("mirror drafts chains of one length: give it no confidence")
    return ConfidentDraft(draft, confidence)


def make_mirror(draft: Draft | None, config: MirrorConfig, target: Target) -> MirrorDraft:
    """`draft`, a small LM, drafting while the target verifies. UserError for any other draft."""
    if draft is None:
        raise UserError("mirror needs a small language model as draft: name one")
    if isinstance(draft, LearningDraft):
        raise UserError(
            "mirror drafts while the target's logits are not there to learn from: drop one of both"
        )
    return MirrorDraft(draft, target, config)


def add_learning(draft: Draft | None, rate: float, target: Target) -> LearningDraft:
    """`draft`, learning in steps of size `rate` while it serves; one that learns already, as it is. UserError for a
    draft that cannot."""
    if draft is None:
        raise UserError("draft 'none' cannot learn: name one, or leave learn out")
    return draft if isinstance(draft, LearningDraft) else LearningDraft(draft, target, rate)
