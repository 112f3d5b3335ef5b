"""Step 1 of 3 from sources to tokens: prompts of bundled files, the standard library, files and the Hub.

Sources may hold millions of prompts: they are read one after the other, and memory holds their ids, to find duplicates,
and the place of each line or row where they are shuffled.
"""

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from decode.common.errors import UserError
from eval.tasks.dataset_specs import BUNDLED_PROMPTS
from eval.tasks.images import FoundImages
from eval.tasks.row_files import read_hub_rows, read_rows
from eval.tasks.row_forms import FORMS, DatasetRow, check_said, read_row
from train.data import python_corpus
from train.data.conversations import Prompt, make_prompt, prompt_text
from train.data.traces import read_tokens, unfold
from train.settings.data import PromptSource

DOMAINS = ("code", "prose", "arithmetic")
REPEATS = "dropped_as_repeats"
EMPTY = "dropped_as_empty"
UNANSWERED = "dropped_without_answer"
REFUSED = "dropped_as_refused"
"""Names of the counts of rows that equal earlier ones, that hold nothing, for origin text that have no answer, and that
cannot be read or encoded."""


@dataclass
class ReadLog:
    """What happened to rows while sources were read."""

    dropped: Counter[str] = field(default_factory=Counter)
    """{name of the count: rows}."""
    forms: dict[tuple[str, ...], str] = field(default_factory=dict)
    """{a source and the columns that were read: a line about it}."""
    unanswered: str = ""
    """Where the first row without an answer stands."""
    max_bad_rows: float = 0.0
    """Largest share of the rows that may be refused; 0: the first one is an error."""
    rows: int = 0
    """Rows read from files and data sets."""
    refused: list[str] = field(default_factory=list)
    """Place and reason of the first refused rows."""
    causes: Counter[str] = field(default_factory=Counter)
    """{what helps, which is the end of a reason: refused rows}."""
    first_of: dict[str, str] = field(default_factory=dict)
    """Place and reason of the first row of each cause."""
    rendered: list[str] = field(default_factory=list)
    """The place of each prompt that was rendered with the target's chat template already, and the mark in it."""
    joined: str = ""
    """What rows that begin alike had in common."""
    images: FoundImages | None = None
    """Those of the prompts; None where texts alone are read."""

    def refuse(self, error: str) -> None:
        """Counts a row that is left out because of `error`, which names it. UserError if none may be."""
        if self.max_bad_rows == 0:
            raise UserError(error)
        self.dropped[REFUSED] += 1
        self.refused += [error][: 3 - len(self.refused)]
        cause = error.rpartition(": ")[2]
        self.causes[cause] += 1
        self.first_of.setdefault(cause, error)

    def check_share(self) -> None:
        """UserError if all rows are refused, or a larger share than may be."""
        number = self.dropped[REFUSED]
        if number > self.max_bad_rows * self.rows or 0 < self.rows == number:
            # The first row may be an odd one, and the cause of most of them what has to be mended.
            cause, share = self.causes.most_common(1)[0]
            which = "the first" if share == number else f"{share} of them such as"
            raise UserError(
                f"{number} of {self.rows} rows are refused, max_bad_rows allows a share of {self.max_bad_rows:g}; "
                f"{which}: {self.first_of[cause]}"
            )

    def lines(self) -> list[str]:
        """What to tell the user."""
        said = [*self.forms.values()]
        if number := self.dropped[UNANSWERED]:
            rows = f"{number} row{'s' * (number > 1)} without an answer skipped"
            said.append(f"{rows}, such as {self.unanswered}: {ANSWER_ADVICE}")
        said += [f"skipped {error}" for error in self.refused]
        if refused := self.dropped[REFUSED]:
            said.append(f"{refused} of {self.rows} rows refused and skipped")
        if self.rendered:
            said.append(
                f"{len(self.rendered)} prompts were rendered with a chat template already, such as {self.rendered[0]}: "
                f"the template renders them once more; {RENDERED_ADVICE}"
            )
        return [*said, self.joined] if self.joined else said


NO_PROMPTS = "the sources hold no prompts: add a source or raise a limit"
ANSWER_ADVICE = (
    "origin text learns answers, and asks no one: name their column (`response` of the source), or a column of whole "
    "texts (`column`)"
)
RENDERED_ADVICE = "give the chats as `messages`, or the bare questions (`column` of the source)"


