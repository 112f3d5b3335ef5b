"""What scripts/readme_table.py does: the table of a report and the picture of it in a page, and the headline: the draft
over plain decoding first, then over the best arm of other engines."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from decode.common.errors import UserError
from decode.common.files import read_json_object, read_text, write_atomically
from decode.common.typed_json import Estimate
from eval.metrics.acceptance import over_best_arm
from eval.metrics.bootstrap import ALL_TASKS
from eval.reporting.figures import estimate_point
from eval.reporting.formatting import (
    NOT_MEASURED,
    format_estimate,
    format_number,
    format_positions,
    format_speedup,
    or_void,
)
from eval.reporting.plots import GLYPHS, axis_limits, dot_plot, recolor
from eval.reporting.summary import leaving_text
from eval.reporting.tables import COLUMNS, Column
from eval.results.report import EngineResult, EvalReport, MethodResult, RivalSpeedup, read_report

Entry = MethodResult | EngineResult
CODE = {"code (humaneval, mbpp)": ("humaneval", "mbpp")}
"""Tasks that a headline names together."""
OURS = "here "


def render_table(report: EvalReport, layout: str = "pooled") -> str:
    """A Markdown table in the layout, and a line on how it was measured.

    A row for each method and engine at each temperature. Columns: those of `layout`, the speed-up on each task if there
    are several, and on all of them together.
    """
    tasks = list(dict.fromkeys(m.task for m in report.methods if not m.is_pooled))
    shown = tasks if len(tasks) > 1 else []
    columns = LAYOUTS[layout]
    by_task = {(row_name(m), m.temperature, m.task): m for m in all_entries(report)}
    rows = [["T", "method", *columns, *shown, "speed-up [95 %]"]]
    for m in by_speed(report):
        own = [by_task[row_name(m), m.temperature, task] for task in shown]
        rows.append(
            [
                f"{m.temperature:g}",
                row_name(m),
                *(column(m) for column in columns.values()),
                *(or_void(x, f"{format_number(x.speedup.value, 2)}×") for x in own),
                format_speedup(m),
            ]
        )
    lines = ["".join(f"| {cell} " for cell in row) + "|" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join([*lines, "", measurement_line(report)])


def all_entries(report: EvalReport) -> list[Entry]:
    return [*report.methods, *report.engines]


def by_speed(report: EvalReport) -> list[Entry]:
    """The entries of all tasks together: the lowest temperature first, and of each temperature the fastest first."""
    pooled = [m for m in all_entries(report) if m.is_pooled]
    return sorted(pooled, key=lambda m: (m.temperature, -(m.valid_speedup.value or 0)))


def row_name(m: Entry) -> str:
    """The name of a method; of another engine the engine and its draft, in italics."""
    if isinstance(m, MethodResult):
        return m.name
    names = {
        "hf": "transformers",
        "hf-assisted": "transformers, assisted by",
        "hf-lookup": "transformers, prompt lookup",
        "llamacpp": "llama.cpp",
        "vllm": "vLLM",
    }
    engine = names.get(m.engine, m.engine)
    return f"*{engine}*" if m.is_plain or m.engine == "hf-lookup" else f"*{engine} {m.name}*"


def draw_speedups(report: EvalReport) -> str:
    """SVG of the speed-ups of all tasks together: a row for each method and engine, a colour for each temperature."""
    timed = [m for m in by_speed(report) if m.valid_speedup.value]
    points = {
        (row_name(m).strip("*"), f"temperature {m.temperature:g}"): estimate_point(m.valid_speedup)
        for m in timed
    }
    rows, names = (list(dict.fromkeys(x)) for x in zip(*points, strict=True))
    title = ", ".join(f"{glyph} {name}" for glyph, name in zip(GLYPHS, names, strict=False))
    limits = axis_limits(points.values(), 1.0)
    axis = "speed-up over plain decoding"
    return recolor(dot_plot(points, rows, names, title, axis, limits, line_at=1.0))


def measurement_line(report: EvalReport) -> str:
    """Prompts, lengths, machine and how many greedy outputs are the target's own."""
    settings, machine = yaml.safe_load(report.settings or ""), report.hardware
    pooled = [m for m in all_entries(report) if m.is_pooled]
    return (
        f"{pooled[0].prompts} prompts, answers of up to {settings['max_new_tokens']} tokens, {draft_lengths(pooled)}, "
        f"batch 1, {settings['dtype']}, {settings['mode']}; {machine.device}, {machine.threads} threads; "
        f"{comparison_text(report)}"
    )


