"""A measurement: what its settings name is loaded and measured, and the report written."""

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from decode.checkpoints.draft_folder import trained_templates
from decode.common import files, run_dir
from decode.common.progress import progress_bars
from decode.constraints.grammar import build_matcher
from decode.distributed.placement import load_target, run_placed
from decode.drafts.base import check_request
from decode.engine.records import DecodeRecord
from decode.model.loading import adopt_tokenizer
from decode.verification.sampling import SamplingParams
from eval.benchmark import baselines, config
from eval.benchmark.config import open_journal
from eval.benchmark.methods import Method, build_methods, draft_checksums
from eval.checks.target_drift import check_original
from eval.evaluate import evaluate
from eval.reporting.render import render_html, terminal_table, write_report
from eval.reporting.token_traces import TokenTrace, read_outputs, select_traces
from eval.results.report import EvalReport
from eval.settings.evaluation import EvalConfig
from eval.tasks import loading

COMMAND = "eval/run.py"
OWNED_FILES = (
    "journal.jsonl", "outputs.jsonl", "report.json", "report.md", "report.html", "speculation_profile.json",
)  # fmt: skip
"""Patterns of the files that this command writes into its output folder; the last one earlier versions wrote."""


@dataclass(frozen=True, repr=False)
class Measurement:
    """What was measured. It prints as the table of the report; a notebook draws the report's page."""

    report: EvalReport
    """report.json: `report.pooled` has τ, α and speed-up of each method, with intervals."""
    folder: Path
    """Where the report lies, with report.html and outputs.jsonl."""
    traces: list[TokenTrace]

    def __repr__(self) -> str:
        console = Console()
        with console.capture() as shown:
            console.print(terminal_table(self.report))
        return shown.get().removesuffix("\n")

    def _repr_html_(self) -> str:
        page = html.escape(render_html(self.report, self.traces))
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 640px; border: 0"></iframe>'


def format_output_line(method: str, temperature: float, record: DecodeRecord) -> str:
    """One line of outputs.jsonl."""
    facts = vars(record) | {"method": method, "temperature": temperature}
    facts["measured_seconds"] = record.seconds  # readers of earlier versions
    names = ("task", "id", "domain", "method", "temperature", "prompt_ids", "output_ids", "rounds")
    clock = ("finish_reason", "seconds", "measured_seconds", "untimed")
    return json.dumps({name: facts[name] for name in (*names, *clock)})


def format_summary_line(report: EvalReport, out: Path) -> str:
    """JSON: the fastest method of each temperature, pooled over tasks, the greedy verdict, failed prompts."""
    best = {}
    for m in sorted(report.pooled, key=lambda m: (m.temperature, m.valid_speedup.value or 0.0)):
        best[f"{m.temperature:g}"] = {
            "name": None if m.void else m.name,
            "tau": m.tau.value,
            "alpha": m.alpha.value,
            "speedup": m.valid_speedup.value,
            "speedup_ci": m.valid_speedup.ci,
        }
    exact = [m for m in report.pooled if m.temperature == 0 and not m.lossy]
    verdicts = [m.lossless.greedy_identical for m in exact]
    return json.dumps(
        {
            "report": str(out / "report.json"),
            "best": best,
            "greedy_identical": all(verdicts) if verdicts else None,
            "void": sum(bool(m.void) for m in report.pooled),
            "failed": len({(f.task, f.id) for m in report.pooled for f in m.failed}),
            "law": None if report.law is None else report.law.passed,
        }
    )


def check_requests(s: EvalConfig, methods: Sequence[Method]) -> None:
    """UserError for a draft that cannot draft what its method asks for, such as more tokens than Medusa has heads."""
    for method in methods:
        if method.draft is not None:
            for temperature in s.temperatures:
                check_request(method.draft, method.k, SamplingParams(temperature, s.top_k, s.top_p))


def measure(s: EvalConfig) -> Measurement | None:
    """Measures the methods and writes the report, or goes on where an earlier start stopped. None in a process of
    several that is not the first."""
    config.check(s)
    return run_placed(s.placement, partial(measure_here, s))


def measure_here(s: EvalConfig) -> Measurement:
    adopt_tokenizer(s.target, s.tokenizer, s.revision)
    loaded = load_target(s.placement, s.target, s.device, s.dtype, s.revision)
    target = loaded.with_template(s.template, trained_templates(m.draft for m in s.methods))
    if s.original:
        check_original(s.original, target)
    build_matcher(s.constraint, target)
    methods = build_methods(s, target)  # every mistake shows before the folder is changed
    baselines.check(s, target, methods)
    check_requests(s, methods)
    items = [item for task in s.tasks for item in loading.load_task_prompts(task, target, True)]
    config.check_images(s, items)
    forms = dict.fromkeys(f"{item.task}: {item.form}" for item in items if item.form)
    with run_dir.open_run(s, COMMAND, OWNED_FILES, config.input_paths(s)) as run:
        out = run.path
        checksums = draft_checksums(s.methods)
        journal = open_journal(run, target.rendering_identity, checksums, s.allow_changed)
        for line in forms:
            Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)
        with progress_bars() as progress:
            report, lines = evaluate(s, target, methods, journal, progress)
        outputs = out / "outputs.jsonl"
        files.write_atomically(outputs, "".join(format_output_line(*line) + "\n" for line in lines))
        traces = select_traces(report, read_outputs(outputs), target.tokenizer)
        write_report(report, out, traces)
    return Measurement(report.with_models(), out, traces)
