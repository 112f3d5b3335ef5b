"""The figures of a report; one without measured values is left out."""

from collections.abc import Sequence
from typing import Any

from decode.drafts.registry import DRAFT_FAMILIES
from eval.metrics import roofline
from eval.metrics.bootstrap import ALL_TASKS
from eval.reporting.plots import (
    PHASE_COLORS,
    SHADE_COLORS,
    ChartSeries,
    Point,
    ReportChart,
    axis_limits,
    dot_plot,
    legend_entries,
    line_chart,
    stacked_bars,
)
from eval.results.report import (
    Report,
    ReportEntry,
    Tuned,
    filter_by_setting,
    measured_settings,
    setting_title,
    unique_names,
)

PROBABILITY_YLIM = (0.0, 1.03)


def build_charts(report: Report, tuned: Tuned | None) -> list[ReportChart]:
    """Every figure that has a panel, most important first."""
    methods = report["methods"]
    charts = [
        _task_chart(
            [*methods, *_engine_entries(report)],
            "speedup",
            "Speed-up by method and task",
            "× plain decoding (dashed)",
        ),
        _task_chart(
            methods, "tau", "τ by method and task", "tokens per target pass (dashed: plain)"
        ),
        _alpha_by_position_chart(methods),
        _accepted_length_chart(methods),
        _latency_chart(methods),
        _phase_chart(methods),
        *(
            [_speedup_vs_k_chart(tuned), _speedup_vs_batch_chart(tuned)]
            if tuned is not None
            else []
        ),
        _roofline_chart(report, tuned),
    ]
    return [chart for chart in charts if len(chart.panels) > 0]


def _engine_entries(report: Report) -> list[ReportEntry]:
    """Entries of other engines, each under "engine draft" as its name; older reports give them no interval."""
    engines = report.get("engines") or []
    return [{**e, "name": f"{e['engine']} {e['name']}"} for e in engines if e.get("speedup_ci")]


def _task_chart(methods: Sequence[ReportEntry], what: str, caption: str, label: str) -> ReportChart:
    """The field `what`: a row for each method, best first, a colour for each task; plain decoding is the line at 1."""
    shown = [m for m in methods if m[what] is not None and m["name"] != "plain"]
    rows = unique_names([m["name"] for m in sorted(shown, key=lambda m: -m[what])])
    tasks = unique_names([m["task"] for m in shown])
    values = {
        setting: {
            (m["name"], m["task"]): Point(0, m[what], m[f"{what}_ci"])
            for m in filter_by_setting(shown, setting)
        }
        for setting in measured_settings(shown)
    }
    xlim = axis_limits((point for panel in values.values() for point in panel.values()), 1.0)
    panels = [
        dot_plot(panel, rows, tasks, setting_title(*setting), label, xlim, 1.0)
        for setting, panel in values.items()
    ]
    return ReportChart(
        caption, "Bars are 95 % intervals over prompts.", panels, legend_entries(tasks)
    )


def _alpha_by_position_chart(methods: Sequence[ReportEntry]) -> ReportChart:
    """α_i over the position i, a line for each method."""
    shown = [m for m in _all_tasks_entries(methods) if m["alpha"] is not None]
    names = unique_names([m["name"] for m in sorted(shown, key=lambda m: -m["alpha"])])
    panels = []
    for setting in measured_settings(shown):
        series = [
            ChartSeries(m["name"], _known_points(m["alpha_by_position"], m["alpha_by_position_ci"]))
            for m in filter_by_setting(shown, setting)
        ]
        panels.append(
            line_chart(
                series, names, setting_title(*setting), "position i", "α_i", ylim=PROBABILITY_YLIM
            )
        )
    note = "α_i: how often the i-th drafted token is accepted if all before it were accepted. All tasks."
    return ReportChart("Acceptance by position", note, panels, legend_entries(names))


def _accepted_length_chart(methods: Sequence[ReportEntry]) -> ReportChart:
    """Shares of rounds by the number of accepted tokens, a stacked bar for each method."""
    shown = [
        m for m in _all_tasks_entries(methods) if sum(m.get("histogram") or []) > 0 and m["k"] > 0
    ]
    longest = max((len(m["histogram"]) - 1 for m in shown), default=0)
    panels = []
    for setting in measured_settings(shown):
        parts = {
            m["name"]: [
                (100 * count / sum(m["histogram"]), _color_for_length(length, longest))
                for length, count in enumerate(m["histogram"])
            ]
            for m in filter_by_setting(shown, setting)
        }
        panels.append(stacked_bars(parts, {}, setting_title(*setting), "% of rounds", 100))
    legend = [
        ("■", _color_for_length(length, longest), str(length)) for length in range(longest + 1)
    ]
    note = "Drafted tokens accepted in a round; each round adds one token of the target to these. All tasks."
    return ReportChart("Accepted lengths", note, panels, legend)


