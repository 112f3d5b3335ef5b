"""Writes a report as JSON, Markdown and one HTML page, and builds its console table."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from decode.common.files import write_atomically
from decode.common.typed_json import to_json
from eval.reporting.advice import advise
from eval.reporting.checklist import tuned_table
from eval.reporting.figures import build_charts
from eval.reporting.formatting import (
    escape_markdown,
    format_estimate,
    format_number,
    html_templates,
    table_markdown,
)
from eval.reporting.summary import (
    distribution_verdict,
    is_output_changed,
    lossless_verdict,
    summary_lines,
)
from eval.reporting.tables import NARROW_COLUMNS, report_tables
from eval.reporting.token_traces import TokenTrace
from eval.results.report import EvalReport
from eval.results.tuned import TunedReport

DEFINITIONS = {
    "τ": "tokens emitted after prefill ÷ rounds, pooled over prompts. The token that the target adds in each round "
    "counts, so plain decoding has τ = 1.",
    "α_i": "P(position i accepted | position i reached). A position is reached if at least i tokens were drafted and "
    "the i − 1 before it were accepted.",
    "α": "Σ accepted at i ÷ Σ reached at i, over all positions.",
    "acceptance_rate": "accepted ÷ drafted tokens. It is not α: the tokens after a rejection count as drafted, so it "
    "falls as K grows.",
    "speed-up": "seconds per token of plain decoding ÷ those of the method: same engine, same prompts, same batch "
    "size, prefill included.",
    "predicted": "the speed-up that follows from the milliseconds of prefill and rounds in a separate pass and from "
    "the acceptance on the other half of the prompts. No second of the measured requests enters it.",
    "K": "tokens drafted in a round; for a tree, its depth.",
    "identical": "prompts whose greedy output equals that of transformers' own generate, token by token; of a "
    "target whose weights are rounded here (w8a8, w4a8, int8, int4) that of plain decoding. A difference "
    "is a tie only if rounding can swap these two tokens here: passes of different widths in the model's dtype are off "
    "by at least the gap of their logits in the next wider dtype. Any other difference is a failure.",
    "[low, high]": "95 % bootstrap interval over prompts, paired for speed-ups and differences. n is the number of "
    "prompts.",
}
"""Meaning of each term and column of a report."""


def write_report(report: EvalReport, folder: Path, traces: Sequence[TokenTrace] = ()) -> None:
    """Writes report.json and its pages into `folder`. ValueError for NaN or infinity in the report."""
    report = report.with_models()
    text = json.dumps(to_json(report), indent=2, ensure_ascii=False, allow_nan=False)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "report.json", text + "\n")
    write_pages(report, folder, traces)


def write_pages(
    report: EvalReport,
    folder: Path,
    traces: Sequence[TokenTrace] = (),
    tuned: TunedReport | None = None,
) -> None:
    """Writes report.md and report.html; traces, tuned as in `render_html`."""
    write_atomically(folder / "report.md", render_markdown(report))
    write_atomically(folder / "report.html", render_html(report, traces, tuned))


def render_markdown(report: EvalReport) -> str:
    """The report as Markdown: summary, tables and definitions, without plots."""
    parts = [
        f"# Speculative decoding of {escape_markdown(report.target_name)}",
        "\n".join(f"- {escape_markdown(line)}" for line in summary_lines(report)),
        *(table_markdown(table) for table in report_tables(report)),
        "## Definitions",
        "\n".join(f"- **{term}**: {meaning}" for term, meaning in DEFINITIONS.items()),
    ]
    return "\n\n".join(parts) + "\n"


def render_html(
    report: EvalReport,
    traces: Sequence[TokenTrace] = (),
    tuned: TunedReport | None = None,
) -> str:
    """The report as one HTML page that needs no other file and no script.

    tuned: a tuning run on the same target; adds its table and plots.
    """
    tables = report_tables(report) + ([] if tuned is None else [tuned_table(tuned.chosen)])
    template = html_templates(Path(__file__).parent).get_template("report.html.j2")
    return template.render(
        target=report.target_name,
        cards=headline_figures(report),
        verdicts=summary_lines(report),
        lossless=f"{lossless_verdict(report)} {distribution_verdict(report)}".strip(),
        broken=is_output_changed(report),
        charts=build_charts(report, tuned),
        traces=traces,
        tables=[table for table in tables if not table.detail],
        details=[table for table in tables if table.detail],
        advice=advise(report, tuned),
        command="python " + shlex.join(report.argv) if report.argv else None,
        settings=report.settings,
        definitions=DEFINITIONS,
    )


def headline_figures(report: EvalReport) -> list[tuple[str, str, str]]:
    """(number, what it is, of what) for the head of the page: the fastest draft of each setting, and plain decoding."""
    figures = []
    for section in report.pooled_sections:
        if best := section.fastest:
            method = f"{best.name}, {section.setting}"
            value, _, interval = format_estimate(best.valid_speedup, 2, "×").partition(" ")
            figures.append((value, f"speed-up {interval}", method))
            if len(figures) == 1:
                tau = format_number(best.tau.value, 2)
                figures.append((tau, "tokens per target pass (τ)", method))
    speed = report.baseline.tokens_per_second
    digits = 0 if speed is None or speed >= 10 else 1
    return [*figures, (format_number(speed, digits), "tokens/s", "plain decoding")]


def terminal_table(report: EvalReport) -> RichTable:
    """A console table for 80 columns: a row for each task, temperature and method."""
    title = Text(f"Speculative decoding of {report.target_name}")
    table = RichTable(title=title, box=box.SIMPLE, padding=0, show_edge=False)
    names = ("task", "T", "method", "K", "n", "τ", "α", "tok/s", "speed-up", "pred.")
    for at, name in enumerate(names):
        right = at not in (0, 2)
        table.add_column(name, justify="right" if right else "left", no_wrap=at > 1)
    for section in report.sections:
        for m in section.entries:  # as Text: a name may hold what rich takes for markup
            table.add_row(*[Text(NARROW_COLUMNS[name](m)) for name in names])
        table.add_section()
    return table
