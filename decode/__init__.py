"""Speculative decoding: text of a target model, produced faster with the help of a draft.

    from decode import load_draft, load_target, speculate

    target = load_target("Qwen/Qwen3-8B")
    print(speculate(target, load_draft("outputs/qwen3-8b/eagle3", target), "Explain TCP slow start.", k=4))

What these functions raise for bad input is UserError; torch is loaded when one is called.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from decode.common.errors import UserError

if TYPE_CHECKING:
    from decode.continuation import Answer
    from decode.drafts.base import Draft
    from decode.model.loading import Target

__all__ = ["UserError", "load_draft", "load_target", "speculate"]


def load_target(name: str, **settings: Any) -> "Target":
    """The target `name`, a folder, a GGUF file or a Hub name, ready to decode one prompt at a time.

    `settings` are revision, tokenizer, device, dtype, placement and template of decode/generate.py, with its defaults.
    UserError for a model that cannot be loaded, and for settings that are not there or of another type.
    """
    from decode.common.command import prepared
    from decode.common.settings import make_settings
    from decode.drafts.settings import LoadingSettings

    s = prepared(lambda: make_settings(LoadingSettings, {"target": name, **settings}))
    from decode.continuation import open_target  # loads torch, which reads what was prepared

    return open_target(s)


def load_draft(name: str, target: "Target", dtype: str = "") -> "Draft | None":
    """The draft `name` for this target: a folder, a Hub name, or what needs neither (ngram, suffix, …); None for none.

    It computes in `dtype`, by default the target's, which never changes the output. UserError for a draft that cannot
    be loaded or was made for another tokenizer.
    """
    from decode.common.files import find_bundled
    from decode.drafts.registry import pick_draft

    return pick_draft(find_bundled(name), target, dtype or target.dtype or "float32")


def speculate(
    target: "Target", draft: "Draft | None", prompt: str | Sequence[int], **settings: Any
) -> "Answer":
    """What the target answers to `prompt`, a text (rendered by its chat template, if it has one) or token ids.

    `settings` are k, max_new_tokens, sampling ({"temperature": 1.0}), seed, lookup and the others of decode/generate.py
    (`DecodingSettings`). The answer prints coloured by the origin of its tokens, draws itself in a notebook, and has
    `text`, `tau` (tokens per round), `seconds` and `record` (token ids, drafted and accepted tokens of each round).
    The text follows the target's distribution whatever the draft is. UserError for settings that are not there, of
    another type or out of range, and for what target or draft cannot do.
    """
    from decode.common.settings import make_settings
    from decode.continuation import answer_prompt, read_prompt
    from decode.drafts.settings import DecodingSettings

    s = make_settings(DecodingSettings, settings)
    text = prompt if isinstance(prompt, str) else target.tokenizer.decode(prompt)
    return answer_prompt(target, draft, text, read_prompt(target, prompt, s.image), s)