def _latency_chart(methods: Sequence[ReportEntry]) -> ReportChart:
    """Median and 95th percentile of the latency of a token, or of a round where tokens were not measured."""
    shown = [m for m in _all_tasks_entries(methods) if m["latency_ms"] is not None]
    tokens = all(m["latency_ms"].get("token") for m in shown)
    each = [m["latency_ms"]["token"] if tokens else m["latency_ms"] for m in shown]
    name = "median, with a line to the 95th percentile"
    values = {
        setting: {
            (m["name"], name): Point(0, x["p50"], (x["p50"], x["p95"]))
            for m, x in zip(shown, each, strict=True)
            if (m["temperature"], m["batch_size"]) == setting and x["p50"] is not None
        }
        for setting in measured_settings(shown)
    }
    rows = unique_names([row for panel in values.values() for row, _ in panel])
    xlim = axis_limits((point for panel in values.values() for point in panel.values()), 0.0)
    unit = "ms per token" if tokens else "ms per round"
    panels = [
        dot_plot(panel, rows, [name], setting_title(*setting), unit, xlim)
        for setting, panel in values.items()
        if panel
    ]
    note = "A token's latency is the time of its round ÷ the tokens that the round emitted."
    return ReportChart(
        "Latency", note if tokens else "Latency of a round.", panels, legend_entries([name])
    )


def _phase_chart(methods: Sequence[ReportEntry]) -> ReportChart:
    """Milliseconds of draft, verification and overhead in a round, a stacked bar for each method."""
    shown = [m for m in _all_tasks_entries(methods) if m["phase_ms"] is not None]
    right = 1.3 * max((sum(m["phase_ms"].values()) for m in shown), default=0.0)
    panels = []
    for setting in measured_settings(shown):
        own = filter_by_setting(shown, setting)
        parts = {
            m["name"]: [(m["phase_ms"][p], PHASE_COLORS[p]) for p in PHASE_COLORS] for m in own
        }
        ends = {m["name"]: f"{m['tau']:.2f} tokens" for m in own if m["tau"] is not None}
        panels.append(stacked_bars(parts, ends, setting_title(*setting), "ms per round", right))
    legend = [("■", color, phase) for phase, color in PHASE_COLORS.items()]
    note = "One round from left to right, and the tokens it yields; timed in a separate pass, because clocks cost time."
    return ReportChart("Where a round's time goes", note, panels, legend)


def _speedup_vs_k_chart(tuned: Tuned) -> ReportChart:
    """Speed-ups over K, measured on one half of the prompts and, dashed, predicted from the other half."""
    cells = [c for c in tuned["predictions"]["cells"] if c["task"] == ALL_TASKS and c["fold"] == 0]
    names = unique_names([c["method"] for c in cells])
    panels = []
    for temperature, batch in sorted({(c["temperature"], c["batch_size"]) for c in cells}):
        own = [c for c in cells if (c["temperature"], c["batch_size"]) == (temperature, batch)]
        if len({c["k"] for c in own}) < 3:
            continue
        series = []
        for name in names:
            points = sorted((c for c in own if c["method"] == name), key=lambda c: c["k"])
            measured = [Point(c["k"], c["measured"], c["ci"]) for c in points]
            guess = [Point(c["k"], c["predicted"]) for c in points]
            series += [ChartSeries(name, measured), ChartSeries(name, guess, dashed=True)]
        title = setting_title(temperature, batch)
        panels.append(line_chart(series, names, title, "K", "× plain decoding", line_at=1.0))
    note = (
        "Points: measured. Dashed: predicted from other prompts, on which only plain decoding and two draft lengths "
        "were timed. Rounds only, without prefill."
    )
    return ReportChart("Speed-up against draft length", note, panels, legend_entries(names))


