"""A prompt as token ids: with the tokenizer's chat template where it has one, else as plain text."""

from collections.abc import Sequence
from typing import Any

from decode.common.errors import UserError, one_line
from decode.common.files import check_characters

Messages = list[dict[str, Any]]


def encode_prompt(tokenizer: Any, prompt: str | Messages) -> list[int]:
    """Ids of the prompt, up to where the model's answer begins, with one BOS at most.

    A plain text becomes one user message if the tokenizer has a chat template. UserError for messages when it has
    none, for messages that the template refuses, and for a prompt without tokens or with half of a surrogate pair.
    """
    return encode_prompts(tokenizer, [prompt])[0]


def encode_prompts(tokenizer: Any, prompts: Sequence[str | Messages]) -> list[list[int]]:
    """`encode_prompt` of each, in one call of the tokenizer, which is faster. UserError if one of them has a fault."""
    if len(prompts) == 0:
        return []
    for prompt in prompts:
        check_characters(prompt, "the prompt")
    if tokenizer.chat_template is None:
        if not all(isinstance(prompt, str) for prompt in prompts):
            raise UserError(
                "the prompt is a chat, but the target's tokenizer has no chat template: use an instruction-tuned "
                "target or plain text prompts"
            )
        encoded = tokenizer(list(prompts))["input_ids"]
    else:
        chats = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts]
        encoded = apply_template(
            tokenizer, chats, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    return [_with_one_bos(ids, tokenizer.bos_token_id) for ids in encoded]


def _with_one_bos(ids: list[int], bos: int | None) -> list[int]:
    """The ids of a prompt without a repeated BOS at their beginning. UserError if there are none."""
    if len(ids) == 0:
        raise UserError("the prompt has no tokens: give at least one word")
    while bos is not None and ids[:2] == [bos, bos]:  # the text or the template has a BOS too
        ids = ids[1:]
    return list(ids)


def apply_template(tokenizer: Any, messages: Messages | list[Messages], **options: Any) -> Any:
    """tokenizer.apply_chat_template(messages, **options). UserError when the template raises an error.

    Templates of some vision-language models leave out a content that is a text; for them it becomes a list of one part.
    """
    if not _shows_texts(tokenizer):
        messages = _as_parts(messages)
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # the template is a program that came with the model
        raise UserError(
            f"the target's chat template refuses its messages ({one_line(error)}): change or remove it"
        ) from error


PROBE = "probe"
SHOWS_TEXTS: dict[str, bool] = {}
"""By chat template: what `_shows_texts` has found."""


def _shows_texts(tokenizer: Any) -> bool:
    """Whether the template writes contents that are texts; True if it writes no list of parts either."""

    def shows(content: Any) -> bool:
        try:
            message = {"role": "user", "content": content}
            return PROBE in tokenizer.apply_chat_template([message], tokenize=False)
        except Exception:  # the template is a program; what it refuses is told where it is asked to
            return False

    template = str(tokenizer.chat_template)
    if template not in SHOWS_TEXTS:
        parts = [{"type": "text", "text": PROBE}]
        SHOWS_TEXTS[template] = shows(PROBE) or not shows(parts)
    return SHOWS_TEXTS[template]


def _as_parts(messages: Any) -> Any:
    """The messages, or lists of messages, with each content that is a text as a list of one part."""
    if isinstance(messages, list):
        return [_as_parts(one) for one in messages]
    if not isinstance(messages.get("content"), str):
        return messages
    return messages | {"content": [{"type": "text", "text": messages["content"]}]}
