"""Which figures a report has: each is drawn where its numbers were measured, and left out otherwise."""

from collections.abc import Sequence
from typing import Any

from eval import roofline
from eval.plots import (
    PHASES,
    SHADES,
    Chart,
    Point,
    Series,
    dots,
    legend_of,
    lines,
    span,
    stacks,
)
from eval.tables import setting_title, settings_of, unique
from eval.wording import Entry, Report

Tuned = dict[str, Any]
POSITIVE = (0.0, 1.03)
WEIGHTLESS = ("plain", "ngram", "suffix")
"""Methods that read no weights but the target's."""


def charts(report: Report, tuned: Tuned | None) -> list[Chart]:
    """Every figure that has a panel, most important first."""
    methods = report["methods"]
    found = [
        _by_task(
            [*methods, *_engines(report)],
            "speedup",
            "Speed-up by method and task",
            "× plain decoding (dashed)",
        ),
        _by_task(methods, "tau", "τ by method and task", "tokens a target pass (dashed: plain)"),
        _positions(methods),
        _lengths(methods),
        _latency(methods),
        _phases(methods),
        *([_over_k(tuned), _over_batch(tuned)] if tuned is not None else []),
        _roofline(report, tuned),
    ]
    return [chart for chart in found if len(chart.panels) > 0]


def _engines(report: Report) -> list[Entry]:
    """Other engines beside our methods, under names that no method has; older reports give them no interval."""
    found = report.get("engines") or []
    return [{**e, "name": f"{e['engine']} {e['name']}"} for e in found if e.get("speedup_ci")]


def _by_task(methods: Sequence[Entry], what: str, caption: str, label: str) -> Chart:
    """A row for each method, the best on top, a colour for each task; plain decoding is the line at 1."""
    shown = [m for m in methods if m[what] is not None and m["name"] != "plain"]
    rows = unique([m["name"] for m in sorted(shown, key=lambda m: -m[what])])
    tasks = unique([m["task"] for m in shown])
    values = {
        setting: {
            (m["name"], m["task"]): Point(0, m[what], m[f"{what}_ci"]) for m in _of(shown, setting)
        }
        for setting in settings_of(shown)
    }
    xlim = span((point for panel in values.values() for point in panel.values()), 1.0)
    panels = [
        dots(panel, rows, tasks, setting_title(*setting), label, xlim, 1.0)
        for setting, panel in values.items()
    ]
    return Chart(caption, "Bars are 95 % intervals over prompts.", panels, legend_of(tasks))


def _positions(methods: Sequence[Entry]) -> Chart:
    shown = [m for m in _pooled(methods) if m["alpha"] is not None]
    names = unique([m["name"] for m in sorted(shown, key=lambda m: -m["alpha"])])
    panels = []
    for setting in settings_of(shown):
        series = [
            Series(m["name"], _known(m["alpha_by_position"], m["alpha_by_position_ci"]))
            for m in _of(shown, setting)
        ]
        panels.append(
            lines(series, names, setting_title(*setting), "position i", "α_i", ylim=POSITIVE)
        )
    note = "α_i: how often the i-th drafted token is accepted when all before it were. All tasks."
    return Chart("Acceptance by position", note, panels, legend_of(names))


def _lengths(methods: Sequence[Entry]) -> Chart:
    """The histogram of accepted lengths, a bar for each method."""
    shown = [m for m in _pooled(methods) if sum(m.get("histogram") or []) > 0 and m["k"] > 0]
    longest = max((len(m["histogram"]) - 1 for m in shown), default=0)
    panels = []
    for setting in settings_of(shown):
        parts = {
            m["name"]: [
                (100 * count / sum(m["histogram"]), _shade(length, longest))
                for length, count in enumerate(m["histogram"])
            ]
            for m in _of(shown, setting)
        }
        panels.append(stacks(parts, {}, setting_title(*setting), "% of rounds", 100))
    legend = [("■", _shade(length, longest), str(length)) for length in range(longest + 1)]
    note = "Drafted tokens accepted in a round; the target's own token comes on top. All tasks."
    return Chart("Accepted lengths", note, panels, legend)


def _latency(methods: Sequence[Entry]) -> Chart:
    """Median and 95th percentile of what a reader waits for: a token where that was measured, else a round."""
    shown = [m for m in _pooled(methods) if m["latency_ms"] is not None]
    tokens = all(m["latency_ms"].get("token") for m in shown)
    each = [m["latency_ms"]["token"] if tokens else m["latency_ms"] for m in shown]
    name = "median, and the line to the 95th percentile"
    values = {
        setting: {
            (m["name"], name): Point(0, x["p50"], (x["p50"], x["p95"]))
            for m, x in zip(shown, each, strict=True)
            if (m["temperature"], m["batch_size"]) == setting and x["p50"] is not None
        }
        for setting in settings_of(shown)
    }
    rows = unique([row for panel in values.values() for row, _ in panel])
    xlim = span((point for panel in values.values() for point in panel.values()), 0.0)
    unit = "ms a token" if tokens else "ms a round"
    panels = [
        dots(panel, rows, [name], setting_title(*setting), unit, xlim)
        for setting, panel in values.items()
        if panel
    ]
    note = "A token's latency is its round's time shared among the tokens that the round put out."
    return Chart("Latency", note if tokens else "Of a round.", panels, legend_of([name]))


