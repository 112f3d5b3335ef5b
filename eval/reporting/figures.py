"""The figures of a report; one without measured values is left out."""

from collections.abc import Sequence
from dataclasses import replace

from decode.common.typed_json import Estimate
from decode.drafts.registry import DRAFT_FAMILIES
from eval.metrics import roofline
from eval.metrics.bootstrap import ALL_TASKS
from eval.metrics.round_cost import RoundCost
from eval.reporting.decision import memory_bandwidth
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
    PLAIN,
    EvalReport,
    Measured,
    MethodResult,
    ModelSizes,
    by_setting,
    setting_title,
    unique_names,
)
from eval.results.tuned import TunedReport

PROBABILITY_YLIM = (0.0, 1.03)


def build_charts(report: EvalReport, tuned: TunedReport | None) -> list[ReportChart]:
    """Every figure that has a panel, most important first."""
    # Older reports have no interval for other engines.
    engines = [
        replace(e, name=f"{e.engine} {e.name}") for e in report.engines if e.valid_speedup.ci
    ]
    pooled, tasks = report.pooled, {m.task for m in report.entries}
    charts = [
        _task_chart(
            [(m, m.valid_speedup) for m in [*report.entries, *engines] if m.task in tasks],
            "Speed-up by method and task",
            "× plain decoding (dashed)",
        ),
        _task_chart(
            [(m, m.tau) for m in report.entries],
            "τ by method and task",
            "tokens per target pass (dashed: plain)",
        ),
        _alpha_by_position_chart([m for m in pooled if m.alpha.value is not None]),
        _accepted_length_chart(pooled),
        _latency_chart(pooled),
        _phase_chart(pooled),
        *([] if tuned is None else [_speedup_vs_k_chart(tuned), _speedup_vs_batch_chart(tuned)]),
        _roofline_chart(report, tuned),
    ]
    return [chart for chart in charts if len(chart.panels) > 0]


def _task_chart(
    entries: Sequence[tuple[Measured, Estimate]], caption: str, label: str
) -> ReportChart:
    """An estimate: a row for each method, best first, a colour for each task; plain decoding is the line at 1."""
    shown = [(m, x) for m, x in entries if x.value is not None and not m.is_plain]
    rows = unique_names([m.name for m, _ in sorted(shown, key=lambda pair: -(pair[1].value or 0))])
    tasks = unique_names([m.task for m, _ in shown])
    values = {
        setting: {(m.name, m.task): estimate_point(x) for m, x in shown if m.setting == setting}
        for setting in sorted({m.setting for m, _ in shown})
    }
    xlim = axis_limits((point for panel in values.values() for point in panel.values()), 1.0)
    panels = [
        dot_plot(panel, rows, tasks, setting_title(*setting), label, xlim, 1.0)
        for setting, panel in values.items()
    ]
    note = "Bars are 95 % intervals over prompts."
    return ReportChart(caption, note, panels, legend_entries(tasks))


def estimate_point(x: Estimate) -> Point:
    assert x.value is not None
    return Point(0, x.value, x.ci)


def alpha_points(m: MethodResult) -> list[Point]:
    """α_i with its interval, for the positions that were reached."""
    pairs = enumerate(m.alpha_by_position, start=1)
    return [Point(i, x.value, x.ci) for i, x in pairs if x.value is not None]


def _alpha_by_position_chart(shown: Sequence[MethodResult]) -> ReportChart:
    """α_i over the position i, a line for each method."""
    names = unique_names([m.name for m in sorted(shown, key=lambda m: -(m.alpha.value or 0))])
    panels = [
        line_chart(
            [ChartSeries(m.name, alpha_points(m)) for m in own],
            names, setting_title(*setting), "position i", "α_i", ylim=PROBABILITY_YLIM,
        )
        for setting, own in by_setting(shown).items()
    ]  # fmt: skip
    note = "α_i: how often the i-th drafted token is accepted if all before it were accepted. All tasks."
    return ReportChart("Acceptance by position", note, panels, legend_entries(names))


