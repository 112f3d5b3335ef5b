"""Step 1 of 4 from sources to prompts: raw contents of bundled files, the standard library, files, the Hub.

Files of the user's and data sets may hold millions of prompts: they are read one after the other, and memory holds the
place of each line or row where they are shuffled.
"""

import itertools
import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from decode.common.errors import UserError
from decode.common.files import parse_json_lines, read_lines, read_text
from decode.common.ranges import Count, at_least
from eval.tasks.dataset_specs import load_hub_dataset
from train.data import python_corpus

BUNDLED_PROMPTS = Path(__file__).resolve().parents[2] / "assets" / "prompts"
DOMAINS = ("code", "prose", "arithmetic")
EXCERPT_LENGTHS = (200, 600)  # characters
SHUFFLE_BUFFER = (
    10_000  # rows of a streamed data set that are shuffled together, where a limit is set
)

Content = str | tuple[str, str] | list[dict[str, Any]]
"""A text, a (prompt, answer) pair, or the messages of a chat."""


@dataclass
class PromptSource:
    """One place that prompts come from."""

    kind: Literal["bundled", "stdlib", "file", "hub"]
    """bundled: this repository's prompts; stdlib: excerpts of Python's standard library; file: a file of yours; hub: a
    data set of the Hugging Face Hub."""

    path: str = ""
    """bundled: code, prose, arithmetic or all; file: .jsonl with `prompt` (for origin text also `response`), `text` or
    `messages` on each line, or .txt with a blank line between prompts; hub: name of the data set."""

    split: str = "train"
    """hub: which split of the data set."""

    config: str | None = None
    """hub: which configuration of the data set; null: its only one."""

    column: str = "prompt"
    """hub: column that holds the text, or the messages of a chat."""

    response: str = ""
    """hub, for origin text: column that holds the answer to `column`."""

    streaming: bool = False
    """hub: read rows as they are downloaded, without storing them. A limit then chooses among nearby rows only."""

    limit: Count | None = None
    """At most this many prompts, chosen at random by the seed; null takes all. stdlib requires a limit."""

    samples: Annotated[int, at_least(1, 100_000)] = 1
    """Answers to sample for each prompt."""


def check(source: PromptSource, answered: bool) -> None:
    """UserError for settings of a source that cannot work; `answered` is True for origin text."""
    if source.kind == "bundled" and source.path not in (*DOMAINS, "all"):
        raise UserError(
            f"source bundled: path {source.path!r} must be one of {', '.join(DOMAINS)}, all"
        )
    if source.kind in ("file", "hub") and source.path == "":
        raise UserError(f"source {source.kind}: path is empty: name the {source.kind} data to read")
    if source.kind == "stdlib" and source.limit is None and not answered:
        raise UserError("source stdlib: limit is missing: set how many excerpts to take")
    if answered and source.samples > 1:
        raise UserError(f"source {source.kind}: a text is used once: set samples to 1")


def read_source(
    source: PromptSource, rng: random.Random, root: Path, answered: bool
) -> Iterator[tuple[str, Content]]:
    """(label, content) of everything in `source`, shuffled where a limit will choose among it.

    With `answered` (origin text) answers are kept and files and modules come whole; without, the last message of a chat
    is the user's and texts come as excerpts or paragraphs.
    """
    if source.kind == "stdlib" and not answered:
        for excerpt in _stdlib_excerpts(rng, tries=20 * (source.limit or 0)):
            yield "stdlib", excerpt
    elif source.kind == "hub":
        yield from ((source.path, content) for content in _read_hub(source, rng, answered))
    elif source.kind == "file":
        name = Path(source.path).name  # without its folder, which stays private
        yield from ((name, content) for content in _read_file(source, rng, answered))
    else:
        if source.kind == "stdlib":
            texts = [
                *python_corpus.read_modules(False).values(),
                *python_corpus.read_help_topics(False).values(),
            ]
            labelled: list[tuple[str, Content]] = [("stdlib", text) for text in texts]
        else:
            labelled = _read_bundled(source.path, root)
        if source.limit is not None:
            rng.shuffle(labelled)
        yield from labelled


def _read_bundled(domain: str, root: Path) -> list[tuple[str, Content]]:
    domains = DOMAINS if domain == "all" else (domain,)
    return [
        (f"bundled/{name}", content)
        for name in domains
        for content in read_jsonl(root / "train" / f"{name}.jsonl", False)
    ]


def _read_file(source: PromptSource, rng: random.Random, answered: bool) -> Iterator[Content]:
    """The contents of a .jsonl or .txt file, shuffled where a limit will choose among them. UserError for none."""
    path, shuffled = Path(source.path), source.limit is not None
    contents: Iterable[Content]
    if path.suffix == ".jsonl":
        contents = (
            _read_shuffled_jsonl(path, rng, answered) if shuffled else read_jsonl(path, answered)
        )
    elif path.suffix == ".txt":
        contents = _read_whole_text(path) if answered else _read_paragraphs(path)
        if shuffled:
            contents = list(contents)
            rng.shuffle(contents)
    else:
        raise UserError(f"prompt file {path}: must end in .jsonl or .txt")
    empty = True
    for content in contents:
        empty = False
        yield content
    if empty:
        raise UserError(f"prompt file {path}: has no prompts: add some or drop the source")


