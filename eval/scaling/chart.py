"""The figures of a data curve: τ and α over the supervised tokens, with the fitted law and its prediction."""

import numpy as np

from eval.reporting.plots import (
    ChartSeries,
    Point,
    ReportChart,
    legend_entries,
    line_chart,
)
from eval.scaling.data_curve import METRICS, DataCurve, doubling_lines, law_of

CAPTION = "Acceptance by training data"
PREDICTED = "twice the data, predicted"
LABELS = {"tau": ("τ", "tokens per target pass"), "alpha": ("α", "share of drafts accepted")}
"""{metric: (title, what the vertical axis shows)}."""
UNIT = "thousand supervised tokens"
FITTED_POINTS = 40


def curve_chart(curve: DataCurve) -> ReportChart:
    """Both panels with their legend, and the verdict as a note."""
    panels = [curve_panel(curve, metric) for metric in METRICS]
    note = f"Points: measured. Dashed: fitted. {' '.join(doubling_lines(curve))}"
    return ReportChart(CAPTION, note, panels, legend_entries(series_names(curve)))


def series_names(curve: DataCurve) -> list[str]:
    """A name for each temperature, and the prediction's."""
    temperatures = sorted({p["temperature"] for p in curve["points"]})
    return [*(f"temperature {t:g}" for t in temperatures), PREDICTED]


def curve_panel(curve: DataCurve, metric: str) -> str:
    """SVG of "tau" or "alpha" over the number of tokens: measured, fitted (dashed), predicted for twice the largest."""
    series = []
    for t in sorted({p["temperature"] for p in curve["points"]}):
        name = f"temperature {t:g}"
        measured = [
            Point(_thousands(p["tokens"]), p[metric], p[f"{metric}_ci"])
            for p in curve["points"]
            if p["temperature"] == t and p[metric] is not None
        ]
        series.append(ChartSeries(name, measured))
        for f in curve["forecasts"]:
            if (f["temperature"], f["metric"]) != (t, metric):
                continue
            law = law_of(f)
            smallest = min(p["tokens"] for p in curve["points"])
            places = np.geomspace(smallest, 2 * law.largest, FITTED_POINTS)
            fitted = [Point(n / 1000, law.at(n)) for n in places]
            series.append(ChartSeries(name, fitted, dashed=True))
            doubled = Point(_thousands(2 * law.largest), f["at_double"], f["at_double_ci"])
            series.append(ChartSeries(PREDICTED, [doubled]))
    title, shown = LABELS[metric]
    return line_chart(series, series_names(curve), title, UNIT, shown, xscale="log")


def marker_line(curve: DataCurve) -> str:
    """What each marker stands for, as text."""
    entries = legend_entries(series_names(curve))
    return ", ".join(f"{glyph} {name}" for glyph, _, name in entries)


def _thousands(tokens: float) -> float:
    """The number ÷ 1,000 with three digits, which the ticks show."""
    return float(f"{tokens / 1000:.3g}")
