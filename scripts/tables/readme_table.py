"""Writes the table of a report into the README, or into another page, between its two markers.

python scripts/tables/readme_table.py
python scripts/tables/readme_table.py --layout positions --name families \
  --report docs/results/families_smollm2.json --readme docs/families.md
python scripts/tables/readme_table.py --config configs/smollm2/no_second_model_table.yaml
python scripts/tables/readme_table.py --layout sizes --name sizes \
  --report outputs/seq2seq/report/report.json --readme docs/seq2seq.md
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import yaml

from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.files import read_text, write_atomically
from eval.metrics.common import ALL_TASKS
from eval.reporting.formatting import format_number, format_with_interval
from eval.reporting.report_data import read_report
from scripts.tables import draft_sizes, large_target
from scripts.tables.large_target import DraftReads, LargeTarget


@dataclass
class ReadmeTableConfig:
    report: str = "docs/results/smollm2.json"
    """A report.json of eval/run.py."""
    name: str = "table"
    """Replaces the block between <!-- NAME: begin --> and <!-- NAME: end -->."""
    readme: str = "README.md"
    """The file with that block."""
    layout: Literal["pooled", "positions", "costs", "sizes"] = "pooled"
    """pooled: a row for each T and method, with pooled α and tokens/s; positions: α at each position and the draft's ms
    a round instead; costs: c, a drafted token's time over a target step's, and the speed-up that costs predict; sizes:
    the table of Leviathan et al., a row for each task, T and draft."""
    large: dict[str, DraftReads] = field(default_factory=dict)
    """costs: {method: {layers: share, head: share} of a target's weights that a drafted token reads}, for a column with
    the bound of the speed-up that the same acceptance gives with Llama-3.1-70B, whose 80 layers cost nothing but their
    reading."""


def render_table(
    report: dict[str, Any], layout: str = "pooled", large: dict[str, DraftReads] | None = None
) -> str:
    """A Markdown table in the layout, and a line on how it was measured; of `sizes` also one on its orderings."""
    if layout == "sizes":
        head, rows = list(draft_sizes.HEADINGS), draft_sizes.size_rows(report)
    else:
        head, rows = method_rows(report, layout, large or {})
    lines = ["".join(f"| {cell} " for cell in row) + "|" for row in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    if layout == "sizes":
        lines += ["", draft_sizes.orderings_text(report)]
    return "\n".join([*lines, "", measurement_line(report)])


def method_rows(
    report: dict[str, Any], layout: str, large: dict[str, DraftReads]
) -> tuple[list[str], list[list[str]]]:
    """The headings, and a row for each method and engine at each temperature.

    Columns: those of `layout`, the speed-up on each task if there are several, and on all of them together; at last the
    bound for a large target, if `large` has methods.
    """
    tasks = list(dict.fromkeys(m["task"] for m in report["methods"] if m["task"] != ALL_TASKS))
    shown = tasks if len(tasks) > 1 and layout != "costs" else []
    last = [f"{LargeTarget.layers} layers"] if large else []
    head = ["T", "method", *LAYOUTS[layout], *shown, "speed-up [95 %]", *last]
    entries = all_entries(report)
    pooled = [m for m in entries if m["task"] == ALL_TASKS]
    by_task = {(m["name"], m["temperature"], m["task"]): m for m in entries}
    rows = []
    for m in sorted(pooled, key=lambda m: (m["temperature"], m["speedup"] or 0)):
        speedups = [by_task[m["name"], m["temperature"], task]["speedup"] for task in shown]
        rows.append(
            [
                f"{m['temperature']:g}",
                m["name"],
                *(column(report, m) for column in LAYOUTS[layout].values()),
                *(f"{format_number(speedup, 2)}×" for speedup in speedups),
                format_with_interval(m["speedup"], m["speedup_ci"], 2, "×"),
                *([large_speedup(m, large)] if large else []),
            ]
        )
    return head, rows


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


Report = dict[str, Any]
Entry = dict[str, Any]
"""An element of a report's `methods`, or one of `engine_entry`."""


def large_speedup(m: Entry, large: dict[str, DraftReads]) -> str:
    reads = large.get(m["name"])
    if reads is None:
        return "–"
    return f"{format_number(large_target.speedup(m, reads, LargeTarget()), 2)}×"


def step_cost(report: Report, m: Entry) -> str:
    """The time of a drafted token over that of a plain step; a dash without timed phases or drafted tokens."""
    plain = next(
        x
        for x in report["methods"]
        if (x["name"], x["task"], x["temperature"]) == ("plain", ALL_TASKS, m["temperature"])
    )
    counts, phases = m.get("counts") or {}, m.get("phase_ms") or {}
    if not (counts.get("drafted") and "draft" in phases and plain.get("phase_ms")):
        return "–"
    a_token = phases["draft"] * counts["rounds"] / counts["drafted"]
    return format_number(a_token / sum(plain["phase_ms"].values()), 3)


def predicted(m: Entry) -> str:
    return format_number(m.get("predicted_speedup"), 2, "×")


def pooled_alpha(m: dict[str, Any]) -> str:
    return "–" if m["alpha"] is None else format_with_interval(m["alpha"], m["alpha_ci"], 3)


def alpha_by_position(m: dict[str, Any]) -> str:
    """`0.31, 0.30, 0.44`; a dash at a position that was never reached."""
    values = m.get("alpha_by_position") or []
    return ", ".join("–" if value is None else format_number(value, 2) for value in values) or "–"


def draft_ms(m: dict[str, Any]) -> str:
    phases = m.get("phase_ms") or {}
    return format_number(phases["draft"], 1) if "draft" in phases else "–"


LAYOUTS: dict[str, dict[str, Callable[[Report, Entry], str]]] = {
    "pooled": {
        "τ": lambda _, m: format_number(m["tau"], 2),
        "α": lambda _, m: pooled_alpha(m),
        "tokens/s": lambda _, m: format_number(m["tokens_per_second"], 0),
    },
    "positions": {
        "τ [95 %]": lambda _, m: format_with_interval(m["tau"], m.get("tau_ci"), 2),
        "α by position": lambda _, m: alpha_by_position(m),
        "draft, ms a round": lambda _, m: draft_ms(m),
    },
    "costs": {
        "τ [95 %]": lambda _, m: format_with_interval(m["tau"], m.get("tau_ci"), 2),
        "α": lambda _, m: pooled_alpha(m),
        "c": step_cost,
        "predicted": lambda _, m: predicted(m),
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
    table = render_table(read_report(Path(s.report)), s.layout, s.large)
    write_atomically(path, f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}")


if __name__ == "__main__":
    run_command(main, ReadmeTableConfig, __doc__)
