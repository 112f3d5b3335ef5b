"""What prompts, grammars, images and drafts are checked for before anything is decoded."""

import warnings
from collections.abc import Sequence

from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.drafts.causal import LanguageModelDraft
from decode.model.loading import Target
from decode.model.vision import ImageInputs
from decode.model.vocabularies import check_embedded


def check_draft_length(target: Target, k: int, name: str = "k") -> None:
    """UserError unless drafts of `k` tokens, the setting `name`, fit the target's context after one token."""
    longest = target.runner.context - 1
    if not 1 <= k <= longest:
        raise UserError(
            f"{name} is {k}: give 1 to {longest}, since the context of {target.name} holds {longest + 1} tokens"
        )


def warn_of_short_draft(draft: Draft, longest: int) -> None:
    """A warning if the draft cannot read all of a prompt and its answer, which have up to `longest` tokens."""
    limits = [x.reads.context for x in draft.buffers().drafts if x.reads.context is not None]
    if limits and min(limits) < longest:
        warnings.warn(
            f"draft {draft.name!r} has a context of {min(limits)} tokens, and prompts with answers may be longer: "
            "nothing is drafted beyond it",
            stacklevel=3,
        )


def check_draft_fits(target: Target, draft: Draft) -> None:
    """UserError for a draft that was made for another target, and for a draft of trees, or one that acts in the
    target's pass, and a target that takes neither."""
    for part in draft.buffers().drafts:
        made_for = part.reads.target
        own = made_for is None or made_for.runner.model is target.runner.model
        fits = part.reads.tokenizer in ("", target.fingerprint)
        if isinstance(part, LanguageModelDraft):
            fits = fits and part.runner.vocab_size == target.runner.vocab_size
        if not (own and fits):
            raise UserError(
                f"draft {draft.name!r} was loaded for another target than {target.name!r}: load it again for this one"
            )
    if target.runner.takes_trees:
        return
    reason = None
    if draft.shape is not None:
        reason = "drafts trees, which need a state for each node: give it no tree"
    elif draft.runs == "pass":
        reason = "acts in the middle of the target's pass, of which one round may have several: choose another"
    if reason is not None:
        raise UserError(
            f"target {target.name!r} has recurrent layers, and draft {draft.name!r} {reason}"
        )


def check_prompts(prompts: list[list[int]], context: int, max_new_tokens: int) -> None:
    """UserError for no prompts, an empty prompt, or one that leaves no room in a context of `context` tokens."""
    if len(prompts) == 0:
        raise UserError("there is no prompt to decode")
    if max_new_tokens < 1:
        raise UserError(f"need max_new_tokens >= 1, got {max_new_tokens}")
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise UserError(f"prompt {i} is empty: give at least one token")
        if len(prompt) >= context:
            raise UserError(
                f"prompt {i} has {len(prompt)} tokens and the target's context holds {context}: shorten it"
            )


def check_tokens(
    target: Target, prompts: list[list[int]], images: Sequence[ImageInputs | None] | None
) -> None:
    """UserError for a token that the target does not embed; what stands for an image may be one."""
    for i, prompt in enumerate(prompts):
        if images is None or images[i] is None:
            check_embedded(target.tokenizer, prompt, target.runner.embedding_rows)


def check_images(
    target: Target, prompts: list[list[int]], images: Sequence[ImageInputs | None] | None
) -> None:
    """UserError for images that are not one entry per prompt, or that the target does not read."""
    if images is None:
        return
    if len(images) != len(prompts):
        raise UserError(
            f"images has {len(images)} entries for {len(prompts)} prompts: give one each"
        )
    if not target.runner.takes_images and any(one is not None for one in images):
        raise UserError(
            f"target {target.name!r} reads text only: leave the images out, or choose a vision-language target"
        )


def check_constrained(mode: str, draft: Draft | None) -> None:
    """UserError for a mode of the engine, or a draft, that cannot follow a grammar."""
    if mode != "eager":
        raise UserError(f"in mode {mode} a grammar cannot be asked for each token: choose eager")
    if draft is not None and draft.shape is not None:
        raise UserError(
            f"draft {draft.name!r} drafts trees, and a grammar follows a chain: give it no tree"
        )
