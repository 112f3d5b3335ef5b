"""Prompts and chats as text and as token ids: by the tokenizer's chat template where it has one, else as plain text."""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from decode.common import damage
from decode.common.chat.choice import (
    DEFAULT,
    PROBED,
    TOOL_USE,
    Arguments,
    Messages,
    TemplateSetting,
    Tools,
    check_setting,
    describe,
    missing_argument_error,
    names_in,
    read_setting,
    undefined_argument,
    with_template,
)
from decode.common.chat.probe import (
    PROBE_REPLY,
    MessageForms,
    TemplateMarks,
    TemplateProbe,
    assistant,
    find_forms,
    probe_template,
    user,
)
from decode.common.errors import UserError, one_line
from decode.common.files import check_characters

Trained = Mapping[str, list[dict[str, Any]]]
"""{draft: the settings with which its training prompts were rendered, the most frequent first}"""
FORMS: dict[tuple[str, ...], MessageForms] = {}
"""{(chat template, names of a chat's own arguments of it): what `find_forms` has found}."""
REWRITES = (
    "the target's chat template changes earlier turns when later ones follow (it may remove reasoning), so replies "
    "cannot be located: set turns to last"
)


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer, with its arguments: what it renders, and what it does."""

    tokenizer: Any
    """It renders with this template, whose arguments are its defaults. Its `chat_template` is None for plain text."""
    setting: dict[str, Any] = field(default_factory=dict)
    """The template's name and arguments, as `read_setting` gives them; {}: the tokenizer's own."""

    @classmethod
    def chosen(
        cls, tokenizer: Any, setting: TemplateSetting | None, trained: Trained | None = None
    ) -> "ChatTemplate":
        """The template that `setting` says; where that is None, the one of most prompts in the training of drafts, if
        all drafts agree, else the tokenizer's own.

        A line on stderr says which template was taken from a draft, and one for each draft that was trained with
        others. UserError as from `with_template`, and for a setting without effect.
        """
        trained = trained or {}
        usual = {json.dumps(found[0], sort_keys=True): found[0] for found in trained.values()}
        as_trained = setting is None and len(usual) == 1
        used = usual.popitem()[1] if as_trained else read_setting(setting)
        if not as_trained:
            check_setting(tokenizer, used)
        template = cls(with_template(tokenizer, used), used)
        if as_trained and used:
            damage.warn_once(
                f"prompts are rendered with --template {describe(used)}, as in the training of {next(iter(trained))!r}"
            )
        for draft, found in trained.items():
            if used not in found:
                damage.warn_once(
                    f"draft {draft!r} was trained on prompts rendered with {describe(found[0])}, and these are "
                    f"rendered with {describe(used)}: fewer of its tokens may be accepted (--template)"
                )
        return template

    @property
    def hash(self) -> str | None:
        """16 hex digits of the template with its arguments; None for plain text."""
        own = self.tokenizer.chat_template
        text = json.dumps(own, sort_keys=True) if isinstance(own, dict) else own
        return text and hashlib.sha256(text.encode()).hexdigest()[:16]

    def encode(
        self, prompt: str | Messages, tools: Tools | None = None, arguments: Arguments | None = None
    ) -> list[int]:
        """Ids of the prompt and the `tools` it offers, up to where the model's answer begins, with one BOS at most.

        A plain text becomes one user message if there is a template. UserError for messages or tools when there is
        none, for messages that the template refuses, for an argument that it needs, and for a prompt without tokens or
        with half of a surrogate pair.
        """
        return self.encode_all([(prompt, tools, arguments)])[0]

    def encode_all(
        self, prompts: Sequence[tuple[str | Messages, Tools | None, Arguments | None]]
    ) -> list[list[int]]:
        """`encode` of each, in one call of the tokenizer, which is faster. UserError if one of them has a fault."""
        if len(prompts) == 0:
            return []
        plain = self.tokenizer.chat_template is None
        texts: list[str] = []
        for prompt, offered, own in prompts:
            check_characters([prompt, offered], "the prompt")
            if not plain:
                chat = [user(prompt)] if isinstance(prompt, str) else prompt
                texts.append(self.render(chat, True, offered, own))
            elif isinstance(prompt, str) and not offered:
                texts.append(prompt)
            else:
                raise UserError(
                    f"the prompt {'has tools' if offered else 'is a chat'}, but the target's tokenizer has no chat "
                    "template: use an instruction-tuned target or plain text prompts"
                )
        encoded = self.tokenizer(texts, **({} if plain else {"add_special_tokens": False}))
        return [_with_one_bos(ids, self.tokenizer.bos_token_id) for ids in encoded["input_ids"]]

    def render(
        self,
        messages: Messages,
        opened: bool = False,
        tools: Tools | None = None,
        arguments: Arguments | None = None,
    ) -> str:
        """The chat as text, with `opened` up to where the next reply begins. UserError when the template raises an
        error, or needs an argument that nobody gave.

        What a message says is put as the template takes it. Templates of some vision-language models leave out a
        content that is a text; for them it becomes a list of one part. Arguments of a tool call are an object for some
        templates and its JSON for others: where a template would refuse the form that they have, or encode a JSON text
        once more, it gets the other form. A tool call without content gets an empty one where the template needs it.
        """
        template, given = self.tokenizer.chat_template, arguments or {}
        if isinstance(template, dict):  # as transformers chooses among them
            use_tools = tools is not None and TOOL_USE in template
            template = template.get(TOOL_USE if use_tools else DEFAULT)
        apply = partial(
            self.tokenizer.apply_chat_template, chat_template=template, tokenize=False, **given
        )
        text = str(template)
        if (text, *given) not in FORMS:
            FORMS[text, *given] = find_forms(apply)
        forms = FORMS[text, *given]
        apply = partial(
            apply,
            [_fit(message, forms) for message in messages],
            tools=tools,
            add_generation_prompt=opened,
        )
        try:
            rendered: str = apply()
        except Exception as error:  # the template is a program that came with the model
            missing = undefined_argument(text, error)
            if missing:
                raise missing_argument_error(missing) from error
            raise UserError(
                f"the target's chat template refuses its messages ({one_line(error)}): change or remove it"
            ) from error
        # Jinja prints what is undefined as nothing: a value shows whether this chat's text would hold it.
        special = self.tokenizer.special_tokens_map
        for name in sorted(names_in(text).needed.difference(given, special)):
            shown = ""
            with contextlib.suppress(Exception):  # it computes with the value: it was not missed
                shown = apply(**{name: PROBED})
            if PROBED in shown:
                raise missing_argument_error(name)
        return rendered

    def try_to_render(self, messages: Messages, opened: bool = False, **given: Any) -> str | None:
        """`render` with the same; None where that raises a UserError."""
        with contextlib.suppress(UserError):
            return self.render(messages, opened, **given)
        return None

    def locate_replies(
        self, messages: Messages, replies: Sequence[int], **given: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        """(the chat as text, where in it each of the messages `replies` begins and ends), with tools and arguments.

        UserError for a template whose rendering of the first turns is not a prefix of its rendering of the whole chat.
        """
        text = self.render(messages, **given)
        places = []
        for i in replies:
            before = self.render(messages[:i], True, **given)
            upto = self.render(messages[: i + 1], **given)
            if not (text.startswith(upto) and upto.startswith(before) and len(upto) > len(before)):
                raise UserError(REWRITES)
            places.append((len(before), len(upto)))
        return text, places

    def between_replies(
        self, history: Messages, later: Sequence[Messages], **given: Any
    ) -> list[str]:
        """What stands from the end of each reply to where the next one begins, in a chat of `history`, a reply, the
        messages `later[0]`, a reply, and so on. UserError for a template that changes replies when others follow."""
        found = []
        for messages in later:
            before = self.render(history, True, **given) + PROBE_REPLY
            history = [*history, assistant(PROBE_REPLY), *messages]
            text = self.render(history, True, **given)
            if not text.startswith(before):
                raise UserError(REWRITES)
            found.append(text[len(before) :])
        return found

    @cached_property
    def probe(self) -> TemplateProbe | None:
        """What the template does. None for plain text, or if it renders no simple chat."""
        if self.tokenizer.chat_template is None:
            return None
        return probe_template(self.tokenizer, self.try_to_render)

    @property
    def marks(self) -> TemplateMarks:
        """What it puts around messages; no marks where there is no probe."""
        return TemplateMarks() if self.probe is None else self.probe.marks()


def _with_one_bos(ids: list[int], bos: int | None) -> list[int]:
    """The ids of a prompt without a repeated BOS at their beginning. UserError if there are none."""
    if len(ids) == 0:
        raise UserError("the prompt has no tokens: give at least one word")
    while bos is not None and ids[:2] == [bos, bos]:  # the text or the template has a BOS too
        ids = ids[1:]
    return list(ids)


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