def check(source: PromptSource, answered: bool) -> None:
    """UserError for settings of a source that cannot work; `answered` is True for origin text."""
    wrong = ""
    if source.kind == "bundled" and source.path not in (*DOMAINS, "all"):
        wrong = f"path {source.path!r} must be one of {', '.join(DOMAINS)}, all"
    elif source.kind in ("file", "hub") and source.path == "":
        wrong = f"path is empty: name the {source.kind} data to read"
    elif source.kind == "stdlib" and source.limit is None and not answered:
        wrong = "limit is missing: set how many excerpts to take"
    elif answered and source.samples > 1:
        wrong = "a text is used once: set samples to 1"
    if wrong:
        raise UserError(f"source {source.kind}: {wrong}")


def read_prompts(
    sources: list[PromptSource], seed: int, root: Path = BUNDLED_PROMPTS
) -> list[Prompt]:
    """All prompts of `sources` in order, each content once.

    The same arguments give the same list, and a larger limit keeps the prompts of a smaller one.
    """
    return list(stream_prompts(sources, seed, ReadLog(), root=root))


def stream_prompts(
    sources: list[PromptSource],
    seed: int,
    log: ReadLog,
    answered: bool = False,
    root: Path = BUNDLED_PROMPTS,
) -> Iterator[Prompt]:
    """The prompts of `read_prompts` one by one, the samples of a content behind each other; contents that had come
    earlier count in `log`.

    With `answered` (origin text) prompts carry their answers, and files and modules come as whole texts.
    """
    for source in sources:
        check(source, answered)
    seen: set[str] = set()

    def is_new(prompt: Prompt) -> bool:
        if prompt.id in seen:
            log.dropped[REPEATS] += 1
        return prompt.id not in seen

    for source in sources:
        rng = random.Random(f"{seed} {source.kind} {source.path} {source.split}")
        found = filter(is_new, read_source(source, rng, root, answered, log))
        taken = 0
        for prompt in itertools.islice(found, source.limit):
            taken += 1
            seen.add(prompt.id)
            yield prompt
            for sample in range(1, source.samples):
                yield replace(prompt, id=f"{prompt.content_id}#{sample}", sample=sample)
        if source.kind == "stdlib" and source.limit is not None and taken < source.limit:
            raise UserError(
                f"source stdlib: limit {source.limit}, but only {taken} excerpts were found: lower it"
            )


def read_source(
    source: PromptSource, rng: random.Random, root: Path, answered: bool, log: ReadLog
) -> Iterator[Prompt]:
    """The first samples of everything in `source`, shuffled where a limit will choose among it. What is skipped is
    counted in `log`.

    With `answered` (origin text) answers are kept and files and modules come whole; without, the last message of a chat
    is the user's and texts come as excerpts or paragraphs.
    """
    shuffle = rng if source.limit is not None else None
    if source.kind == "hub":
        rows = read_hub_rows(
            source.path, source.config, source.split, streaming=source.streaming, rng=shuffle
        )
        yield from _read_rows(rows, source.path, source, answered, log)
    elif source.kind == "file":
        path = Path(source.path)
        rows = read_rows(path, source.split, shuffle, answered)
        skipped = log.dropped[UNANSWERED]
        prompt = None
        for prompt in _read_rows(rows, path.resolve().name, source, answered, log):
            yield prompt
        if prompt is None and log.dropped[UNANSWERED] == skipped and not log.dropped[REFUSED]:
            raise UserError(f"prompt file {path}: has no prompts: add some or drop the source")
    elif source.kind == "stdlib" and not answered:
        for excerpt in _stdlib_excerpts(rng, tries=20 * (source.limit or 0)):
            yield make_prompt("stdlib", excerpt)
    else:
        if source.kind == "stdlib":
            parts = python_corpus.read_modules(False), python_corpus.read_help_topics(False)
            found = [make_prompt("stdlib", text) for part in parts for text in part.values()]
        else:  # bundled prompts are texts to continue, not questions
            names = DOMAINS if source.path == "all" else (source.path,)
            files = {f"bundled/{name}": root / "train" / f"{name}.jsonl" for name in names}
            found = [x for label, path in files.items() for x in _read_prompt_file(path, label)]
        if shuffle is not None:
            rng.shuffle(found)
        yield from found


