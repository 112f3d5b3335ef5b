"""Predicts the speed-up of a draft length: expected tokens per round and milliseconds per round.

Expected tokens follow Leviathan et al. 2023 (arXiv 2211.17192). Their cost model takes verification as free; here the
cost of a round is a straight line in K through rounds that were measured inside the decoding loop.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from decode.engine.records import DecodeRecord
from eval.metrics import acceptance
from eval.metrics.bootstrap import paired_ratio_interval

MAX_RELATIVE_HALF_WIDTH = 0.1
"""A prediction is not judged by a measured speed-up whose interval is wider than ± this share of it."""


def expected_tokens(alpha_by_position: Sequence[float]) -> float:
    """Tokens per round, bonus token included: 1 + the sum over i of α_1 · … · α_i, each α_i conditional."""
    total, reached = 1.0, 1.0
    for alpha in alpha_by_position:
        reached *= alpha
        total += reached
    return total


@dataclass(frozen=True)
class RoundCost:
    """Milliseconds of a round as a straight line in K, through rounds measured inside the decoding loop.

    Each further draft step and verified token costs about the same. Micro-benchmarks outside the loop are off by
    16-25 %.
    """

    fixed_ms: float
    per_token_ms: float

    def ms_at(self, k: int) -> float:
        return self.fixed_ms + self.per_token_ms * k


def fit_round_cost(short: tuple[float, float], long: tuple[float, float]) -> RoundCost:
    """Through two measured points (K, milliseconds a round)."""
    per_token = (long[1] - short[1]) / (long[0] - short[0])
    return RoundCost(short[1] - per_token * short[0], per_token)


def predicted_speedup(
    alpha_by_position: Sequence[float], k: int, cost: RoundCost, plain_ms: float
) -> float:
    """Milliseconds per token of plain decoding ÷ those of rounds with K = k."""
    return plain_ms * expected_tokens(alpha_by_position[:k]) / cost.ms_at(k)


@dataclass(frozen=True)
class SpeedupModel:
    """Speed-up of any draft length, fitted to plain rounds and rounds at two draft lengths."""

    unconditional_acceptance: list[float]
    """P(position i is accepted) in a round, i = 1, 2, …: not conditional, so that rounds without a draft count."""
    cost: RoundCost
    plain_ms: float

    def tokens(self, k: int) -> float:
        """Tokens per round at K = k. Past the measured positions, acceptance falls by the last measured ratio."""
        last = self.unconditional_acceptance[-1]
        falls = (
            last / self.unconditional_acceptance[-2]
            if len(self.unconditional_acceptance) > 1 and self.unconditional_acceptance[-2] > 0
            else last
        )
        more = [last * falls**i for i in range(1, k - len(self.unconditional_acceptance) + 1)]
        return 1 + sum([*self.unconditional_acceptance[:k], *more])

    def speedup(self, k: int) -> float:
        """Predicted speed-up of rounds, without prefill."""
        return self.plain_ms * self.tokens(k) / self.cost.ms_at(k)


def fit_speedup_model(
    plain: Sequence[DecodeRecord],
    short: tuple[int, Sequence[DecodeRecord]],
    long: tuple[int, Sequence[DecodeRecord]],
) -> SpeedupModel:
    """From records whose rounds were interleaved: plain ones, and (K, records) for a small and a large K.

    Positions that both draft lengths have are pooled.
    """
    taken = acceptance.accepted_by_position(long[1], long[0]).sum(0).astype(float)
    rounds = [float(acceptance.round_counts(long[1]).sum())] * long[0]
    for i, count in enumerate(acceptance.accepted_by_position(short[1], short[0]).sum(0)):
        taken[i] += count
        rounds[i] += float(acceptance.round_counts(short[1]).sum())
    gains = [float(a) / r for a, r in zip(taken, rounds, strict=True)]
    line = fit_round_cost((short[0], mean_round_ms(short[1])), (long[0], mean_round_ms(long[1])))
    return SpeedupModel(gains, line, mean_round_ms(plain))


def mean_round_ms(records: Sequence[DecodeRecord]) -> float:
    """Mean over all rounds of all records. StatisticsError if there is none."""
    return 1000 * statistics.fmean(t for record in records for t in record.round_seconds)


@dataclass(frozen=True)
class MeasuredSpeedup:
    """A speed-up of rounds, without prefill: plain milliseconds per token ÷ the method's, same prompts, pooled."""

    speedup: float
    ci: tuple[float, float] | None
    of_sums: float
    """The same by the clock, with what the machine stalled."""

    @property
    def is_precise(self) -> bool:
        """Whether the interval is narrow enough to judge a prediction by."""
        return (
            self.ci is not None
            and (self.ci[1] - self.ci[0]) / 2 <= MAX_RELATIVE_HALF_WIDTH * self.speedup
        )


def pooled_round_speedup(
    plain: Sequence[DecodeRecord], records: Sequence[DecodeRecord]
) -> float | None:
    """The speed-up of rounds, from records whose `seconds` are those of their rounds; None where no round was run."""
    slow, fast = (sum(x.seconds for x in side) for side in (plain, records))
    slow_tokens, fast_tokens = (
        acceptance.emitted_tokens(plain).sum(),
        acceptance.emitted_tokens(records).sum(),
    )
    if min(slow_tokens, fast_tokens, fast) <= 0:
        return None
    return float(slow / slow_tokens / (fast / fast_tokens))


def round_speedup_with_interval(
    plain: Sequence[DecodeRecord], records: Sequence[DecodeRecord], seed: int = 0
) -> MeasuredSpeedup | None:
    """`pooled_round_speedup` with its interval; both sides hold the same prompts in the same order."""
    speedup = pooled_round_speedup(plain, records)
    if speedup is None:
        return None
    slow, fast = ([x.seconds for x in side] for side in (plain, records))
    tokens = acceptance.emitted_tokens(plain), acceptance.emitted_tokens(records)
    interval = paired_ratio_interval(slow, tokens[0], fast, tokens[1], seed)
    of_sums = pooled_round_speedup(
        *(list(map(acceptance.as_measured, side)) for side in (plain, records))
    )
    return MeasuredSpeedup(speedup, interval, speedup if of_sums is None else of_sums)


def prediction_record(k: int, predicted: float, measured: MeasuredSpeedup) -> dict[str, object]:
    """A predicted speed-up beside the measured one, ready for JSON; `counted` where the measurement is precise."""
    return {
        "k": k,
        "predicted": predicted,
        "measured": measured.speedup,
        "ci": measured.ci,
        "error": abs(predicted / measured.speedup - 1),
        "counted": measured.is_precise,
    }


STRONG_ALPHA, STRONG_DRAFT_LENGTHS = 0.8, (7, 10)
"""From this α on, guides recommend the draft lengths of strong drafts."""
GUIDE_DRAFT_LENGTHS = {"code": (4, 7), "prose": (3, 4)}
"""Draft lengths that published guides recommend, by domain."""


def recommended_k_range(task: str, alpha: float | None) -> tuple[int, int] | None:
    """Draft lengths that guides recommend for this domain, or for a draft with this α; None where there are none."""
    if alpha is not None and alpha >= STRONG_ALPHA:
        return STRONG_DRAFT_LENGTHS
    return GUIDE_DRAFT_LENGTHS.get(task)
