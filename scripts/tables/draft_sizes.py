"""The table of Leviathan et al. 2023 (arXiv 2211.17192, table 2) from a report: task, T and draft, one row each.

Methods are drafts of one family, listed from the smallest to the largest, as configs/seq2seq/eval.yaml does.
"""

from typing import Any

from eval.metrics.common import ALL_TASKS
from eval.metrics.speedup_model import leviathan_speedup
from eval.reporting.formatting import format_number, format_with_interval
from eval.reporting.summary import draft_step_cost

Entry = dict[str, Any]
"""An element of a report's `methods`."""
HEADINGS = ("task", "T", "draft", "γ", "α [95 %]", "c", "τ", "predicted", "speed-up [95 %]")


def draft_entries(report: dict[str, Any]) -> list[Entry]:
    """Entries of drafts on single tasks, by task and temperature; drafts keep the report's order."""
    found = [m for m in report["methods"] if m["task"] != ALL_TASKS and m["alpha"] is not None]
    tasks = list(dict.fromkeys(m["task"] for m in found))
    return sorted(found, key=lambda m: (tasks.index(m["task"]), m["temperature"]))


def predicted(report: dict[str, Any], m: Entry) -> float | None:
    """The paper's formula with the measured α and c; None where no phase was timed."""
    c = draft_step_cost(report, m["name"], m["temperature"])
    return None if c is None else leviathan_speedup(m["alpha"], m["k"], c)


def size_rows(report: dict[str, Any]) -> list[list[str]]:
    """The cells below HEADINGS, a row for each of `draft_entries`."""
    return [
        [
            m["task"],
            f"{m['temperature']:g}",
            m["name"],
            str(m["k"]),
            format_with_interval(m["alpha"], m["alpha_ci"], 3),
            format_number(draft_step_cost(report, m["name"], m["temperature"]), 2),
            format_number(m["tau"], 2),
            format_number(predicted(report, m), 2, "×"),
            format_with_interval(m["speedup"], m["speedup_ci"], 2, "×"),
        ]
        for m in draft_entries(report)
    ]


def orderings_text(report: dict[str, Any]) -> str:
    """In how many cells the orderings of the paper's table hold in this one."""
    entries = draft_entries(report)
    cells: dict[tuple[str, float], list[Entry]] = {}
    for m in entries:
        cells.setdefault((m["task"], m["temperature"]), []).append(m)
    names = list(dict.fromkeys(m["name"] for m in entries))
    rising = sum(
        all(a["alpha"] < b["alpha"] for a, b in zip(own, own[1:], strict=False))
        for own in cells.values()
    )
    greedy = {(m["task"], m["name"]): m["alpha"] for m in entries if m["temperature"] == 0}
    pairs = [
        greedy[m["task"], m["name"]] > m["alpha"]
        for m in entries
        if m["temperature"] > 0 and (m["task"], m["name"]) in greedy
    ]
    fastest = [max(own, key=lambda m: m["speedup"])["name"] for own in cells.values()]
    wins = ", ".join(f"{name} {fastest.count(name)}" for name in names)
    text = (
        f"Of {len(cells)} pairs of task and T, α rises with every step from {' to '.join(names)} in {rising}; greedy α "
        f"is above sampled α in {sum(pairs)} of {len(pairs)}; fastest: {wins}"
    )
    if all(predicted(report, m) is not None for m in entries):
        foreseen = [
            max(own, key=lambda m: predicted(report, m) or 0)["name"] for own in cells.values()
        ]
        same = sum(a == b for a, b in zip(foreseen, fastest, strict=True))
        text += f"; the formula names the fastest draft in {same} of {len(cells)}"
    return f"{text}."
