"""Step 2 of 4 from sources to prompts: contents become Prompts with ids; limits apply and exact duplicates are dropped.

A prompt is plain text to continue, a chat to answer, or for origin text either of them with its answer. Its id is a
hash of its content, so ids are the same on every machine and in every run; resuming and decontamination rely on that.
"""

import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.common.errors import UserError
from decode.engine import chat_template
from train.data.sources import (
    BUNDLED_PROMPTS,
    Content,
    PromptSource,
    check,
    read_jsonl,
    read_source,
)


@dataclass(frozen=True)
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
    seen: set[str] = set()
    prompts: list[Prompt] = []
    duplicates = [0]
    for source in sources:
        check(source, answered)
        rng = random.Random(f"{seed} {source.kind} {source.path} {source.split}")
        before = len(prompts)
        contents = read_source(source, rng, root, answered)
        new_contents = _drop_duplicates(contents, seen, duplicates)
        for label, content in itertools.islice(new_contents, source.limit):
            prompts += [make_prompt(label, content, sample) for sample in range(source.samples)]
        taken = (len(prompts) - before) // source.samples
        if source.kind == "stdlib" and source.limit is not None and taken < source.limit:
            raise UserError(
                f"source stdlib: limit {source.limit}, but only {taken} excerpts were found: lower it"
            )
    return prompts, duplicates[0]


def evaluation_texts(root: Path = BUNDLED_PROMPTS) -> list[str]:
    """The texts of all bundled evaluation prompts."""
    paths = sorted((root / "eval").glob("*.jsonl"))
    return [text for path in paths for text in read_prompt_texts(path)]


def read_prompt_texts(path: Path) -> list[str]:
    """The prompts of a jsonl file as plain text."""
    return [prompt_text(make_prompt("", content, 0)) for content in read_jsonl(path, False)]


def prompt_text(prompt: Prompt) -> str:
    """The prompt's whole text, messages and answer included, for comparing prompts."""
    if prompt.messages is not None:
        return "\n".join(message["content"] for message in prompt.messages)
    return "\n".join(text for text in (prompt.text, prompt.answer) if text)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """The token ids that the target continues, in its chat template. UserError names the prompt."""
    content = prompt.text if prompt.text is not None else prompt.messages
    try:
        return chat_template.encode_prompt(tokenizer, content or "")
    except UserError as error:
        raise UserError(f"prompt {prompt.id} of {prompt.source}: {error}") from error


def _drop_duplicates(
    candidates: Iterator[tuple[str, Content]], seen: set[str], duplicates: list[int]
) -> Iterator[tuple[str, Content]]:
    """Candidates whose content is not in `seen`, to which they are added; the others are counted in `duplicates[0]`."""
    for label, content in candidates:
        digest = _digest(content)
        if digest in seen:
            duplicates[0] += 1
        else:
            seen.add(digest)
            yield label, content


def make_prompt(label: str, content: Content, sample: int) -> Prompt:
    """The prompt of a content; its id is the content's hash and the sample's number."""
    name = f"{_digest(content)}#{sample}"
    if isinstance(content, list):
        return Prompt(name, label, None, content, sample)
    text, answer = (content, None) if isinstance(content, str) else content
    return Prompt(name, label, text, None, sample, answer)


def _digest(content: Content) -> str:
    """The first 16 hex digits of the SHA-256 of the content; chats and pairs are hashed as JSON with sorted keys."""
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
