"""Step 1 of 4 from sources to prompts: raw contents of bundled files, the standard library, files, the Hub.

Files of the user's and data sets may hold millions of prompts: they are read one after the other, and memory holds the
place of each line or row where they are shuffled.
"""

import itertools
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from decode.common.errors import UserError
from decode.common.files import parse_json_lines, read_lines, read_text
from decode.common.ranges import Count, at_least
from decode.engine.chat_template import Tools
from eval.tasks.dataset_specs import load_hub_dataset
from eval.tasks.row_forms import Content, drop_arrow_nulls, prompt_columns, read_row
from train.data import python_corpus

BUNDLED_PROMPTS = Path(__file__).resolve().parents[2] / "assets" / "prompts"
DOMAINS = ("code", "prose", "arithmetic")
EXCERPT_LENGTHS = (200, 600)  # characters
SHUFFLE_BUFFER = (
    10_000  # rows of a streamed data set that are shuffled together, where a limit is set
)

REPEATS = "dropped_as_repeats"
EMPTY = "dropped_as_empty"
UNANSWERED = "dropped_without_answer"
"""Names of the counts of rows that equal earlier ones, that hold nothing, and for origin text that have no answer."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a source holds at one place."""

    label: str
    """Name of the source, without the folder that it lies in, which stays private."""
    content: Content
    tools: Tools | None = None


@dataclass
class ReadLog:
    """What happened to rows while sources were read."""

    dropped: Counter[str] = field(default_factory=Counter)
    """{name of the count: rows}."""
    forms: dict[tuple[str, ...], str] = field(default_factory=dict)
    """{a source and the columns that were read: a line about it}."""
    unanswered: str = ""
    """Where the first row without an answer stands."""

    def lines(self) -> list[str]:
        """What to tell the user."""
        number = self.dropped[UNANSWERED]
        rows = (
            f"{number} row{'s' * (number > 1)} without an answer skipped, such as {self.unanswered}"
        )
        skipped = f"{rows}: {ANSWER_ADVICE}"
        return [*self.forms.values(), *([skipped] if number else [])]


ANSWER_ADVICE = (
    "origin text learns answers, and asks no one: name their column (`response` of the source), or a column of whole "
    "texts (`column`)"
)


@dataclass
class PromptSource:
    """One place that prompts come from."""

    kind: Literal["bundled", "stdlib", "file", "hub"]
    """bundled: this repository's prompts; stdlib: excerpts of Python's standard library; file: a file of yours; hub: a
    data set of the Hugging Face Hub."""

    path: str = ""
    """bundled: code, prose, arithmetic or all; file: .jsonl, or .txt with a blank line between prompts; hub: name of a
    data set. A row is read as the first of these that it holds: messages, conversations, conversation (chats, maybe as
    JSON); prompt, instruction with input, question, query (with their answers, for origin text); text. Its tools are
    offered to the target."""

    split: str = "train"
    """hub: which split of the data set."""

    config: str | None = None
    """hub: which configuration of the data set; null: its only one."""

    column: str = ""
    """hub and .jsonl: column that holds the text, or the messages of a chat; empty: as `path` says."""

    response: str = ""
    """hub and .jsonl, for origin text: column that holds the answer; empty: as `path` says."""

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
    source: PromptSource, rng: random.Random, root: Path, answered: bool, log: ReadLog
) -> Iterator[Candidate]:
    """Everything in `source`, shuffled where a limit will choose among it. What is skipped is counted in `log`.

    With `answered` (origin text) answers are kept and files and modules come whole; without, the last message of a chat
    is the user's and texts come as excerpts or paragraphs.
    """
    if source.kind == "stdlib" and not answered:
        for excerpt in _stdlib_excerpts(rng, tries=20 * (source.limit or 0)):
            yield Candidate("stdlib", excerpt)
    elif source.kind == "hub":
        yield from _read_hub(source, rng, answered, log)
    elif source.kind == "file":
        yield from _read_file(source, rng, answered, log)
    else:
        if source.kind == "stdlib":
            texts = [
                *python_corpus.read_modules(False).values(),
                *python_corpus.read_help_topics(False).values(),
            ]
            found = [Candidate("stdlib", text) for text in texts]
        else:
            found = _read_bundled(source.path, root)
        if source.limit is not None:
            rng.shuffle(found)
        yield from found


