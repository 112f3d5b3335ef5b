"""Texts that were rendered with a chat template already: sampling would render them once more."""

from dataclasses import dataclass
from typing import Any

from decode.common.chat_template import apply_template
from decode.common.errors import UserError
from eval.tasks.row_forms import message_text
from train.data.prompts import Prompt

ASKED, SAID, NEXT = "Qask1", "Qsay2", "Qask3"
"""Placeholders of contents, between which the template's marks stand."""
WRITTEN_BY_MODELS = frozenset(("<think>", "</think>"))
"""Tokens of a generation prompt that answers hold too."""


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
    if tokenizer.chat_template is None:
        return TemplateMarks()
    messages = [
        {"role": role, "content": content}
        for role, content in (("user", ASKED), ("assistant", SAID), ("user", NEXT))
    ]
    try:
        text = apply_template(tokenizer, messages, add_generation_prompt=True)
    except UserError:
        return TemplateMarks()
    if not all(content in text for content in (ASKED, SAID, NEXT)):
        return TemplateMarks()
    before_question = text.split(SAID)[1].split(NEXT)[0] or text.split(ASKED)[0]
    before_answer = text.split(NEXT)[1]
    ends = {tokenizer.bos_token, tokenizer.eos_token, None, ""}
    added = set(tokenizer.get_added_vocab()) - ends - WRITTEN_BY_MODELS
    pieces = before_question + before_answer
    tokens = tuple(sorted((token for token in added if token in pieces), key=pieces.index))
    words = tuple(_last_line(piece, ends) for piece in (before_question, before_answer))
    clear = all(len(word) > 2 and not word.isalnum() for word in words) and words[0] != words[1]
    return TemplateMarks(tokens, words if clear and not tokens else ())


def _last_line(piece: str, ends: set[Any]) -> str:
    for end in ends - {None, ""}:
        piece = piece.replace(end, "\n")
    lines = [
        line.strip() for line in piece.splitlines() if line.strip() not in ("", *WRITTEN_BY_MODELS)
    ]
    return lines[-1] if lines else ""
