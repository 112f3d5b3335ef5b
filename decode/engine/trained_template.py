"""The chat template that a command renders prompts with: that of its setting, else that of its draft's training."""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from decode.checkpoints.draft_folder import read_metadata
from decode.common import damage
from decode.common.target_record import ModelFingerprint
from decode.common.template_choice import (
    TemplateSetting,
    check_setting,
    describe,
    read_setting,
    template_hash,
    with_template,
)
from decode.model.loading import Target


def use_template(
    target: Target, setting: TemplateSetting | None, drafts: Iterable[str] = ()
) -> Target:
    """The target with a tokenizer that renders chats as `setting` says; where that is None, as most prompts were in the
    training of `drafts` (folders or other names), if all drafts agree, else with the tokenizer's own template.

    A line on stderr says which template was taken from a draft, and one for each draft that was trained with others.
    UserError as from `with_template`, and for a setting without effect.
    """
    trained = {
        draft: found for draft in dict.fromkeys(drafts) if (found := trained_templates(draft))
    }
    usual = {json.dumps(found[0], sort_keys=True): found[0] for found in trained.values()}
    chosen: dict[str, Any] = {}
    if setting is not None:
        chosen = read_setting(setting)
    elif len(usual) == 1:
        (chosen,) = usual.values()
    if setting is not None:
        check_setting(target.tokenizer, chosen)
    tokenizer = with_template(target.tokenizer, chosen)
    if setting is None and chosen:
        damage.warn_once(
            f"prompts are rendered with --template {describe(chosen)}, as in the training of {next(iter(trained))!r}"
        )
    for draft, found in trained.items():
        if chosen not in found:
            damage.warn_once(
                f"draft {draft!r} was trained on prompts rendered with {describe(found[0])}, and these are rendered "
                f"with {describe(chosen)}: fewer of its tokens may be accepted (--template)"
            )
    return replace(target, tokenizer=tokenizer, template=chosen)


def trained_templates(draft: str) -> list[dict[str, Any]]:
    """The settings of the chat template that a draft's training prompts were rendered with, the most frequent first; []
    where nobody wrote them down."""
    return (read_metadata(draft).templates if draft else None) or []


def rendering_identity(target: Target) -> ModelFingerprint:
    """What the target is, with the chat template that renders its prompts."""
    return replace(target.identity, chat_template=template_hash(target.tokenizer))
