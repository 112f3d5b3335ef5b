"""forecast.json as Markdown."""

import json
from collections.abc import Sequence

from eval.metrics.bootstrap import ALL_TASKS
from eval.reporting.formatting import (
    NOT_MEASURED,
    Table,
    escape_markdown,
    format_estimate,
    format_number,
    table_markdown,
)
from eval.results.forecast import ForecastReport, ForecastRow, KSchedule

ASSUMPTIONS = (
    "τ and α are exact for the measured answers; the intervals are 95 % bootstrap over prompts. Speed-ups are of whole "
    "requests one at a time, the schedules of requests that all decode all the time."
)


def forecast_markdown(result: ForecastReport) -> str:
    """The page of a forecast."""
    draft, target = result.draft.name, result.target.name
    parts = [f"# Forecast of {escape_markdown(draft)} for {escape_markdown(target)}", ASSUMPTIONS]
    engines = [[x.engine, x.rule, x.setting] for x in result.engines]
    parts.append(table_markdown(Table("Rules", ["engine", "rule", "setting"], engines, prose=True)))
    for temperature, rule in dict.fromkeys((x.temperature, x.rule) for x in result.rows):
        own = [x for x in result.rows if (x.temperature, x.rule) == (temperature, rule)]
        title = f"T = {temperature:g}, {'any rule' if temperature == 0 else 'rule ' + rule}"
        parts.append(table_markdown(figures_table(title, own)))
        parts.append(table_markdown(tau_by_task(f"τ by task, {title}", own)))
    return "\n\n".join([*parts, *map(schedule_text, result.schedules)]) + "\n"


def figures_table(title: str, rows: Sequence[ForecastRow]) -> Table:
    """τ, α by position and speed-up by K, over all tasks."""
    pooled = [x for x in rows if x.task == ALL_TASKS]
    most = max(x.k for x in pooled)
    cells = [
        [
            str(x.k),
            format_estimate(x.tau, 2),
            format_estimate(x.alpha, 3),
            *(format_number(a.value, 3) for a in x.alpha_by_position),
            *[NOT_MEASURED] * (most - len(x.alpha_by_position)),
            format_estimate(x.speedup, 2, "×"),
        ]
        for x in pooled
    ]
    header = ["K", "τ", "α", *(f"α_{i}" for i in range(1, most + 1)), "speed-up"]
    return Table(title, header, cells)


def tau_by_task(title: str, rows: Sequence[ForecastRow]) -> Table:
    """τ with its interval by task (all of them together first) and K, from rows of one temperature and rule."""
    found = {(row.task, row.k): format_estimate(row.tau, 2) for row in rows}
    ks = list(dict.fromkeys(row.k for row in rows))
    cells = [
        [task, *(found.get((task, k), NOT_MEASURED) for k in ks)]
        for task in dict.fromkeys(row.task for row in rows)
    ]
    return Table(title, ["task", *(f"K = {k}" for k in ks)], cells)


def schedule_text(entry: KSchedule) -> str:
    """Throughput by batch size, and the best K in the engines' own form."""
    where = f"T = {entry.temperature:g}, rule {entry.rule}"
    if entry.context:
        where += f", prompts of {entry.context:,} tokens"
    rates = entry.tokens_per_second
    columns = [[format_number(value, 0) for value in values] for values in rates.values()]
    cells = [list(row) for row in zip(map(str, entry.batches), *columns, strict=True)]
    header = ["requests", *(f"K = {k}" for k in rates)]
    table = table_markdown(Table(f"Tokens per second, {where}", header, cells))
    if not entry.vllm.speculative_config:
        return f"{table}\n\nNo K pays."
    lines = [
        f"- {name} {x.version}: `{json.dumps(x.speculative_config)}`"
        for name, x in (("vLLM", entry.vllm), ("TensorRT-LLM", entry.tensorrt_llm))
    ]
    return "\n".join([table, "", *lines, f"- SGLang: `{' '.join(entry.sglang.flags)}`"])
