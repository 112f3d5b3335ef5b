"""One pass over sampled sets, or over prompts before sampling, with all checks.

Rows are read one by one. In memory stay counts and a few examples.
"""

import functools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decode.common.chat.choice import Arguments, describe, with_template
from decode.common.chat.probe import TemplateMarks, TemplateProbe
from decode.common.chat.render import ChatTemplate
from decode.common.errors import UserError
from decode.model.loading import load_config
from eval.tasks.images import FOLDER, read_stored
from train.data import mixture
from train.data.conversations import Conversation, Prompt, encode_prompt
from train.data.filters import EvaluationOverlap
from train.data.manifest import load_set, read_manifest
from train.data.prompt_pipeline import TargetTokenizer
from train.data.sources import (
    NO_PROMPTS,
    REFUSED,
    ReadLog,
    evaluation_texts,
    stream_prompts,
)
from train.doctor_checks.answers import AnswerCheck, check_sources, check_template
from train.doctor_checks.boundary import BoundaryCheck
from train.doctor_checks.findings import DataFinding, Tally, percent
from train.doctor_checks.lookup import LookupCheck
from train.doctor_checks.rows import SeenRow, prompt_row
from train.settings.data import DoctorConfig

EVALUATED = "evaluation prompt in the data"
MOST_RENDERINGS = 256
"""Arguments of rows with which the template is looked at, which takes some hundredths of a second: rows with others,
such as each with a date of its own, are not rendered again."""


@dataclass(frozen=True)
class Examination:
    """What was found in sets or prompts."""

    rows: int
    labels: int
    facts: dict[str, str | int]
    findings: list[DataFinding]
    """The gravest first."""
    shown: list[SeenRow]
    """The samples to show."""


class Renderings:
    """The target's chat template with each setting that is met, and what it does."""

    def __init__(self, s: DoctorConfig, reader: TargetTokenizer):
        self.reader = reader
        self._found: dict[str, ChatTemplate] = {}
        parts = mixture.mixture_parts(s.data) if s.data else []
        self.usual = read_manifest(Path(parts[0].path)).templates()[0] if parts else {}
        """The one that says what the template does."""
        if s.template is not None:
            self.usual = reader.with_template(s.template).template

    def of(
        self, setting: dict[str, Any], own: Arguments | None = None
    ) -> tuple[ChatTemplate, TemplateProbe | None]:
        """(the template with this setting and a row's own arguments, what it does: None if it renders no simple chat,
        or after too many others)."""
        used = {**setting, **(own or {})}
        key = json.dumps(used, sort_keys=True)
        if key not in self._found:
            if own and len(self._found) >= MOST_RENDERINGS:
                return self.of(setting)[0], None
            self._found[key] = ChatTemplate(with_template(self.reader.tokenizer, used), used)
        return self._found[key], self._found[key].probe


def examine_sets(
    s: DoctorConfig, renderings: Renderings, prompts: Mapping[str, Prompt]
) -> Examination:
    """Reads all rows of the sets in `data` once; `prompts` are those of some rows, by id.

    UserError for a set that cannot be read or was made with another tokenizer.
    """
    reader, (chat, template) = renderings.reader, renderings.of(renderings.usual)
    config = load_config(s.target, "target", s.revision)
    size = int(config.get_text_config(decoder=True).vocab_size)
    tally, marks = Tally(s.worth), chat.marks
    answers = AnswerCheck(tally, reader.tokenizer, reader.eos, size, s.max_length)
    boundary = BoundaryCheck(tally, template, reader.eos, prompts)
    evaluation, lookup = EvaluationOverlap(evaluation_texts(s.decontaminate)), LookupCheck(tally)
    check_template(tally, chat, reader.eos)
    tally.said["items"] = "rows"
    first: list[SeenRow] = []
    for row in read_rows(s, renderings, tally):
        answers.add(row)
        text = row.text_ids()
        if not 0 <= min(text, default=0) <= max(text, default=0) < size:
            continue  # such ids have no text
        tally.looked.update(texts=1, chosen=row.chosen)
        boundary.add(row)
        lookup.add(row)
        if evaluation.overlaps(row.asked):
            tally.add(EVALUATED, row)
        if holds_rendered_text(marks, row):
            tally.said.setdefault("example", row.id)
            tally.add("text is rendered already", row)
        first += [row.kept()] if len(first) < s.show else []
    for finished in (boundary, answers, lookup):
        finished.finish()
    labels, looked = tally.labels, tally.looked
    facts: dict[str, str | int] = {
        "rows": f"{looked['rows']:,} ({looked['chosen']:,} rendered again)",
        "tokens": f"{answers.read:,}, supervised {labels:,} ({percent(labels, answers.read)})",
        **({"tokens of images": f"{answers.of_images:,}"} if answers.of_images else {}),
    }
    facts |= lookup.facts()
    return _examination(s, tally, looked["rows"], facts, first)


