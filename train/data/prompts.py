"""Prompts for the target to answer, or texts to learn as they stand.

A prompt is plain text to continue or a chat to answer. Its id is a hash of its content, so ids are
the same on every machine and in every run, and resuming and decontamination can rely on them.
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

from decode.common import chat_template
from decode.common.errors import UserError
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
    """Plain `text` or a chat's `messages` (the other is None), and which sample of it this is."""

    id: str
    source: str
    text: str | None
    messages: list[dict[str, Any]] | None
    sample: int
    answer: str | None = None
    """To `text`, where it is there and wanted."""


def read_prompts(
    sources: list[PromptSource], seed: int, root: Path = BUNDLED_PROMPTS
) -> list[Prompt]:
    """All prompts of `sources` in order; content that came earlier is not taken again.

    The same arguments give the same list, and a larger limit keeps the prompts of a smaller one.
    """
    return read_prompts_with_duplicates(sources, seed, root=root)[0]


def read_prompts_with_duplicates(
    sources: list[PromptSource], seed: int, answered: bool = False, root: Path = BUNDLED_PROMPTS
) -> tuple[list[Prompt], int]:
    """(what `load_prompts` gives, how often content was passed over since it came earlier).

    With `answered` answers are taken along where there are any, and texts come whole: files and modules.
    """
    seen: set[str] = set()
    prompts: list[Prompt] = []
    repeats = [0]
    for source in sources:
        check(source, answered)
        rng = random.Random(f"{seed} {source.kind} {source.path} {source.split}")
        before = len(prompts)
        fresh = _drop_duplicates(read_source(source, rng, root, answered), seen, repeats)
        for label, content in itertools.islice(fresh, source.limit):
            prompts += [make_prompt(label, content, sample) for sample in range(source.samples)]
        found = (len(prompts) - before) // source.samples
        if source.kind == "stdlib" and source.limit is not None and found < source.limit:
            raise UserError(
                f"source stdlib: limit {source.limit}, but only {found} cuts were found: lower it"
            )
    return prompts, repeats[0]


def evaluation_texts(root: Path = BUNDLED_PROMPTS) -> list[str]:
    """Every bundled evaluation prompt."""
    paths = sorted((root / "eval").glob("*.jsonl"))
    return [text for path in paths for text in read_prompt_texts(path)]


def read_prompt_texts(path: Path) -> list[str]:
    """The prompts of a jsonl file as plain text."""
    return [prompt_text(make_prompt("", content, 0)) for content in read_jsonl(path, False)]


def prompt_text(prompt: Prompt) -> str:
    """All that is said in it, for comparing."""
    if prompt.messages is not None:
        return "\n".join(message["content"] for message in prompt.messages)
    return "\n".join(text for text in (prompt.text, prompt.answer) if text)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Token ids that the target continues (decode.common.chat_template); UserError names the prompt."""
    content = prompt.text if prompt.text is not None else prompt.messages
    try:
        return chat_template.encode_prompt(tokenizer, content or "")
    except UserError as error:
        raise UserError(f"prompt {prompt.id} of {prompt.source}: {error}") from error


def _drop_duplicates(
    candidates: Iterator[tuple[str, Content]], seen: set[str], repeats: list[int]
) -> Iterator[tuple[str, Content]]:
    """Candidates whose content is not in `seen`, which grows by them; the others are counted in `repeats`."""
    for label, content in candidates:
        digest = _digest(content)
        if digest in seen:
            repeats[0] += 1
        else:
            seen.add(digest)
            yield label, content


def make_prompt(label: str, content: Content, sample: int) -> Prompt:
    """The prompt whose id is the content's."""
    name = f"{_digest(content)}#{sample}"
    if isinstance(content, list):
        return Prompt(name, label, None, content, sample)
    text, answer = (content, None) if isinstance(content, str) else content
    return Prompt(name, label, text, None, sample, answer)


def _digest(content: Content) -> str:
    """First 16 hex digits of the SHA-256 of the content; what is no plain text is hashed as sorted JSON."""
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