def _speedup_vs_batch_chart(tuned: Tuned) -> ReportChart:
    """Speed-up over batch size, each method at its best K for that batch size."""
    cells = [
        c
        for c in tuned["cells"]
        if c["task"] == ALL_TASKS and c["tree"] is None and c["speedup"] and c["method"] != "plain"
    ]
    names = unique_names([c["method"] for c in cells])
    panels = []
    for temperature in sorted({c["temperature"] for c in cells}):
        series = []
        for name in names:
            own = [c for c in cells if c["method"] == name and c["temperature"] == temperature]
            best = {
                size: max((c for c in own if c["batch_size"] == size), key=lambda c: c["speedup"])
                for size in sorted({c["batch_size"] for c in own})
            }
            points = [Point(size, c["speedup"], c["ci"]) for size, c in best.items()]
            if len(points) > 1:
                series.append(ChartSeries(name, points))
        if series:
            title = f"temperature {temperature:g}"
            panels.append(
                line_chart(series, names, title, "batch", "× plain", line_at=1.0, xscale="log")
            )
    note = (
        "Each method at its best draft length for that batch; plain decoding uses the same batch."
    )
    return ReportChart("Speed-up against batch size", note, panels, legend_entries(names))


def _roofline_chart(report: Report, tuned: Tuned | None) -> ReportChart:
    """Tokens/s at batch 1 as a share of the bandwidth's limit, where the bandwidth and the model sizes are known."""
    models, bandwidth = report.get("models") or {}, memory_bandwidth(report, tuned)
    target = models.get("target")
    panels = []
    shown = [m for m in _all_tasks_entries(report["methods"]) if m["batch_size"] == 1]
    if bandwidth is not None and target is not None and not target["experts"]:
        for setting in measured_settings(shown):
            parts, ends = {}, {}
            for m in filter_by_setting(shown, setting):
                top = roofline_tokens_per_second(m, models, bandwidth)
                if top is not None and m["tokens_per_second"] is not None:
                    share = 100 * m["tokens_per_second"] / top
                    parts[m["name"]] = [(share, PHASE_COLORS["verify"])]
                    ends[m["name"]] = f"{m['tokens_per_second']:,.0f} of {top:,.0f} tokens/s"
            if parts:
                title = setting_title(*setting)
                most = max(100.0, *(bar[0][0] for bar in parts.values()))
                panels.append(stacked_bars(parts, ends, title, "% of the ceiling", 1.5 * most))
    note = (
        f"Ceiling: all weights are read once per round at {(bandwidth or 0) / 1e9:,.0f} GB/s, with the measured τ; it "
        "counts neither the KV cache nor arithmetic. Weights that stay in a processor cache can be read faster."
    )
    return ReportChart("Roofline", note, panels)


def roofline_tokens_per_second(
    entry: ReportEntry, models: dict[str, Any], bandwidth: float
) -> float | None:
    """Tokens/s that `bandwidth` (bytes/s) allows this method at its measured τ; None where sizes are unknown, and for a
    draft with a lookup, of adaptive length or with mirror, which is not read K times in every round."""
    width = roofline.DTYPE_BYTES.get(entry["dtype"])
    without_weights = {"plain", *(f.name for f in DRAFT_FAMILIES.values() if not f.has_weights)}
    free = {"parameters": 0} if entry["name"] in without_weights else None
    draft = models["drafts"].get(entry["name"], free)
    if width is None or draft is None or entry["tau"] is None:
        return None
    if entry.get("lookup") or entry.get("adaptive") or entry.get("mirror"):
        return None
    target_bytes = width * models["target"]["parameters"]
    draft_bytes = width * draft["parameters"]
    return roofline.speculative_ceiling(
        bandwidth, target_bytes, draft_bytes, entry["k"], entry["tau"]
    )


def memory_bandwidth(report: Report, tuned: Tuned | None) -> float | None:
    """Memory bandwidth in bytes/s: by the data sheet of a known GPU, or as tuning measured it on the same device."""
    device = report["hardware"].get("device")
    known = roofline.GPU_SPECS.get(device)
    if known is not None:
        return known.bandwidth
    if tuned is not None and tuned["hardware"]["device"] == device:
        return float(tuned["bandwidth"])
    return None


def _all_tasks_entries(methods: Sequence[ReportEntry]) -> list[ReportEntry]:
    return [m for m in methods if m["task"] == ALL_TASKS]


def _known_points(values: Sequence[float | None], intervals: Sequence[Any]) -> list[Point]:
    """The values that are not None over their positions, counted from 1."""
    pairs = enumerate(zip(values, intervals, strict=True), start=1)
    return [Point(i, value, interval) for i, (value, interval) in pairs if value is not None]


def _color_for_length(length: int, longest: int) -> str:
    """The colour of an accepted length between 0 and `longest`."""
    if length == 0:
        return SHADE_COLORS[0]
    return SHADE_COLORS[max(1, round(length * (len(SHADE_COLORS) - 1) / max(longest, 1)))]
