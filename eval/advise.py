"""Whether to switch speculation on, from a report's own numbers, with the production checklist filled in.

    python eval/advise.py outputs/quickstart/report/report.json
    python eval/advise.py report.json --tuned outputs/tune/tuned.json --rows 8 --length 4096 --memory_gb 24

Markdown on stdout; --out FILE writes it there as well. What was not measured is said to be missing.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.runs import read_json, write_atomically
from decode.settings import UserError, run_command
from eval.checklist import checklist
from eval.grid import Table, as_markdown
from eval.roofline import with_models
from eval.rules import Rule, decide, facts_of, rules, seen
from eval.tables import Section, drafting, sections
from eval.wording import Entry, Report, markdown, target_name, with_interval

DO = {
    "on": "switch it on",
    "off": "leave it off",
    "batch": "batch instead",
    "measure": "measure more before deciding",
}


@dataclass
class Settings:
    report: str
    """A report.json of eval/run.py; may stand first without its name."""
    tuned: str = ""
    """A tuned.json of eval/tune.py on the same target."""
    rows: int = 0
    """Requests at a time that are planned; 0: the report's batch size."""
    length: int = 0
    """Tokens of prompt and reply that each of them holds; 0: the mean reply of the report."""
    memory_gb: float = 0.0
    """Memory of the device in GB (1e9 bytes); 0: that of the report's GPU, if it is a known one."""
    out: str = ""
    """File for the text; empty writes none."""


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
    pooled = [section for section in sections(report) if section.task == "all"]
    leading = best_of(pooled[0]) if pooled else None
    if leading is None:
        return Advice("Nothing to advise on: no speed-up was measured.", [], [], {})
    facts = facts_of(report, leading, memory, rows, length)
    verdict, reasons = decide(facts)
    name = f"{leading['name']} at K = {leading['k']}" if leading["k"] else leading["name"]
    return Advice(
        headline=f"{DO[verdict].capitalize()}: {name}, {pooled[0].setting}.",
        reasons=reasons,
        tables=[_rules_table(rules(report, leading, facts)), _settings_table(report)],
        checklist=checklist(report, leading, facts, tuned),
    )


def best_of(section: Section) -> Entry | None:
    """The fastest drafting entry of a section; None where there is none with a speed-up."""
    real = drafting(section)
    return real[0] if real else None


def _rules_table(found: Sequence[Rule]) -> Table:
    rows = [[rule.name, rule.wants, rule.value, rule.holds] for rule in found]
    return Table("Rules of thumb", ["rule", "wants", "here", "holds"], rows, prose=True)


def _settings_table(report: Report) -> Table:
    """The fastest method of each task and setting, and whether it clearly helps there."""
    rows = []
    for section in sections(report):
        best = best_of(section)
        if best is not None:
            value = with_interval(best["speedup"], best["speedup_ci"], 2, "×")
            helps = {"on": "yes", "off": "no"}.get(seen(best["speedup_ci"]), "unclear")
            rows.append([section.task, section.setting, best["name"], str(best["k"]), value, helps])
    header = ["task", "setting", "fastest draft", "K", "speed-up", "helps"]
    return Table("By task and setting", header, rows, prose=True)


def as_text(advice: Advice, target: str) -> str:
    """The advice as Markdown."""
    parts = [
        f"# Speculative decoding of {markdown(target)}: advice",
        f"**{markdown(advice.headline)}** {markdown(' '.join(advice.reasons))}",
        *(as_markdown(table) for table in advice.tables),
        "## Checklist",
        *(
            f"### {step}\n\n" + "\n".join(f"- {markdown(line)}" for line in lines)
            for step, lines in advice.checklist.items()
        ),
    ]
    return "\n\n".join(parts) + "\n"


def main(s: Settings) -> None:
    report = read_report(Path(s.report))
    tuned = read_json(Path(s.tuned)) if s.tuned else None
    for name in ("rows", "length", "memory_gb"):
        if getattr(s, name) < 0:
            raise UserError(f"{name} must not be negative")
    advice = advise(report, tuned, 1e9 * s.memory_gb or None, s.rows or None, s.length or None)
    text = as_text(advice, target_name(report))
    if s.out:
        write_atomically(Path(s.out), text)
    sys.stdout.write(text)


def read_report(path: Path) -> Report:
    """A report of schema 1, with the sizes of its models; UserError for anything else."""
    report = read_json(path)
    if not isinstance(report, dict) or report.get("schema") != 1 or "methods" not in report:
        raise UserError(f"{path} is no report of eval/run.py (schema 1): give its report.json")
    return with_models(report)


if __name__ == "__main__":
    run_command(main, Settings, __doc__, first="report")
