"""A Prompt: plain text to continue, a chat to answer, or for origin text either of them with its answer.

Its id is a hash of its content, so ids are the same on every machine and in every run; resuming and decontamination
rely on that.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.common import chat_template
from decode.common.chat_template import Arguments, Messages, Tools
from decode.common.errors import UserError
from eval.tasks.row_forms import Content, message_text


@dataclass(frozen=True, slots=True)
class Prompt:
    """Plain `text` or the `messages` of a chat; the other one is None."""

    id: str
    source: str
    """Name of the source, without the folder that it lies in, which stays private."""
    text: str | None
    messages: Messages | None
    sample: int
    """0 .. samples - 1: several answers may be generated for one content."""
    answer: str | None = None
    """The answer to `text`, for origin text if the source has one."""
    tools: Tools | None = None
    """What the chat may call."""
    location: str = ""
    """Where its row stands, for messages."""
    arguments: Arguments | None = None
    """Its own arguments of the chat template, which stand above those of the command."""

    @property
    def content_id(self) -> str:
        """The part of the id that all samples of a content have in common."""
        return self.id.rpartition("#")[0]

    @property
    def asked(self) -> str | Messages:
        return self.text if self.text is not None else self.messages or ""


def make_prompt(
    source: str,
    content: Content,
    sample: int,
    tools: Tools | None = None,
    arguments: Arguments | None = None,
    location: str = "",
) -> Prompt:
    """The prompt of a content; its id is the hash of content, tools and arguments, and the sample's number."""
    others = {"tools": tools, "arguments": arguments}
    name = f"{_digest(content, {key: value for key, value in others.items() if value})}#{sample}"
    text, answer, messages = None, None, None
    if isinstance(content, list):
        messages = content
    else:
        text, answer = (content, None) if isinstance(content, str) else content
    return Prompt(name, source, text, messages, sample, answer, tools, location, arguments)


def _digest(content: Content, others: dict[str, Any]) -> str:
    """The first 16 hex digits of the SHA-256 of a text, or of the JSON with sorted keys of anything else."""
    hashed = {"content": content, **others} if others else content
    text = hashed if isinstance(hashed, str) else json.dumps(hashed, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def prompt_text(prompt: Prompt) -> str:
    """The prompt's whole text, messages and answer included, for comparing prompts."""
    if prompt.messages is not None:
        return "\n".join(map(message_text, prompt.messages))
    return "\n".join(text for text in (prompt.text, prompt.answer) if text)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    try:
        return chat_template.encode_prompt(tokenizer, prompt.asked, prompt.tools, prompt.arguments)
    except UserError as error:
        raise UserError(f"prompt {prompt.id} of {prompt.source}: {error}") from error


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
) -> list[list[int]]:
    """`encode_prompt` of each, many times faster for thousands of them."""
    asked = [prompt.asked for prompt in prompts]
    tools = [prompt.tools for prompt in prompts]
    arguments = [prompt.arguments for prompt in prompts]
    try:
        return chat_template.encode_prompts(tokenizer, asked, tools, arguments)
    except UserError:
        return [encode_prompt(tokenizer, prompt) for prompt in prompts]  # names the prompt