def _accepted_length_chart(pooled: Sequence[MethodResult]) -> ReportChart:
    """Shares of rounds by the number of accepted tokens, a stacked bar for each method."""
    shown = [m for m in pooled if m.k > 0 and sum(m.histogram or []) > 0]
    longest = max((len(m.histogram or []) - 1 for m in shown), default=0)
    shades = len(SHADE_COLORS) - 1
    colors = [
        SHADE_COLORS[max(length > 0, round(length * shades / max(longest, 1)))]
        for length in range(longest + 1)
    ]
    panels = []
    for setting, own in by_setting(shown).items():
        counts = {m.name: m.histogram or [] for m in own}
        parts = {
            name: [(100 * n / sum(rounds), colors[length]) for length, n in enumerate(rounds)]
            for name, rounds in counts.items()
        }
        panels.append(stacked_bars(parts, {}, setting_title(*setting), "% of rounds", 100))
    legend = [("■", color, str(length)) for length, color in enumerate(colors)]
    note = "Drafted tokens accepted in a round; each round adds one token of the target to these. All tasks."
    return ReportChart("Accepted lengths", note, panels, legend)


def _latency_chart(pooled: Sequence[MethodResult]) -> ReportChart:
    """Median and 95th percentile of the latency of a token, or of a round where tokens were not measured."""
    spreads = [(m, m.latency_ms) for m in pooled if m.latency_ms is not None]
    tokens = all(x.token for _, x in spreads)
    name = "median, with a line to the 95th percentile"
    values: dict[tuple[float, int], dict[tuple[str, str], Point]] = {}
    for m, rounds in sorted(spreads, key=lambda pair: pair[0].setting):
        x = rounds.token if tokens and rounds.token else rounds
        if x.p50 is not None and x.p95 is not None:
            point = Point(0, x.p50, (x.p50, x.p95))
            values.setdefault(m.setting, {})[m.name, name] = point
    rows = unique_names([row for panel in values.values() for row, _ in panel])
    xlim = axis_limits((point for panel in values.values() for point in panel.values()), 0.0)
    unit = "ms per token" if tokens else "ms per round"
    panels = [
        dot_plot(panel, rows, [name], setting_title(*setting), unit, xlim)
        for setting, panel in values.items()
    ]
    note = "A token's latency is the time of its round ÷ the tokens that the round emitted."
    return ReportChart(
        "Latency", note if tokens else "Latency of a round.", panels, legend_entries([name])
    )


def _phase_chart(pooled: Sequence[MethodResult]) -> ReportChart:
    """Milliseconds of draft, verification and overhead in a round, a stacked bar for each method."""
    timed = [(m, m.phase_ms) for m in pooled if m.phase_ms is not None]
    right = 1.3 * max((phases.total for _, phases in timed), default=0.0)
    panels = []
    for setting, own in by_setting([m for m, _ in timed]).items():
        parts = {
            m.name: [(vars(m.phase_ms)[p], PHASE_COLORS[p]) for p in PHASE_COLORS] for m in own
        }
        ends = {m.name: f"{m.tau.value:.2f} tokens" for m in own if m.tau.value is not None}
        panels.append(stacked_bars(parts, ends, setting_title(*setting), "ms per round", right))
    legend = [("■", color, phase) for phase, color in PHASE_COLORS.items()]
    note = "One round from left to right, and the tokens it yields; timed in a separate pass, because clocks cost time."
    return ReportChart("Where a round's time goes", note, panels, legend)


