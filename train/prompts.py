"""Prompts for the target to answer: where they come from, what is dropped, how they are encoded.

A prompt is plain text to continue or a chat to answer. Its id is a hash of its content, so ids are
the same on every machine and in every run, and resuming and decontamination can rely on them.
"""

import hashlib
import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from decode import chat
from decode.settings import UserError
from train import stdlib

BUNDLED = Path(__file__).resolve().parents[1] / "assets" / "prompts"
DOMAINS = ("code", "prose", "arithmetic")
CUT_LENGTHS = (200, 600)  # characters
NGRAM = 13  # words in common that count as overlap, as in GPT-3 (arXiv 2005.14165, appendix C)

Content = str | list[dict[str, Any]]


@dataclass
class Source:
    """One place that prompts come from."""

    kind: Literal["bundled", "stdlib", "file", "hub"]
    """bundled: our own; stdlib: cuts of Python's standard library; file: a file of yours;
    hub: a data set of the Hugging Face Hub."""

    path: str = ""
    """bundled: code, prose, arithmetic or all; file: .jsonl with `prompt`, `text` or `messages` on
    each line, or .txt with a blank line between prompts; hub: name of the data set."""

    split: str = "train"
    """hub: split of the data set."""

    config: str | None = None
    """hub: configuration of the data set."""

    column: str = "prompt"
    """hub: column with the text, or with the messages of a chat."""

    limit: int | None = None
    """Prompts to take at most, chosen at random by the seed; null takes all. stdlib needs it."""

    samples: int = 1
    """Answers to sample for each prompt."""


@dataclass(frozen=True)
class Prompt:
    """Plain `text` or a chat's `messages` (the other is None), and which sample of it this is."""

    id: str
    source: str
    text: str | None
    messages: list[dict[str, Any]] | None
    sample: int


def load_prompts(sources: list[Source], seed: int, root: Path = BUNDLED) -> list[Prompt]:
    """All prompts of `sources` in order; content that came earlier is not taken again.

    The same arguments give the same list, and a larger limit keeps the prompts of a smaller one.
    """
    seen: set[str] = set()
    prompts: list[Prompt] = []
    for source in sources:
        _check(source)
        rng = random.Random(f"{seed} {source.kind} {source.path} {source.split}")
        before = len(prompts)
        fresh = _fresh(_candidates(source, rng, root), seen)
        for label, content in itertools.islice(fresh, source.limit):
            prompts += [_prompt(label, content, sample) for sample in range(source.samples)]
        found = (len(prompts) - before) // source.samples
        if source.kind == "stdlib" and source.limit is not None and found < source.limit:
            raise UserError(
                f"source stdlib: limit {source.limit}, but only {found} cuts were found: lower it"
            )
    return prompts


def evaluation_texts(root: Path = BUNDLED) -> list[str]:
    """Every bundled evaluation prompt."""
    paths = sorted((root / "eval").glob("*.jsonl"))
    return [_text_of(content) for path in paths for content in _read_jsonl(path)]


def drop_overlaps(prompts: list[Prompt], evaluation_texts: list[str]) -> tuple[list[Prompt], int]:
    """(prompts that share nothing with the evaluation texts, number of prompts dropped).

    Dropped is what equals, contains or lies within an evaluation text, or has 13 words in a row in
    common with one. Only words count: a change of white space hides nothing.
    """
    texts = [_normal(text) for text in evaluation_texts]
    joined = "\0".join(texts)
    grams = {gram for text in texts for gram in _ngrams(text)}

    def overlaps(prompt: Prompt) -> bool:
        text = _normal(_text_of(prompt.text if prompt.messages is None else prompt.messages))
        contained = text in joined or any(other in text for other in texts)
        return contained or not grams.isdisjoint(_ngrams(text))

    kept = [prompt for prompt in prompts if not overlaps(prompt)]
    return kept, len(prompts) - len(kept)