def read_rows(s: DoctorConfig, renderings: Renderings, tally: Tally) -> Iterator[SeenRow]:
    """The rows of all sets; of several sets ids are prefixed with the set's number, as in training.

    A set that was made with another chat template is reported.
    """
    parts, unread = mixture.mixture_parts(s.data), functools.cache(_why_unread)
    for number, part in enumerate(parts):
        manifest, store = load_set(Path(part.path))
        setting = manifest.template if s.template is None else renderings.usual
        mixture.check_tokenizer(part.path, manifest, store, renderings.reader)
        if manifest.chat_template_hash != renderings.of(setting)[0].hash:
            then = describe(manifest.template)
            other = (
                "by another template than the target has now" if manifest.template == setting
                else f"with --template {then}, and this is {describe(setting)}"
            )  # fmt: skip
            kind = "made with another chat template"
            tally.report(kind, len(store), len(store), path=part.path, other=other)
        chosen = _chosen(s, len(store))
        for i, row in enumerate(store):
            name = f"{number}/{row['id']}" if len(parts) > 1 else row["id"]
            own = json.loads(row.get("chat_template_kwargs", "null"))
            again = i in chosen and "images" not in row  # their placeholders are no rendered text
            seen = SeenRow(name, row, *renderings.of(setting, own), again)
            paths = mixture.locate_images(Path(part.path, FOLDER), row).get("images", ())
            if lost := next(filter(None, map(unread, paths)), ""):
                tally.said.setdefault("unread", lost)
                tally.add("image cannot be read", seen)
            yield seen


def _why_unread(path: str) -> str:
    """What is wrong with a stored image; "" for nothing."""
    try:
        read_stored(path)
    except UserError as error:
        return str(error)
    return ""


def examine_prompts(
    s: DoctorConfig, renderings: Renderings, prompts: list[Prompt], log: ReadLog
) -> Examination:
    """Checks prompts before sampling; `log` says how they were read, and how many equal ones were left out."""
    kinds = Counter(json.dumps(prompt.arguments) for prompt in prompts)
    chat, template = renderings.of(renderings.usual, json.loads(kinds.most_common(1)[0][0]))
    bare, _ = renderings.of(renderings.usual)
    tally, marks = Tally(s.worth), chat.marks
    evaluation = EvaluationOverlap(evaluation_texts(s.decontaminate))
    tally.said |= {"refused": "; ".join(log.refused), "items": "prompts"}
    tally.looked["rows"] = len(prompts)
    seen: list[tuple[SeenRow, Prompt]] = []
    for prompt in prompts:
        try:
            if prompt.images and log.images is not None:
                ids = log.images.encode(prompt.messages or [], **prompt.given)
            else:
                ids = encode_prompt(bare, prompt)
                renderings.reader.check_embedded(Conversation([ids], []))
        except UserError as error:
            tally.said.setdefault("why", f"{prompt.location}: {error}")
            refused = SeenRow(prompt.id, prompt_row(prompt, []), chat, None, False)
            tally.add("prompt is refused", refused)
            continue
        own = renderings.of(renderings.usual, prompt.arguments)
        row = SeenRow(prompt.id, prompt_row(prompt, ids), *own, False)
        tally.looked["texts"] += 1
        if marks.found_in(*prompt.texts_asked):
            tally.said.setdefault("example", prompt.id)
            tally.add("text is rendered already", row)
        if evaluation.overlaps(row.asked):
            tally.add(EVALUATED, row)
        seen.append((row, prompt))
    tally.report("row is refused", log.dropped[REFUSED], log.rows)
    counts = check_sources(tally, seen, template)
    check_template(tally, chat, renderings.reader.eos)
    forms = {"read": "; ".join(log.lines())} if log.forms else {}
    facts = {"prompts": f"{len(prompts):,}", **forms, **counts}
    return _examination(s, tally, len(prompts), facts, [row for row, _ in seen[: s.show]])


def read_sources(s: DoctorConfig, renderings: Renderings) -> tuple[list[Prompt], ReadLog]:
    """(the prompts of `sources` with their images, equal ones left out; how they were read). UserError if there are
    none."""
    reader = replace(renderings.reader, template=renderings.usual)
    log = ReadLog(max_bad_rows=1.0, images=reader.find_images())
    prompts = list(stream_prompts(s.sources, s.seed, log))
    log.check_share()
    if len(prompts) == 0:
        raise UserError(NO_PROMPTS)
    return prompts, log


def holds_rendered_text(marks: TemplateMarks, row: SeenRow) -> bool:
    """Whether marks of the chat template stand within what the user asked, or in a piece of plain text."""
    if row.is_window:
        return marks.found_in(row.text) != ""
    turns = sum(message["role"] == "user" for message in row.messages or [])
    counts = [row.text.count(word) for word in marks.words]  # what is asked ends before the first
    return marks.found_in(row.asked) != "" or (turns > 0 and min(counts, default=0) > turns)


def _chosen(s: DoctorConfig, count: int) -> set[int]:
    """Which of `count` rows are rendered again."""
    return set(mixture.shuffled(count, s.seed)[: s.rows or None].tolist())


def _examination(
    s: DoctorConfig, tally: Tally, rows: int, facts: dict[str, str | int], first: list[SeenRow]
) -> Examination:
    """What the tally found; shown are examples of findings, then the first rows, each once."""
    findings, examples = tally.findings()
    shown = list({row.id: row for row in [*examples, *first]}.values())[: s.show]
    return Examination(rows, tally.labels, facts, findings, shown)
