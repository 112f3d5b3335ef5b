"""One pass over sampled sets, or over prompts before sampling, with all checks.

Rows are read one by one. In memory stay counts, digests of prompts, a few examples, and the chosen sample of rows whose
text is rendered and tokenised again and compared in pairs.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from decode.common.chat_template import Arguments
from decode.common.errors import UserError
from decode.common.ranges import Count, CountOrZero, Seed, Share, zero_or
from decode.common.template_choice import TemplateSetting, describe, with_template
from decode.model.loading import load_config
from train.data import mixture
from train.data.conversations import Conversation, TurnSelection
from train.data.manifest import load_set, read_manifest
from train.data.mixture import DataSpec
from train.data.prompt_pipeline import TargetTokenizer, evaluation_texts
from train.data.prompts import Prompt, encode_prompt, stream_prompts
from train.data.rendered_text import TemplateMarks, template_marks
from train.data.sources import REFUSED, RENDERED_ADVICE, REPEATS, PromptSource, ReadLog
from train.doctor_checks.answers import AnswerCheck
from train.doctor_checks.boundary import BoundaryCheck
from train.doctor_checks.chat_features import FeatureCheck, source_findings, template_findings
from train.doctor_checks.findings import (
    DataFinding,
    Defect,
    by_severity,
    cost_or_note,
    percent,
    stop_or_cost,
)
from train.doctor_checks.prompt_overlap import OverlapCheck
from train.doctor_checks.seen_rows import SeenRow, prompt_row
from train.doctor_checks.template import ChatTemplate, probe
from train.doctor_checks.text_mix import MixCheck
from train.doctor_checks.vocab_coverage import CoverageCheck

MOST_RENDERINGS = 256
"""Arguments of rows with which the template is looked at, which takes some hundredths of a second: rows with others,
such as each with a date of its own, are not rendered again."""


@dataclass
class DoctorConfig:
    target: str = "assets/target"
    """The model that the data is for: folder or Hub name. Its tokenizer, template and config are read, no weights."""
    revision: str | None = None
    """Commit, tag or branch of a target on the Hub."""
    template: TemplateSetting | None = None
    """Which chat template, and its arguments, as in train/sample.py; null: those that the manifest of each set names,
    and for `sources` those of the first set, if there is one."""
    data: DataSpec = ""
    """A sampled set from train/sample.py, or several: [{path: one}, {path: other}], read whole. May stand first."""
    sources: list[PromptSource] = field(default_factory=list)
    """Prompts before sampling, as in train/sample.py. With `data` too, rows are compared with the prompts they
    answer, which also shows a wrong boundary where the target has no chat template."""
    turns: TurnSelection = "last"
    """sources: which replies are to be sampled, as in train/sample.py."""
    decontaminate: str | list[str] = ""
    """Files or folders with evaluation prompts besides the bundled ones."""
    max_length: Count = 512
    """Tokens of a row that training reads (--loop.max_length of train/distill.py)."""
    vocabs: list[Count] = field(default_factory=lambda: [8192, 32000])
    """Sizes of draft vocabularies whose coverage of the labels is measured."""
    short: Count = 3
    """Answers with fewer tokens, their end not counted, are very short."""
    near_duplicates: Annotated[float, zero_or(0.6, 1)] = 0.8
    """Prompts are nearly equal if they share this part of their 5-word shingles; 0: not looked for."""
    worth: Share = 0.05
    """From this share of the rows or labels on a defect costs something (or stops, if it is grave)."""
    rows: CountOrZero = 2000
    """Rows of each set, chosen by the seed, whose text is rendered and tokenised again; 0: all."""
    show: CountOrZero = 3
    """Samples to show, those of the gravest findings first."""
    show_tokens: Count = 300
    """Tokens shown of a sample, around where its labels begin."""
    html: str = ""
    """File for a page with findings and samples; empty: the terminal shows them."""
    out: str = ""
    """File for the JSON of the last line; empty: none."""
    strict: bool = False
    """Exit code 1 if there is a finding that stops or costs."""
    seed: Seed = 0


@dataclass(frozen=True)
class Examination:
    """What was found in sets or prompts."""

    rows: int
    labels: int
    facts: dict[str, Any]
    findings: list[DataFinding]
    """The gravest first."""
    shown: list[SeenRow]
    """The samples to show."""


class Renderings:
    """The target's tokenizer with each setting of the chat template that is met, and what each template does."""

    def __init__(self, s: DoctorConfig, reader: TargetTokenizer):
        self.bare = reader
        self._found: dict[str, tuple[TargetTokenizer, ChatTemplate | None]] = {}
        parts = mixture.mixture_parts(s.data) if s.data else []
        self.usual = read_manifest(Path(parts[0].path)).templates()[0] if parts else {}
        """The one that says what the template does."""
        if s.template is not None:
            self.usual = reader.with_template(s.template).template

    def of(
        self, setting: dict[str, Any], own: Arguments | None = None
    ) -> tuple[TargetTokenizer, ChatTemplate | None]:
        """(the tokenizer with this setting and a row's own arguments, what its template does: None if it renders no
        simple chat, or after too many others)."""
        template = {**setting, **(own or {})}
        key = json.dumps(template, sort_keys=True)
        if own and key not in self._found and len(self._found) >= MOST_RENDERINGS:
            return self.of(setting)[0], None
        if key not in self._found:
            tokenizer = with_template(self.bare.tokenizer, template)
            reader = replace(self.bare, tokenizer=tokenizer, template=template)
            self._found[key] = reader, probe(tokenizer)
        return self._found[key]


