"""Writes the table of a report into the README, or into another page, between its two markers, and draws a picture of
it.

python scripts/readme_table.py --picture docs/images/speedups.svg
python scripts/readme_table.py --layout positions --name families \
  --report docs/results/families_smollm2.json --readme docs/families.md
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import yaml

from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.files import read_text, write_atomically
from eval.metrics.bootstrap import ALL_TASKS
from eval.reporting.formatting import format_number, format_with_interval
from eval.reporting.plots import GLYPHS, Point, axis_limits, dot_plot, recolor
from eval.results.report import read_report


@dataclass
class ReadmeTableConfig:
    report: str = "docs/results/smollm2.json"
    """A report.json of eval/run.py."""
    name: str = "table"
    """Replaces the block between <!-- NAME: begin --> and <!-- NAME: end -->."""
    readme: str = "README.md"
    """The file with that block."""
    layout: Literal["pooled", "positions"] = "pooled"
    """pooled: a row for each T and method, with pooled α and tokens/s; positions: α at each position and the draft's ms
    a round instead."""
    picture: str = ""
    """An .svg file to draw the speed-ups of all tasks together into, with their intervals; empty: none."""


def render_table(report: dict[str, Any], layout: str = "pooled") -> str:
    """A Markdown table in the layout, and a line on how it was measured."""
    head, rows = method_rows(report, layout)
    lines = ["".join(f"| {cell} " for cell in row) + "|" for row in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return "\n".join([*lines, "", measurement_line(report)])


def method_rows(report: dict[str, Any], layout: str) -> tuple[list[str], list[list[str]]]:
    """The headings, and a row for each method and engine at each temperature.

    Columns: those of `layout`, the speed-up on each task if there are several, and on all of them together.
    """
    tasks = list(dict.fromkeys(m["task"] for m in report["methods"] if m["task"] != ALL_TASKS))
    shown = tasks if len(tasks) > 1 else []
    head = ["T", "method", *LAYOUTS[layout], *shown, "speed-up [95 %]"]
    entries = all_entries(report)
    pooled = [m for m in entries if m["task"] == ALL_TASKS]
    by_task = {(m["name"], m["temperature"], m["task"]): m for m in entries}
    rows = []
    for m in by_speed(pooled):
        speedups = [by_task[m["name"], m["temperature"], task]["speedup"] for task in shown]
        rows.append(
            [
                f"{m['temperature']:g}",
                m["name"],
                *(column(m) for column in LAYOUTS[layout].values()),
                *(f"{format_number(speedup, 2)}×" for speedup in speedups),
                format_with_interval(m["speedup"], m["speedup_ci"], 2, "×"),
            ]
        )
    return head, rows


def by_speed(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lowest temperature first, and of each temperature the fastest first."""
    return sorted(entries, key=lambda m: (m["temperature"], -(m["speedup"] or 0)))


def draw_speedups(report: dict[str, Any]) -> str:
    """SVG of the speed-ups of all tasks together: a row for each method and engine, a colour for each temperature."""
    pooled = [m for m in by_speed(all_entries(report)) if m["task"] == ALL_TASKS and m["speedup"]]
    names = {m["temperature"]: f"temperature {m['temperature']:g}" for m in pooled}
    points = {
        (m["name"].strip("*"), names[m["temperature"]]): Point(0.0, m["speedup"], m["speedup_ci"])
        for m in pooled
    }
    rows = list(dict.fromkeys(row for row, _ in points))
    title = ", ".join(
        f"{glyph} {name}" for glyph, name in zip(GLYPHS, names.values(), strict=False)
    )
    limits = axis_limits(points.values(), 1.0)
    colors = list(names.values())
    return recolor(
        dot_plot(points, rows, colors, title, "speed-up over plain decoding", limits, line_at=1.0)
    )


