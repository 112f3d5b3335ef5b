"""One pass over sampled sets, or over prompts before sampling, with all checks.

Rows are read one by one. In memory stay counts, digests of prompts, a few examples, and the chosen sample of rows whose
text is rendered and tokenised again and compared in pairs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from decode.common.errors import UserError
from decode.common.ranges import Count, CountOrZero, Seed, Share, zero_or
from decode.model.loading import load_config
from train.data import mixture
from train.data.conversations import TurnSelection
from train.data.manifest import load_set
from train.data.mixture import DataSpec
from train.data.prompt_pipeline import TargetTokenizer, evaluation_texts
from train.data.prompts import Prompt, encode_prompt, stream_prompts
from train.data.sources import REFUSED, REPEATS, PromptSource, ReadLog
from train.doctor_checks.answers import AnswerCheck
from train.doctor_checks.boundary import BoundaryCheck
from train.doctor_checks.chat_features import FeatureCheck, source_findings, template_findings
from train.doctor_checks.findings import (
    DataFinding,
    Defect,
    by_severity,
    cost_or_note,
    percent,
)
from train.doctor_checks.prompt_overlap import OverlapCheck
from train.doctor_checks.seen_rows import SeenRow, prompt_row
from train.doctor_checks.template import ChatTemplate
from train.doctor_checks.text_mix import MixCheck
from train.doctor_checks.vocab_coverage import CoverageCheck


@dataclass
class DoctorConfig:
    target: str = "assets/target"
    """The model that the data is for: folder or Hub name. Its tokenizer, template and config are read, no weights."""
    revision: str | None = None
    """Commit, tag or branch of a target on the Hub."""
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


def examine_sets(
    s: DoctorConfig,
    reader: TargetTokenizer,
    template: ChatTemplate | None,
    prompts: Mapping[str, Prompt],
) -> Examination:
    """Reads all rows of the sets in `data` once; `prompts` are those of some rows, by id.

    UserError for a set that cannot be read or was made with another tokenizer.
    """
    size = vocab_size(s)
    boundary = BoundaryCheck(reader.tokenizer, template, reader.eos, prompts)
    answers = AnswerCheck(reader.tokenizer, reader.eos, size, s.max_length, s.short)
    overlap, features, mix = build_overlap(s), FeatureCheck(template), MixCheck()
    coverage = CoverageCheck(size, reader.eos)
    first: list[SeenRow] = []
    looked = 0
    others: list[DataFinding] = []
    for row in read_rows(s, reader, template, others):
        answers.add(row)
        if not 0 <= min(row.ids, default=0) <= max(row.ids, default=0) < size:
            continue  # such ids have no text
        for check in (boundary, overlap, features, mix, coverage):
            check.add(row)
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
    s: DoctorConfig,
    reader: TargetTokenizer,
    template: ChatTemplate | None,
    findings: list[DataFinding],
) -> Iterator[SeenRow]:
    """The rows of all sets; of several sets ids are prefixed with the set's number, as in training.

    A set that was made with another chat template adds a finding.
    """
    parts = mixture.mixture_parts(s.data)
    for number, part in enumerate(parts):
        manifest, store = load_set(Path(part.path))
        mixture.check_tokenizer(part.path, manifest, store, reader)
        if manifest.chat_template_hash != reader.chat_template_hash:
            findings.append(
                DataFinding(
                    "made with another chat template", "costs", len(store), len(store),
                    f"all {len(store):,} rows of {part.path} were rendered by another template than the target has now",
                    "sample again, or serve with the template of the set",
                )
            )  # fmt: skip
        chosen = set(mixture.shuffled(len(store), s.seed)[: s.rows or None].tolist())
        for i, row in enumerate(store):
            name = f"{number}/{row['id']}" if len(parts) > 1 else row["id"]
            yield SeenRow(name, row, reader.tokenizer, template, i in chosen)


def examine_prompts(
    s: DoctorConfig, reader: TargetTokenizer, template: ChatTemplate | None, prompts: list[Prompt],
    log: ReadLog,
) -> Examination:  # fmt: skip
    """Checks prompts before sampling; `log` says how they were read, and how many equal ones were left out."""
    overlap, mix = build_overlap(s), MixCheck()
    refused, too_long = Defect(), Defect()
    seen: list[tuple[SeenRow, Prompt]] = []
    chosen = set(mixture.shuffled(len(prompts), s.seed)[: s.rows or None].tolist())
    why = ""
    for i, prompt in enumerate(prompts):
        try:
            ids = encode_prompt(reader.tokenizer, prompt)
        except UserError as error:
            why = why or f"{prompt.location}: {error}"
            refused.add(SeenRow(prompt.id, prompt_row(prompt, []), reader.tokenizer, None, False))
            continue
        row = SeenRow(prompt.id, prompt_row(prompt, ids), reader.tokenizer, template, i in chosen)
        if len(ids) >= reader.context:
            too_long.add(row)
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
