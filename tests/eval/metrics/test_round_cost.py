"""Predicted speed-ups against worked examples and a brute-force walk."""

import pytest

from decode.engine.records import DecodeRecord
from eval.metrics.round_cost import (
    RoundCost,
    expected_tokens,
    is_precise,
    predict_round_speedups,
    round_speedup,
)


def test_cost_line() -> None:
    """Catches slope and intercept swapped."""
    cost = RoundCost.through((2, 8.0), (6, 12.0))
    assert cost == RoundCost(6.0, 1.0)
    assert cost.at(10) == 16.0


def test_expected_tokens() -> None:
    """Catches α past the first position taken for α of a round, and a bonus token that is forgotten. Past the known
    positions each is worth its share of the one before."""
    assert expected_tokens([0.5] + [0.25] * 5, 8) == pytest.approx(1 + 0.5 + 0.25 * 7)
    assert expected_tokens([0.8, 0.4], 4) == pytest.approx(1 + 0.8 + 0.4 + 0.2 + 0.1)
    assert expected_tokens([0.8, 0.4], 1) == pytest.approx(1.8)
    for k in (1, 2, 7):  # of α alone, Leviathan's (1 − α^(K + 1)) ÷ (1 − α)
        assert expected_tokens([0.7], k) == pytest.approx((1 - 0.7 ** (k + 1)) / 0.3)
    assert expected_tokens([0.0], 4) == 1.0
    assert expected_tokens([0.0, 0.0], 4) == 1.0


def sample(number: int, rounds: list[tuple[int, int]], ms: float, task: str = "t") -> DecodeRecord:
    """A prompt whose rounds each took `ms`."""
    seconds = [ms / 1000] * len(rounds)
    emitted = sum(a + 1 for _, a in rounds)
    return DecodeRecord(
        [5] * 5, [5] * (emitted + 1), rounds, "length", 0.01, seconds, task, str(number),
        seconds=sum(seconds),
    )  # fmt: skip


def test_calibration_gives_back_an_exact_law() -> None:
    """Catches α of a round that never drafted: half of these rounds propose nothing, and must count as such."""

    def at(k: int) -> list[DecodeRecord]:
        """Of 8 rounds, 4 draft nothing, 2 accept 1 and 2 accept all."""
        rounds = [(0, 0)] * 4 + [(k, 1)] * 2 + [(k, k)] * 2
        return [sample(i, rounds, 10 + 2 * k) for i in range(3)]

    plain = [sample(i, [(0, 0)] * 12, 11) for i in range(3)]
    found = predict_round_speedups(plain, (2, at(2)), (6, at(6)), (1, 2, 3, 5, 6, 8))
    for k in (1, 2, 3, 5, 6):
        assert found[k] == pytest.approx(round_speedup(plain, at(k)).value)
    # past the positions that were seen, each is worth as much as the one before
    assert found[8] == pytest.approx(11 * (1 + 0.5 + 0.25 * 7) / (10 + 2 * 8))


def test_speedup_of_rounds_pools_tokens() -> None:
    """Catches a mean of ratios, a first token counted as a round's, and a verdict on two wild prompts."""
    plain = [sample(0, [(0, 0)] * 10, 10), sample(1, [(0, 0)] * 90, 10)]
    fast = [sample(0, [(1, 1)] * 5, 40), sample(1, [(1, 1)] * 45, 10)]
    measured = round_speedup(plain, fast)
    assert measured.value == pytest.approx(1000 / (5 * 40 + 45 * 10))
    assert not is_precise(measured)
    steady = [sample(i, [(0, 0)] * 9, 10) for i in range(4)]
    assert is_precise(round_speedup(steady, steady))
    assert round_speedup(plain, [sample(0, [], 1)]).value is None