def encode(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
    """Token ids that the target continues (decode.chat); UserError names the prompt."""
    content = prompt.text if prompt.text is not None else prompt.messages
    try:
        return chat.encode(tokenizer, content or "")
    except UserError as error:
        raise UserError(f"prompt {prompt.id} of {prompt.source}: {error}") from error


def _check(source: Source) -> None:
    """Raises UserError for a source that cannot be read as it is written."""
    if source.kind == "bundled" and source.path not in (*DOMAINS, "all"):
        raise UserError(
            f"source bundled: path {source.path!r} must be one of {', '.join(DOMAINS)}, all"
        )
    if source.kind in ("file", "hub") and source.path == "":
        raise UserError(f"source {source.kind}: path is empty: name the {source.kind} data to read")
    if source.kind == "stdlib" and source.limit is None:
        raise UserError("source stdlib: limit is missing: set how many cuts to take")
    if source.limit is not None and source.limit < 1:
        raise UserError(f"source {source.kind}: limit {source.limit} must be at least 1, or null")
    if source.samples < 1:
        raise UserError(f"source {source.kind}: samples {source.samples} must be at least 1")


def _candidates(source: Source, rng: random.Random, root: Path) -> Iterator[tuple[str, Content]]:
    """(label, content) of all that `source` offers: shuffled where a limit will choose."""
    if source.kind == "stdlib":
        for cut in _stdlib_cuts(rng, tries=20 * (source.limit or 0)):
            yield "stdlib", cut
    elif source.kind == "hub":
        yield from ((source.path, content) for content in _read_hub(source, rng))
    else:
        found = _read_bundled(source.path, root) if source.kind == "bundled" else _read_file(source)
        if source.limit is not None:
            rng.shuffle(found)
        yield from found


def _fresh(
    candidates: Iterator[tuple[str, Content]], seen: set[str]
) -> Iterator[tuple[str, Content]]:
    """Candidates whose content is not in `seen`, which grows by them."""
    for label, content in candidates:
        digest = _digest(content)
        if digest not in seen:
            seen.add(digest)
            yield label, content


def _prompt(label: str, content: Content, sample: int) -> Prompt:
    text, messages = (content, None) if isinstance(content, str) else (None, content)
    return Prompt(f"{_digest(content)}#{sample}", label, text, messages, sample)


def _digest(content: Content) -> str:
    """First 16 hex digits of the SHA-256 of the content; a chat is hashed as sorted JSON."""
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _read_bundled(domain: str, root: Path) -> list[tuple[str, Content]]:
    domains = DOMAINS if domain == "all" else (domain,)
    return [
        (f"bundled/{name}", content)
        for name in domains
        for content in _read_jsonl(root / "train" / f"{name}.jsonl")
    ]


def _read_file(source: Source) -> list[tuple[str, Content]]:
    """Labelled by the file's name only: where it lies on this machine is nobody's business."""
    path = Path(source.path)
    if path.suffix not in (".jsonl", ".txt"):
        raise UserError(f"prompt file {path}: must end in .jsonl or .txt")
    contents = _read_jsonl(path) if path.suffix == ".jsonl" else _read_paragraphs(path)
    if len(contents) == 0:
        raise UserError(f"prompt file {path}: has no prompts: add some or drop the source")
    return [(path.name, content) for content in contents]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"prompt file {path}: {_first_line(error)}: give a readable UTF-8 file"
        ) from error


def _read_paragraphs(path: Path) -> list[Content]:
    paragraphs = re.split(r"\n[ \t]*\n", _read_text(path))
    return [text.strip("\n") for text in paragraphs if text.strip() != ""]


def _read_jsonl(path: Path) -> list[Content]:
    """One content for each line that is not blank."""
    contents = []
    # not splitlines(): JSON strings may hold separators such as U+2028
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if line.strip() == "":
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not JSON ({error.msg}): write one object a line") from error
        known = ("prompt", "text", "messages")
        keys = [key for key in known if isinstance(record, dict) and key in record]
        if len(keys) == 0:
            raise UserError(f"{where}: needs an object with `prompt`, `text` or `messages`")
        content = _content(record[keys[0]], where)
        if content is None:
            raise UserError(f"{where}: `{keys[0]}` is empty: fill it or remove the line")
        contents.append(content)
    return contents


def _read_hub(source: Source, rng: random.Random) -> Iterator[Content]:
    """Contents of one column; rows that hold none are passed over."""
    import datasets  # slow to import, and only this source needs it

    name = f"hub data set {source.path!r}"
    try:
        data = datasets.load_dataset(source.path, source.config, split=source.split)
    except Exception as error:  # its failures share no class: network, names, formats, scripts
        raise UserError(
            f"{name} (config {source.config}, split {source.split!r}) cannot be loaded "
            f"({_first_line(error)}): check path, config, split and the network"
        ) from error
    if source.column not in data.column_names:
        raise UserError(
            f"{name}: no column {source.column!r}: set column to one of {data.column_names}"
        )
    order = list(range(len(data)))
    if source.limit is not None:
        rng.shuffle(order)
    for index in order:
        content = _content(data[index][source.column], f"{name}, row {index}")
        if content is not None:
            yield content


def _content(value: Any, where: str) -> Content | None:
    """Text or messages ready to be answered; None if there is nothing to answer."""
    if value is None or (isinstance(value, str) and value.strip() == ""):
        return None
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise UserError(f"{where}: a prompt must be text or a list of messages, not {value!r:.40}")
    messages = [_message(item, where) for item in value]
    while len(messages) > 0 and messages[-1]["role"] == "assistant":
        messages.pop()  # the target answers itself
    return messages or None


def _message(item: Any, where: str) -> dict[str, Any]:
    """The message without the empty fields that Arrow adds to it."""
    message = {k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else {}
    if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
        raise UserError(f"{where}: every message needs `role` and `content` as text")
    return message


def _stdlib_cuts(rng: random.Random, tries: int) -> Iterator[str]:
    """Whole lines from random places of modules that are not held out, 200 to 600 characters."""
    sources = list(stdlib.modules(False).values())
    ends = list(itertools.accumulate(len(text) for text in sources))
    shortest, longest = CUT_LENGTHS
    for _ in range(tries):
        text = rng.choices(sources, cum_weights=ends)[0]
        start = text.find("\n", rng.randrange(len(text))) + 1
        end = text.find("\n", start + rng.randint(shortest, longest))
        # without the last newline: it would often be split off the token it belongs to
        cut = text[start : end if end >= 0 else len(text)].strip("\n")
        if shortest <= len(cut) <= longest:
            yield cut


def _text_of(content: Content | None) -> str:
    if isinstance(content, list):
        return "\n".join(message["content"] for message in content)
    return content or ""


def _normal(text: str) -> str:
    return " ".join(text.split())


def _ngrams(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}


def _first_line(error: Exception) -> str:
    lines = str(error).strip().split("\n")
    return lines[0] or type(error).__name__
