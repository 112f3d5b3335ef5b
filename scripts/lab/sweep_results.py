"""The results of a sweep: the metric of each trial, averaged over seeds, as a table, as JSON and as a chart.

The metric is read from what each trial wrote when the table is made, so another --metric runs nothing again.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.common import files, provenance
from decode.common.errors import UserError
from decode.common.progress import duration
from decode.common.typed_json import to_json
from eval.reporting import plots
from eval.reporting.formatting import (
    NOT_MEASURED,
    Table,
    escape_markdown,
    format_with_interval,
    table_markdown,
)
from eval.reporting.plots import ChartSeries, Point
from scripts.lab.cells import mean_and_spread, paired_difference
from scripts.lab.sweep_plan import SweepConfig, Trial, to_text
from scripts.lab.sweep_pool import STDOUT, read_record

Settings = dict[str, object]


@dataclass(frozen=True)
class TrialResult:
    """How a trial ended, and its metric."""

    trial: Trial
    value: float | None = None
    seconds: float | None = None
    problem: str | None = None
    """Why there is no value."""


@dataclass(frozen=True)
class Difference:
    """A row's metric minus the best row's, paired by seed, with a 95 % interval."""

    mean: float
    ci: tuple[float, float]
    seeds: int


@dataclass(frozen=True)
class SweepRow:
    """The trials of one combination of settings, which differ in their seed only."""

    settings: Settings
    metric: float | None
    """The mean over the trials."""
    spread: float | None
    """Their standard deviation."""
    values: list[float]
    trials: int
    seconds: float | None
    outputs: list[str]
    to_best: Difference | None
    """None for the best row itself, and for fewer than two common seeds."""


def collect_results(s: SweepConfig, trials: list[Trial]) -> tuple[list[SweepRow], dict[str, str]]:
    """(the rows, the best first; {trial without a value: why})."""
    groups: dict[str, list[TrialResult]] = {}
    for trial in trials:
        key = json.dumps(without_seed(trial.settings))
        groups.setdefault(key, []).append(read_result(s, trial))
    sign = -1 if s.goal == "max" else 1

    def rank(group: list[TrialResult]) -> tuple[bool, float]:
        mean, _ = mean_and_spread(list(by_seed(group).values()))
        return mean is None, sign * (mean or 0.0)

    ranked = sorted(groups.values(), key=rank)
    rows = [pool_seeds(group, ranked[0]) for group in ranked]
    return rows, {x.trial.name: x.problem for group in groups.values() for x in group if x.problem}


def read_result(s: SweepConfig, trial: Trial) -> TrialResult:
    """The result of a trial that has ended; without a value if it failed or has not written the metric."""
    record = read_record(trial) or {"error": "it has not ended", "seconds": None, "attempts": 0}
    if record["error"] is not None:
        return TrialResult(trial, problem=f"{record['error']}, attempts: {record['attempts']}")
    try:
        return TrialResult(trial, read_metric(s, trial), record["seconds"])
    except UserError as error:
        return TrialResult(trial, problem=str(error))


def read_metric(s: SweepConfig, trial: Trial) -> float:
    """The metric in what the trial wrote. UserError that lists what is there instead."""
    file = trial.out / s.result if trial.out.suffix == "" else trial.out
    file = trial.folder / STDOUT if s.result == "stdout" else file
    text = files.read_text(file)
    if s.result == "stdout":
        text = (text.strip().splitlines() or [""])[-1]
    if file.suffix == ".jsonl":
        values = [value for _, value in files.parse_jsonl(text, file)]
    else:
        values = [files.parse_json(text, str(file), "make it again")]
    found = [look_up(value, s.metric) for value in values]
    numbers = [x for x in found if isinstance(x, int | float) and not isinstance(x, bool)]
    if len(numbers) == 0:
        names = sorted({name for value in values if isinstance(value, dict) for name in value})
        raise UserError(f"no {s.metric} in {file}, but {', '.join(names[:8])}")
    best = max if s.goal == "max" else min
    return float(best(numbers) if s.point == "best" else numbers[-1])


def look_up(value: Any, name: str) -> Any:
    """The part of nested dicts and lists with this dotted name, whose parts may have dots; None if it is not there."""
    if name == "":
        return value
    if isinstance(value, list):
        value = dict(zip(map(str, range(len(value))), value, strict=True))
    if not isinstance(value, dict):
        return None
    inner = [key for key in value if name == key or name.startswith(f"{key}.")]
    key = max(inner, key=len, default=None)
    return None if key is None else look_up(value[key], name[len(key) + 1 :])


def without_seed(settings: Settings) -> Settings:
    """The settings that results are told apart by."""
    return {name: value for name, value in settings.items() if name.split(".")[-1] != "seed"}


def by_seed(results: list[TrialResult]) -> dict[str, float]:
    """{its seeds: the value of each trial that has one}."""
    found: dict[str, float] = {}
    for x in results:
        if x.value is not None:
            seeds = x.trial.settings.keys() - without_seed(x.trial.settings).keys()
            found[json.dumps({name: x.trial.settings[name] for name in sorted(seeds)})] = x.value
    return found


def pool_seeds(results: list[TrialResult], best: list[TrialResult]) -> SweepRow:
    """The row of these trials, beside those of the best row."""
    own, base = by_seed(results), by_seed(best)
    mean, spread = mean_and_spread(list(own.values()))
    common = [seed for seed in own if seed in base]
    found = paired_difference([own[seed] for seed in common], [base[seed] for seed in common])
    return SweepRow(
        settings=without_seed(results[0].trial.settings),
        metric=mean,
        spread=spread,
        values=list(own.values()),
        trials=len(results),
        seconds=mean_and_spread([x.seconds for x in results if x.seconds is not None])[0],
        outputs=[str(result.trial.out) for result in results],
        to_best=Difference(*found, len(common)) if found and results is not best else None,
    )


def write_results(s: SweepConfig, rows: list[SweepRow], failed: dict[str, str]) -> str:
    """Writes sweep.json, sweep.md and, if one number is swept, sweep.svg; returns the Markdown."""
    names = [n for n in rows[0].settings if len({to_text(row.settings[n]) for row in rows}) > 1]
    out, svg = Path(s.out), chart(s, rows, names)
    parts = [table_markdown(results_table(s, rows, names))]
    differences = [
        [*texts_of(row, names), format_with_interval(x.mean, x.ci, 4), str(x.seeds)]
        for row in rows
        if (x := row.to_best)
    ]
    if differences:
        title = f"{s.metric} minus that of the first row, paired by seed"
        header = [*names, "difference [95 %]", "seeds"]
        parts.append(table_markdown(Table(title, header, differences)))
    if svg:
        files.write_atomically(out / "sweep.svg", plots.recolor(svg))
        parts.append(f"![{s.metric}](sweep.svg)")
    if failed:
        named = [f"- {name}: {escape_markdown(why)}" for name, why in failed.items()]
        parts += ["## Failed", "\n".join(named)]
    text = "\n\n".join(parts) + "\n"
    files.write_atomically(out / "sweep.md", text)
    shown = ("command", "recipe", "words", "metric", "goal", "point")
    facts = {"schema": 1, **{name: vars(s)[name] for name in shown}}
    facts |= {"rows": to_json(rows), "failed": failed, **to_json(provenance.collect())}
    files.write_atomically(
        out / "sweep.json", json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
    )
    return text


def texts_of(row: SweepRow, names: list[str]) -> list[str]:
    return [to_text(row.settings[name]) for name in names]


def results_table(s: SweepConfig, rows: list[SweepRow], names: list[str]) -> Table:
    """A line for each row; the spread is the standard deviation over seeds."""
    seeds = max(row.trials for row in rows) > 1
    lines = []
    for row in rows:
        value = NOT_MEASURED if row.metric is None else f"{row.metric:.4g}"
        value += "" if row.spread is None else f" ± {row.spread:.2g}"
        line = [*texts_of(row, names), value]
        line += [f"{len(row.values)} of {row.trials}"] if seeds else []
        lines.append([*line, NOT_MEASURED if row.seconds is None else duration(row.seconds)])
    header = [*names, s.metric, *(["seeds"] if seeds else []), "time"]
    return Table(f"Sweep of {s.command}", header, lines)


def chart(s: SweepConfig, rows: list[SweepRow], names: list[str]) -> str:
    """SVG of the metric over the one swept number, a line for each combination of the others; "" if there is none."""
    numeric = [name for name in names if all(is_number(row.settings[name]) for row in rows)]
    if len(numeric) != 1 or all(row.metric is None for row in rows):
        return ""
    others = [name for name in names if name != numeric[0]]
    lines: dict[str, list[Point]] = {}
    for row in rows:
        if row.metric is not None:
            spread, x = row.spread or 0.0, float(str(row.settings[numeric[0]]))
            point = Point(x, row.metric, (row.metric - spread, row.metric + spread))
            lines.setdefault(", ".join(texts_of(row, others)), []).append(point)
    series = [ChartSeries(name, sorted(x, key=lambda p: p.x)) for name, x in lines.items()]
    xs = [point.x for one in series for point in one.points]
    scale = "log" if min(xs) > 0 and max(xs) / min(xs) >= 10 else "linear"
    entries = plots.legend_entries(list(lines)) if len(lines) > 1 else []
    title = "  ".join(f"{glyph} {name}" for glyph, _, name in entries)
    return plots.line_chart(series, list(lines), title, numeric[0], s.metric, xscale=scale)


def is_number(value: Any) -> bool:
    """Whether the value is a number, or text of one, as 1e-3 is in YAML."""
    try:
        return not isinstance(value, bool) and float(value) is not None
    except (TypeError, ValueError):
        return False
