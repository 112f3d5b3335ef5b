"""What a draft length should be worth: expected tokens a round, cost of a round, predicted speed-up.

Formulas: Leviathan et al. 2023 (arXiv 2211.17192), and the form with measured costs that does not assume that
verification is free.
"""

from collections.abc import Sequence
from dataclasses import dataclass


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


def leviathan_speedup(alpha: float, k: int, cost: float) -> float:
    """Theorem 3.8: leviathan_tokens / (K · cost + 1), cost = draft step ÷ target step, verification free."""
    return leviathan_tokens(alpha, k) / (k * cost + 1)


@dataclass(frozen=True)
class RoundCost:
    """Milliseconds of a round as a straight line in K, through rounds measured inside the loop.

    Draft steps and verified columns cost about the same each; micro-benchmarks outside the loop miss by 16-25 %.
    """

    fixed: float
    each: float

    def at(self, k: int) -> float:
        return self.fixed + self.each * k


def round_cost(few: tuple[int, float], many: tuple[int, float]) -> RoundCost:
    """Through two measured points (K, milliseconds a round)."""
    each = (many[1] - few[1]) / (many[0] - few[0])
    return RoundCost(few[1] - each * few[0], each)


def predicted_speedup(
    alpha_by_position: Sequence[float], k: int, cost: RoundCost, plain_ms: float
) -> float:
    """Milliseconds a token of plain decoding over those of rounds with K = k."""
    return plain_ms * expected_tokens(alpha_by_position[:k]) / cost.at(k)


def best_k(
    alpha_by_position: Sequence[float], cost: RoundCost, plain_ms: float
) -> tuple[int, float]:
    """The K with the largest predicted speed-up, of those with a measured α, and that speed-up."""
    speedups = {
        k: predicted_speedup(alpha_by_position, k, cost, plain_ms)
        for k in range(1, len(alpha_by_position) + 1)
    }
    k = max(speedups, key=lambda each: speedups[each])
    return k, speedups[k]
