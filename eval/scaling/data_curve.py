"""data_curve.json: τ and α over the number of supervised tokens, what twice as many would give, a verdict, and figures.

"stop": more data of this kind is worth less than asked, by the whole interval of its relative gain in τ; "go on": it is
worth more, by the whole interval; "not clear": neither, or the measurements allow no interval.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from decode.common.errors import UserError
from decode.common.provenance import Hardware
from decode.common.published import Digest, Folder, Name, Private, Version, Word
from decode.common.target_record import TargetRecord
from decode.common.typed_json import Estimate
from eval.metrics.bootstrap import Array, Interval, Ratio
from eval.reporting.formatting import (
    NOT_MEASURED,
    Table,
    format_estimate,
    format_number,
    format_with_interval,
)
from eval.reporting.plots import ChartSeries, Point, ReportChart, legend_entries, line_chart
from eval.results.report import SCHEMA, read_measurements
from eval.scaling import power_law
from eval.scaling.power_law import PowerLaw

WHAT = "data_curve.json of scripts/lab/data_curve.py"
METRICS = {"tau": (0, 1), "alpha": (2, 3)}
"""{metric: columns of its numerator and its denominator in the counts of a prompt}."""
SYMBOLS = {"tau": "τ", "alpha": "α"}
STOP, GO_ON, NOT_CLEAR = "stop", "go on", "not clear"
SEED = 0
"""Of all intervals."""
CAPTION = "Acceptance by training data"
PREDICTED = "twice the data, predicted"


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


@dataclass(frozen=True)
class CurvePoint:
    """The trainings of one size together; τ and α by seed as well."""

    temperature: float
    size: int
    tokens: float
    rows: float
    steps: float
    tau: Estimate
    tau_seeds: list[float | None] = field(default_factory=list, kw_only=True)
    alpha: Estimate
    alpha_seeds: list[float | None] = field(default_factory=list, kw_only=True)

    def of(self, metric: str) -> Estimate:
        return self.tau if metric == "tau" else self.alpha


@dataclass(frozen=True)
class CurveForecast:
    """The law of a metric, and what it says of twice the largest size."""

    temperature: float
    metric: Word
    law: PowerLaw
    exponent_ci: Interval | None
    identified: bool = field(default=False, kw_only=True)
    limit: float | None
    """None where the measurements do not say."""
    at_double: Estimate
    gain: Estimate
    """Relative to the law at the largest size."""
    verdict: Name | None
    """Of τ alone."""


@dataclass(frozen=True, kw_only=True)
class DataCurve:
    """data_curve.json."""

    schema: int
    target: TargetRecord
    data: Folder | None = None
    family: Word
    loss: Word | None = None
    tasks: list[Name] = field(default_factory=list)
    k: int = 0
    max_new_tokens: int = 0
    temperatures: list[float] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    worth: float
    """The relative gain in τ from which on twice the data is worth it."""
    passes: float = 0.0
    least_steps: int = 0
    steps: int = 0
    points: list[CurvePoint]
    before: list[CurvePoint]
    """The draft before training."""
    forecasts: list[CurveForecast]
    verdict: Name
    argv: Private[list[str]] = field(default_factory=list)
    git: Digest | None = None
    versions: dict[Word, Version] = field(default_factory=dict)
    hardware: Hardware = Hardware()


def build_curve(
    points: Sequence[TrainedPoint],
    before: TrainedPoint | None,
    temperatures: Sequence[float],
    k: int,
    worth: float,
    **facts: Any,
) -> DataCurve:
    """`before` is the draft without training; `facts` are the fields that do not follow from the points."""
    sizes = sorted({point.size for point in points})
    forecasts = [
        found
        for temperature in temperatures
        for metric in METRICS
        if (found := _forecast(points, temperature, metric, k, worth)) is not None
    ]
    verdicts = [f.verdict for f in forecasts if f.metric == "tau"]
    return DataCurve(
        schema=SCHEMA,
        k=k,
        temperatures=list(temperatures),
        worth=worth,
        points=[
            _pooled([p for p in points if p.size == size], temperature)
            for temperature in temperatures
            for size in sizes
        ],
        before=[_pooled([before], x) for x in temperatures] if before is not None else [],
        forecasts=forecasts,
        verdict=overall_verdict(verdicts, len(temperatures)),
        **facts,
    )


def verdict(gain_ci: Interval | None, worth: float) -> str:
    """Whether an interval of the relative gain lies below `worth` (STOP), at or above it (GO_ON), or neither."""
    if gain_ci is None:
        return NOT_CLEAR
    if gain_ci[1] < worth:
        return STOP
    return GO_ON if gain_ci[0] >= worth else NOT_CLEAR


def overall_verdict(verdicts: Sequence[str | None], temperatures: int) -> str:
    """GO_ON if one temperature says so, STOP if all of them do, else NOT_CLEAR."""
    if GO_ON in verdicts:
        return GO_ON
    return STOP if verdicts.count(STOP) == temperatures else NOT_CLEAR


def read_data_curve(path: str | Path, tokenizer: str = "") -> DataCurve:
    """UserError for another file than a data_curve.json of schema 1, and for one of a target with another tokenizer
    than the one with this fingerprint."""
    curve: DataCurve = read_measurements(DataCurve, Path(path), WHAT)
    if not curve.points:
        raise UserError(f"{path} is not {WHAT}: it has no points")
    if curve.target.tokenizer is None:
        raise UserError(f"{path} is not {WHAT}: target has no 'tokenizer'")
    if tokenizer and curve.target.tokenizer != tokenizer:
        raise UserError(f"{path} is about another target: give that of this target")
    return curve


def missing_tokens(law: PowerLaw, share: float) -> float:
    """Supervised tokens by which a draft is behind that accepts `share` of what one of the largest size does.

    By a law of τ: the largest size minus the one at which τ - 1 is that share of τ - 1 there; from 0 to the largest.
    """
    # A law is followed down to a millionth of the largest size.
    sizes = law.largest * np.exp(np.linspace(-20 * np.log(2), 0.0, 2000))
    reached = np.array([law.at(size) for size in sizes]) - 1 >= share * (law.level - 1)
    return 0.0 if share >= 1 else float(law.largest - sizes[reached.argmax()] * reached.any())


def doubling_lines(curve: DataCurve) -> list[str]:
    """A sentence for each temperature: what twice the data would give, and the verdict."""
    lines = []
    for f in (f for f in curve.forecasts if f.metric == "tau"):
        ci, value = f.gain.ci, f.gain.value
        interval = (
            "no interval: too few sizes or prompts" if ci is None else
            f"95 % interval {100 * ci[0]:+z.1f} % to {100 * ci[1]:+z.1f} %"
        )  # fmt: skip
        gain = NOT_MEASURED if value is None else f"{100 * value:+z.1f} %"
        lines.append(
            f"T = {f.temperature:g}: doubling {f.law.largest:,.0f} supervised tokens gives {gain} τ ({interval}): "
            f"{f.verdict} (worth it from {100 * curve.worth:+z.1f} %)."
        )
    return lines


def points_table(curve: DataCurve) -> Table:
    """A row for each temperature and size, for the draft before training, and for the prediction."""
    rows = []
    for temperature in sorted({p.temperature for p in curve.points}):
        rows += [
            [
                f"{temperature:g}",
                f"{p.tokens:,.0f}" if p.size else "before training",
                format_number(p.rows or None, 0),
                format_number(p.steps or None, 0),
                format_estimate(p.tau, 3),
                format_estimate(p.alpha, 3),
            ]
            for p in [*curve.before, *curve.points]
            if p.temperature == temperature
        ]
        guesses = {f.metric: f for f in curve.forecasts if f.temperature == temperature}
        if guesses:
            doubled = 2 * next(iter(guesses.values())).law.largest
            cells = [
                format_estimate(guesses[m].at_double if m in guesses else Estimate(), 3)
                for m in METRICS
            ]
            size = f"{doubled:,.0f}, predicted"
            rows.append([f"{temperature:g}", size, *[NOT_MEASURED] * 2, *cells])
    header = ["T", "supervised tokens", "rows", "steps", "τ", "α"]
    return Table(CAPTION, header, rows)


def laws_table(curve: DataCurve) -> Table:
    """The fitted law of each temperature and metric."""
    rows = []
    for f in curve.forecasts:
        ratio, c = f"n ÷ {f.law.largest:,.0f}", f"{f.law.exponent:.2f}"
        grown = f"ln({ratio})" if f.law.exponent == 0 else f"(1 − ({ratio})^−{c}) ÷ {c}"
        formula = f"{f.law.level:.3f} {f.law.slope:+z.4f} · {grown}"
        limit = "not identified" if f.limit is None else format_number(f.limit, 3)
        exponent = format_with_interval(f.law.exponent, f.exponent_ci, 2)
        rows.append([f"{f.temperature:g}", SYMBOLS[f.metric], formula, exponent, limit])
    return Table("Fit", ["T", "metric", "law of n tokens", "exponent", "limit"], rows)


def _counts(points: Sequence[TrainedPoint], temperature: float, metric: str) -> list[Array]:
    """[numerators, denominators] of the metric, both [points, prompts]."""
    counts = np.array([p.counts[str(temperature)] for p in points], dtype=np.float64)
    return [counts[:, :, column] for column in METRICS[metric]]


def _pooled(points: Sequence[TrainedPoint], temperature: float) -> CurvePoint:
    """The trainings of one size, their counts summed for each prompt."""
    measured: dict[str, Any] = {"temperature": temperature, "size": points[0].size}
    for name in ("tokens", "rows", "steps"):
        measured[name] = float(np.mean([vars(p)[name] for p in points]))
    for metric in METRICS:
        tops, bottoms = _counts(points, temperature, metric)
        measured[metric] = Ratio(tops.sum(0), bottoms.sum(0)).estimate(SEED)
        pairs = zip(tops, bottoms, strict=True)
        measured[f"{metric}_seeds"] = [Ratio(*pair).value for pair in pairs]
    return CurvePoint(**measured)


def _forecast(
    points: Sequence[TrainedPoint], temperature: float, metric: str, k: int, worth: float
) -> CurveForecast | None:
    """None where nothing can be fitted."""
    sizes = np.array([p.tokens for p in points], dtype=np.float64)
    bounds = (1.0, k + 1.0) if metric == "tau" else (0.0, 1.0)
    tops, bottoms = _counts(points, temperature, metric)
    found = power_law.forecast(sizes, tops, bottoms, bounds, SEED)
    if found is None:
        return None
    limit = found.law.limit
    known = found.identified and limit is not None and bounds[0] <= limit <= bounds[1]
    return CurveForecast(
        **vars(found),
        temperature=temperature,
        metric=metric,
        identified=found.identified,
        limit=limit if known else None,
        verdict=verdict(found.gain.ci, worth) if metric == "tau" else None,
    )


def curve_chart(curve: DataCurve) -> ReportChart:
    """Both panels with their legend, and the verdict as a note."""
    panels = [curve_panel(curve, metric) for metric in METRICS]
    note = f"Points: measured. Dashed: fitted. {' '.join(doubling_lines(curve))}"
    return ReportChart(
        "Acceptance by training data", note, panels, legend_entries(series_names(curve))
    )


def series_names(curve: DataCurve) -> list[str]:
    temperatures = sorted({p.temperature for p in curve.points})
    return [*(f"temperature {t:g}" for t in temperatures), PREDICTED]


def curve_panel(curve: DataCurve, metric: str) -> str:
    """SVG of "tau" or "alpha" over the number of tokens: measured, fitted (dashed), predicted for twice the largest."""
    series = []
    smallest = min(p.tokens for p in curve.points)
    for t in sorted({p.temperature for p in curve.points}):
        name = f"temperature {t:g}"
        own = [(p.tokens, p.of(metric)) for p in curve.points if p.temperature == t]
        series.append(ChartSeries(name, _points(own)))
        for f in curve.forecasts:
            if (f.temperature, f.metric) == (t, metric):
                doubled = 2 * f.law.largest
                fitted = [Point(n / 1000, f.law.at(n)) for n in np.geomspace(smallest, doubled, 40)]
                series.append(ChartSeries(name, fitted, dashed=True))
                series.append(ChartSeries(PREDICTED, _points([(doubled, f.at_double)])))
    axis = {"tau": "tokens per target pass", "alpha": "share of drafts accepted"}[metric]
    unit, names = "thousand supervised tokens", series_names(curve)
    return line_chart(series, names, SYMBOLS[metric], unit, axis, xscale="log")


def marker_line(curve: DataCurve) -> str:
    entries = legend_entries(series_names(curve))
    return ", ".join(f"{glyph} {name}" for glyph, _, name in entries)


def _points(values: Sequence[tuple[float, Estimate]]) -> list[Point]:
    """Over thousands of tokens, to the three digits that ticks show."""
    known = [(n, x.value, x.ci) for n, x in values if x.value is not None]
    return [Point(float(f"{n / 1000:.3g}"), value, ci) for n, value, ci in known]
