"""Which figures a report has: each is drawn where its numbers were measured, and left out otherwise."""

from collections.abc import Sequence
from typing import Any

from decode.drafts.registry import DRAFT_FAMILIES
from eval.metrics import roofline
from eval.reporting.formatting import Report, ReportEntry
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
from eval.reporting.tables import measured_settings, setting_title, unique_names

Tuned = dict[str, Any]
PROBABILITY_YLIM = (0.0, 1.03)


def build_charts(report: Report, tuned: Tuned | None) -> list[ReportChart]:
    """Every figure that has a panel, most important first."""
    methods = report["methods"]
    found = [
        _task_chart(
            [*methods, *_engine_entries(report)],
            "speedup",
            "Speed-up by method and task",
            "× plain decoding (dashed)",
        ),
        _task_chart(methods, "tau", "τ by method and task", "tokens a target pass (dashed: plain)"),
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
    return [chart for chart in found if len(chart.panels) > 0]


def _engine_entries(report: Report) -> list[ReportEntry]:
    """Other engines beside our methods, under names that no method has; older reports give them no interval."""
    found = report.get("engines") or []
    return [{**e, "name": f"{e['engine']} {e['name']}"} for e in found if e.get("speedup_ci")]


def _task_chart(methods: Sequence[ReportEntry], what: str, caption: str, label: str) -> ReportChart:
    """A row for each method, the best on top, a colour for each task; plain decoding is the line at 1."""
    shown = [m for m in methods if m[what] is not None and m["name"] != "plain"]
    rows = unique_names([m["name"] for m in sorted(shown, key=lambda m: -m[what])])
    tasks = unique_names([m["task"] for m in shown])
    values = {
        setting: {
            (m["name"], m["task"]): Point(0, m[what], m[f"{what}_ci"])
            for m in _filter_by_setting(shown, setting)
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
    shown = [m for m in _all_tasks_entries(methods) if m["alpha"] is not None]
    names = unique_names([m["name"] for m in sorted(shown, key=lambda m: -m["alpha"])])
    panels = []
    for setting in measured_settings(shown):
        series = [
            ChartSeries(m["name"], _known_points(m["alpha_by_position"], m["alpha_by_position_ci"]))
            for m in _filter_by_setting(shown, setting)
        ]
        panels.append(
            line_chart(
                series, names, setting_title(*setting), "position i", "α_i", ylim=PROBABILITY_YLIM
            )
        )
    note = "α_i: how often the i-th drafted token is accepted when all before it were. All tasks."
    return ReportChart("Acceptance by position", note, panels, legend_entries(names))


def _accepted_length_chart(methods: Sequence[ReportEntry]) -> ReportChart:
    """The histogram of accepted lengths, a bar for each method."""
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
            for m in _filter_by_setting(shown, setting)
        }
        panels.append(stacked_bars(parts, {}, setting_title(*setting), "% of rounds", 100))
    legend = [
        ("■", _color_for_length(length, longest), str(length)) for length in range(longest + 1)
    ]
    note = "Drafted tokens accepted in a round; the target's own token comes on top. All tasks."
    return ReportChart("Accepted lengths", note, panels, legend)


def _latency_chart(methods: Sequence[ReportEntry]) -> ReportChart:
    """Median and 95th percentile of what a reader waits for: a token where that was measured, else a round."""
    shown = [m for m in _all_tasks_entries(methods) if m["latency_ms"] is not None]
    tokens = all(m["latency_ms"].get("token") for m in shown)
    each = [m["latency_ms"]["token"] if tokens else m["latency_ms"] for m in shown]
    name = "median, and the line to the 95th percentile"
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
    unit = "ms a token" if tokens else "ms a round"
    panels = [
        dot_plot(panel, rows, [name], setting_title(*setting), unit, xlim)
        for setting, panel in values.items()
        if panel
    ]
    note = "A token's latency is its round's time shared among the tokens that the round put out."
    return ReportChart("Latency", note if tokens else "Of a round.", panels, legend_entries([name]))


def _phase_chart(methods: Sequence[ReportEntry]) -> ReportChart:
    shown = [m for m in _all_tasks_entries(methods) if m["phase_ms"] is not None]
    right = 1.3 * max((sum(m["phase_ms"].values()) for m in shown), default=0.0)
    panels = []
    for setting in measured_settings(shown):
        own = _filter_by_setting(shown, setting)
        parts = {
            m["name"]: [(m["phase_ms"][p], PHASE_COLORS[p]) for p in PHASE_COLORS] for m in own
        }
        ends = {m["name"]: f"{m['tau']:.2f} tokens" for m in own if m["tau"] is not None}
        panels.append(stacked_bars(parts, ends, setting_title(*setting), "ms a round", right))
    legend = [("■", color, phase) for phase, color in PHASE_COLORS.items()]
    note = "One round from left to right and what it yields; timed in a pass of its own, since clocks cost time."
    return ReportChart("Where a round's time goes", note, panels, legend)


def _speedup_vs_k_chart(tuned: Tuned) -> ReportChart:
    """Measured speed-ups of one half of the prompts and, dashed, what the other half predicted."""
    cells = [c for c in tuned["predictions"]["cells"] if c["task"] == "all" and c["fold"] == 0]
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
        "Points: measured. Dashed: predicted from other prompts, of which only two draft lengths and plain rounds were "
        "timed. Rounds only, prefill aside."
    )
    return ReportChart("Speed-up against draft length", note, panels, legend_entries(names))


def _speedup_vs_batch_chart(tuned: Tuned) -> ReportChart:
    """The best draft length of each method at each batch size."""
    cells = [
        c
        for c in tuned["cells"]
        if c["task"] == "all" and c["tree"] is None and c["speedup"] and c["method"] != "plain"
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
    note = "Each method at its best draft length for that batch; plain decoding is batched alike."
    return ReportChart("Speed-up against batch size", note, panels, legend_entries(names))


def _roofline_chart(report: Report, tuned: Tuned | None) -> ReportChart:
    """Tokens a second at batch 1 as a share of what bandwidth allows, where bandwidth and sizes are known."""
    models, bandwidth = report.get("models") or {}, memory_bandwidth(report, tuned)
    target = models.get("target")
    panels = []
    shown = [m for m in _all_tasks_entries(report["methods"]) if m["batch_size"] == 1]
    if bandwidth is not None and target is not None and not target["experts"]:
        for setting in measured_settings(shown):
            parts, ends = {}, {}
            for m in _filter_by_setting(shown, setting):
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
        f"Ceiling: reading all weights once a round at {(bandwidth or 0) / 1e9:,.0f} GB/s, the measured τ; "
        "K/V cache and arithmetic come for free in it. Weights that stay in a cache can be read faster."
    )
    return ReportChart("Roofline", note, panels)


def roofline_tokens_per_second(
    entry: ReportEntry, models: dict[str, Any], bandwidth: float
) -> float | None:
    """Tokens a second that bandwidth allows this method with its measured τ; None where sizes are not known."""
    width = roofline.DTYPE_BYTES.get(entry["dtype"])
    without_weights = {"plain", *(f.name for f in DRAFT_FAMILIES.values() if not f.has_weights)}
    free = {"parameters": 0} if entry["name"] in without_weights else None
    draft = models["drafts"].get(entry["name"], free)
    if width is None or draft is None or entry["tau"] is None:
        return None
    target_bytes = width * models["target"]["parameters"]
    draft_bytes = width * draft["parameters"]
    return roofline.speculative_ceiling(
        bandwidth, target_bytes, draft_bytes, entry["k"], entry["tau"]
    )


def memory_bandwidth(report: Report, tuned: Tuned | None) -> float | None:
    """Bytes a second: of the data sheet for a known GPU, or as measured while tuning on the same device."""
    device = report["hardware"].get("device")
    known = roofline.GPU_SPECS.get(device)
    if known is not None:
        return known.bandwidth
    if tuned is not None and tuned["hardware"]["device"] == device:
        return float(tuned["bandwidth"])
    return None


def _filter_by_setting(
    methods: Sequence[ReportEntry], setting: tuple[float, int]
) -> list[ReportEntry]:
    return [m for m in methods if (m["temperature"], m["batch_size"]) == setting]


def _all_tasks_entries(methods: Sequence[ReportEntry]) -> list[ReportEntry]:
    return [m for m in methods if m["task"] == "all"]


def _known_points(values: Sequence[float | None], intervals: Sequence[Any]) -> list[Point]:
    pairs = enumerate(zip(values, intervals, strict=True), start=1)
    return [Point(i, value, interval) for i, (value, interval) in pairs if value is not None]


def _color_for_length(length: int, longest: int) -> str:
    """The colour of an accepted length between 0 and `longest`."""
    last = len(SHADE_COLORS) - 1
    return (
        SHADE_COLORS[0]
        if length == 0
        else SHADE_COLORS[max(1, round(length * last / max(longest, 1)))]
    )