def _read_whole_text(path: Path) -> list[Content]:
    """The text of a file, if there is any."""
    return [text for text in [read_text(path)] if text.strip() != ""]


def _read_paragraphs(path: Path) -> Iterator[Content]:
    """What stands between blank lines; of two blank lines the second one belongs to the paragraph behind them."""
    lines: list[str] = []
    for line in itertools.chain(read_lines(path), ["\n"]):
        if lines and line.strip(" \t") == "\n":
            text = "".join(lines).strip("\n")
            lines = []
            if text.strip() != "":
                yield text
        else:
            lines.append(line)


def read_jsonl(path: Path, answered: bool) -> Iterator[Content]:
    """One content for each line that is not blank. UserError names path and line of a bad one."""
    return _parse_contents(read_lines(path), path, answered)


def _read_shuffled_jsonl(path: Path, rng: random.Random, answered: bool) -> Iterator[Content]:
    """The contents of `read_jsonl` in random order; every line is checked before the first one is given."""
    for _ in read_jsonl(path, answered):
        pass
    starts, end = array("q"), 0
    with path.open("rb") as file:
        for line in file:
            if line.decode().strip("\ufeff").strip() != "":
                starts.append(end)
            end += len(line)
        rng.shuffle(starts)  # type: ignore[arg-type]
        for start in starts:
            file.seek(start)
            yield from _parse_contents([file.readline().decode("utf-8-sig")], path, answered)


def _parse_contents(lines: Iterable[str], path: Path, answered: bool) -> Iterator[Content]:
    for where, record in parse_json_lines(lines, path):
        known = ("prompt", "text", "messages")
        keys = [key for key in known if isinstance(record, dict) and key in record]
        if len(keys) == 0:
            raise UserError(f"{where}: needs an object with `prompt`, `text` or `messages`")
        content = _content(record[keys[0]], where, record.get("response"), answered)
        if content is None:
            raise UserError(f"{where}: `{keys[0]}` is empty: fill it or remove the line")
        yield content


def _read_hub(source: PromptSource, rng: random.Random, answered: bool) -> Iterator[Content]:
    """The contents of one column of a Hub data set; rows without content are skipped."""
    name = f"hub data set {source.path!r}"
    data = load_hub_dataset(source.path, source.config, source.split, streaming=source.streaming)
    rows: Iterable[tuple[int, Any]]
    if source.streaming:
        limited = source.limit is not None
        rows = enumerate(
            data.shuffle(rng.getrandbits(32), buffer_size=SHUFFLE_BUFFER) if limited else data
        )
    else:
        order = array("q", range(len(data)))
        if source.limit is not None:
            rng.shuffle(order)  # type: ignore[arg-type]
        rows = ((index, data[index]) for index in order)
    for index, row in rows:
        for column in (source.column, source.response):
            if column and column not in row:
                raise UserError(f"{name}: no column {column!r}: choose among {list(row)}")
        answer = row[source.response] if source.response else None
        content = _content(row[source.column], f"{name}, row {index}", answer, answered)
        if content is not None:
            yield content


def _content(value: Any, where: str, answer: Any, answered: bool) -> Content | None:
    """A checked text, (prompt, answer) pair or chat; None if `value` is empty.

    Chats end with a message of the user, or with an answer where `answered` is True.
    """
    if value is None or (isinstance(value, str) and value.strip() == ""):
        return None
    if isinstance(value, str):
        if not answered or answer is None:
            return value
        if not isinstance(answer, str) or answer.strip() == "":
            raise UserError(f"{where}: the response must be text, not {answer!r:.40}")
        return value, answer
    if not isinstance(value, list):
        raise UserError(f"{where}: a prompt must be text or a list of messages, not {value!r:.40}")
    messages = [_message(item, where) for item in value]
    # Without `answered` the target generates the last reply; with it, messages after the last reply are useless.
    while len(messages) > 0 and (messages[-1]["role"] == "assistant") != answered:
        messages.pop()
    return messages or None


def _message(item: Any, where: str) -> dict[str, Any]:
    """The message without the empty fields that Arrow adds; UserError unless role and content are text."""
    message = {k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else {}
    if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
        raise UserError(f"{where}: every message needs `role` and `content` as text")
    return message


def _stdlib_excerpts(rng: random.Random, tries: int) -> Iterator[str]:
    """Excerpts of 200 to 600 characters, whole lines, at random places of modules that are not held out."""
    sources = list(python_corpus.read_modules(False).values())
    ends = list(itertools.accumulate(len(text) for text in sources))
    shortest, longest = EXCERPT_LENGTHS
    for _ in range(tries):
        text = rng.choices(sources, cum_weights=ends)[0]
        start = text.find("\n", rng.randrange(len(text))) + 1
        end = text.find("\n", start + rng.randint(shortest, longest))
        # without the last newline, which the tokenizer would often have merged with what follows it
        excerpt = text[start : end if end >= 0 else len(text)].strip("\n")
        if shortest <= len(excerpt) <= longest:
            yield excerpt
