"""A prompt as token ids: with the tokenizer's chat template where it has one, else as plain text."""

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from decode.common.errors import UserError, one_line
from decode.common.files import check_characters
from decode.common.template_choice import (
    PROBED,
    arguments_to_give,
    missing_argument_error,
    template_text,
    undefined_argument,
)

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]
"""What a chat may call: JSON schemas of functions."""
Arguments = dict[str, Any]
"""A chat's own arguments of the template, such as {"enable_thinking": False}."""


def encode_prompt(
    tokenizer: Any,
    prompt: str | Messages,
    tools: Tools | None = None,
    arguments: Arguments | None = None,
) -> list[int]:
    """Ids of the prompt and the `tools` it offers, up to where the model's answer begins, with one BOS at most.

    A plain text becomes one user message if the tokenizer has a chat template. UserError for messages or tools when it
    has none, for messages that the template refuses, for an argument that it needs, and for a prompt without tokens or
    with half of a surrogate pair.
    """
    return encode_prompts(tokenizer, [prompt], [tools], [arguments])[0]


def encode_prompts(
    tokenizer: Any,
    prompts: Sequence[str | Messages],
    tools: Sequence[Tools | None],
    arguments: Sequence[Arguments | None] | None = None,
) -> list[list[int]]:
    """`encode_prompt` of each, in one call of the tokenizer, which is faster. UserError if one of them has a fault."""
    if len(prompts) == 0:
        return []
    arguments = arguments or [None] * len(prompts)
    texts: list[str] = []
    for prompt, offered, own in zip(prompts, tools, arguments, strict=True):
        check_characters([prompt, offered], "the prompt")
        if tokenizer.chat_template is not None:
            chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            texts.append(
                apply_template(tokenizer, chat, own, tools=offered, add_generation_prompt=True)
            )
        elif isinstance(prompt, str) and not offered:
            texts.append(prompt)
        else:
            raise UserError(
                f"the prompt {'has tools' if offered else 'is a chat'}, but the target's tokenizer has no chat "
                "template: use an instruction-tuned target or plain text prompts"
            )
    options = {} if tokenizer.chat_template is None else {"add_special_tokens": False}
    encoded = tokenizer(texts, **options)["input_ids"]
    return [_with_one_bos(ids, tokenizer.bos_token_id) for ids in encoded]


def _with_one_bos(ids: list[int], bos: int | None) -> list[int]:
    """The ids of a prompt without a repeated BOS at their beginning. UserError if there are none."""
    if len(ids) == 0:
        raise UserError("the prompt has no tokens: give at least one word")
    while bos is not None and ids[:2] == [bos, bos]:  # the text or the template has a BOS too
        ids = ids[1:]
    return list(ids)


def apply_template(
    tokenizer: Any, messages: Messages, arguments: Arguments | None = None, **options: Any
) -> str:
    """tokenizer.apply_chat_template(messages, **options, **arguments) as text. UserError when the template raises an
    error, or needs an argument that nobody gave.

    What a message says is put as the template takes it. Templates of some vision-language models leave out a content
    that is a text; for them it becomes a list of one part. Arguments of a tool call are an object for some templates
    and its JSON for others: where a template would refuse the form that they have, or encode a JSON text once more, it
    gets the other form. A tool call without content gets an empty one where the template needs it.
    """
    template, given = template_text(tokenizer, options.get("tools")), arguments or {}
    render = partial(tokenizer.apply_chat_template, chat_template=template, tokenize=False, **given)
    text = str(template)
    if (text, *given) not in FORMS:
        FORMS[text, *given] = _find_forms(render)
    forms = FORMS[text, *given]
    messages = [_fit(message, forms) for message in messages]
    try:
        rendered: str = render(messages, **options)
    except Exception as error:  # the template is a program that came with the model
        missing = undefined_argument(text, error)
        if missing:
            raise missing_argument_error(missing) from error
        raise UserError(
            f"the target's chat template refuses its messages ({one_line(error)}): change or remove it"
        ) from error
    # Jinja prints what is undefined as nothing: a value shows whether this chat's text would hold it.
    for name in sorted(arguments_to_give(text, given)):
        if name in tokenizer.special_tokens_map:
            continue
        shown = ""
        with contextlib.suppress(Exception):  # it computes with the value: then it was not missed
            shown = render(messages, **options, **{name: PROBED})
        if PROBED in shown:
            raise missing_argument_error(name)
    return rendered


@dataclass(frozen=True)
class MessageForms:
    """How a chat template takes what messages hold, found by rendering each form."""

    parts: bool
    """It writes contents that are lists of parts, and leaves out texts."""
    objects: bool
    """It writes arguments of tool calls that are objects."""
    texts: bool
    """It writes arguments that are JSON texts, and does not encode them again."""
    content: bool
    """It writes the calls of a message only if that has a content."""


FORMS: dict[tuple[str, ...], MessageForms] = {}
"""{(chat template, names of a chat's own arguments of it): what `_find_forms` has found}."""
PROBE, PROBE_CALL, PROBE_ARGUMENT = "probe", "zq_call", "zq_argument"


def _find_forms(render: Callable[..., str]) -> MessageForms:
    def shown(chat: Messages, *marks: str) -> str:
        try:
            text = render(chat)
        except Exception:  # the template is a program; what it refuses is told where it is asked to
            return ""
        return text if all(mark in text for mark in marks) else ""

    def call(arguments: Any, **content: str) -> str:
        function = {"name": PROBE_CALL, "arguments": arguments}
        calls = [{"type": "function", "id": "call00001", "function": function}]
        chat = [user(as_text), {"role": "assistant", **content, "tool_calls": calls}]
        return shown(chat, PROBE_CALL, PROBE_ARGUMENT)

    def user(content: Any) -> dict[str, Any]:
        return {"role": "user", "content": content}

    parts = [{"type": "text", "text": PROBE}]
    needs_parts = not shown([user(PROBE)], PROBE) and bool(shown([user(parts)], PROBE))
    as_text: Any = parts if needs_parts else PROBE
    given = {PROBE_ARGUMENT: "zv"}
    written = json.dumps(given)
    as_object, as_json = call(given, content=""), call(written, content="")
    best = given if as_object else written
    encoded_twice = json.dumps(written)[1:-1] in as_json
    return MessageForms(
        parts=needs_parts,
        objects=bool(as_object),
        texts=bool(as_json) and not encoded_twice,
        content=not call(best) and bool(call(best, content="")),
    )


def _fit(message: dict[str, Any], forms: MessageForms) -> dict[str, Any]:
    """The message as the template takes it; what the template takes already stays as it is."""
    content, calls = message.get("content"), message.get("tool_calls")
    if forms.parts and isinstance(content, str):
        message = message | {"content": [{"type": "text", "text": content}]}
    if not calls:
        return message
    empty = {"content": ""} if forms.content and content is None else {}
    return message | empty | {"tool_calls": [_fit_call(call, forms) for call in calls]}


def _fit_call(call: Any, forms: MessageForms) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return call | {"function": _fit_call(call["function"], forms)}
    arguments = call.get("arguments")
    if isinstance(arguments, str) and forms.objects and not forms.texts:
        with contextlib.suppress(ValueError, RecursionError):  # no JSON: as it is
            return call | {"arguments": json.loads(arguments)}
    if isinstance(arguments, dict | list) and forms.texts and not forms.objects:
        return call | {"arguments": json.dumps(arguments, ensure_ascii=False)}
    return call
