"""report.json (schema 1) as Markdown, as one self-contained HTML page, and as a console table.

    python eval/report.py outputs/quickstart/report            # renders report.md and report.html again
    python eval/report.py DIR --tuned outputs/tune/tuned.json  # with the plots of a tuning run

Every result stands with its n and its 95 % interval; what was not measured is shown as –, or not at all.
"""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import jinja2
from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from decode.runs import read_json
from decode.settings import UserError, run_command
from decode.target import load_tokenizer
from eval.advise import advise, best_of, read_report
from eval.checklist import tuned_table
from eval.figures import charts
from eval.grid import as_markdown
from eval.roofline import with_models
from eval.tables import sections, tables
from eval.traces import Trace, pick, read_outputs
from eval.verdicts import is_broken, law_verdict, lossless_verdict, verdicts
from eval.wording import Report, markdown, number, target_name, with_interval

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


@dataclass
class Settings:
    folder: str
    """Output folder of eval/run.py; may stand first without its name."""
    tuned: str = ""
    """A tuned.json of eval/tune.py on the same target: adds its plots and settings."""


def write_report(
    report: Report,
    folder: Path,
    traces: Sequence[Trace] = (),
    tuned: dict[str, Any] | None = None,
) -> None:
    """Write report.json, report.md and report.html into `folder`. Raises on NaN or infinity."""
    report = with_models(report)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    (folder / "report.md").write_text(render_markdown(report), encoding="utf-8")
    (folder / "report.html").write_text(render_html(report, traces, tuned), encoding="utf-8")


def render_markdown(report: Report) -> str:
    """The report as Markdown: verdicts, tables, definitions; no plots."""
    parts = [
        f"# Speculative decoding of {markdown(target_name(report))}",
        "\n".join(f"- {markdown(line)}" for line in verdicts(report)),
        *(as_markdown(table) for table in tables(report)),
        "## Definitions",
        "\n".join(f"- **{word}**: {meaning}" for word, meaning in DEFINITIONS.items()),
    ]
    return "\n\n".join(parts) + "\n"


def render_html(
    report: Report, traces: Sequence[Trace] = (), tuned: dict[str, Any] | None = None
) -> str:
    """The report as one HTML page that needs no other file and no script."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found = tables(report) + ([] if tuned is None else [tuned_table(tuned)])
    return environment.get_template(TEMPLATE).render(
        target=target_name(report),
        cards=cards(report),
        verdicts=verdicts(report),
        lossless=f"{lossless_verdict(report)} {law_verdict(report)}".strip(),
        broken=is_broken(report),
        charts=charts(report, tuned),
        traces=traces,
        tables=[table for table in found if not table.detail],
        details=[table for table in found if table.detail],
        advice=advise(report, tuned),
        command=command_of(report),
        settings=report.get("settings"),
        definitions=DEFINITIONS,
    )


def cards(report: Report) -> list[tuple[str, str, str]]:
    """(number, what it is, of what) for the head of the page: of the fastest draft, pooled, of each setting."""
    found = []
    for section in sections(report):
        best = best_of(section) if section.task == "all" else None
        if best is not None:
            interval = with_interval(best["speedup"], best["speedup_ci"], 2, "×").partition(" ")[2]
            what = f"speed-up {interval}"
            found.append(
                (number(best["speedup"], 2, "×"), what, f"{best['name']}, {section.setting}")
            )
            if len(found) == 1:
                tau = number(best["tau"], 2)
                found.append(
                    (tau, "tokens a target pass (τ)", f"{best['name']}, {section.setting}")
                )
    speed = report["baseline"]["tokens_per_second"]
    found.append(
        (number(speed, 0 if speed is None or speed >= 10 else 1), "tokens/s", "plain decoding")
    )
    return found


def command_of(report: Report) -> str | None:
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
    for section in sections(report):
        for m in section.entries:
            cells = [
                section.task,
                f"{m['temperature']:g}",
                m["name"],
                number(m["k"], 0),
                number(m["prompts"], 0),
                number(m["tau"], 2),
                number(m["alpha"], 3),
                number(m["tokens_per_second"], 0),
                with_interval(m["speedup"], m["speedup_ci"], 2, "×"),
            ]
            table.add_row(*[Text(cell) for cell in cells])  # Text: no markup in names
        table.add_section()
    return table


def main(s: Settings) -> None:
    folder = Path(s.folder)
    report = read_report(folder / "report.json")
    tuned = read_json(Path(s.tuned)) if s.tuned else None
    traces: list[Trace] = []
    if (folder / "outputs.jsonl").is_file():
        try:
            tokenizer = load_tokenizer(target_name(report))
        except UserError as error:
            Console(stderr=True).print(f"no traces: {error}", highlight=False)
        else:
            traces = pick(report, read_outputs(folder / "outputs.jsonl"), tokenizer)
    write_report(report, folder, traces, tuned)
    sys.stdout.write(f"{folder / 'report.html'}\n")


if __name__ == "__main__":
    run_command(main, Settings, __doc__, first="folder")
