"""Predicted speed-ups against worked examples and a brute-force walk."""

import pytest

from decode.engine.records import DecodeRecord
from eval.metrics.speedup_model import (
    RoundCost,
    SpeedupModel,
    fit_round_cost,
    fit_speedup_model,
    is_precise,
    round_speedup,
)


def test_cost_line() -> None:
    """Catches slope and intercept swapped."""
    cost = fit_round_cost((2, 8.0), (6, 12.0))
    assert cost == RoundCost(6.0, 1.0)


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
    model = fit_speedup_model(plain, (2, at(2)), (6, at(6)))
    assert model.unconditional_acceptance == pytest.approx([0.5] + [0.25] * 5)
    for k in (1, 2, 3, 5, 6):
        assert model.speedup(k) == pytest.approx(round_speedup(plain, at(k)).value)
    # past the positions that were seen, each is worth its share of the one before: here all of it
    assert model.tokens(8) == pytest.approx(1 + 0.5 + 0.25 * 7)
    falling = SpeedupModel([0.8, 0.4], RoundCost(1, 1), 1)
    assert falling.tokens(4) == pytest.approx(1 + 0.8 + 0.4 + 0.2 + 0.1)


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