def all_entries(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of our methods and of other engines."""
    return [*report["methods"], *map(engine_entry, report.get("engines") or [])]


def measurement_line(report: dict[str, Any]) -> str:
    """Prompts, lengths, machine and how many greedy outputs are the target's own."""
    hardware = report["hardware"]
    settings = yaml.safe_load(report["settings"])
    pooled = [m for m in all_entries(report) if m["task"] == ALL_TASKS]
    return (
        f"{pooled[0]['prompts']} prompts, answers of up to {settings['max_new_tokens']} tokens, "
        f"{draft_lengths(pooled)}, batch 1, {settings['dtype']}, {settings['mode']}; {hardware['device']}, "
        f"{hardware['threads']} threads; {comparison_text(report)}"
    )


def pooled_alpha(m: dict[str, Any]) -> str:
    return "–" if m["alpha"] is None else format_with_interval(m["alpha"], m["alpha_ci"], 3)


def alpha_by_position(m: dict[str, Any]) -> str:
    """`0.31, 0.30, 0.44`; a dash at a position that was never reached."""
    values = m.get("alpha_by_position") or []
    return ", ".join("–" if value is None else format_number(value, 2) for value in values) or "–"


def draft_ms(m: dict[str, Any]) -> str:
    phases = m.get("phase_ms") or {}
    return format_number(phases["draft"], 1) if "draft" in phases else "–"


LAYOUTS: dict[str, dict[str, Callable[[dict[str, Any]], str]]] = {
    "pooled": {
        "τ": lambda m: format_number(m["tau"], 2),
        "α": pooled_alpha,
        "tokens/s": lambda m: format_number(m["tokens_per_second"], 0),
    },
    "positions": {
        "τ [95 %]": lambda m: format_with_interval(m["tau"], m.get("tau_ci"), 2),
        "α by position": alpha_by_position,
        "draft, ms a round": draft_ms,
    },
}
"""{layout: {heading: the cell of a row}}: what stands between the method and its speed-ups."""


def draft_lengths(entries: Sequence[dict[str, Any]]) -> str:
    """`K = 3`, or, where methods differ, that of most of them first: `K = 3, but 6 (dspark, pard)`."""
    names: dict[int, list[str]] = {}
    for m in entries:
        name = m["name"].strip("*")
        if m["k"] > 0 and name not in names.get(m["k"], []):
            names.setdefault(m["k"], []).append(name)
    if not names:
        return "no drafts"
    usual, *others = sorted(names, key=lambda k: -len(names[k]))
    return f"K = {usual}" + "".join(f", but {k} ({', '.join(names[k])})" for k in others)


def engine_entry(e: dict[str, Any]) -> dict[str, Any]:
    """An element of the report's `engines` with the fields of its `methods` that the table shows."""
    names = {
        "hf": "transformers",
        "hf-assisted": "transformers, assisted by",
        "hf-lookup": "transformers, prompt lookup",
    }
    engine = names.get(e["engine"], e["engine"])
    name = engine if e["name"] == "plain" or e["engine"] == "hf-lookup" else f"{engine} {e['name']}"
    return {**e, "name": f"*{name}*", "alpha": None}


def comparison_text(report: dict[str, Any]) -> str:
    """The differences in α between methods, and how many greedy outputs are the target's own."""
    parts = []
    for c in report["comparisons"]:
        if c["task"] == "all":
            change = format_with_interval(c["difference"], c["ci"], 3)
            parts.append(f"α of {c['a']} − {c['b']} at T = {c['temperature']:g}: {change}")
    greedy = [
        m["lossless"] for m in report["methods"] if m["task"] == "all" and m["temperature"] == 0
    ]
    same = sum(x["identical"] for x in greedy)
    ties = sum(len(x["ties"]) for x in greedy)
    total = sum(x["prompts"] for x in greedy)
    parts.append(
        f"greedy outputs equal to transformers' `generate`: {same} of {total} (ties {ties}, "
        f"failures {total - same - ties})."
    )
    return "; ".join(parts)


def main(s: ReadmeTableConfig) -> None:
    """Replaces the block. UserError unless each marker is in the file exactly once, in their order."""
    path = Path(s.readme)
    text = read_text(path)
    begin, end = f"<!-- {s.name}: begin -->", f"<!-- {s.name}: end -->"
    if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
        raise UserError(f"{path} needs the marker {begin} and then {end}, once each: add them")
    head, rest = text.split(begin)
    table = render_table(read_report(Path(s.report)), s.layout)
    write_atomically(path, f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}")
    if s.picture:
        write_atomically(Path(s.picture), draw_speedups(read_report(Path(s.report))))


if __name__ == "__main__":
    run_command(main, ReadmeTableConfig, __doc__)
