"""A prompt as token ids: with the tokenizer's chat template where it has one, else as plain text."""

from typing import Any

import jinja2

from decode.common.errors import UserError, first_line

Messages = list[dict[str, Any]]


def encode_prompt(tokenizer: Any, prompt: str | Messages) -> list[int]:
    """Ids of the prompt, up to where the model's answer begins, with one BOS at most.

    A plain text becomes one user message if the tokenizer has a chat template. UserError for messages when it has
    none, and for messages that the template refuses.
    """
    if tokenizer.chat_template is None:
        if not isinstance(prompt, str):
            raise UserError(
                "the prompt is a chat, but the target's tokenizer has no chat template: use an instruction-tuned "
                "target or plain text prompts"
            )
        ids = tokenizer(prompt)["input_ids"]
    else:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            ids = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except jinja2.TemplateError as error:
            reason = first_line(error)
            raise UserError(
                f"the target's chat template refuses its messages ({reason}): change or remove it"
            ) from error
    bos = tokenizer.bos_token_id
    while bos is not None and ids[:2] == [
        bos,
        bos,
    ]:  # the text or the template has a BOS of its own
        ids = ids[1:]
    return list(ids)
