"""The figures of a forecast: τ, α by position and speed-up for each task, temperature, rule and K, with intervals."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from decode.common.typed_json import Estimate, to_json
from eval.forecasting.costs import EngineCost
from eval.forecasting.rounds import ExpectedRounds, TextChains, add_rounds, expected_rounds
from eval.metrics.bootstrap import ALL_TASKS, Ratio, paired_ratio, ratio_or_none
from eval.results.forecast import ForecastCounts, ForecastRow


def forecast_row(
    texts: Sequence[TextChains],
    rule: str,
    k: int,
    seed: int,
    cost: EngineCost | None = None,
    *,
    task: str = ALL_TASKS,
    temperature: float = 0.0,
) -> ForecastRow:
    """Of these texts, which are those of `task` at `temperature`; intervals are over prompts."""
    answers: dict[tuple[str, str], list[ExpectedRounds]] = {}
    for text in texts:
        answers.setdefault((text.task, text.id), []).append(expected_rounds(text, rule, k))
    prompts = [add_rounds(found) for found in answers.values()]
    names = ("emitted", "rounds", "drafting_rounds", "accepted", "reached")
    columns = (np.array([vars(x)[name] for x in prompts]) for name in names)
    emitted, rounds, drafting, accepted, reached = columns
    speedup = Estimate()
    if cost is not None:
        slow = Ratio([cost.plain_request_ms(x) for x in prompts], emitted)
        fast = Ratio([cost.request_ms(x) for x in prompts], emitted)
        speedup = paired_ratio(slow, fast, seed)
    return ForecastRow(
        task=task,
        temperature=temperature,
        k=k,
        rule=rule,
        prompts=len(prompts),
        texts=len(texts),
        tau=Ratio(emitted, rounds).estimate(seed),
        mean_accept_length=Ratio(drafting + accepted.sum(1), drafting).estimate(seed),
        alpha=Ratio(accepted.sum(1), reached.sum(1)).estimate(seed),
        alpha_by_position=[
            Ratio(*pair).estimate(seed) for pair in zip(accepted.T, reached.T, strict=True)
        ],
        unconditional_by_position=[Ratio(own, drafting).estimate(seed) for own in accepted.T],
        acceptance_rate=ratio_or_none(accepted.sum(), sum(x.drafted for x in prompts)),
        counts=ForecastCounts(
            float(emitted.sum()),
            float(rounds.sum()),
            float(drafting.sum()),
            accepted.sum(0).tolist(),
        ),
        speedup=speedup,
    )


def forecast_rows(
    texts: Mapping[float, Sequence[TextChains]],
    ks: Iterable[int],
    *,
    rules: Sequence[str],
    seed: int,
    cost: EngineCost | None = None,
) -> list[ForecastRow]:
    """A row for each temperature, task (pooled first), rule and K."""
    rows = []
    for temperature, found in texts.items():
        tasks = list(dict.fromkeys(text.task for text in found))
        for task in [ALL_TASKS, *tasks] if len(tasks) > 1 else [ALL_TASKS]:
            chosen = [text for text in found if task in (ALL_TASKS, text.task)]
            # Greedy decoding has one rule.
            for rule in rules if temperature > 0 else ["greedy"]:
                rows += [
                    forecast_row(chosen, rule, k, seed, cost, task=task, temperature=temperature)
                    for k in ks
                ]
    return rows


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
    counts, shares = row.counts, [count / rounds for count in accepted]
    return {
        "rule": rule,
        "forecast": to_json(row),
        "served": {"mean_accept_length": length, "unconditional_by_position": shares},
        "inside": inside(length, row.mean_accept_length.ci),
        "positions_inside": sum(map(inside, shares, [x.ci for x in row.unconditional_by_position])),
        "equal": abs(counts.drafting_rounds - rounds) < 1e-6 and counts.accepted == accepted,
        "other_rules": {
            other: inside(length, forecast_row(texts, other, k, seed).mean_accept_length.ci)
            for other in others
        },
    }