def _speedup_vs_k_chart(tuned: TunedReport) -> ReportChart:
    """Speed-ups over K, measured on one half of the prompts and, dashed, predicted from the other half."""
    cells = [c for c in tuned.predictions.cells if c.task == ALL_TASKS and c.fold == 0]
    names = unique_names([c.method for c in cells])
    panels = []
    for setting in sorted({(c.temperature, c.batch_size) for c in cells}):
        own = [c for c in cells if (c.temperature, c.batch_size) == setting]
        if len({c.k for c in own}) < 3:
            continue
        series = []
        for name in names:
            points = sorted((c for c in own if c.method == name), key=lambda c: c.k)
            measured = [replace(estimate_point(c.measured), x=c.k) for c in points]
            guess = [Point(c.k, c.predicted) for c in points]
            series += [ChartSeries(name, measured), ChartSeries(name, guess, dashed=True)]
        title = setting_title(*setting)
        panels.append(line_chart(series, names, title, "K", "× plain decoding", line_at=1.0))
    note = (
        "Points: measured. Dashed: predicted from other prompts, on which only plain decoding and two draft lengths "
        "were timed. Rounds only, without prefill."
    )
    return ReportChart("Speed-up against draft length", note, panels, legend_entries(names))


def _speedup_vs_batch_chart(tuned: TunedReport) -> ReportChart:
    """Speed-up over batch size, each method at its best K for that batch size."""
    cells = [
        c
        for c in tuned.cells
        if c.task == ALL_TASKS and c.tree is None and c.speedup.value and c.method != PLAIN
    ]
    names = unique_names([c.method for c in cells])
    panels = []
    for temperature in sorted({c.temperature for c in cells}):
        best: dict[str, dict[int, Point]] = {name: {} for name in names}
        for c in sorted(cells, key=lambda c: (c.batch_size, c.speedup.value)):
            if c.temperature == temperature:  # of one batch size, the fastest comes last
                point = replace(estimate_point(c.speedup), x=c.batch_size)
                best[c.method][c.batch_size] = point
        series = [ChartSeries(x, [*own.values()]) for x, own in best.items() if len(own) > 1]
        if series:
            title = f"temperature {temperature:g}"
            panels.append(
                line_chart(series, names, title, "batch", "× plain", line_at=1.0, xscale="log")
            )
    note = (
        "Each method at its best draft length for that batch; plain decoding uses the same batch."
    )
    return ReportChart("Speed-up against batch size", note, panels, legend_entries(names))


def _roofline_chart(report: EvalReport, tuned: TunedReport | None) -> ReportChart:
    """Tokens/s at batch 1 as a share of the bandwidth's limit, where the bandwidth and the model sizes are known."""
    models, bandwidth = report.models, memory_bandwidth(report, tuned)
    panels = []
    shown = [m for m in report.pooled if m.batch_size == 1]
    if bandwidth is not None and models and models.target and not models.target.experts:
        for setting, own in by_setting(shown).items():
            parts, ends = {}, {}
            for m in own:
                top = roofline_tokens_per_second(m, models, bandwidth)
                speed = m.tokens_per_second.value
                if top is not None and speed is not None:
                    parts[m.name] = [(100 * speed / top, PHASE_COLORS["verify"])]
                    ends[m.name] = f"{speed:,.0f} of {top:,.0f} tokens/s"
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
    m: MethodResult, models: ModelSizes, bandwidth: float
) -> float | None:
    """Tokens/s that `bandwidth` (bytes/s) allows this method at its measured τ; None where sizes are unknown, and for a
    draft with a lookup, of adaptive length or with mirror, which is not read K times in every round."""
    width, size = roofline.DTYPE_BYTES.get(m.dtype), models.drafts.get(m.name)
    family = DRAFT_FAMILIES.get(m.name)
    free = m.is_plain or (family is not None and not family.has_weights)
    if width is None or models.target is None or (size is None and not free):
        return None
    if m.tau.value is None or not m.drafts_alone:
        return None
    draft_bytes = 0 if size is None else width * size.parameters
    target_bytes = width * models.target.parameters
    return m.tau.value * bandwidth / RoundCost(target_bytes, draft_bytes).at(m.k)
