"""The tables and figures of a model card: a draft's entries in a report, its training settings and its data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decode.common.typed_json import from_json
from eval.forecasting.pages import tau_by_task
from eval.reporting import plots
from eval.reporting.formatting import (
    NOT_MEASURED,
    Table,
    escape_markdown,
    format_number,
    format_value,
    format_with_interval,
)
from eval.results.forecast import ForecastRow
from eval.results.report import setting_title, unique_names
from eval.scaling import data_curve
from eval.scaling.data_curve import DataCurve
from train.hub.report_entries import ReportEntry, format_identical, get_nested, measured_settings

NOT_RECORDED = "not recorded"
COST_LABELS = {"wall_seconds": "wall time, s", "tokens": "tokens trained on"}


@dataclass(frozen=True)
class CardImage:
    """A figure of the card, saved as images/`name`; `key` explains its markers."""

    name: str
    caption: str
    svg: str
    key: str


def acceptance_tables(own: Sequence[ReportEntry]) -> list[Table]:
    """A table for each setting: τ, α and α by position, with intervals, by task and method; all tasks first."""
    tables = []
    for setting, entries in group_by_setting(own):
        last = max(len(m["alpha_by_position"]) for m in entries)
        rows = []
        for m in entries:
            pairs = zip(m["alpha_by_position"], m["alpha_by_position_ci"], strict=True)
            cells = [format_with_interval(value, interval, 3) for value, interval in pairs]
            rows.append(
                [
                    m["task"],
                    m["name"],
                    format_number(m["k"], 0),
                    format_number(m["prompts"], 0),
                    format_with_interval(m["tau"], m["tau_ci"], 2),
                    format_with_interval(m["alpha"], m["alpha_ci"], 3),
                    *cells,
                    *[NOT_MEASURED] * (last - len(cells)),
                ]
            )
        header = ["task", "method", "K", "n", "τ", "α", *(f"α_{i}" for i in range(1, last + 1))]
        tables.append(Table(heading(setting), header, rows))
    return tables


def speed_tables(own: Sequence[ReportEntry]) -> list[Table]:
    """A table for each setting with timed methods: speed-up, tokens per second, latency, losslessness."""
    header = ["task", "method", "K", "n", "speed-up", "tokens/s", "first token ms", "identical"]
    tables = []
    for setting, entries in group_by_setting(own):
        rows = [
            [
                m["task"],
                m["name"],
                format_number(m["k"], 0),
                format_number(m["prompts"], 0),
                format_with_interval(m["speedup"], m["speedup_ci"], 2, "×"),
                format_with_interval(m["tokens_per_second"], m.get("tokens_per_second_ci"), 1),
                format_number(get_nested(m, "latency_ms", "first_token"), 1),
                format_identical(m),
            ]
            for m in entries
            if m["speedup"] is not None
        ]
        if len(rows) > 0:
            tables.append(Table(heading(setting), header, rows))
    return tables


def forecast_tables(forecast: Mapping[str, Any] | None) -> list[Table]:
    """τ by task and K as serving engines draft by default, one table for each temperature; [] without a forecast."""
    rows = [from_json(ForecastRow, row) for row in (forecast or {}).get("rows", [])]
    rows = [row for row in rows if row.rule == "greedy"]
    return [
        tau_by_task(f"Temperature {t:g}:", [row for row in rows if row.temperature == t])
        for t in dict.fromkeys(row.temperature for row in rows)
    ]


def tuned_lengths_table(chains: Sequence[ReportEntry]) -> Table | None:
    """The fastest draft length of each domain, chosen by eval/tune.py; None if all are the same."""
    if len({c["k"] for c in chains}) < 2:
        return None
    rows = [
        [
            c["task"],
            f"{c['temperature']:g}",
            format_number(c["k"], 0),
            format_number(c["prompts"], 0),
            format_with_interval(c["speedup"], c["ci"], 2, "×"),
            format_number(c["held_out"], 2, "×"),
        ]
        for c in chains
    ]
    header = ["domain", "temperature", "fastest K", "n", "speed-up in rounds", "held out"]
    return Table("Tuned draft lengths", header, rows)


def card_images(own: Sequence[ReportEntry], k: int) -> list[CardImage]:
    """For each setting: α by position with a line for each task, and speed-ups with a row for each method.

    α is that of chains with K = `k`, or of the longest chains if the report has none of that length (K tuned later).
    """
    found = []
    for (temperature, batch), entries in group_by_setting(own):
        title, name = setting_title(temperature, batch), f"t{temperature:g}-b{batch}.svg"
        tasks = unique_names([m["task"] for m in entries])
        chain = [m for m in entries if m["tree"] is None and m["alpha"] is not None]
        lengths = {m["k"] for m in chain}
        shown = k if k in lengths else max(lengths, default=0)
        chain = [m for m in chain if m["k"] == shown]
        one = [m for m in chain if m["name"] == chain[0]["name"]]
        if len(one) > 0:
            series = [plots.ChartSeries(m["task"], alpha_points(m)) for m in one]
            svg = plots.line_chart(series, tasks, title, "position i", "α_i", ylim=(0.0, 1.03))
            found.append(
                CardImage(
                    f"acceptance-{name}",
                    f"Acceptance by position, {chain[0]['name']}, K = {shown}",
                    plots.recolor(svg),
                    marker_legend(tasks),
                )
            )
        timed = [m for m in entries if m["speedup"] is not None]
        if len(timed) > 0:
            points = {
                (f"{m['name']}, K {m['k']}", m["task"]): plots.Point(
                    0, m["speedup"], m["speedup_ci"]
                )
                for m in timed
            }
            rows = unique_names([name for name, _ in points])
            width = plots.axis_limits(points.values(), 1.0)
            svg = plots.dot_plot(
                points, rows, tasks, title, "× plain decoding (dashed)", width, 1.0
            )
            found.append(
                CardImage(
                    f"speedup-{name}", "Speed-up by task", plots.recolor(svg), marker_legend(tasks)
                )
            )
    return found


def data_curve_images(curve: Mapping[str, Any] | None) -> list[CardImage]:
    """τ over the training data; [] without a data curve."""
    if curve is None:
        return []
    measured = from_json(DataCurve, curve)
    svg = plots.recolor(data_curve.curve_panel(measured, "tau"))
    key = f"{data_curve.marker_line(measured)}, dashed: fitted"
    return [CardImage("data-curve.svg", data_curve.CAPTION, svg, key)]


def alpha_points(entry: ReportEntry) -> list[plots.Point]:
    """α_i with its interval, for the positions that were reached."""
    pairs = zip(entry["alpha_by_position"], entry["alpha_by_position_ci"], strict=True)
    return [plots.Point(i, a, ci) for i, (a, ci) in enumerate(pairs, start=1) if a is not None]


def marker_legend(tasks: Sequence[str]) -> str:
    """The marker of each task, as text."""
    return ", ".join(
        f"{glyph} {escape_markdown(name)}" for glyph, _, name in plots.legend_entries(tasks)
    )


def slowdown_lines(own: Sequence[ReportEntry]) -> list[str]:
    """A line for each method and setting with tasks whose speed-up interval lies below 1."""
    lines = []
    for setting, entries in group_by_setting(own):
        sure = [m for m in entries if m["speedup_ci"] is not None and m["speedup_ci"][1] < 1]
        for name, k in dict.fromkeys((m["name"], m["k"]) for m in sure):
            cases = ", ".join(
                f"{m['task']} {format_number(m['speedup'], 2, '×')}"
                for m in sure
                if (m["name"], m["k"]) == (name, k)
            )
            lines.append(
                f"Slower than plain decoding as {name}, K = {k}, {setting_title(*setting)}: {cases}."
            )
    return lines


def training_table(draft: Mapping[str, Any]) -> Table:
    """The training settings, one a row, without empty ones."""
    rows = flatten(draft.get("training") or {})
    return Table("Training", ["setting", "value"], rows or [["recipe", NOT_RECORDED]])


def cost_table(draft: Mapping[str, Any]) -> Table:
    """Time, tokens, hardware and samples of the training."""
    spent = draft.get("cost") or {}
    rows = [
        [label, format_value(spent.get(key, NOT_RECORDED))] for key, label in COST_LABELS.items()
    ]
    rows += [
        [f"hardware {key}", format_value(value)] for key, value in draft.get("hardware", {}).items()
    ]
    if not draft.get("hardware"):
        rows.append(["hardware", NOT_RECORDED])
    rows += [[key, format_value(draft.get(key, NOT_RECORDED))] for key in ("processes", "samples")]
    return Table("Cost", ["cost", "value"], rows)


def data_table(draft: Mapping[str, Any]) -> Table:
    """The manifests of the sampled sets, one field a row."""
    rows = [row for name, made in dataset_manifests(draft) for row in flatten(made, name)]
    return Table("Data", ["manifest", "value"], rows or [["manifest", NOT_RECORDED]])


def dataset_manifests(draft: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(prefix of its rows, manifest) of each sampled set; the prefix is empty if there is only one."""
    found = draft.get("data_manifest") or []
    if isinstance(found, dict):
        return [("", found)]
    return [(f"{part['path']} (weight {part['weight']:g}) ", part["manifest"]) for part in found]


