"""TODO: eval.reporting.render."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from eval.metrics.roofline import with_model_sizes
from eval.reporting.advice import advise, fastest_entry
from eval.reporting.checklist import tuned_table
from eval.reporting.figures import build_charts
from eval.reporting.formatting import (
    Report,
    escape_markdown,
    format_number,
    format_with_interval,
    table_markdown,
    target_name,
)
from eval.reporting.summary import (
    distribution_verdict,
    is_output_changed,
    lossless_verdict,
    summary_lines,
)
from eval.reporting.tables import report_sections, report_tables
from eval.reporting.token_traces import TokenTrace

TEMPLATE = "report.html.j2"


DEFINITIONS = {
    "τ": "tokens emitted after prefill ÷ rounds, pooled over prompts; a round's own token from the "
    "target counts, so plain decoding is 1.0.",
    "α_i": "P(position i accepted | position i reached). Reached: at least i tokens were drafted "
    "and the i − 1 before were accepted.",
    "α": "Σ accepted at i ÷ Σ reached at i, over all positions.",
    "acceptance_rate": "accepted ÷ drafted tokens. Not α: tokens behind a rejection count as "
    "drafted, so it falls as K grows.",
    "speed-up": "seconds per token of plain decoding ÷ those of the method: same engine, same "
    "prompts, same batch size, prefill included.",
    "predicted": "the speed-up that other prompts' rounds at other draft lengths foretell; empty "
    "unless it was predicted out of sample.",
    "K": "tokens drafted in a round; for a tree, its depth.",
    "identical": "prompts whose greedy output equals that of transformers' own generate, token by token. "
    "A divergence is a tie only if the two largest logits are closer than twice the measured "
    "difference between one-token and several-token passes; any other is a failure.",
    "[low, high]": "95 % bootstrap interval over prompts, paired for speed-ups and differences. "
    "n is the number of prompts.",
}


def write_report(
    report: Report,
    folder: Path,
    traces: Sequence[TokenTrace] = (),
    tuned: dict[str, Any] | None = None,
) -> None:
    """Write report.json, report.md and report.html into `folder`. Raises on NaN or infinity."""
    report = with_model_sizes(report)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    (folder / "report.md").write_text(render_markdown(report), encoding="utf-8")
    (folder / "report.html").write_text(render_html(report, traces, tuned), encoding="utf-8")


def render_markdown(report: Report) -> str:
    """The report as Markdown: verdicts, tables, definitions; no plots."""
    parts = [
        f"# Speculative decoding of {escape_markdown(target_name(report))}",
        "\n".join(f"- {escape_markdown(line)}" for line in summary_lines(report)),
        *(table_markdown(table) for table in report_tables(report)),
        "## Definitions",
        "\n".join(f"- **{word}**: {meaning}" for word, meaning in DEFINITIONS.items()),
    ]
    return "\n\n".join(parts) + "\n"


def render_html(
    report: Report, traces: Sequence[TokenTrace] = (), tuned: dict[str, Any] | None = None
) -> str:
    """The report as one HTML page that needs no other file and no script."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found = report_tables(report) + ([] if tuned is None else [tuned_table(tuned)])
    return environment.get_template(TEMPLATE).render(
        target=target_name(report),
        cards=headline_figures(report),
        verdicts=summary_lines(report),
        lossless=f"{lossless_verdict(report)} {distribution_verdict(report)}".strip(),
        broken=is_output_changed(report),
        charts=build_charts(report, tuned),
        traces=traces,
        tables=[table for table in found if not table.detail],
        details=[table for table in found if table.detail],
        advice=advise(report, tuned),
        command=benchmark_command(report),
        settings=report.get("settings"),
        definitions=DEFINITIONS,
    )


def headline_figures(report: Report) -> list[tuple[str, str, str]]:
    """(number, what it is, of what) for the head of the page: of the fastest draft, pooled, of each setting."""
    found = []
    for section in report_sections(report):
        best = fastest_entry(section) if section.task == "all" else None
        if best is not None:
            interval = format_with_interval(best["speedup"], best["speedup_ci"], 2, "×").partition(
                " "
            )[2]
            what = f"speed-up {interval}"
            found.append(
                (format_number(best["speedup"], 2, "×"), what, f"{best['name']}, {section.setting}")
            )
            if len(found) == 1:
                tau = format_number(best["tau"], 2)
                found.append(
                    (tau, "tokens a target pass (τ)", f"{best['name']}, {section.setting}")
                )
    speed = report["baseline"]["tokens_per_second"]
    found.append(
        (
            format_number(speed, 0 if speed is None or speed >= 10 else 1),
            "tokens/s",
            "plain decoding",
        )
    )
    return found


def benchmark_command(report: Report) -> str | None:
    """The command line that measured this."""
    return "python " + shlex.join(report["argv"]) if report.get("argv") else None


def terminal_table(report: Report) -> RichTable:
    """A table of 80 columns for the console: one row for each task, temperature and method."""
    table = RichTable(title=Text(f"Speculative decoding of {target_name(report)}"), box=box.SIMPLE)
    table.add_column("task")
    table.add_column("T", justify="right")
    table.add_column("method", no_wrap=True)
    for name in ("K", "n", "τ", "α", "tok/s", "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    for section in report_sections(report):
        for m in section.entries:
            cells = [
                section.task,
                f"{m['temperature']:g}",
                m["name"],
                format_number(m["k"], 0),
                format_number(m["prompts"], 0),
                format_number(m["tau"], 2),
                format_number(m["alpha"], 3),
                format_number(m["tokens_per_second"], 0),
                format_with_interval(m["speedup"], m["speedup_ci"], 2, "×"),
            ]
            table.add_row(*[Text(cell) for cell in cells])  # Text: no markup in names
        table.add_section()
    return table
