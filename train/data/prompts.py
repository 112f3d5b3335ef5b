"""Step 2 of 4 from sources to prompts: contents become Prompts with ids; limits apply and exact duplicates are dropped.

Prompts are streamed: only their ids stay in memory, to find duplicates.

A prompt is plain text to continue, a chat to answer, or for origin text either of them with its answer. Its id is a
hash of its content, so ids are the same on every machine and in every run; resuming and decontamination rely on that.
"""

import hashlib
import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.common import chat_template
from decode.common.chat_template import Arguments, Tools
from decode.common.errors import UserError
from eval.tasks.row_forms import Content, message_text
from train.data.sources import (
    BUNDLED_PROMPTS,
    REPEATS,
    Candidate,
    PromptSource,
    ReadLog,
    check,
    read_contents,
    read_source,
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Plain `text` or the `messages` of a chat; the other one is None."""

    id: str
    source: str
    text: str | None
    messages: list[dict[str, Any]] | None
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


def read_prompts(
    sources: list[PromptSource], seed: int, root: Path = BUNDLED_PROMPTS
) -> list[Prompt]:
    """All prompts of `sources` in order, each content once.

    The same arguments give the same list, and a larger limit keeps the prompts of a smaller one.
    """
    return read_prompts_with_duplicates(sources, seed, root=root)[0]


def read_prompts_with_duplicates(
    sources: list[PromptSource], seed: int, answered: bool = False, root: Path = BUNDLED_PROMPTS
) -> tuple[list[Prompt], int]:
    """(the prompts of `read_prompts`, number of contents dropped because they had come earlier).

    With `answered` (origin text) prompts carry their answers, and files and modules come as whole texts.
    """
    log = ReadLog()
    prompts = list(stream_prompts(sources, seed, log, answered, root))
    return prompts, log.dropped[REPEATS]


def stream_prompts(
    sources: list[PromptSource],
    seed: int,
    log: ReadLog,
    answered: bool = False,
    root: Path = BUNDLED_PROMPTS,
) -> Iterator[Prompt]:
    """The prompts of `read_prompts_with_duplicates` one by one; contents that had come earlier count in `log`.

    The samples of a content follow each other.
    """
    for source in sources:
        check(source, answered)
    seen: set[str] = set()
    for source in sources:
        rng = random.Random(f"{seed} {source.kind} {source.path} {source.split}")
        candidates = read_source(source, rng, root, answered, log)
        taken = 0
        for prompt in itertools.islice(_drop_duplicates(candidates, seen, log), source.limit):
            taken += 1
            yield prompt
            for sample in range(1, source.samples):
                yield replace(prompt, id=f"{prompt.content_id}#{sample}", sample=sample)
        if source.kind == "stdlib" and source.limit is not None and taken < source.limit:
            raise UserError(
                f"source stdlib: limit {source.limit}, but only {taken} excerpts were found: lower it"
            )


def evaluation_texts(root: Path = BUNDLED_PROMPTS) -> list[str]:
    """The texts of all bundled evaluation prompts."""
    paths = sorted((root / "eval").glob("*.jsonl"))
    return [text for path in paths for text in read_prompt_texts(path)]


def read_prompt_texts(path: Path) -> list[str]:
    """The prompts of a file or a folder as plain text."""
    return [prompt_text(make_prompt("", found.content, 0)) for found in read_contents(path)]


def prompt_text(prompt: Prompt) -> str:
    """The prompt's whole text, messages and answer included, for comparing prompts."""
    if prompt.messages is not None:
        return "\n".join(map(message_text, prompt.messages))
    return "\n".join(text for text in (prompt.text, prompt.answer) if text)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """The token ids that the target continues, in its chat template. UserError names the prompt."""
    content = prompt.text if prompt.text is not None else prompt.messages
    try:
        return chat_template.encode_prompt(tokenizer, content or "", prompt.tools, prompt.arguments)
    except UserError as error:
        raise UserError(f"prompt {prompt.id} of {prompt.source}: {error}") from error


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]
) -> list[list[int]]:
    """`encode_prompt` of each, many times faster for thousands of them."""
    contents = [prompt.text if prompt.text is not None else prompt.messages for prompt in prompts]
    tools = [prompt.tools for prompt in prompts]
    arguments = [prompt.arguments for prompt in prompts]
    try:
        return chat_template.encode_prompts(
            tokenizer, [content or "" for content in contents], tools, arguments
        )
    except UserError:
        return [encode_prompt(tokenizer, prompt) for prompt in prompts]  # names the prompt


def _drop_duplicates(
    candidates: Iterator[Candidate], seen: set[str], log: ReadLog
) -> Iterator[Prompt]:
    """The first samples of candidates whose id is not in `seen`, to which it is added; the others are counted."""
    for candidate in candidates:
        prompt = make_prompt(
            candidate.label, candidate.content, 0, candidate.tools, candidate.arguments
        )
        prompt = replace(prompt, location=candidate.location)
        if prompt.id in seen:
            log.dropped[REPEATS] += 1
        else:
            seen.add(prompt.id)
            yield prompt


def make_prompt(
    label: str,
    content: Content,
    sample: int,
    tools: Tools | None = None,
    arguments: Arguments | None = None,
) -> Prompt:
    """The prompt of a content; its id is the hash of content, tools and arguments, and the sample's number."""
    others = {"tools": tools, "arguments": arguments}
    name = f"{_digest(content, {key: value for key, value in others.items() if value})}#{sample}"
    if isinstance(content, list):
        return Prompt(name, label, None, content, sample, tools=tools, arguments=arguments)
    text, answer = (content, None) if isinstance(content, str) else content
    return Prompt(name, label, text, None, sample, answer, tools, arguments=arguments)


def _digest(content: Content, others: dict[str, Any]) -> str:
    """The first 16 hex digits of the SHA-256 of a text, or of the JSON with sorted keys of anything else."""
    hashed = {"content": content, **others} if others else content
    text = hashed if isinstance(hashed, str) else json.dumps(hashed, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
