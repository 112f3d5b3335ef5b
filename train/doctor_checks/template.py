"""What a chat template does, found by rendering placeholders; and the way back from a row's text to its messages."""

from dataclasses import dataclass
from typing import Any, Literal

from decode.common.chat_template import Messages, apply_template
from decode.common.errors import UserError
from train.data.conversations import PROBE_REPLY

SYSTEM, USER, REPLY, NEXT, LAST = "Qsys0", "Qask1", "Qsay2", "Qask3", "Qsay4"
"""Placeholders of contents; they begin and end with letters, so that trimming does not change them."""
TOOL = "zq_probe_tool"
Kept = Literal["kept", "dropped", "refused"]


@dataclass(frozen=True)
class ChatTemplate:
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
    rewrites_history: bool
    """A reply without thoughts is rendered otherwise once another turn follows."""
    doubles_bos: bool
    """The template's text begins with BOS, and the tokenizer puts another one in front."""

    def facts(self) -> dict[str, str]:
        """What the report lists of the template."""
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


def user(content: str) -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    """A reply."""
    return {"role": "assistant", "content": content}


def render(tokenizer: Any, messages: Messages, opened: bool = False, **options: Any) -> str | None:
    """The chat as text, with `opened` up to where the reply begins; None if the template raises an error."""
    try:
        return apply_template(tokenizer, messages, add_generation_prompt=opened, **options)
    except UserError:
        return None


def probe(tokenizer: Any) -> ChatTemplate | None:
    """What the tokenizer's template does. None without a template, or if it renders no simple chat."""
    if tokenizer.chat_template is None:
        return None
    closed = render(tokenizer, [user(USER)])
    opened = render(tokenizer, [user(USER)], True)
    answered = render(tokenizer, [user(USER), assistant(REPLY)])
    if closed is None or opened is None or answered is None or USER not in opened:
        return None
    user_to_reply = _after(opened, USER)
    opening = opened[len(closed) :] if opened.startswith(closed) else ""
    opening = opening or user_to_reply  # "[/INST]" belongs to the user's message
    thinks, plain = (
        render(tokenizer, [user(USER)], True, arguments={"enable_thinking": value})
        for value in (True, False)
    )
    bos = tokenizer.bos_token_id
    others = {thinks, plain} - {opened, None} if thinks != plain else set()
    last_end = answered.split(REPLY)[-1] if REPLY in answered else ""
    before_system, system_to_user, system = _probe_system(tokenizer)
    thoughtful = [user(USER), assistant(PROBE_REPLY), user(NEXT)]
    history = render(tokenizer, thoughtful, True)
    longer = render(tokenizer, [user(USER), assistant(REPLY), user(NEXT)], True)
    return ChatTemplate(
        tokenizer=tokenizer,
        opening=opening,
        opening_ids=_encode(tokenizer, opening),
        other_openings=tuple(sorted(_after(text, USER) for text in others if text is not None)),
        turn_end=_encode(tokenizer, last_end)[:1],
        before_user=opened.split(USER)[0],
        before_system=before_system,
        system_to_user=system_to_user,
        user_to_reply=user_to_reply,
        user_to_earlier=_between(longer, USER, REPLY) or user_to_reply,
        reply_to_user=_between(longer, REPLY, NEXT),
        system=system,
        tools=_probe_tools(tokenizer),
        tool_calls=_probe_tool_calls(tokenizer),
        tool_results=_probe_tool_results(tokenizer),
        has_thinking_switch=thinks != plain,
        drops_thoughts=history is not None and "\nwhy\n" not in history,
        rewrites_history=longer is not None and not longer.startswith(opened + REPLY),
        doubles_bos=bos is not None and tokenizer(opened)["input_ids"][:2] == [bos, bos],
    )


def unrender(template: ChatTemplate, text: str) -> Messages | None:
    """The messages of a chat whose rendering begins with `text`, which ends with a reply or an opened one.

    None if the text was not rendered by this template, or not in turns of user and assistant. A reply's content holds
    all that lies between the generation prompt and the end of the turn: thoughts and tool calls are text there.
    """
    messages: Messages = []
    if not template.user_to_reply:
        return None
    if text.startswith(template.before_user):
        rest = text[len(template.before_user) :]
    elif template.before_system and text.startswith(template.before_system):
        system, found, rest = text[len(template.before_system) :].partition(template.system_to_user)
        if not found:
            return None
        messages.append({"role": "system", "content": system})
    else:
        return None
    end = template.tokenizer.decode(template.turn_end)
    while True:
        asked, found, rest = _partition(rest, template.user_to_reply, template.user_to_earlier)
        if not found:
            return None
        messages.append(user(asked))
        if rest == "":
            return messages
        separator = template.reply_to_user or "\0"
        said, found, rest = rest.partition(separator)
        if not found:
            said = said.rstrip() if end and said.rstrip().endswith(end) else said
            messages.append(assistant(said.removesuffix(end)))
            return messages
        messages.append(assistant(said))


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def _partition(text: str, *separators: str) -> tuple[str, str, str]:
    """str.partition at the separator that comes first; of two at one place, at the longer one."""
    places = [(text.find(s), -len(s), s) for s in separators if s in text]
    return text.partition(min(places)[2]) if places else (text, "", "")


def _after(text: str, before: str) -> str:
    """What stands behind the last `before`."""
    return text.rpartition(before)[2]


def _between(text: str | None, before: str, after: str) -> str:
    """What stands between two placeholders; "" if one of them is missing."""
    if text is None or before not in text or after not in text:
        return ""
    return text.split(before)[-1].split(after)[0]


def _probe_system(tokenizer: Any) -> tuple[str, str, Kept]:
    """(text before a system message, text between it and the user's, whether the template keeps it)."""
    text = render(tokenizer, [{"role": "system", "content": SYSTEM}, user(USER)], True)
    if text is None:
        return "", "", "refused"
    if SYSTEM not in text:
        return "", "", "dropped"
    return text.split(SYSTEM)[0], _between(text, SYSTEM, USER), "kept"


def _kept(text: str | None, mark: str) -> Kept:
    return "refused" if text is None else "kept" if mark in text else "dropped"


def _probe_tools(tokenizer: Any) -> Kept:
    parameters = {"type": "object", "properties": {}}
    function = {"name": TOOL, "description": "probe", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    return _kept(render(tokenizer, [user(USER)], True, tools=tools), TOOL)


def _tool_chat() -> Messages:
    call = {"type": "function", "id": "call00001", "function": {"name": TOOL, "arguments": {}}}
    return [user(USER), {"role": "assistant", "content": "", "tool_calls": [call]}]


def _probe_tool_calls(tokenizer: Any) -> Kept:
    return _kept(render(tokenizer, _tool_chat()), TOOL)


def _probe_tool_results(tokenizer: Any) -> Kept:
    result = {"role": "tool", "content": LAST, "name": TOOL, "tool_call_id": "call00001"}
    return _kept(render(tokenizer, [*_tool_chat(), result], True), LAST)
