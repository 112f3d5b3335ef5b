"""What a chat template does, found by rendering placeholders: how it takes messages, and what it puts around them.

With it the way back from a text to its messages, and the marks of texts that were rendered already: sampling would
render them once more."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from decode.common.chat.choice import Messages

PROBE, PROBE_CALL, PROBE_ARGUMENT = "probe", "zq_call", "zq_argument"
PROBE_REPLY = "<think>\nwhy\n</think>\n\nso"
"""A placeholder reply with reasoning, which reveals templates that remove reasoning from earlier turns."""
SYSTEM, USER, REPLY, NEXT, LAST = "Qsys0", "Qask1", "Qsay2", "Qask3", "Qsay4"
"""Placeholders of contents; they begin and end with letters, so that trimming does not change them."""
TOOL, CALL_ID = "zq_probe_tool", "call00001"
WRITTEN_BY_MODELS = frozenset(("<think>", "</think>"))
"""Tokens of a generation prompt that answers hold too."""
Kept = Literal["kept", "dropped", "refused"]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def calls_of(name: str, arguments: Any) -> dict[str, Any]:
    """What a message has that calls one tool."""
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"type": "function", "id": CALL_ID, "function": function}]}


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


def find_forms(render: Callable[[Messages], str]) -> MessageForms:
    """The forms that a template takes, of which `render` may raise any error."""

    def shown(chat: Messages, *marks: str) -> str:
        try:
            text = render(chat)
        except Exception:  # the template is a program; what it refuses is told where it is asked to
            return ""
        return text if all(mark in text for mark in marks) else ""

    def call(arguments: Any, **content: str) -> str:
        chat = [user(as_text), {"role": "assistant", **content, **calls_of(PROBE_CALL, arguments)}]
        return shown(chat, PROBE_CALL, PROBE_ARGUMENT)

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


@dataclass(frozen=True)
class TemplateMarks:
    """What a chat template puts around messages."""

    tokens: tuple[str, ...] = ()
    """Special tokens, each of which marks a turn. Begin and end of a text, as `</s>`, are not among them."""
    words: tuple[str, ...] = ()
    """Where it has no such tokens, what stands before a question and before an answer, as [INST] and [/INST]."""

    def found_in(self, *texts: str) -> str:
        """The first mark by which one of the texts shows that it was rendered; "" if none was."""
        for text in texts:
            token = next((token for token in self.tokens if token in text), "")
            rendered = bool(self.words) and all(word in text for word in self.words)
            if token or rendered:
                return token or self.words[0]
        return ""


@dataclass(frozen=True)
class TemplateProbe:
    """A chat template, as far as rendering placeholders shows it. Texts include special tokens."""

    tokenizer: Any
    opening: str
    """The generation prompt: what stands directly before every reply."""
    opening_ids: list[int]
    other_openings: tuple[str, ...]
    """The generation prompts with enable_thinking true and false, where that changes it."""
    turn_end: list[int]
    """[1] int: the token that the template puts behind a reply; empty if it puts none."""
    before_user: str
    """Before the first message of the user, where the chat has no system message."""
    before_system: str
    """Before a system message; "" if the template drops or refuses one."""
    system_to_user: str
    user_to_reply: str
    user_to_earlier: str
    """Before an earlier reply; it differs where the generation prompt opens a thought."""
    reply_to_user: str
    system: Kept
    tools: Kept
    tool_calls: Kept
    tool_results: Kept
    has_thinking_switch: bool
    """enable_thinking changes the generation prompt."""
    drops_thoughts: bool
    """Of earlier replies only what follows `</think>` stays."""

    def facts(self) -> dict[str, str]:
        return {
            "generation prompt": self.opening,
            "token that ends a turn": self.tokenizer.decode(self.turn_end),
            "system message": self.system,
            "tools": self.tools,
            "tool calls": self.tool_calls,
            "tool results": self.tool_results,
            "enable_thinking": "changes the prompt" if self.has_thinking_switch else "no effect",
            "thoughts of earlier turns": "dropped" if self.drops_thoughts else "kept",
        }

    def unrender(self, text: str) -> Messages | None:
        """The messages of a chat whose rendering begins with `text`, which ends with a reply or an opened one.

        None if the text was not rendered by this template, or not in turns of user and assistant. A reply's content
        holds all that lies between the generation prompt and the end of the turn: thoughts and tool calls are text
        there.
        """
        messages: Messages = []
        if not self.user_to_reply:
            return None
        if text.startswith(self.before_user):
            rest = text.removeprefix(self.before_user)
        elif self.before_system and text.startswith(self.before_system):
            system, found, rest = text[len(self.before_system) :].partition(self.system_to_user)
            if not found:
                return None
            messages.append({"role": "system", "content": system})
        else:
            return None
        end = self.tokenizer.decode(self.turn_end)
        while True:
            asked, found, rest = _partition(rest, self.user_to_reply, self.user_to_earlier)
            if not found:
                return None
            messages.append(user(asked))
            if rest == "":
                return messages
            said, found, rest = rest.partition(self.reply_to_user or "\0")
            if not found:
                said = said.rstrip() if end and said.rstrip().endswith(end) else said
                return [*messages, assistant(said.removesuffix(end))]
            messages.append(assistant(said))

    def marks(self) -> TemplateMarks:
        """What stands around messages, by which a rendered text is known."""
        before_question = self.reply_to_user or self.before_user
        ends = {self.tokenizer.bos_token, self.tokenizer.eos_token, None, ""}
        added = set(self.tokenizer.get_added_vocab()) - ends - WRITTEN_BY_MODELS
        pieces = before_question + self.user_to_reply
        tokens = tuple(sorted((token for token in added if token in pieces), key=pieces.index))
        words = tuple(_last_line(piece, ends) for piece in (before_question, self.user_to_reply))
        clear = all(len(word) > 2 and not word.isalnum() for word in words) and words[0] != words[1]
        return TemplateMarks(tokens, words if clear and not tokens else ())


def probe_template(tokenizer: Any, render: Callable[..., str | None]) -> TemplateProbe | None:
    """What a template does by which `render(messages, opened, tools, arguments)` gives a text, or None where it raises
    an error. None if it renders no simple chat."""
    asked = [user(USER)]
    closed, opened = render(asked), render(asked, True)
    answered = render([*asked, assistant(REPLY)])
    if closed is None or opened is None or answered is None or USER not in opened:
        return None
    user_to_reply = opened.rpartition(USER)[2]
    opening = opened[len(closed) :] if opened.startswith(closed) else ""
    opening = opening or user_to_reply  # "[/INST]" belongs to the user's message
    thinks, plain = (
        render(asked, True, arguments={"enable_thinking": value}) for value in (True, False)
    )
    others = {thinks, plain} - {opened, None} if thinks != plain else set()
    last_end = answered.split(REPLY)[-1] if REPLY in answered else ""
    with_system = render([{"role": "system", "content": SYSTEM}, *asked], True)
    system = _kept(with_system, SYSTEM)
    calls = [*asked, assistant("") | calls_of(TOOL, {})]
    result = {"role": "tool", "content": LAST, "name": TOOL, "tool_call_id": CALL_ID}
    parameters = {"type": "object", "properties": {}}
    function = {"name": TOOL, "description": "probe", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    history = render([*asked, assistant(PROBE_REPLY), user(NEXT)], True)
    longer = render([*asked, assistant(REPLY), user(NEXT)], True)
    return TemplateProbe(
        tokenizer=tokenizer,
        opening=opening,
        opening_ids=_encode(tokenizer, opening),
        other_openings=tuple(sorted(text.rpartition(USER)[2] for text in others if text)),
        turn_end=_encode(tokenizer, last_end)[:1],
        before_user=opened.split(USER)[0],
        before_system=(with_system or "").split(SYSTEM)[0] if system == "kept" else "",
        system_to_user=_between(with_system, SYSTEM, USER),
        user_to_reply=user_to_reply,
        user_to_earlier=_between(longer, USER, REPLY) or user_to_reply,
        reply_to_user=_between(longer, REPLY, NEXT),
        system=system,
        tools=_kept(render(asked, True, tools=tools), TOOL),
        tool_calls=_kept(render(calls), TOOL),
        tool_results=_kept(render([*calls, result], True), LAST),
        has_thinking_switch=thinks != plain,
        drops_thoughts=history is not None and "\nwhy\n" not in history,
    )


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _partition(text: str, *separators: str) -> tuple[str, str, str]:
    """str.partition at the separator that comes first; of two at one place, at the longer one."""
    places = [(text.find(s), -len(s), s) for s in separators if s in text]
    return text.partition(min(places)[2]) if places else (text, "", "")


def _between(text: str | None, before: str, after: str) -> str:
    if text is None or before not in text or after not in text:
        return ""
    return text.split(before)[-1].split(after)[0]


def _kept(text: str | None, mark: str) -> Kept:
    return "refused" if text is None else "kept" if mark in text else "dropped"


def _last_line(piece: str, ends: set[Any]) -> str:
    for end in ends - {None, ""}:
        piece = piece.replace(end, "\n")
    lines = [
        line.strip() for line in piece.splitlines() if line.strip() not in ("", *WRITTEN_BY_MODELS)
    ]
    return lines[-1] if lines else ""
