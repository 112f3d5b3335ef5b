"""Writes the table of a report into the README, or into another page, between its two markers.

python scripts/readme_table.py
python scripts/readme_table.py --name heads --report docs/results/compare_heads.json --readme docs/families.md
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.files import read_text, write_atomically
from eval.reporting.formatting import format_number, format_with_interval
from eval.reporting.report_data import read_report


@dataclass
class ReadmeTableConfig:
    report: str = "docs/results/reproduce.json"
    """A report.json of eval/run.py."""
    name: str = "table"
    """Replaces the block between <!-- NAME: begin --> and <!-- NAME: end -->."""
    readme: str = "README.md"
    """The file with that block."""


def render_table(report: dict[str, Any]) -> str:
    """A Markdown table with a row for each method and temperature over all tasks, and a line on how it was measured."""
    lines = [
        "| T | method | τ | α | tokens/s | speed-up [95 %] |",
        "|---|---|---|---|---|---|",
    ]
    pooled = [m for m in report["methods"] if m["task"] == "all"]
    for m in sorted(pooled, key=lambda m: (m["temperature"], m["speedup"])):
        alpha = format_with_interval(m["alpha"], m["alpha_ci"], 3) if m["name"] != "plain" else "–"
        lines.append(
            f"| {m['temperature']:g} | {m['name']} | {format_number(m['tau'], 2)} | {alpha} | "
            f"{format_number(m['tokens_per_second'], 0)} | "
            f"{format_with_interval(m['speedup'], m['speedup_ci'], 2, '×')} |"
        )
    hardware = report["hardware"]
    prompts = pooled[0]["prompts"]
    lines += [
        "",
        f"{prompts} prompts, K = {max(m['k'] for m in pooled)}, batch 1, fp32, eager; {hardware['device']}, "
        f"{hardware['threads']} threads; {comparison_text(report)}",
    ]
    return "\n".join(lines)


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
    table = render_table(read_report(Path(s.report)))
    write_atomically(path, f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}")


if __name__ == "__main__":
    run_command(main, ReadmeTableConfig, __doc__)
