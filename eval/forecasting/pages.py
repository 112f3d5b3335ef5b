"""forecast.json as Markdown."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from eval.metrics.bootstrap import ALL_TASKS
from eval.reporting.formatting import (
    Table,
    escape_markdown,
    format_number,
    format_with_interval,
    table_markdown,
)

ASSUMPTIONS = (
    "τ and α are exact for the measured answers; the intervals are 95 % bootstrap over prompts. Speed-ups are of whole "
    "requests one at a time, the schedules of requests that all decode all the time."
)


def forecast_markdown(result: Mapping[str, Any]) -> str:
    """The page of a forecast."""
    draft, target = result["draft"]["name"], result["target"]["name"]
    parts = [f"# Forecast of {escape_markdown(draft)} for {escape_markdown(target)}", ASSUMPTIONS]
    engines = [[x["engine"], x["rule"], x["setting"]] for x in result["engines"]]
    parts.append(table_markdown(Table("Rules", ["engine", "rule", "setting"], engines, prose=True)))
    rows = result["rows"]
    for temperature, rule in dict.fromkeys((x["temperature"], x["rule"]) for x in rows):
        own = [x for x in rows if (x["temperature"], x["rule"]) == (temperature, rule)]
        title = f"T = {temperature:g}, {'any rule' if temperature == 0 else 'rule ' + rule}"
        parts.append(table_markdown(figures_table(title, own)))
        parts.append(table_markdown(tau_by_task(f"τ by task, {title}", own)))
    for entry in result["schedules"]:
        parts.append(schedule_text(entry))
    return "\n\n".join(parts) + "\n"


def figures_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """τ, α by position and speed-up by K, over all tasks."""
    pooled = [x for x in rows if x["task"] == ALL_TASKS]
    most = max(x["k"] for x in pooled)
    cells = []
    for x in pooled:
        alphas = [format_number(a, 3) for a in x["alpha_by_position"]]
        cells.append(
            [
                str(x["k"]),
                format_with_interval(x["tau"], x["tau_ci"], 2),
                format_with_interval(x["alpha"], x["alpha_ci"], 3),
                *alphas,
                *["–"] * (most - len(alphas)),
                format_with_interval(x.get("speedup"), x.get("speedup_ci"), 2, "×"),
            ]
        )
    header = ["K", "τ", "α", *(f"α_{i}" for i in range(1, most + 1)), "speed-up"]
    return Table(title, header, cells)


def tau_by_task(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """τ with its interval by task (all of them together first) and K, from rows of one temperature and rule."""
    found = {(row["task"], row["k"]): row for row in rows}
    ks = list(dict.fromkeys(row["k"] for row in rows))
    cells = []
    for task in dict.fromkeys(row["task"] for row in rows):
        own = [found.get((task, k), {"tau": None, "tau_ci": None}) for k in ks]
        cells.append([task, *(format_with_interval(x["tau"], x["tau_ci"], 2) for x in own)])
    return Table(title, ["task", *(f"K = {k}" for k in ks)], cells)


def schedule_text(entry: Mapping[str, Any]) -> str:
    """Throughput by batch size, and the best K in the engines' own form."""
    where = f"T = {entry['temperature']:g}, rule {entry['rule']}"
    if entry["context"]:
        where += f", prompts of {entry['context']:,} tokens"
    rates = entry["tokens_per_second"]
    cells = [
        [str(batch), *(format_number(values[i], 0) for values in rates.values())]
        for i, batch in enumerate(entry["batches"])
    ]
    header = ["requests", *(f"K = {k}" for k in rates)]
    table = table_markdown(Table(f"Tokens per second, {where}", header, cells))
    vllm, tensorrt = entry["vllm"], entry["tensorrt_llm"]
    lines = [
        f"- vLLM {vllm['version']}: `{json.dumps(vllm['speculative_config'])}`",
        f"- TensorRT-LLM {tensorrt['version']}: `{json.dumps(tensorrt['speculative_config'])}`",
        f"- SGLang: `{' '.join(entry['sglang']['flags'])}`",
    ]
    return table + "\n\n" + "\n".join(lines if vllm["speculative_config"] else ["No K pays."])
