"""What a round takes and gives: predicted speed-ups of a draft length in rounds, and of whole requests.

Leviathan et al. 2023 (arXiv 2211.17192) take verification as free; here the cost of a round is a straight line in K
through rounds that were measured inside the decoding loop.

A request is taken to last as long as its prefill and its rounds. What a prefill and a round cost is measured in a
separate pass (`fit_step_cost`); how many rounds a token takes is counted on every other batch and used for the rest. No
second of the requests whose speed-up is predicted is used, so a gap between predicted and measured is either noise or
something that this account of a request leaves out.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from decode.common.typed_json import Estimate
from decode.engine.records import DecodeRecord
from eval.metrics.acceptance import Acceptance
from eval.metrics.bootstrap import MS_PER_SECOND, Ratio, paired_ratio, quotient, ratio_or_none

MAX_RELATIVE_HALF_WIDTH = 0.1
"""A prediction is not judged by a measured speed-up whose interval is wider than ± this share of it."""


@dataclass(frozen=True)
class RoundCost:
    """What a round takes as a straight line in K: milliseconds, bytes that it reads, or steps of the target.

    Each further draft step and verified token costs about the same. Of milliseconds it goes through rounds measured
    inside the decoding loop; micro-benchmarks outside it are off by 16-25 %.
    """

    fixed: float
    per_token: float

    @classmethod
    def through(cls, short: tuple[int, float], long: tuple[int, float]) -> "RoundCost":
        """Through two measured points (K, what a round took)."""
        per_token = (long[1] - short[1]) / (long[0] - short[0])
        return cls(short[1] - per_token * short[0], per_token)

    def at(self, k: int) -> float:
        return self.fixed + self.per_token * k


def expected_tokens(acceptance: Sequence[float], k: int) -> float:
    """Tokens that a round gives with K = `k`: the target's own, and each drafted one with the probability that position
    1, 2, … is accepted in a round (not given that it was reached).

    Past the known positions this falls by the last known ratio: of [α] they are 1 + α + … + α^k.
    """
    last = acceptance[-1]
    falls = last / acceptance[-2] if len(acceptance) > 1 and acceptance[-2] > 0 else last
    more = [last * falls**i for i in range(1, k - len(acceptance) + 1)]
    return 1 + sum([*acceptance[:k], *more])


def predict_round_speedups(
    plain: Sequence[DecodeRecord],
    short: tuple[int, Sequence[DecodeRecord]],
    long: tuple[int, Sequence[DecodeRecord]],
    lengths: Iterable[int],
) -> dict[int, float]:
    """{K: predicted speed-up of its rounds, without prefill}, from records whose rounds were interleaved: plain ones,
    and (K, records) for a small and a large K.

    Positions that both draft lengths have are pooled. Rounds without a draft count as such.
    """
    few, many = (Acceptance.of(records, k) for k, records in (short, long))
    taken, rounds = many.accepted_at.sum(0), np.full(long[0], many.rounds.sum())
    taken[: short[0]] += few.accepted_at.sum(0)
    rounds[: short[0]] += few.rounds.sum()
    gains = [float(a) / float(r) for a, r in zip(taken, rounds, strict=True)]
    cost = RoundCost.through(*((k, mean_round_ms(records)) for k, records in (short, long)))
    plain_ms = mean_round_ms(plain)
    return {k: plain_ms * expected_tokens(gains, k) / cost.at(k) for k in lengths}


def mean_round_ms(records: Sequence[DecodeRecord]) -> float:
    """Mean over all rounds of all records. StatisticsError if there is none."""
    return 1000 * statistics.fmean(t for record in records for t in record.round_seconds)


def is_precise(speedup: Estimate) -> bool:
    """Whether the interval is narrow enough to judge a prediction by."""
    if speedup.value is None or speedup.ci is None:
        return False
    low, high = speedup.ci
    return (high - low) / 2 <= MAX_RELATIVE_HALF_WIDTH * speedup.value


def seconds_of_rounds(records: Sequence[DecodeRecord]) -> Ratio:
    """Seconds per emitted token, of records whose `seconds` are those of their rounds."""
    return Ratio([r.seconds for r in records], Acceptance.of(records).emitted)


def round_speedup(
    plain: Sequence[DecodeRecord], records: Sequence[DecodeRecord], seed: int = 0
) -> Estimate:
    """Plain seconds per token of rounds ÷ the method's; both sides hold the same prompts in the same order."""
    return paired_ratio(seconds_of_rounds(plain), seconds_of_rounds(records), seed)


def pooled_round_speedup(
    plain: Sequence[DecodeRecord], records: Sequence[DecodeRecord]
) -> float | None:
    """`round_speedup` without its interval."""
    return quotient(seconds_of_rounds(plain).value, seconds_of_rounds(records).value)


STRONG_ALPHA, STRONG_DRAFT_LENGTHS = 0.8, (7, 10)
"""From this α on, guides recommend the draft lengths of strong drafts."""
GUIDE_DRAFT_LENGTHS = {"code": (4, 7), "prose": (3, 4)}
"""Draft lengths that published guides recommend, by domain."""


def recommended_k_range(task: str, alpha: float | None) -> tuple[int, int] | None:
    """Draft lengths that guides recommend for this domain, or for a draft with this α; None where there are none."""
    if alpha is not None and alpha >= STRONG_ALPHA:
        return STRONG_DRAFT_LENGTHS
    return GUIDE_DRAFT_LENGTHS.get(task)


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
    found = quotient(predict_ms_per_token(plain, plain_cost), predict_ms_per_token(own, cost))
    few = "too few prompts with rounds to predict one half from the other"
    return found, few if found is None else None