def _read_prompt_file(path: Path, label: str = "") -> Iterator[Prompt]:
    source = PromptSource("file")
    return _read_rows(read_rows(path, source.split), label, source, False, ReadLog())


def evaluation_texts(
    decontaminate: str | list[str] = "", root: Path = BUNDLED_PROMPTS
) -> list[str]:
    """The bundled evaluation prompts and those of the files in `decontaminate`; an empty name is no file."""
    own = [decontaminate] if isinstance(decontaminate, str) else decontaminate
    paths = [*sorted((root / "eval").glob("*.jsonl")), *(Path(path) for path in own if path)]
    return [prompt_text(prompt) for path in paths for prompt in _read_prompt_file(path)]


def _read_rows(
    rows: Iterable[DatasetRow], label: str, source: PromptSource, answered: bool, log: ReadLog
) -> Iterator[Prompt]:
    """The prompts of rows, with `answered` only of those that have an answer; `log` counts the others. A row of several
    rollouts counts as so many, if no `column` is named."""
    unfolded = ([row] if source.column else unfold(row, answered) for row in rows)
    for item in itertools.chain.from_iterable(unfolded):
        log.rows += 1
        prompt = None
        try:
            prompt = _read_row(item, label, source, answered, log)
        except UserError as error:
            log.refuse(str(error))
        if log.rows == 1000:  # long before the end of a file in which hardly anything is right
            log.check_share()
        if prompt is not None:
            yield prompt


def _read_row(
    item: DatasetRow, label: str, source: PromptSource, answered: bool, log: ReadLog
) -> Prompt | None:
    """What a row holds; None if it counts in `log` as empty or unanswered. UserError for a row that is refused: so is
    one without content in a file, which a set of the Hub may have."""
    if item.error:
        raise UserError(item.error)
    where = item.location
    tokens = None if source.column else read_tokens(item, answered)
    if tokens is not None:
        log.forms.setdefault((label,), f"{label}: read as token ids and labels")
        return make_prompt(label, tokens, location=where)
    row = read_row(item, answered, source.column, source.response, log.images is not None)
    content = None if row is None else row.answered() if answered else row.question()
    if row is not None and content is not None:
        if log.images is not None and not isinstance(content, tuple):
            of_file = Path(source.path) if source.kind == "file" else None
            content = log.images.place(content, row, where, of_file)
        if isinstance(content, list):
            check_said(content, where)
        if (label, *row.columns) not in log.forms:
            log.forms[label, *row.columns] = f"{label}: {row.describe()}"
        return make_prompt(label, content, row.tools, row.arguments, where)
    if answered and row is not None:
        log.dropped[UNANSWERED] += 1
        log.unanswered = log.unanswered or where
    elif source.kind != "file":
        log.dropped[EMPTY] += 1
    elif row is not None:
        raise UserError(f"{item.name(row.columns[0])} holds replies alone: remove the line")
    else:
        own = [form.column for form in FORMS if form.column in item.fields]
        columns = [source.column] if source.column else own
        names = ", ".join(f"`{column}`" for column in columns)
        verb = "is" if len(columns) == 1 else "are"
        raise UserError(f"{where}: {names} {verb} empty: fill it or remove the line")
    return None


def _stdlib_excerpts(rng: random.Random, tries: int) -> Iterator[str]:
    """Excerpts of 200 to 600 characters, whole lines, at random places of modules that are not held out."""
    sources = list(python_corpus.read_modules(False).values())
    ends = list(itertools.accumulate(len(text) for text in sources))
    shortest, longest = 200, 600
    for _ in range(tries):
        text = rng.choices(sources, cum_weights=ends)[0]
        start = text.find("\n", rng.randrange(len(text))) + 1
        end = text.find("\n", start + rng.randint(shortest, longest))
        # without the last newline, which the tokenizer would often have merged with what follows it
        excerpt = text[start : end if end >= 0 else len(text)].strip("\n")
        if shortest <= len(excerpt) <= longest:
            yield excerpt