def _read_bundled(domain: str, root: Path) -> list[Candidate]:
    """The bundled prompts, which are texts to continue, not questions."""
    domains = DOMAINS if domain == "all" else (domain,)
    return [
        replace(candidate, label=f"bundled/{name}")
        for name in domains
        for candidate in read_jsonl(root / "train" / f"{name}.jsonl")
    ]


def _read_file(
    source: PromptSource, rng: random.Random, answered: bool, log: ReadLog
) -> Iterator[Candidate]:
    """What a .jsonl or .txt file holds, shuffled where a limit will choose among it. UserError for nothing."""
    path, shuffled = Path(source.path), source.limit is not None
    if path.suffix == ".jsonl":
        rows = _shuffled_rows(path, source, rng, answered) if shuffled else _json_rows(path)
        found = _read_rows(rows, path.name, source, answered, log)
    elif path.suffix == ".txt":
        texts = _read_whole_text(path) if answered else _read_paragraphs(path)
        if shuffled:
            texts = list(texts)
            rng.shuffle(texts)
        found = (Candidate(path.name, text) for text in texts)
    else:
        raise UserError(f"prompt file {path}: must end in .jsonl or .txt")
    skipped = log.dropped[UNANSWERED]
    empty = True
    for candidate in found:
        empty = False
        yield candidate
    if empty and log.dropped[UNANSWERED] == skipped:
        raise UserError(f"prompt file {path}: has no prompts: add some or drop the source")


def _read_whole_text(path: Path) -> list[str]:
    """The text of a file, if there is any."""
    return [text for text in [read_text(path)] if text.strip() != ""]


def _read_paragraphs(path: Path) -> Iterator[str]:
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


def read_jsonl(path: Path) -> Iterator[Candidate]:
    """The prompt of each line that is not blank. UserError names path and line of a bad one."""
    return _read_rows(_json_rows(path), path.name, PromptSource("file"), False, ReadLog())


def _json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """("path:line", row) of each line that is not blank. UserError for one that is no JSON object."""
    return _parse_rows(read_lines(path), path)


def _parse_rows(lines: Iterable[str], path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, row in parse_json_lines(lines, path):
        if not isinstance(row, dict):
            raise UserError(f"{where}: needs an object with a column such as `prompt`")
        yield where, row


def _shuffled_rows(
    path: Path, source: PromptSource, rng: random.Random, answered: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of `_json_rows` in random order; every row is checked before the first one is given."""
    for _ in _read_rows(_json_rows(path), path.name, source, answered, ReadLog()):
        pass
    starts, numbers, end = array("q"), array("q"), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.decode().strip("\ufeff").strip() != "":
                starts.append(end)
                numbers.append(number)
            end += len(line)
        order = array("q", range(len(starts)))
        rng.shuffle(order)  # type: ignore[arg-type]
        for i in order:
            file.seek(starts[i])
            for _, row in _parse_rows([file.readline().decode("utf-8-sig")], path):
                yield f"{path}:{numbers[i]}", row


def _read_hub(
    source: PromptSource, rng: random.Random, answered: bool, log: ReadLog
) -> Iterator[Candidate]:
    """The rows of a Hub data set."""
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
    named = ((f"{name}, row {index}", drop_arrow_nulls(row, data.features)) for index, row in rows)
    return _read_rows(named, source.path, source, answered, log)


def _read_rows(
    rows: Iterable[tuple[str, dict[str, Any]]],
    label: str,
    source: PromptSource,
    answered: bool,
    log: ReadLog,
) -> Iterator[Candidate]:
    """The prompts of rows, with `answered` only of those that have an answer; `log` counts the others.

    A row without any content is an error in a file, and skipped in a set of the Hub.
    """
    for where, fields in rows:
        row = read_row(fields, where, answered, source.column, source.response)
        content = None if row is None else row.answered() if answered else row.question()
        if content is not None and row is not None:
            if (label, *row.columns) not in log.forms:
                log.forms[label, *row.columns] = f"{label}: {row.describe(fields)}"
            yield Candidate(label, content, row.tools)
        elif answered and row is not None:
            log.dropped[UNANSWERED] += 1
            log.unanswered = log.unanswered or where
        elif source.kind == "file":
            columns = [source.column] if source.column else prompt_columns(fields)
            verb = "is" if len(columns) == 1 else "are"
            names = ", ".join(f"`{column}`" for column in columns)
            raise UserError(f"{where}: {names} {verb} empty: fill it or remove the line")
        else:
            log.dropped[EMPTY] += 1


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
