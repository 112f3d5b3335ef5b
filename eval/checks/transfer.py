"""Does a draft that was trained for one target still fit another one: a fine-tuned, merged or quantised copy of it?

What counts is the accepted tokens of a round, τ - 1, since a draft of which nothing is accepted has τ = 1. Prompts are
paired, and intervals are over prompts.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from decode.drafts.base import Draft
from decode.engine.engine import decode
from decode.model.loading import Target
from decode.verification.sampling import SamplingParams
from eval.metrics import acceptance
from eval.metrics.bootstrap import (
    Array,
    Interval,
    paired_difference_interval,
    paired_ratio_interval,
)
from eval.metrics.common import ratio_or_none
from eval.tasks.loading import TaskPrompt

BATCH = 16
"""Prompts that are decoded together."""
KEEP, FINE_TUNE, RETRAIN, NOT_CLEAR, REFUSED = (
    "keep", "fine-tune", "retrain", "not clear", "refused",
)  # fmt: skip


def count_acceptance(
    target: Target,
    draft: Draft,
    prompts: Sequence[TaskPrompt],
    temperatures: Sequence[float],
    k: int,
    max_new_tokens: int,
) -> dict[str, list[list[int]]]:
    """{temperature: [emitted, rounds, accepted, reached] of each prompt}, decoded with the same seeds every time."""
    counts = {}
    for temperature in temperatures:
        records = decode(
            target,
            draft,
            [item.prompt_ids for item in prompts],
            k=k,
            sampling=SamplingParams(temperature),
            max_new_tokens=max_new_tokens,
            rows=BATCH,
            seed=0,
        )
        columns = (
            acceptance.emitted_tokens(records),
            acceptance.round_counts(records),
            acceptance.accepted_by_position(records, k).sum(1),
            acceptance.reached_by_position(records, k).sum(1),
        )
        counts[str(temperature)] = np.stack(columns, 1).tolist()
    return counts


def compare(counts: Array, others: Array, keep: float, retrain: float) -> dict[str, Any]:
    """What the draft loses from one target, `counts`, to another, `others`: both [n prompts, 4] of count_acceptance.

    `share` is the other target's accepted tokens a round ÷ the first one's. `verdict` is KEEP if its whole interval is
    at least `keep`, RETRAIN if the whole of it is below `retrain`, FINE_TUNE if it is all below `keep`, else NOT_CLEAR.
    """
    emitted, rounds, accepted, reached = counts.T
    other_emitted, other_rounds, other_accepted, other_reached = others.T
    before = ratio_or_none(float((emitted - rounds).sum()), float(rounds.sum()))
    after = ratio_or_none(float((other_emitted - other_rounds).sum()), float(other_rounds.sum()))
    share = None if before is None or after is None else ratio_or_none(after, before)
    interval = paired_ratio_interval(
        other_emitted - other_rounds, other_rounds, emitted - rounds, rounds, 0
    )
    return {
        "tau": None if after is None else 1 + after,
        "alpha": ratio_or_none(float(other_accepted.sum()), float(other_reached.sum())),
        "alpha_difference_ci": paired_difference_interval(
            other_accepted, other_reached, accepted, reached, 0
        ),
        "share": share,
        "share_ci": interval,
        "verdict": judge(interval, keep, retrain),
    }


def judge(share: Interval | None, keep: float, retrain: float) -> str:
    """The verdict on an interval of the share of accepted tokens that is left."""
    if share is None:
        return NOT_CLEAR
    if share[0] >= keep:
        return KEEP
    if share[1] < retrain:
        return RETRAIN
    return FINE_TUNE if share[1] < keep else NOT_CLEAR