def examine_sets(
    s: DoctorConfig, renderings: Renderings, prompts: Mapping[str, Prompt]
) -> Examination:
    """Reads all rows of the sets in `data` once; `prompts` are those of some rows, by id.

    UserError for a set that cannot be read or was made with another tokenizer.
    """
    reader, template = renderings.of(renderings.usual)
    size = vocab_size(s)
    boundary = BoundaryCheck(template, reader.eos, prompts)
    answers = AnswerCheck(reader.tokenizer, reader.eos, size, s.max_length, s.short)
    overlap, features, mix = build_overlap(s), FeatureCheck(template), MixCheck()
    coverage = CoverageCheck(size, reader.eos)
    rendered, marks = Defect(), template_marks(reader.tokenizer)
    first: list[SeenRow] = []
    looked = 0
    others: list[DataFinding] = []
    for row in read_rows(s, renderings, others):
        answers.add(row)
        if not 0 <= min(row.ids, default=0) <= max(row.ids, default=0) < size:
            continue  # such ids have no text
        for check in (boundary, overlap, features, mix, coverage):
            check.add(row)
        if holds_rendered_text(marks, row):
            rendered.add(row)
        looked += row.chosen
        first += [row.kept()] if len(first) < s.show else []
    labels = answers.labels
    findings = by_severity(
        [
            *others,
            *template_findings(reader.tokenizer, template, reader.eos),
            *boundary.findings(labels, s.worth),
            *answers.findings(s.worth),
            *overlap.findings(s.worth),
            *features.findings(labels, s.worth),
            *([rendered_finding(rendered, answers.rows, "rows", s.worth)] if rendered.rows else []),
            *mix.findings(looked),
            *coverage.findings(s.vocabs, s.worth),
        ]
    )
    facts = {
        "rows": f"{answers.rows:,} ({looked:,} rendered and tokenised again)",
        "tokens": f"{answers.read:,}, supervised {labels:,} ({percent(labels, answers.read)})",
        **features.facts(),
        **mix.facts(),
        **coverage.facts(s.vocabs),
    }
    return Examination(answers.rows, labels, facts, findings, choose_shown(s, findings, first))


def read_rows(
    s: DoctorConfig, renderings: Renderings, findings: list[DataFinding]
) -> Iterator[SeenRow]:
    """The rows of all sets; of several sets ids are prefixed with the set's number, as in training.

    A set that was made with another chat template adds a finding.
    """
    parts = mixture.mixture_parts(s.data)
    for number, part in enumerate(parts):
        manifest, store = load_set(Path(part.path))
        setting = manifest.template if s.template is None else renderings.usual
        reader, _ = renderings.of(setting)
        mixture.check_tokenizer(part.path, manifest, store, reader)
        if manifest.chat_template_hash != reader.chat_template_hash:
            then = describe(manifest.template)
            other = (
                "by another template than the target has now" if manifest.template == setting
                else f"with --template {then}, and this is {describe(setting)}"
            )  # fmt: skip
            findings.append(
                DataFinding(
                    "made with another chat template", "costs", len(store), len(store),
                    f"all {len(store):,} rows of {part.path} were rendered {other}",
                    "sample again, or serve with the template of the set",
                )
            )  # fmt: skip
        chosen = set(mixture.shuffled(len(store), s.seed)[: s.rows or None].tolist())
        for i, row in enumerate(store):
            name = f"{number}/{row['id']}" if len(parts) > 1 else row["id"]
            own = json.loads(row.get("chat_template_kwargs", "null"))
            rendering, template = renderings.of(setting, own)
            yield SeenRow(name, row, rendering.tokenizer, template, i in chosen)


