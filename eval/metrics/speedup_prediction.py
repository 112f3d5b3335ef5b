"""Predicts the speed-up of whole requests from step costs of a separate pass and acceptance on other prompts.

A request is taken to last as long as its prefill and its rounds. What a prefill and a round cost is measured in a
separate pass (`fit_step_cost`); how many rounds a token takes is counted on every other batch and used for the rest. No
second of the requests whose speed-up is predicted is used, so a gap between predicted and measured is either noise or
something that this account of a request leaves out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from decode.engine.records import DecodeRecord
from eval.metrics.common import MS_PER_SECOND, ratio_or_none


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of prefill, a straight line in the prompt's tokens, and of a round.

    Prefill is the share of one prompt of a batch; a round is that of the whole batch, with everything between rounds.
    """

    prefill_ms: float
    prefill_ms_per_token: float
    round_ms: float


@dataclass(frozen=True)
class PromptRounds:
    """A record and what its batch took: rows of a batch wait for the one with the most rounds."""

    record: DecodeRecord
    batch: int
    rounds: int


def with_batch_rounds(records: Sequence[DecodeRecord]) -> list[PromptRounds]:
    """The records of one method in the order in which their batches were decoded; each batch is complete."""
    found: list[PromptRounds] = []
    at = number = 0
    while at < len(records):
        batch = records[at : at + records[at].rows]
        rounds = max(len(record.rounds) for record in batch)
        found += [PromptRounds(record, number, rounds) for record in batch]
        at, number = at + len(batch), number + 1
    return found


def fit_step_cost(records: Sequence[DecodeRecord]) -> StepCost | None:
    """From the records of a method in a pass of its own; None if it ran no round."""
    own = with_batch_rounds(records)
    rounds = sum(x.rounds / x.record.rows for x in own)
    if rounds == 0:
        return None
    lengths = np.array([x.record.prompt_tokens for x in own], dtype=np.float64)
    shares = np.array([x.record.first_token_seconds / x.record.rows for x in own])
    decoding = sum(x.record.seconds for x in own) - shares.sum()
    slope, fixed = 0.0, float(shares.mean())
    if len(set(lengths)) > 1:
        line = np.polyfit(lengths, shares, 1)
        if line[0] > 0:  # else noise is larger than the cost of a token
            slope, fixed = float(line[0]), float(line[1])
    return StepCost(
        MS_PER_SECOND * fixed, MS_PER_SECOND * slope, MS_PER_SECOND * float(decoding) / rounds
    )


def predict_ms_per_token(own: Sequence[PromptRounds], cost: StepCost) -> float | None:
    """Milliseconds per output token of these prompts; None if one half of the batches ran no round.

    Of a prompt that is predicted, the lengths of prompt and answer are known. Rounds per token are those of the other
    half: of every other batch among those of `own`.
    """
    numbers = {batch: i for i, batch in enumerate(dict.fromkeys(x.batch for x in own))}
    total = 0.0
    for half in (0, 1):
        counted = [x for x in own if numbers[x.batch] % 2 != half]
        rounds_per_token = ratio_or_none(
            sum(x.rounds for x in counted), sum(x.record.output_tokens - 1 for x in counted)
        )
        if not rounds_per_token:
            return None
        for x in own:
            if numbers[x.batch] % 2 == half:
                prefill = cost.prefill_ms + cost.prefill_ms_per_token * x.record.prompt_tokens
                rounds = rounds_per_token * (x.record.output_tokens - 1)
                total += prefill + cost.round_ms * rounds / x.record.rows
    return ratio_or_none(total, sum(x.record.output_tokens for x in own))


def predict_speedup(
    plain: Sequence[PromptRounds],
    own: Sequence[PromptRounds],
    plain_cost: StepCost | None,
    cost: StepCost | None,
) -> tuple[float | None, str | None]:
    """(the predicted speed-up, why there is none): one of them is None. `plain` holds the prompts of `own`."""
    if plain_cost is None or cost is None:
        return None, "no step was timed"
    slow, fast = predict_ms_per_token(plain, plain_cost), predict_ms_per_token(own, cost)
    predicted = None if slow is None or not fast else slow / fast
    if predicted is None:
        return None, "too few prompts with rounds to predict one half from the other"
    return predicted, None
