"""What a chat template does, found by rendering placeholders.

With it the way back from a row's text to its messages, and the marks of texts that were rendered already: sampling
would render them once more."""

from dataclasses import dataclass
from typing import Any, Literal

from decode.common.chat_template import Messages, apply_template
from decode.common.errors import UserError
from eval.tasks.row_forms import message_text
from train.data.conversations import PROBE_REPLY, Prompt

SYSTEM, USER, REPLY, NEXT, LAST = "Qsys0", "Qask1", "Qsay2", "Qask3", "Qsay4"
"""Placeholders of contents; they begin and end with letters, so that trimming does not change them."""
TOOL = "zq_probe_tool"
WRITTEN_BY_MODELS = frozenset(("<think>", "</think>"))
"""Tokens of a generation prompt that answers hold too."""
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


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
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
    asked = [user(USER)]
    closed, opened = render(tokenizer, asked), render(tokenizer, asked, True)
    answered = render(tokenizer, [*asked, assistant(REPLY)])
    if closed is None or opened is None or answered is None or USER not in opened:
        return None
    user_to_reply = opened.rpartition(USER)[2]
    opening = opened[len(closed) :] if opened.startswith(closed) else ""
    opening = opening or user_to_reply  # "[/INST]" belongs to the user's message
    thinks, plain = (
        render(tokenizer, asked, True, arguments={"enable_thinking": value})
        for value in (True, False)
    )
    others = {thinks, plain} - {opened, None} if thinks != plain else set()
    last_end = answered.split(REPLY)[-1] if REPLY in answered else ""
    with_system = render(tokenizer, [{"role": "system", "content": SYSTEM}, *asked], True)
    system = _kept(with_system, SYSTEM)
    call = {"type": "function", "id": "call00001", "function": {"name": TOOL, "arguments": {}}}
    calls: Messages = [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = {"role": "tool", "content": LAST, "name": TOOL, "tool_call_id": "call00001"}
    parameters = {"type": "object", "properties": {}}
    function = {"name": TOOL, "description": "probe", "parameters": parameters}
    tools = [{"type": "function", "function": function}]
    history = render(tokenizer, [*asked, assistant(PROBE_REPLY), user(NEXT)], True)
    longer = render(tokenizer, [*asked, assistant(REPLY), user(NEXT)], True)
    return ChatTemplate(
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
        tools=_kept(render(tokenizer, asked, True, tools=tools), TOOL),
        tool_calls=_kept(render(tokenizer, calls), TOOL),
        tool_results=_kept(render(tokenizer, [*calls, result], True), LAST),
        has_thinking_switch=thinks != plain,
        drops_thoughts=history is not None and "\nwhy\n" not in history,
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
        rest = text.removeprefix(template.before_user)
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
        said, found, rest = rest.partition(template.reply_to_user or "\0")
        if not found:
            said = said.rstrip() if end and said.rstrip().endswith(end) else said
            return [*messages, assistant(said.removesuffix(end))]
        messages.append(assistant(said))


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


@dataclass(frozen=True)
class TemplateMarks:
    """What a chat template puts around messages."""

    tokens: tuple[str, ...] = ()
    """Special tokens, each of which marks a turn. Begin and end of a text, as `</s>`, are not among them."""
    words: tuple[str, ...] = ()
    """Where it has no such tokens, what stands before a question and before an answer, as [INST] and [/INST]."""

    def found_in(self, text: str) -> str:
        """The mark by which a text shows that it was rendered; "" if it was not."""
        token = next((token for token in self.tokens if token in text), "")
        rendered = bool(self.words) and all(word in text for word in self.words)
        return token or (self.words[0] if rendered else "")

    def found_in_prompt(self, prompt: Prompt) -> str:
        """`found_in` what is asked: the text, or the messages that the target did not write."""
        asked = [m for m in prompt.messages or [] if m["role"] != "assistant"]
        texts = [prompt.text or "", *map(message_text, asked)]
        return next((mark for mark in map(self.found_in, texts) if mark), "")


def template_marks(tokenizer: Any) -> TemplateMarks:
    """The marks of the tokenizer's chat template; none without one, or if it refuses a simple chat."""
    found = probe(tokenizer)
    if found is None:
        return TemplateMarks()
    before_question = found.reply_to_user or found.before_user
    ends = {tokenizer.bos_token, tokenizer.eos_token, None, ""}
    added = set(tokenizer.get_added_vocab()) - ends - WRITTEN_BY_MODELS
    pieces = before_question + found.user_to_reply
    tokens = tuple(sorted((token for token in added if token in pieces), key=pieces.index))
    words = tuple(_last_line(piece, ends) for piece in (before_question, found.user_to_reply))
    clear = all(len(word) > 2 and not word.isalnum() for word in words) and words[0] != words[1]
    return TemplateMarks(tokens, words if clear and not tokens else ())


def _last_line(piece: str, ends: set[Any]) -> str:
    for end in ends - {None, ""}:
        piece = piece.replace(end, "\n")
    lines = [
        line.strip() for line in piece.splitlines() if line.strip() not in ("", *WRITTEN_BY_MODELS)
    ]
    return lines[-1] if lines else ""
