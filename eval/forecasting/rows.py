"""The figures of a forecast: τ, α by position and speed-up for each task, temperature, rule and K, with intervals."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from eval.forecasting.costs import EngineCost
from eval.forecasting.rounds import ExpectedRounds, TextChains, add_rounds, expected_rounds
from eval.metrics.bootstrap import ALL_TASKS, paired_ratio_interval, ratio_interval, ratio_or_none


def rules_for(temperature: float, rules: Sequence[str]) -> Sequence[str]:
    """Those of `rules` that differ at the temperature: greedy decoding has one."""
    return rules if temperature > 0 else ["greedy"]


def by_prompt(texts: Sequence[TextChains], rule: str, k: int) -> list[ExpectedRounds]:
    """The expected counts of each prompt, those of several answers to it together."""
    prompts: dict[tuple[str, str], list[ExpectedRounds]] = {}
    for text in texts:
        prompts.setdefault((text.task, text.id), []).append(expected_rounds(text, rule, k))
    return [add_rounds(found) for found in prompts.values()]


def forecast_row(
    texts: Sequence[TextChains], rule: str, k: int, seed: int, cost: EngineCost | None = None
) -> dict[str, Any]:
    """One row, ready for JSON; None where nothing was reached. Intervals are 95 % bootstrap over prompts.

    `tau` is trimmed at the end of answers; `mean_accept_length` is 1 + accepted ÷ rounds that drafted, which
    engines print; `unconditional_by_position` divides by the same rounds. `speedup` is of whole requests one at a time.
    """
    prompts = by_prompt(texts, rule, k)
    emitted = np.array([x.emitted for x in prompts])
    rounds = np.array([x.rounds for x in prompts])
    drafting = np.array([x.drafting_rounds for x in prompts])
    accepted = np.array([x.accepted for x in prompts])
    reached = np.array([x.reached for x in prompts])
    row = {
        "k": k,
        "rule": rule,
        "prompts": len(prompts),
        "texts": len(texts),
        "tau": ratio_or_none(emitted.sum(), rounds.sum()),
        "tau_ci": ratio_interval(emitted, rounds, seed),
        "mean_accept_length": ratio_or_none((drafting + accepted.sum(1)).sum(), drafting.sum()),
        "mean_accept_length_ci": ratio_interval(drafting + accepted.sum(1), drafting, seed),
        "alpha": ratio_or_none(accepted.sum(), reached.sum()),
        "alpha_ci": ratio_interval(accepted.sum(1), reached.sum(1), seed),
        "alpha_by_position": _ratios(accepted, reached),
        "alpha_by_position_ci": _intervals(accepted, reached, seed),
        "unconditional_by_position": _ratios(accepted, drafting[:, None] + 0 * accepted),
        "unconditional_by_position_ci": _intervals(
            accepted, drafting[:, None] + 0 * accepted, seed
        ),
        "acceptance_rate": ratio_or_none(accepted.sum(), sum(x.drafted for x in prompts)),
        "counts": {
            "emitted": float(emitted.sum()),
            "rounds": float(rounds.sum()),
            "drafting_rounds": float(drafting.sum()),
            "accepted": accepted.sum(0).tolist(),
        },
    }
    if cost is None:
        return row
    slow = np.array([cost.plain_request_ms(x) for x in prompts])
    fast = np.array([cost.request_ms(x) for x in prompts])
    return row | {
        "speedup": ratio_or_none(slow.sum(), fast.sum()),
        "speedup_ci": paired_ratio_interval(slow, emitted, fast, emitted, seed),
    }


def forecast_rows(
    texts: Mapping[float, Sequence[TextChains]],
    ks: Iterable[int],
    *,
    rules: Sequence[str],
    seed: int,
    cost: EngineCost | None = None,
) -> list[dict[str, Any]]:
    """A row for each temperature, task (pooled first), rule and K."""
    rows = []
    for temperature, found in texts.items():
        tasks = list(dict.fromkeys(text.task for text in found))
        for task in [ALL_TASKS, *tasks] if len(tasks) > 1 else [ALL_TASKS]:
            chosen = [text for text in found if task in (ALL_TASKS, text.task)]
            for rule in rules_for(temperature, rules):
                for k in ks:
                    place = {"task": task, "temperature": temperature}
                    rows.append(place | forecast_row(chosen, rule, k, seed, cost))
    return rows


def _ratios(top: Any, bottom: Any) -> list[float | None]:
    """Column by column; None where the denominators are 0."""
    return [ratio_or_none(a, b) for a, b in zip(top.sum(0), bottom.sum(0), strict=True)]


def _intervals(top: Any, bottom: Any, seed: int) -> list[Any]:
    return [ratio_interval(a, b, seed) for a, b in zip(top.T, bottom.T, strict=True)]


def inside(value: float, interval: Sequence[float] | None) -> bool:
    """Whether the interval holds the value, to rounding."""
    return interval is not None and interval[0] - 1e-9 <= value <= interval[1] + 1e-9


def compare(
    texts: Sequence[TextChains], rule: str, served: dict[str, Any], others: Sequence[str], seed: int
) -> dict[str, Any]:
    """The forecast for `rule` beside `served`, which has an engine's `rounds` and accepted drafts `by_position`.

    `equal`: the forecast's counts are the engine's, as greedy ones must be wherever both engines write the same text.
    `other_rules` says of `others`, which it does not have, whether their intervals would hold its figure too.
    """
    rounds, accepted = served["rounds"], served["by_position"]
    k, length = len(accepted), 1 + sum(accepted) / rounds
    row = forecast_row(texts, rule, k, seed)
    counts, shares = row["counts"], [count / rounds for count in accepted]
    return {
        "rule": rule,
        "forecast": row,
        "served": {"mean_accept_length": length, "unconditional_by_position": shares},
        "inside": inside(length, row["mean_accept_length_ci"]),
        "positions_inside": sum(map(inside, shares, row["unconditional_by_position_ci"])),
        "equal": abs(counts["drafting_rounds"] - rounds) < 1e-6 and counts["accepted"] == accepted,
        "other_rules": {
            other: inside(length, forecast_row(texts, other, k, seed)["mean_accept_length_ci"])
            for other in others
        },
    }
