"""TODO: eval.reporting.advice."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.common.errors import UserError
from decode.common.files import read_json
from eval.metrics.roofline import with_model_sizes
from eval.reporting.checklist import build_checklist
from eval.reporting.decision import (
    RuleOfThumb,
    collect_decision_inputs,
    decide,
    rules_of_thumb,
    verdict_from_measurement,
)
from eval.reporting.formatting import (
    Report,
    ReportEntry,
    Table,
    escape_markdown,
    format_with_interval,
    table_markdown,
)
from eval.reporting.tables import ReportSection, real_draft_entries, report_sections

RECOMMENDATION_TEXT = {
    "on": "switch it on",
    "off": "leave it off",
    "batch": "batch instead",
    "measure": "measure more before deciding",
}


@dataclass(frozen=True)
class Advice:
    """What the page and the command print."""

    headline: str
    reasons: list[str]
    tables: list[Table]
    checklist: dict[str, list[str]]


def advise(
    report: Report,
    tuned: dict[str, Any] | None = None,
    memory: float | None = None,
    rows: int | None = None,
    length: int | None = None,
) -> Advice:
    """Advice from the report's own numbers. `memory` bytes, `rows` and `length` describe the planned load."""
    pooled = [section for section in report_sections(report) if section.task == "all"]
    leading = fastest_entry(pooled[0]) if pooled else None
    if leading is None:
        return Advice("Nothing to advise on: no speed-up was measured.", [], [], {})
    facts = collect_decision_inputs(report, leading, memory, rows, length)
    verdict, reasons = decide(facts)
    name = f"{leading['name']} at K = {leading['k']}" if leading["k"] else leading["name"]
    return Advice(
        headline=f"{RECOMMENDATION_TEXT[verdict].capitalize()}: {name}, {pooled[0].setting}.",
        reasons=reasons,
        tables=[_rules_table(rules_of_thumb(report, leading, facts)), _settings_table(report)],
        checklist=build_checklist(report, leading, facts, tuned),
    )


def fastest_entry(section: ReportSection) -> ReportEntry | None:
    """The fastest drafting entry of a section; None where there is none with a speed-up."""
    real = real_draft_entries(section)
    return real[0] if real else None


def _rules_table(found: Sequence[RuleOfThumb]) -> Table:
    rows = [[rule.name, rule.recommended, rule.value, rule.holds] for rule in found]
    return Table("Rules of thumb", ["rule", "wants", "here", "holds"], rows, prose=True)


def _settings_table(report: Report) -> Table:
    """The fastest method of each task and setting, and whether it clearly helps there."""
    rows = []
    for section in report_sections(report):
        best = fastest_entry(section)
        if best is not None:
            value = format_with_interval(best["speedup"], best["speedup_ci"], 2, "×")
            helps = {"on": "yes", "off": "no"}.get(
                verdict_from_measurement(best["speedup_ci"]), "unclear"
            )
            rows.append([section.task, section.setting, best["name"], str(best["k"]), value, helps])
    header = ["task", "setting", "fastest draft", "K", "speed-up", "helps"]
    return Table("By task and setting", header, rows, prose=True)


def advice_markdown(advice: Advice, target: str) -> str:
    """The advice as Markdown."""
    parts = [
        f"# Speculative decoding of {escape_markdown(target)}: advice",
        f"**{escape_markdown(advice.headline)}** {escape_markdown(' '.join(advice.reasons))}",
        *(table_markdown(table) for table in advice.tables),
        "## Checklist",
        *(
            f"### {step}\n\n" + "\n".join(f"- {escape_markdown(line)}" for line in lines)
            for step, lines in advice.checklist.items()
        ),
    ]
    return "\n\n".join(parts) + "\n"


def read_report(path: Path) -> Report:
    """A report of schema 1, with the sizes of its models; UserError for anything else."""
    report = read_json(path)
    if not isinstance(report, dict) or report.get("schema") != 1 or "methods" not in report:
        raise UserError(f"{path} is no report of eval/run.py (schema 1): give its report.json")
    return with_model_sizes(report)