def heading(setting: tuple[float, int]) -> str:
    """The line above a setting's table."""
    return f"{setting_title(*setting).capitalize()}:"


def group_by_setting(
    own: Sequence[ReportEntry],
) -> list[tuple[tuple[float, int], list[ReportEntry]]]:
    """((temperature, batch size), entries) of each setting; all tasks together first, then by task, method and K."""
    found = []
    for setting in measured_settings(own):
        entries = [m for m in own if (m["temperature"], m["batch_size"]) == setting]
        order = unique_names([m["task"] for m in entries])
        entries.sort(key=lambda m: (order.index(m["task"]), m["name"], m["k"]))
        found.append((setting, entries))
    return found


def flatten(value: Mapping[str, Any], prefix: str = "") -> list[list[str]]:
    """[dotted name, value as text] of every field in nested settings that is not empty."""
    rows: list[list[str]] = []
    for key, item in value.items():
        if isinstance(item, dict):
            rows += flatten(item, f"{prefix}{key}.")
        elif item not in (None, "", []):
            rows.append([f"{prefix}{key}", format_value(item)])
    return rows


def provenance_table(
    draft: Mapping[str, Any],
    hashed: Sequence[str],
    report: Mapping[str, Any] | None,
    tuned: Mapping[str, Any] | None,
) -> Table:
    """Checksum of the `hashed` files, and commits, versions and hardware of training, report and tuning."""
    rows = [[f"draft_sha256 ({' + '.join(hashed)})", draft["draft_sha256"]]]
    rows.append(["trained by commit", format_value(draft.get("git") or NOT_RECORDED)])
    rows.append(["trained with", format_value(draft.get("versions") or NOT_RECORDED)])
    if report is None:
        rows.append(["report", "none given"])
    else:
        rows.append(["measured by commit", format_value(report.get("git") or NOT_RECORDED)])
        rows.append(["seed of the measurement", format_value(report.get("seed", NOT_RECORDED))])
        rows.append(["measured on", format_value(report.get("hardware") or NOT_RECORDED)])
        rows.append(["measured with", format_value(report.get("versions") or NOT_RECORDED)])
    if tuned is not None:
        rows.append(["tuned by commit", format_value(tuned.get("git") or NOT_RECORDED)])
        rows.append(["tuned on", format_value(tuned.get("hardware") or NOT_RECORDED)])
    return Table("Provenance", ["what", "value"], rows)