def of_method(column: Column) -> Callable[[Entry], str]:
    """A column that other engines do not have."""
    return lambda m: column(m) if isinstance(m, MethodResult) else NOT_MEASURED


def number(x: Estimate | float | None) -> float | None:
    """The value alone: figures of other engines have no interval."""
    return x.value if isinstance(x, Estimate) else x


LAYOUTS: dict[str, dict[str, Callable[[Entry], str]]] = {
    "pooled": {
        "τ": lambda m: format_number(number(m.tau), 2),
        "α": of_method(COLUMNS["α"]),
        "tokens/s": lambda m: or_void(m, format_number(number(m.tokens_per_second), 0)),
    },
    "positions": {
        "τ [95 %]": lambda m: (
            COLUMNS["τ"](m) if isinstance(m, MethodResult) else format_number(m.tau, 2)
        ),
        "α by position": of_method(
            lambda m: format_positions(x.value for x in m.alpha_by_position)
        ),
        "draft, ms a round": of_method(
            lambda m: format_number(None if m.phase_ms is None else m.phase_ms.draft, 1)
        ),
    },
}
"""{layout: {heading: the cell of a row}}: what stands between the method and its speed-ups."""


def draft_lengths(entries: Sequence[Entry]) -> str:
    """`K = 3`, or, where methods differ, that of most of them first: `K = 3, but 6 (dspark, pard)`."""
    names: dict[int, dict[str, None]] = {}
    for m in entries:
        if m.k > 0:
            names.setdefault(m.k, {})[row_name(m).strip("*")] = None
    if not names:
        return "no drafts"
    usual, *others = sorted(names, key=lambda k: -len(names[k]))
    return f"K = {usual}" + "".join(f", but {k} ({', '.join(names[k])})" for k in others)


def comparison_text(report: EvalReport) -> str:
    """The differences in α between methods, and how many greedy outputs are the target's own."""
    parts = [
        f"α of {c.a} − {c.b} at T = {c.temperature:g}: {format_estimate(c.difference, 3)}"
        for c in report.comparisons
        if c.task == ALL_TASKS
    ]
    own = [m for m in report.pooled if m.greedy is not None and m.temperature == 0]
    rounded = any(m.is_rounded for m in own)
    if rounded:  # plain decoding is then what the others are compared with
        own = [m for m in own if not m.is_plain]
    greedy = [m.greedy for m in own if m.greedy is not None]
    same = sum(x.identical for x in greedy)
    ties = sum(len(x.ties) for x in greedy)
    total = sum(x.prompts for x in greedy)
    whose = "plain decoding of the same weights" if rounded else "transformers' `generate`"
    parts.append(
        f"greedy outputs equal to {whose}: {same} of {total} (ties {ties}, failures {total - same - ties})."
    )
    if rounded:
        most = max(x.prompts for x in greedy)
        parts[-1] += " " + leaving_text(most, greedy)
    return "; ".join(parts)


def measured_on(report: EvalReport) -> dict[str, Any]:
    """The settings that two reports of one table share, and the number of prompts of each task."""
    settings = yaml.safe_load(report.settings or "")
    shared = ("target", "dtype", "max_new_tokens", "temperatures")
    return {key: settings[key] for key in shared} | {m.task: m.prompts for m in report.methods}