def _phases(methods: Sequence[Entry]) -> Chart:
    shown = [m for m in _pooled(methods) if m["phase_ms"] is not None]
    right = 1.3 * max((sum(m["phase_ms"].values()) for m in shown), default=0.0)
    panels = []
    for setting in settings_of(shown):
        own = _of(shown, setting)
        parts = {m["name"]: [(m["phase_ms"][p], PHASES[p]) for p in PHASES] for m in own}
        ends = {m["name"]: f"{m['tau']:.2f} tokens" for m in own if m["tau"] is not None}
        panels.append(stacks(parts, ends, setting_title(*setting), "ms a round", right))
    legend = [("■", color, phase) for phase, color in PHASES.items()]
    note = "One round from left to right and what it yields; timed in a pass of its own, since clocks cost time."
    return Chart("Where a round's time goes", note, panels, legend)


def _over_k(tuned: Tuned) -> Chart:
    """Measured speed-ups of one half of the prompts and, dashed, what the other half predicted."""
    cells = [c for c in tuned["predictions"]["cells"] if c["task"] == "all" and c["fold"] == 0]
    names = unique([c["method"] for c in cells])
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
            series += [Series(name, measured), Series(name, guess, dashed=True)]
        title = setting_title(temperature, batch)
        panels.append(lines(series, names, title, "K", "× plain decoding", line_at=1.0))
    note = (
        "Points: measured. Dashed: predicted from other prompts, of which only two draft lengths and plain rounds were "
        "timed. Rounds only, prefill aside."
    )
    return Chart("Speed-up against draft length", note, panels, legend_of(names))


def _over_batch(tuned: Tuned) -> Chart:
    """The best draft length of each method at each batch size."""
    cells = [
        c
        for c in tuned["cells"]
        if c["task"] == "all" and c["tree"] is None and c["speedup"] and c["method"] != "plain"
    ]
    names = unique([c["method"] for c in cells])
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
                series.append(Series(name, points))
        if series:
            title = f"temperature {temperature:g}"
            panels.append(
                lines(series, names, title, "batch", "× plain", line_at=1.0, xscale="log")
            )
    note = "Each method at its best draft length for that batch; plain decoding is batched alike."
    return Chart("Speed-up against batch size", note, panels, legend_of(names))


def _roofline(report: Report, tuned: Tuned | None) -> Chart:
    """Tokens a second at batch 1 as a share of what bandwidth allows, where bandwidth and sizes are known."""
    models, bandwidth = report.get("models") or {}, bandwidth_of(report, tuned)
    target = models.get("target")
    panels = []
    shown = [m for m in _pooled(report["methods"]) if m["batch_size"] == 1]
    if bandwidth is not None and target is not None and not target["experts"]:
        for setting in settings_of(shown):
            parts, ends = {}, {}
            for m in _of(shown, setting):
                top = ceiling_of(m, models, bandwidth)
                if top is not None and m["tokens_per_second"] is not None:
                    share = 100 * m["tokens_per_second"] / top
                    parts[m["name"]] = [(share, PHASES["verify"])]
                    ends[m["name"]] = f"{m['tokens_per_second']:,.0f} of {top:,.0f} tokens/s"
            if parts:
                title = setting_title(*setting)
                most = max(100.0, *(bar[0][0] for bar in parts.values()))
                panels.append(stacks(parts, ends, title, "% of the ceiling", 1.5 * most))
    note = (
        f"Ceiling: reading all weights once a round at {(bandwidth or 0) / 1e9:,.0f} GB/s, the measured τ; "
        "K/V cache and arithmetic come for free in it. Weights that stay in a cache can be read faster."
    )
    return Chart("Roofline", note, panels)


def ceiling_of(entry: Entry, models: dict[str, Any], bandwidth: float) -> float | None:
    """Tokens a second that bandwidth allows this method with its measured τ; None where sizes are not known."""
    width = roofline.DTYPE_BYTES.get(entry["dtype"])
    free = {"parameters": 0} if entry["name"] in WEIGHTLESS else None
    draft = models["drafts"].get(entry["name"], free)
    if width is None or draft is None or entry["tau"] is None:
        return None
    target_bytes = width * models["target"]["parameters"]
    draft_bytes = width * draft["parameters"]
    return roofline.draft_ceiling(bandwidth, target_bytes, draft_bytes, entry["k"], entry["tau"])


def bandwidth_of(report: Report, tuned: Tuned | None) -> float | None:
    """Bytes a second: of the data sheet for a known GPU, or as measured while tuning on the same device."""
    device = report["hardware"].get("device")
    known = roofline.GPUS.get(device)
    if known is not None:
        return known.bandwidth
    if tuned is not None and tuned["hardware"]["device"] == device:
        return float(tuned["bandwidth"])
    return None


def _of(methods: Sequence[Entry], setting: tuple[float, int]) -> list[Entry]:
    return [m for m in methods if (m["temperature"], m["batch_size"]) == setting]


def _pooled(methods: Sequence[Entry]) -> list[Entry]:
    return [m for m in methods if m["task"] == "all"]


def _known(values: Sequence[float | None], intervals: Sequence[Any]) -> list[Point]:
    pairs = enumerate(zip(values, intervals, strict=True), start=1)
    return [Point(i, value, interval) for i, (value, interval) in pairs if value is not None]


def _shade(length: int, longest: int) -> str:
    """The colour of an accepted length between 0 and `longest`."""
    last = len(SHADES) - 1
    return SHADES[0] if length == 0 else SHADES[max(1, round(length * last / max(longest, 1)))]
