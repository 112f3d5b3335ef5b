"""A prompt as token ids: with the tokenizer's chat template where it has one, else as plain text."""

from typing import Any

from decode.common.errors import UserError, one_line
from decode.common.files import check_characters

Messages = list[dict[str, Any]]


def encode_prompt(tokenizer: Any, prompt: str | Messages) -> list[int]:
    """Ids of the prompt, up to where the model's answer begins, with one BOS at most.

    A plain text becomes one user message if the tokenizer has a chat template. UserError for messages when it has
    none, for messages that the template refuses, and for a prompt without tokens or with half of a surrogate pair.
    """
    check_characters(prompt, "the prompt")
    if tokenizer.chat_template is None:
        if not isinstance(prompt, str):
            raise UserError(
                "the prompt is a chat, but the target's tokenizer has no chat template: use an instruction-tuned "
                "target or plain text prompts"
            )
        ids = tokenizer(prompt)["input_ids"]
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        ids = apply_template(
            tokenizer, messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    if len(ids) == 0:
        raise UserError("the prompt has no tokens: give at least one word")
    bos = tokenizer.bos_token_id
    while bos is not None and ids[:2] == [bos, bos]:  # the text or the template has a BOS too
        ids = ids[1:]
    return list(ids)


def apply_template(tokenizer: Any, messages: Messages, **options: Any) -> Any:
    """tokenizer.apply_chat_template(messages, **options). UserError when the template raises an error."""
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # the template is a program that came with the model
        raise UserError(
            f"the target's chat template refuses its messages ({one_line(error)}): change or remove it"
        ) from error