def examine_prompts(
    s: DoctorConfig, renderings: Renderings, prompts: list[Prompt], log: ReadLog
) -> Examination:
    """Checks prompts before sampling; `log` says how they were read, and how many equal ones were left out."""
    kinds = Counter(json.dumps(prompt.arguments) for prompt in prompts)
    reader, template = renderings.of(renderings.usual, json.loads(kinds.most_common(1)[0][0]))
    overlap, mix = build_overlap(s), MixCheck()
    refused, too_long, rendered = Defect(), Defect(), Defect()
    marks = template_marks(reader.tokenizer)
    seen: list[tuple[SeenRow, Prompt]] = []
    chosen = set(mixture.shuffled(len(prompts), s.seed)[: s.rows or None].tolist())
    why = ""
    bare, _ = renderings.of(renderings.usual)
    for i, prompt in enumerate(prompts):
        try:
            ids = encode_prompt(bare.tokenizer, prompt)
            bare.check_embedded(Conversation([ids], []))
        except UserError as error:
            why = why or f"{prompt.location}: {error}"
            refused.add(SeenRow(prompt.id, prompt_row(prompt, []), reader.tokenizer, None, False))
            continue
        own, its = renderings.of(renderings.usual, prompt.arguments)
        row = SeenRow(prompt.id, prompt_row(prompt, ids), own.tokenizer, its, i in chosen)
        if len(ids) >= reader.context:
            too_long.add(row)
        if marks.found_in_prompt(prompt):
            rendered.add(row)
        overlap.add(row)
        mix.add(row)
        seen.append((row, prompt))
    total = len(prompts)
    counts, lost = source_findings(seen, template, s.turns)
    found = [
        refused.finding(
            "prompt is refused", "stops", total,
            f"{percent(refused.rows, total)} of the prompts cannot be encoded; sampling skips them, and ends above its "
            f"max_bad_rows: {why:.160}",
            "remove or change them",
        ),
        too_long.finding(
            "prompt longer than the context", cost_or_note(too_long.rows, total, s.worth), total,
            f"{percent(too_long.rows, total)} of the prompts leave no room for an answer in {reader.context:,} tokens "
            "and are not sampled", "filters.max_prompt, or shorter prompts",
        ),
        rendered_finding(rendered, total, "prompts", s.worth),
    ]  # fmt: skip
    unread = log.dropped[REFUSED]
    if unread:
        found.append(
            DataFinding(
                "row is refused", "stops" if unread > s.worth * log.rows else "costs", unread, log.rows,
                f"{percent(unread, log.rows)} of the rows cannot be read; sampling skips them, and ends above its "
                f"max_bad_rows: {'; '.join(log.refused):.400}", "correct or remove them",
            )
        )  # fmt: skip
    duplicates = log.dropped[REPEATS]
    if duplicates:
        read = total + duplicates
        found.append(
            DataFinding(
                "repeated prompts", cost_or_note(duplicates, read, s.worth), duplicates, read,
                f"{percent(duplicates, read)} of the prompts read are equal to earlier ones: sampling drops them, so "
                "there are fewer than it seems", "more prompts",
            )
        )  # fmt: skip
    found += lost + overlap.findings(s.worth) + mix.findings(len(seen))
    found += template_findings(reader.tokenizer, template, reader.eos)
    findings = by_severity([finding for finding in found if finding.rows > 0])
    first = [row for row, _ in seen[: s.show]]
    forms = {"read": "; ".join(log.lines())} if log.forms else {}
    facts = {"prompts": f"{total:,}", **forms, **counts, **mix.facts()}
    return Examination(total, 0, facts, findings, choose_shown(s, findings, first))


def read_sources(s: DoctorConfig) -> tuple[list[Prompt], ReadLog]:
    """(the prompts of `sources`, equal ones left out; how they were read). UserError if there are none."""
    log = ReadLog(max_bad_rows=1.0)
    prompts = list(stream_prompts(s.sources, s.seed, log))
    log.check_share()
    if len(prompts) == 0:
        raise UserError("the sources hold no prompts: add a source or raise a limit")
    return prompts, log


def holds_rendered_text(marks: TemplateMarks, row: SeenRow) -> bool:
    """Whether marks of the chat template stand within what the user asked, or in a piece of plain text."""
    if row.is_window:
        return marks.found_in(row.text) != ""
    turns = sum(message["role"] == "user" for message in row.messages or [])
    counts = [row.text.count(word) for word in marks.words]  # what is asked ends before the first
    return marks.found_in(row.asked) != "" or (turns > 0 and min(counts, default=0) > turns)


def rendered_finding(rendered: Defect, total: int, what: str, worth: float) -> DataFinding:
    """The finding about prompts or rows (`what`) that hold marks of the chat template."""
    example = rendered.examples[0].id if rendered.examples else ""
    return rendered.finding(
        "text is rendered already", stop_or_cost(rendered.rows, total, worth), total,
        f"{percent(rendered.rows, total)} of the {what} hold marks of the chat template, such as {example}: it renders "
        "them once more, or learns marks and questions as answers", RENDERED_ADVICE,
    )  # fmt: skip


def build_overlap(s: DoctorConfig) -> OverlapCheck:
    """The check against the bundled evaluation prompts and those of `decontaminate`."""
    return OverlapCheck(evaluation_texts(s.decontaminate), s.near_duplicates)


def choose_shown(
    s: DoctorConfig, findings: list[DataFinding], first: list[SeenRow]
) -> list[SeenRow]:
    """An example of each finding, the gravest first, then the first rows; each once, `show` in all."""
    examples = [f.examples[0] for f in findings if f.severity != "note" and f.examples]
    by_id = {row.id: row for row in reversed([*examples, *first])}
    order = dict.fromkeys(row.id for row in [*examples, *first])
    return [by_id[name] for name in order][: s.show]


def vocab_size(s: DoctorConfig) -> int:
    """Rows of the target's embedding, by its config."""
    config = load_config(s.target, "target", s.revision)
    return int(config.get_text_config(decoder=True).vocab_size)
