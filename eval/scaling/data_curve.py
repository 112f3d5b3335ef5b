"""data_curve.json: τ and α over the number of supervised tokens, what twice as many would give, a verdict, and figures.

"stop": more data of this kind is worth less than asked, by the whole interval of its relative gain in τ; "go on": it is
worth more, by the whole interval; "not clear": neither, or the measurements allow no interval.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from decode.common.errors import UserError
from decode.common.files import read_json_object
from eval.metrics.bootstrap import Array, Interval, ratio_interval, ratio_or_none
from eval.reporting.formatting import NOT_MEASURED, Table, format_number, format_with_interval
from eval.reporting.plots import (
    ChartSeries,
    Point,
    ReportChart,
    legend_entries,
    line_chart,
)
from eval.scaling import power_law

DataCurve = Mapping[str, Any]
"""The content of data_curve.json."""
WHAT = "data_curve.json of scripts/lab/data_curve.py"
METRICS = {"tau": (0, 1), "alpha": (2, 3)}
"""{metric: places of its numerator and its denominator in the counts of a prompt}."""
STOP, GO_ON, NOT_CLEAR = "stop", "go on", "not clear"
SEED = 0
"""Of all intervals."""
HALVINGS = 20
"""How far below the largest size a law is followed."""
FILE_KEYS = ("schema", "target", "family", "worth", "verdict", "points", "before", "forecasts")
POINT_KEYS = frozenset(
    ("temperature", "size", "tokens", "rows", "steps", "tau", "tau_ci", "alpha", "alpha_ci")
)
FORECAST_KEYS = frozenset(
    ("temperature", "metric", "law", "exponent_ci", "limit", "at_double", "at_double_ci", "gain")
    + ("gain_ci", "verdict")
)
LAW_KEYS = frozenset(("largest", "level", "slope", "exponent"))


@dataclass(frozen=True)
class TrainedPoint:
    """One training on a part of the data, and what its draft did to each prompt."""

    size: int
    """The number of supervised tokens that was asked for."""
    seed: int
    tokens: int
    """Supervised tokens of the rows: the first ones that reach `size`."""
    rows: int
    steps: int
    counts: dict[str, list[list[int]]]
    """{temperature: [emitted, rounds, accepted, reached] of each prompt}."""


def build_curve(
    points: Sequence[TrainedPoint],
    before: TrainedPoint | None,
    temperatures: Sequence[float],
    k: int,
    worth: float,
) -> dict[str, Any]:
    """{points, before, forecasts, verdict} of data_curve.json. `before` is the draft without training.

    `worth` is the relative gain in τ from which on twice the data is worth it.
    """
    rows, untrained, forecasts = [], [], []
    for temperature in temperatures:
        for size in sorted({point.size for point in points}):
            rows.append(_pooled([p for p in points if p.size == size], temperature, k))
        if before is not None:
            untrained.append(_pooled([before], temperature, k))
        for metric in METRICS:
            found = _forecast(points, temperature, metric, k)
            if found is not None:
                forecasts.append(found)
    for f in forecasts:
        f["verdict"] = verdict(f["gain_ci"], worth) if f["metric"] == "tau" else None
    verdicts = [f["verdict"] for f in forecasts if f["metric"] == "tau"]
    return {
        "points": rows,
        "before": untrained,
        "forecasts": forecasts,
        "verdict": overall_verdict(verdicts, len(temperatures)),
    }


def verdict(gain_ci: Interval | None, worth: float) -> str:
    """Whether an interval of the relative gain lies below `worth` (STOP), at or above it (GO_ON), or neither."""
    if gain_ci is None:
        return NOT_CLEAR
    if gain_ci[1] < worth:
        return STOP
    return GO_ON if gain_ci[0] >= worth else NOT_CLEAR


def overall_verdict(verdicts: Sequence[str], temperatures: int) -> str:
    """GO_ON if one temperature says so, STOP if all of them do, else NOT_CLEAR."""
    if GO_ON in verdicts:
        return GO_ON
    return STOP if verdicts.count(STOP) == temperatures else NOT_CLEAR


def read_data_curve(path: str | Path, tokenizer: str = "") -> dict[str, Any]:
    """The content of a data_curve.json of schema 1.

    UserError for anything else, and for one of a target with another tokenizer than the one with this fingerprint.
    """
    curve = read_json_object(path, WHAT, FILE_KEYS[:5], FILE_KEYS[5:])
    if curve["schema"] != 1:
        raise UserError(f"{path} is not {WHAT} of schema 1: make it again with this version")
    for name, wanted in (("points", POINT_KEYS), ("forecasts", FORECAST_KEYS)):
        for number, entry in enumerate(curve[name]):
            _check_keys(path, f"{name}[{number}]", entry, wanted)
            if name == "forecasts":
                _check_keys(path, f"{name}[{number}].law", entry["law"], LAW_KEYS)
    _check_keys(path, "target", curve["target"], {"name", "tokenizer"})
    if not curve["points"]:
        raise UserError(f"{path} is not {WHAT}: it has no points")
    if tokenizer and curve["target"]["tokenizer"] != tokenizer:
        raise UserError(f"{path} is about another target: give that of this target")
    return curve


def _check_keys(path: str | Path, name: str, entry: Any, wanted: Set[str]) -> None:
    """UserError unless `entry` is an object with these keys."""
    missing = sorted(wanted - entry.keys()) if isinstance(entry, dict) else sorted(wanted)
    if missing:
        raise UserError(f"{path} is not {WHAT}: {name} has no {missing[0]!r}")


def law_of(forecast: Mapping[str, Any]) -> power_law.PowerLaw:
    """The law of an entry of `forecasts`."""
    return power_law.PowerLaw(**{key: forecast["law"][key] for key in LAW_KEYS})


def missing_tokens(law: power_law.PowerLaw, share: float) -> float:
    """Supervised tokens by which a draft is behind that accepts `share` of what one of the largest size does.

    By a law of τ: the largest size minus the one at which τ - 1 is that share of τ - 1 there; from 0 to the largest.
    """
    sizes = law.largest * np.exp(np.linspace(-HALVINGS * np.log(2), 0.0, 2000))
    reached = np.array([law.at(size) for size in sizes]) - 1 >= share * (law.level - 1)
    return 0.0 if share >= 1 else float(law.largest - sizes[reached.argmax()] * reached.any())


def doubling_lines(curve: DataCurve) -> list[str]:
    """A sentence for each temperature: what twice the data would give, and the verdict."""
    lines = []
    for f in curve["forecasts"]:
        if f["metric"] != "tau":
            continue
        law = law_of(f)
        ci = f["gain_ci"]
        interval = (
            "no interval: too few sizes or prompts" if ci is None else
            f"95 % interval {100 * ci[0]:+z.1f} % to {100 * ci[1]:+z.1f} %"
        )  # fmt: skip
        gain = NOT_MEASURED if f["gain"] is None else f"{100 * f['gain']:+z.1f} %"
        lines.append(
            f"T = {f['temperature']:g}: doubling {law.largest:,.0f} supervised tokens gives {gain} τ ({interval}): "
            f"{f['verdict']} (worth it from {100 * curve['worth']:+z.1f} %)."
        )
    return lines


def points_table(curve: DataCurve) -> Table:
    """A row for each temperature and size, for the draft before training, and for the prediction."""
    rows = []
    for temperature in sorted({p["temperature"] for p in curve["points"]}):
        of_it = [p for p in [*curve["before"], *curve["points"]] if p["temperature"] == temperature]
        for p in of_it:
            rows.append(
                [
                    f"{temperature:g}",
                    f"{p['tokens']:,.0f}" if p["size"] else "before training",
                    format_number(p["rows"] or None, 0),
                    format_number(p["steps"] or None, 0),
                    format_with_interval(p["tau"], p["tau_ci"], 3),
                    format_with_interval(p["alpha"], p["alpha_ci"], 3),
                ]
            )
        guesses = {f["metric"]: f for f in curve["forecasts"] if f["temperature"] == temperature}
        if guesses:
            doubled = 2 * law_of(next(iter(guesses.values()))).largest
            cells = [
                format_with_interval(guesses[m]["at_double"], guesses[m]["at_double_ci"], 3)
                if m in guesses
                else NOT_MEASURED
                for m in METRICS
            ]
            rows.append(
                [f"{temperature:g}", f"{doubled:,.0f}, predicted", *[NOT_MEASURED] * 2, *cells]
            )
    return Table(
        "Acceptance by training data", ["T", "supervised tokens", "rows", "steps", "τ", "α"], rows
    )


def laws_table(curve: DataCurve) -> Table:
    """The fitted law of each temperature and metric."""
    rows = []
    for f in curve["forecasts"]:
        law = law_of(f)
        ratio, c = f"n ÷ {law.largest:,.0f}", f"{law.exponent:.2f}"
        grown = f"ln({ratio})" if law.exponent == 0 else f"(1 − ({ratio})^−{c}) ÷ {c}"
        formula = f"{law.level:.3f} {law.slope:+z.4f} · {grown}"
        limit = "not identified" if f["limit"] is None else format_number(f["limit"], 3)
        exponent = format_with_interval(law.exponent, f["exponent_ci"], 2)
        name = {"tau": "τ", "alpha": "α"}[f["metric"]]
        rows.append([f"{f['temperature']:g}", name, formula, exponent, limit])
    return Table("Fit", ["T", "metric", "law of n tokens", "exponent", "limit"], rows)


def _columns(
    points: Sequence[TrainedPoint], temperature: float, metric: str
) -> tuple[Array, Array]:
    """(numerators, denominators) of the metric, both [points, prompts]."""
    counts = np.array([p.counts[str(temperature)] for p in points], dtype=np.float64)
    top, bottom = METRICS[metric]
    return counts[:, :, top], counts[:, :, bottom]


def _pooled(points: Sequence[TrainedPoint], temperature: float, k: int) -> dict[str, Any]:
    """One entry of `points`: the trainings of one size together, their counts summed for each prompt."""
    entry: dict[str, Any] = {
        "temperature": temperature,
        "size": points[0].size,
        "tokens": float(np.mean([p.tokens for p in points])),
        "rows": float(np.mean([p.rows for p in points])),
        "steps": float(np.mean([p.steps for p in points])),
    }
    for metric in METRICS:
        tops, bottoms = _columns(points, temperature, metric)
        entry[metric] = ratio_or_none(tops.sum(), bottoms.sum())
        entry[f"{metric}_ci"] = ratio_interval(tops.sum(0), bottoms.sum(0), SEED)
        entry[f"{metric}_seeds"] = [
            ratio_or_none(top, bottom)
            for top, bottom in zip(tops.sum(1), bottoms.sum(1), strict=True)
        ]
    return entry


def _forecast(
    points: Sequence[TrainedPoint], temperature: float, metric: str, k: int
) -> dict[str, Any] | None:
    """One entry of `forecasts` without its verdict; None where nothing can be fitted."""
    sizes = np.array([p.tokens for p in points], dtype=np.float64)
    bounds = (1.0, k + 1.0) if metric == "tau" else (0.0, 1.0)
    found = power_law.forecast(sizes, *_columns(points, temperature, metric), bounds, SEED)
    if found is None:
        return None
    limit = found.law.limit
    known = found.identified and limit is not None and bounds[0] <= limit <= bounds[1]
    return {
        "temperature": temperature,
        "metric": metric,
        "law": vars(found.law).copy(),
        "exponent_ci": found.exponent_ci,
        "identified": found.identified,
        "limit": limit if known else None,
        "at_double": found.at_double,
        "at_double_ci": found.at_double_ci,
        "gain": found.gain,
        "gain_ci": found.gain_ci,
    }


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
