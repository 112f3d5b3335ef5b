"""The tables and figures of a model card: a draft's entries in a report, its training settings and its data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decode.checkpoints.draft_folder import DraftMetadata
from decode.common.typed_json import to_json
from eval.reporting import plots
from eval.reporting.figures import PROBABILITY_YLIM, alpha_points, estimate_point
from eval.reporting.formatting import (
    Table,
    escape_markdown,
    format_estimate,
    format_number,
    format_value,
)
from eval.reporting.tables import method_table
from eval.results.report import (
    EvalReport,
    MethodResult,
    by_setting,
    setting_title,
    unique_names,
)
from eval.results.tuned import TunedChain, TunedReport

NOT_RECORDED = "not recorded"
ACCEPTANCE_COLUMNS = ("task", "method", "K", "n", "τ", "α")
SPEED_COLUMNS = (
    "task", "method", "K", "n", "speed-up", "tokens/s", "first token ms", "identical",
)  # fmt: skip


@dataclass(frozen=True)
class CardImage:
    """A figure of the card, saved as images/`name`; `key` explains its markers."""

    name: str
    caption: str
    svg: str
    key: str


def tables_by_setting(
    own: Sequence[MethodResult], columns: Sequence[str], positions: bool = False
) -> list[Table]:
    """A table for each setting, by task and method, all tasks first; with α by position if `positions`."""
    return [
        method_table(f"{setting_title(*x).capitalize()}:", entries, columns, positions=positions)
        for x, entries in by_setting(in_order(own)).items()
    ]


def tuned_lengths_table(chains: Sequence[TunedChain]) -> Table | None:
    """The fastest draft length of each domain, chosen by eval/tune.py; None if all are the same."""
    if len({chain.cell.k for chain in chains}) < 2:
        return None
    rows = [
        [
            chain.cell.task,
            f"{chain.cell.temperature:g}",
            format_number(chain.cell.k, 0),
            format_number(chain.cell.prompts, 0),
            format_estimate(chain.cell.speedup, 2, "×"),
            format_number(chain.held_out, 2, "×"),
        ]
        for chain in chains
    ]
    header = ["domain", "temperature", "fastest K", "n", "speed-up in rounds", "held out"]
    return Table("Tuned draft lengths", header, rows)


def card_images(own: Sequence[MethodResult], k: int) -> list[CardImage]:
    """For each setting: α by position with a line for each task, and speed-ups with a row for each method.

    α is that of chains with K = `k`, or of the longest chains if the report has none of that length (K tuned later).
    """
    found = []

    def add(name: str, caption: str, svg: str, key: str) -> None:
        found.append(CardImage(name, caption, plots.recolor(svg), key))

    for setting, entries in by_setting(in_order(own)).items():
        title, name = setting_title(*setting), f"t{setting[0]:g}-b{setting[1]}.svg"
        tasks = unique_names([m.task for m in entries])
        legend = plots.legend_entries(tasks)
        key = ", ".join(f"{glyph} {escape_markdown(task)}" for glyph, _, task in legend)
        chains = [m for m in entries if m.tree is None and m.alpha.value is not None]
        lengths = {m.k for m in chains}
        shown = k if k in lengths else max(lengths, default=0)
        chains = [m for m in chains if m.k == shown]
        one = [m for m in chains if m.name == chains[0].name]
        if one:
            series = [plots.ChartSeries(m.task, alpha_points(m)) for m in one]
            svg = plots.line_chart(series, tasks, title, "position i", "α_i", ylim=PROBABILITY_YLIM)
            caption = f"Acceptance by position, {one[0].name}, K = {shown}"
            add(f"acceptance-{name}", caption, svg, key)
        points = {
            (f"{m.name}, K {m.k}", m.task): estimate_point(m.valid_speedup)
            for m in entries
            if m.valid_speedup.value is not None
        }
        if points:
            rows, label = unique_names([row for row, _ in points]), "× plain decoding (dashed)"
            limits = plots.axis_limits(points.values(), 1.0)
            svg = plots.dot_plot(points, rows, tasks, title, label, limits, 1.0)
            add(f"speedup-{name}", "Speed-up by task", svg, key)
    return found


def slowdown_lines(own: Sequence[MethodResult]) -> list[str]:
    """A line for each method and setting with tasks whose speed-up interval lies below 1."""
    slow: dict[str, list[str]] = {}
    for setting, entries in by_setting(in_order(own)).items():
        for m in entries:
            if m.valid_speedup.ci is not None and m.valid_speedup.ci[1] < 1:
                where = f"{m.name}, K = {m.k}, {setting_title(*setting)}"
                case = f"{m.task} {format_number(m.valid_speedup.value, 2, '×')}"
                slow.setdefault(where, []).append(case)
    return [
        f"Slower than plain decoding as {where}: {', '.join(cases)}."
        for where, cases in slow.items()
    ]


def training_table(draft: DraftMetadata) -> Table:
    rows = flatten(draft.training or {})
    return Table("Training", ["setting", "value"], rows or [["recipe", NOT_RECORDED]])


def cost_table(draft: DraftMetadata) -> Table:
    machine = to_json(draft.hardware) or {}
    rows = [
        ["wall time, s", recorded(draft.cost and draft.cost.wall_seconds)],
        ["tokens trained on", recorded(draft.cost and draft.cost.tokens)],
        *([f"hardware {key}", format_value(value)] for key, value in machine.items()),
        *([] if machine else [["hardware", NOT_RECORDED]]),
        ["processes", recorded(draft.processes)],
        ["samples", recorded(draft.samples)],
    ]
    return Table("Cost", ["cost", "value"], rows)


def data_table(draft: DraftMetadata) -> Table:
    rows = [row for name, made in dataset_manifests(draft) for row in flatten(made, name)]
    return Table("Data", ["manifest", "value"], rows or [["manifest", NOT_RECORDED]])


def dataset_manifests(draft: DraftMetadata) -> list[tuple[str, Mapping[str, Any]]]:
    """(prefix of its rows, manifest) of each sampled set; the prefix is empty if there is only one."""
    found = draft.data_manifest or []
    if isinstance(found, dict):
        return [("", found)]
    return [(f"{part['path']} (weight {part['weight']:g}) ", part["manifest"]) for part in found]


def in_order(own: Sequence[MethodResult]) -> list[MethodResult]:
    """All tasks together first, then by task, method and K."""
    tasks = unique_names([m.task for m in own])
    return sorted(own, key=lambda m: (tasks.index(m.task), m.name, m.k))


def flatten(value: Mapping[str, Any], prefix: str = "") -> list[list[str]]:
    """[dotted name, value as text] of every field in nested settings that is not empty."""
    rows: list[list[str]] = []
    for key, item in value.items():
        if isinstance(item, dict):
            rows += flatten(item, f"{prefix}{key}.")
        elif item not in (None, "", []):
            rows.append([f"{prefix}{key}", format_value(item)])
    return rows


def recorded(value: Any) -> str:
    return format_value(NOT_RECORDED if value in (None, {}) else value)


def provenance_table(
    draft: DraftMetadata,
    hashed: Sequence[str],
    report: EvalReport | None,
    tuned: TunedReport | None,
) -> Table:
    """Checksum of the `hashed` files, and commits, versions and hardware of training, report and tuning."""
    rows = [
        [f"draft_sha256 ({' + '.join(hashed)})", format_value(draft.draft_sha256)],
        ["trained by commit", recorded(draft.git)],
        ["trained with", recorded(draft.versions)],
    ]
    if report is None:
        rows.append(["report", "none given"])
    else:
        rows += [
            ["measured by commit", recorded(report.git)],
            ["seed of the measurement", recorded(report.seed)],
            ["measured on", recorded(to_json(report.hardware))],
            ["measured with", recorded(report.versions)],
        ]
    if tuned is not None:
        rows.append(["tuned by commit", recorded(tuned.git)])
        rows.append(["tuned on", recorded(to_json(tuned.hardware))])
    return Table("Provenance", ["what", "value"], rows)
