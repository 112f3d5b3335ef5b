"""A forecast beside what vLLM accepted on the same prompts: whether it lies in the interval."""

from collections.abc import Sequence
from typing import Any

from eval.forecasting.rounds import TextChains
from eval.forecasting.rows import forecast_row


def inside(value: float, interval: Sequence[float] | None) -> bool:
    """Whether the interval holds the value, to rounding."""
    return interval is not None and interval[0] - 1e-9 <= value <= interval[1] + 1e-9


def compare(
    texts: Sequence[TextChains], rule: str, served: dict[str, Any], others: Sequence[str], seed: int
) -> dict[str, Any]:
    """The forecast for `rule` beside `served`, which has vLLM's `rounds` and accepted drafts `by_position`.

    `equal`: the forecast's counts are vLLM's, as greedy ones must be wherever both engines write the same text.
    `other_rules` says of `others`, which vLLM does not have, whether their intervals would hold its figure too.
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
