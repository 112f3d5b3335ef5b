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
    for prompt, offered in zip(prompts, tools, strict=True):
        check_characters([prompt, offered], "the prompt")
    if tokenizer.chat_template is None:
        if any(tools) or not all(isinstance(prompt, str) for prompt in prompts):
            what = "has tools" if any(tools) else "is a chat"
            raise UserError(
                f"the prompt {what}, but the target's tokenizer has no chat template: use an instruction-tuned "
                "target or plain text prompts"
            )
        encoded = tokenizer(list(prompts))["input_ids"]
    else:
        chats = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts]
        texts = [
            apply_template(tokenizer, chat, own, tools=offered, add_generation_prompt=True)
            for chat, offered, own in zip(
                chats, tools, arguments or [None] * len(chats), strict=True
            )
        ]
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
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
    text = template_text(tokenizer, options.get("tools"))
    given = arguments or {}
    render = partial(tokenizer.apply_chat_template, chat_template=text, tokenize=False, **given)
    if not _shows_texts(str(text), render):
        messages = [_as_parts(message) for message in messages]
    if any(message.get("tool_calls") for message in messages):
        forms = _find_call_forms(str(text), render)
        messages = [_fit_calls(message, forms) for message in messages]
    try:
        rendered: str = render(messages, **options)
    except Exception as error:  # the template is a program that came with the model
        missing = undefined_argument(str(text), error)
        if missing:
            raise missing_argument_error(missing) from error
        raise UserError(
            f"the target's chat template refuses its messages ({one_line(error)}): change or remove it"
        ) from error
    # Jinja prints what is undefined as nothing: a value shows whether this chat's text would hold it.
    for name in sorted(arguments_to_give(str(text), given)):
        if name in tokenizer.special_tokens_map:
            continue
        shown = ""
        with contextlib.suppress(Exception):  # it computes with the value: then it was not missed
            shown = render(messages, **options, **{name: PROBED})
        if PROBED in shown:
            raise missing_argument_error(name)
    return rendered


PROBE = "probe"
SHOWS_TEXTS: dict[str, bool] = {}
"""By chat template: what `_shows_texts` has found."""


def _shows_texts(template: str, render: Callable[..., str]) -> bool:
    """Whether the template writes contents that are texts; True if it writes no list of parts either."""

    def shows(content: Any) -> bool:
        try:
            return PROBE in render([{"role": "user", "content": content}])
        except Exception:  # the template is a program; what it refuses is told where it is asked to
            return False

    if template not in SHOWS_TEXTS:
        parts = [{"type": "text", "text": PROBE}]
        SHOWS_TEXTS[template] = shows(PROBE) or not shows(parts)
    return SHOWS_TEXTS[template]


def _as_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a content that is a text as a list of one part."""
    if not isinstance(message.get("content"), str):
        return message
    return message | {"content": [{"type": "text", "text": message["content"]}]}


@dataclass(frozen=True)
class CallForms:
    """How a chat template takes the tool calls of a message, found by rendering each form."""

    objects: bool
    """It writes arguments that are objects."""
    texts: bool
    """It writes arguments that are JSON texts, and does not encode them again."""
    content: bool
    """It writes the calls of a message only if that has a content."""


CALL_FORMS: dict[str, CallForms] = {}
"""By chat template: what `_find_call_forms` has found."""
PROBE_CALL, PROBE_ARGUMENT = "zq_call", "zq_argument"


def _find_call_forms(template: str, render: Callable[..., str]) -> CallForms:
    def shown(arguments: Any, **content: str) -> str:
        function = {"name": PROBE_CALL, "arguments": arguments}
        call = {"type": "function", "id": "call00001", "function": function}
        asked = {"role": "user", "content": PROBE}
        chat = [asked, {"role": "assistant", **content, "tool_calls": [call]}]
        try:
            text = render(chat)
        except Exception:  # the template is a program; what it refuses is told where it is asked to
            return ""
        return text if PROBE_CALL in text and PROBE_ARGUMENT in text else ""

    if template not in CALL_FORMS:
        given = {PROBE_ARGUMENT: "zv"}
        written = json.dumps(given)
        as_object, as_text = shown(given, content=""), shown(written, content="")
        encoded_twice = json.dumps(written)[1:-1] in as_text
        best = given if as_object else written
        CALL_FORMS[template] = CallForms(
            objects=bool(as_object),
            texts=bool(as_text) and not encoded_twice,
            content=not shown(best) and bool(shown(best, content="")),
        )
    return CALL_FORMS[template]


def _fit_calls(message: dict[str, Any], forms: CallForms) -> dict[str, Any]:
    """The message with its tool calls as the template takes them; what the template takes stays as it is."""
    if not message.get("tool_calls"):
        return message
    empty = {"content": ""} if forms.content and message.get("content") is None else {}
    return message | empty | {"tool_calls": [_fit_call(c, forms) for c in message["tool_calls"]]}


def _fit_call(call: Any, forms: CallForms) -> Any:
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