def with_engines_of(report: EvalReport, other_path: Path) -> EvalReport:
    """The report, with another one's rows of other engines, whose speed-ups are over plain decoding in their own run.

    UserError unless both are of the same target, prompts, lengths and temperatures.
    """
    other = read_report(other_path)
    mine, theirs = map(measured_on, (report, other))
    for key, value in mine.items():
        if theirs.get(key) != value:
            raise UserError(
                f"{other_path}: {key} is {theirs.get(key)!r}, and {value!r} in the table: give a report on the same "
                "prompts"
            )
    return replace(report, engines=[*report.engines, *other.engines])


def write_table(
    report_path: Path, others: Sequence[Path], name: str, path: Path, layout: str, picture: str
) -> None:
    """Replaces the block `name` of the page, and draws the picture if it has a path. `others` are reports whose other
    engines have rows too.

    UserError unless each marker is in the page exactly once, in their order.
    """
    text = read_text(path)
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
        raise UserError(f"{path} needs the marker {begin} and then {end}, once each: add them")
    head, rest = text.split(begin)
    report = reduce(with_engines_of, others, read_report(report_path))
    table = render_table(report, layout)
    write_atomically(path, f"{head}{begin}\n{table}\n{end}{rest.split(end)[1]}")
    if picture:
        write_atomically(Path(picture), draw_speedups(report))


# ---- the headline ----


def headline_lines(report: EvalReport, rivals: list[RivalSpeedup]) -> list[str]:
    """Of the lowest temperature, each draft on all tasks and on each, with n and intervals."""
    sections = report.pooled_sections[:1]
    drafts = [m for section in sections for m in section.entries if m.is_real_draft]
    lines = []
    for best in drafts:
        own = [m for m in report.methods if (m.name, m.setting) == (best.name, best.setting)]
        parts = [f"{m.task} {format_speedup(m)}" for m in own]
        lines.append(
            f"{best.name} over plain decoding (T = {best.temperature:g}, n = {best.prompts}): {', '.join(parts)}"
        )
    for method, engine in dict.fromkeys((r.method, r.engine) for r in rivals):
        found = [r for r in rivals if (r.method, r.engine) == (method, engine)]
        parts = [f"{r.task} {format_estimate(r.speedup, 2, '×')} ({r.arm})" for r in found]
        n = max(r.prompts for r in found)
        lines.append(f"{method} over the best arm of {engine} (n = {n}): {', '.join(parts)}")
    return lines


def rivals_of(report: EvalReport, requests: Path | None) -> list[RivalSpeedup]:
    """Those of the report; of one before they were kept, from a file of its requests, one {task, id, arm, tokens,
    seconds} each, in which the arms of this engine begin with `here`. UserError for another file."""
    if requests is None:
        return report.rivals
    arms: dict[str, dict[tuple[str, str], tuple[float, int]]] = {}
    try:
        for x in read_json_object(requests, "a file of requests", ["requests"])["requests"]:
            arms.setdefault(x["arm"], {})[x["task"], x["id"]] = (x["seconds"], x["tokens"])
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{requests}: a request lacks {error}: give one with task, id, arm, tokens, seconds"
        ) from None
    others = {name: arm for name, arm in arms.items() if not name.startswith(OURS)}
    tasks = list(dict.fromkeys(task for arm in arms.values() for task, _ in arm))
    groups = {ALL_TASKS: tasks, **{task: [task] for task in tasks}}
    groups |= {name: [*own] for name, own in CODE.items() if {*own} <= {*tasks}}
    found = []
    for name, own in arms.items():
        if name in others or name == f"{OURS}plain":
            continue
        for group, members in groups.items():
            mine = {key: x for key, x in own.items() if key[0] in members}
            arm, prompts, speedup = over_best_arm(mine, others, report.seed)
            engine = arm.split(" ")[0]
            found.append(
                RivalSpeedup(name.removeprefix(OURS), engine, arm, group, 0.0, prompts, speedup)
            )
    return found
