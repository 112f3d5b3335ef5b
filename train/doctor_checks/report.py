"""The report of train/doctor.py: samples and findings for a reader, the same as JSON."""

import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from decode.common import files, provenance
from decode.common.chat.choice import describe
from decode.common.errors import UserError
from decode.common.run_dir import check_file
from decode.common.typed_json import to_json
from train.data import mixture
from train.data.prompt_pipeline import load_target_tokenizer
from train.data.sources import ReadLog
from train.doctor_checks.examination import (
    Renderings,
    examine_prompts,
    examine_sets,
    read_sources,
)
from train.doctor_checks.findings import DataFinding
from train.doctor_checks.rendering import print_findings, print_samples, render_page
from train.settings.data import DoctorConfig

DATA_TITLE, SOURCES_TITLE = "Sampled set", "Prompts before sampling"


@dataclass(frozen=True)
class ExaminedPart:
    """How much of what was examined."""

    rows: int
    labels: int
    facts: dict[str, str | int]


@dataclass(frozen=True)
class DoctorReport:
    """The JSON of the last line, to which `provenance` is added."""

    target: str
    data: str | list[str]
    parts: dict[str, ExaminedPart]
    """{DATA_TITLE or SOURCES_TITLE: what was examined}."""
    template: dict[str, str]
    """{what a chat template does: whether this one does it}."""
    findings: list[DataFinding]
    stops_or_costs: int
    """How many findings stop or cost."""


def check(s: DoctorConfig) -> None:
    """UserError for settings that would fail only after the data was read."""
    if not s.data and not s.sources:
        raise UserError("nothing to examine: give --data, a sampled set, or --sources, prompts")
    folders = [part.path for part in mixture.mixture_parts(s.data)] if s.data else []
    evaluation = [s.decontaminate] if isinstance(s.decontaminate, str) else s.decontaminate
    inputs = [s.target, *folders, *evaluation, *(source.path for source in s.sources)]
    check_file(s.out, inputs)
    check_file(s.html, inputs, "--html")
    if s.out and Path(s.out).resolve() == Path(s.html or "-").resolve():
        raise UserError(f"out and html are both {s.out}: name two files")


def report(s: DoctorConfig) -> None:
    """Says what was found, on the terminal or a page, and as JSON. SystemExit where `strict` asks for it."""
    check(s)
    renderings = Renderings(s, load_target_tokenizer(s.target, s.revision))
    chat, probed = renderings.of(renderings.usual)
    prompts, log = read_sources(s, renderings) if s.sources else ([], ReadLog())
    parts = {}
    if s.data:
        by_id = {prompt.id: prompt for prompt in prompts}
        parts[DATA_TITLE] = examine_sets(s, renderings, by_id)
    if s.sources:
        parts[SOURCES_TITLE] = examine_prompts(s, renderings, prompts, log)
    template = {"settings": describe(chat.setting)} if chat.setting else {}
    template |= probed.facts() if probed else {}
    console = Console()
    if s.html:
        page = render_page(s.target, template, parts, s.show_tokens)
        files.write_atomically(Path(s.html), page)
    for title, examined in parts.items():
        if not s.html:
            print_samples(console, examined.shown, s.show_tokens)
        print_findings(console, title, examined)
    findings = [finding for examined in parts.values() for finding in examined.findings]
    found = DoctorReport(
        target=s.target,
        data=s.data if isinstance(s.data, str) else [part.path for part in s.data],
        parts={title: ExaminedPart(x.rows, x.labels, x.facts) for title, x in parts.items()},
        template=template,
        findings=findings,
        stops_or_costs=sum(finding.severity != "note" for finding in findings),
    )
    files.write_result(s.out, to_json(found) | to_json(provenance.collect()))
    if s.strict and found.stops_or_costs:
        sys.exit(1)
