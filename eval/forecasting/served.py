"""A forecast beside what vLLM did: whether it is inside the interval, and how far the speed-up is off."""

import statistics
from collections.abc import Sequence
from typing import Any

from eval.forecasting.costs import EngineCost, fit_engine_cost, vllm_point
from eval.forecasting.rounds import TextChains
from eval.forecasting.rows import forecast_row

Answer = dict[str, Any]
"""Of eval/benchmark/vllm_worker.py."""


def vllm_cost(by_k: dict[int, Sequence[Answer]]) -> EngineCost:
    """The costs of vLLM from answers with K = 0 and two other K."""
    plain = vllm_point(by_k[0], 0, 1, 0, 0.0)
    drafted = [vllm_point(by_k[k], k, 1, 0, plain.round_ms) for k in by_k if k > 0]
    return fit_engine_cost([plain, *drafted])


def served_figures(answers: Sequence[Answer], plain: Sequence[Answer]) -> dict[str, Any]:
    """What vLLM did: counts, mean length of rounds that drafted, share accepted by position, and measured speed-up."""
    rounds, accepted = (sum(a[name] for a in answers) for name in ("rounds", "accepted"))
    by_position = [sum(x) for x in zip(*(a["by_position"] for a in answers), strict=True)]
    return {
        "rounds": rounds,
        "accepted": by_position,
        "mean_accept_length": 1 + accepted / rounds,
        "unconditional_by_position": [x / rounds for x in by_position],
        "speedup": sum(a["seconds"] for a in plain) / sum(a["seconds"] for a in answers),
    }


def inside(value: float, interval: Sequence[float] | None) -> bool:
    """Whether the interval holds the value, to rounding."""
    return interval is not None and interval[0] - 1e-9 <= value <= interval[1] + 1e-9


def compare(
    texts: Sequence[TextChains],
    rule: str,
    k: int,
    served: dict[str, Any],
    cost: EngineCost | None,
    seed: int,
    others: Sequence[str],
) -> dict[str, Any]:
    """One cell: the forecast beside what was served; `other_rules` says which wrong rules' intervals hold it too."""
    row = forecast_row(texts, rule, k, seed, cost)
    length = served["mean_accept_length"]
    found: dict[str, Any] = {
        "rule": rule,
        "k": k,
        "forecast": row,
        "served": served,
        "inside": inside(length, row["mean_accept_length_ci"]),
        "positions_inside": sum(
            map(inside, served["unconditional_by_position"], row["unconditional_by_position_ci"])
        ),
        "other_rules": {
            other: inside(length, forecast_row(texts, other, k, seed)["mean_accept_length_ci"])
            for other in others
        },
    }
    if cost is not None:
        found["speedup_error"] = row["speedup"] / served["speedup"] - 1
    return found


def summarize(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many cells are inside, how many greedy ones are equal to the count, and the median error of speed-ups."""
    greedy = [c for c in cells if c["temperature"] == 0]
    errors = [abs(c["speedup_error"]) for c in cells if "speedup_error" in c]
    return {
        "cells": len(cells),
        "inside": sum(c["inside"] for c in cells),
        "positions": sum(c["k"] for c in cells),
        "positions_inside": sum(c["positions_inside"] for c in cells),
        "greedy_cells": len(greedy),
        "greedy_equal": sum(
            abs(c["forecast"]["counts"]["drafting_rounds"] - c["served"]["rounds"]) < 1e-6
            and c["forecast"]["counts"]["accepted"] == c["served"]["accepted"]
            for c in greedy
        ),
        "median_speedup_error": statistics.median(errors),
        "largest_speedup_error": max(errors),
    }
