"""What a draft length should be worth: expected tokens a round, cost of a round, predicted speed-up.

Formulas: Leviathan et al. 2023 (arXiv 2211.17192), and two forms with measured costs that do not assume that
verification is free: by parts, and as a straight line through rounds measured inside the loop.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from decode.engine.records import DecodeRecord
from eval.metrics import acceptance
from eval.metrics.bootstrap import paired_ratio_interval

MAX_RELATIVE_HALF_WIDTH = 0.1
"""A measured speed-up whose interval is wider than ± this share says too little to judge a prediction by."""


def expected_tokens(alpha_by_position: Sequence[float]) -> float:
    """Tokens a round yields, bonus included: 1 + the sum over i of α_1 · … · α_i, each α_i conditional."""
    total, reached = 1.0, 1.0
    for alpha in alpha_by_position:
        reached *= alpha
        total += reached
    return total


def leviathan_tokens(alpha: float, k: int) -> float:
    """(1 - α^(K + 1)) / (1 - α): the same when every position is accepted alike."""
    return expected_tokens([alpha] * k)


@dataclass(frozen=True)
class RoundCost:
    """Milliseconds of a round as a straight line in K, through rounds measured inside the loop.

    Draft steps and verified columns cost about the same each; micro-benchmarks outside the loop miss by 16-25 %.
    """

    fixed_ms: float
    per_token_ms: float

    def ms_at(self, k: int) -> float:
        return self.fixed_ms + self.per_token_ms * k


def fit_round_cost(few: tuple[int, float], many: tuple[int, float]) -> RoundCost:
    """Through two measured points (K, milliseconds a round)."""
    each = (many[1] - few[1]) / (many[0] - few[0])
    return RoundCost(few[1] - each * few[0], each)


def predicted_speedup(
    alpha_by_position: Sequence[float], k: int, cost: RoundCost, plain_ms: float
) -> float:
    """Milliseconds a token of plain decoding over those of rounds with K = k."""
    return plain_ms * expected_tokens(alpha_by_position[:k]) / cost.ms_at(k)


@dataclass(frozen=True)
class SpeedupModel:
    """What rounds at two draft lengths, and plain ones, say about every other draft length."""

    unconditional_acceptance: list[float]
    """P(position i is accepted) in a round, i = 1, 2, …: not conditional, so that rounds without a draft count."""
    cost: RoundCost
    plain_ms: float

    def tokens(self, k: int) -> float:
        """Tokens a round yields at K = k; past the measured positions each is worth its share of the one before."""
        last = self.unconditional_acceptance[-1]
        falls = (
            last / self.unconditional_acceptance[-2]
            if len(self.unconditional_acceptance) > 1 and self.unconditional_acceptance[-2] > 0
            else last
        )
        more = [last * falls**i for i in range(1, k - len(self.unconditional_acceptance) + 1)]
        return 1 + sum([*self.unconditional_acceptance[:k], *more])

    def speedup(self, k: int) -> float:
        """Predicted, of rounds: prefill aside."""
        return self.plain_ms * self.tokens(k) / self.cost.ms_at(k)


def fit_speedup_model(
    plain: Sequence[DecodeRecord],
    few: tuple[int, Sequence[DecodeRecord]],
    many: tuple[int, Sequence[DecodeRecord]],
) -> SpeedupModel:
    """From samples whose rounds were interleaved: plain ones, and (K, samples) for a small and a large K.

    Positions that both draft lengths have are pooled.
    """
    taken = acceptance.accepted_by_position(many[1], many[0]).sum(0).astype(float)
    rounds = [float(acceptance.round_counts(many[1]).sum())] * many[0]
    for i, count in enumerate(acceptance.accepted_by_position(few[1], few[0]).sum(0)):
        taken[i] += count
        rounds[i] += float(acceptance.round_counts(few[1]).sum())
    gains = [float(a) / r for a, r in zip(taken, rounds, strict=True)]
    line = fit_round_cost((few[0], mean_round_ms(few[1])), (many[0], mean_round_ms(many[1])))
    return SpeedupModel(gains, line, mean_round_ms(plain))


def mean_round_ms(samples: Sequence[DecodeRecord]) -> float:
    """Mean over all rounds of all samples. Raises StatisticsError if there is none."""
    return 1000 * statistics.fmean(t for sample in samples for t in sample.round_seconds)


@dataclass(frozen=True)
class MeasuredSpeedup:
    """A speed-up of rounds, prefill aside: plain milliseconds a token over the method's, same prompts, pooled."""

    speedup: float
    ci: tuple[float, float] | None

    @property
    def is_precise(self) -> bool:
        """Narrow enough to judge a prediction by."""
        return (
            self.ci is not None
            and (self.ci[1] - self.ci[0]) / 2 <= MAX_RELATIVE_HALF_WIDTH * self.speedup
        )


def pooled_round_speedup(
    plain: Sequence[DecodeRecord], samples: Sequence[DecodeRecord]
) -> float | None:
    """The speed-up of rounds alone, of samples whose `seconds` are those of their rounds; None where none was run."""
    slow, fast = (sum(x.seconds for x in side) for side in (plain, samples))
    slow_tokens, fast_tokens = (
        acceptance.emitted_tokens(plain).sum(),
        acceptance.emitted_tokens(samples).sum(),
    )
    if min(slow_tokens, fast_tokens, fast) <= 0:
        return None
    return float(slow / slow_tokens / (fast / fast_tokens))


def round_speedup_with_interval(
    plain: Sequence[DecodeRecord], samples: Sequence[DecodeRecord], seed: int = 0
) -> MeasuredSpeedup | None:
    """`round_ratio` with its interval, over the same prompts in the same order."""
    speedup = pooled_round_speedup(plain, samples)
    if speedup is None:
        return None
    slow, fast = ([x.seconds for x in side] for side in (plain, samples))
    tokens = acceptance.emitted_tokens(plain), acceptance.emitted_tokens(samples)
    return MeasuredSpeedup(speedup, paired_ratio_interval(slow, tokens[0], fast, tokens[1], seed))


def prediction_record(k: int, guess: float, measured: MeasuredSpeedup) -> dict[str, object]:
    """A predicted speed-up beside the measured one, ready for JSON; `counted` where the measurement is sure."""
    return {
        "k": k,
        "predicted": guess,
        "measured": measured.speedup,
        "ci": measured.ci,
        "error": abs(guess / measured.speedup - 1),
        "counted": measured.is_precise,
    }


STRONG_ALPHA, STRONG_DRAFT_LENGTHS = 0.8, (7, 10)
"""From this α on a draft counts as strong, and guides give it more."""
GUIDE_DRAFT_LENGTHS = {"code": (4, 7), "prose": (3, 4)}
"""Draft lengths that guides give by domain."""


def recommended_k_range(task: str, alpha: float | None) -> tuple[int, int] | None:
    """The draft lengths that guides give for this domain, or for a draft this strong; None where they say nothing."""
    if alpha is not None and alpha >= STRONG_ALPHA:
        return STRONG_DRAFT_LENGTHS
    return GUIDE_DRAFT_LENGTHS.get(task)
