"""The draft length for an acceptance and a cost: the formula, what a row remembers, and what is measured."""

import random

import pytest

from decode.common.errors import UserError
from decode.drafts.adaptive import (
    PROBE_EVERY,
    TRIALS,
    RoundTimes,
    RunningAcceptance,
    expected_tokens,
    extend_costs,
    fastest_length,
)

COSTS = [27.0, 30.0, 32.0, 34.0, 36.0, 38.0, 40.0]


def run(row: RunningAcceptance, alpha: float, rounds: int, seed: int = 0) -> list[int]:
    """The lengths of that many rounds of a row whose every draft is accepted with probability alpha."""
    coins, lengths = random.Random(seed), []
    for _ in range(rounds):
        k = row.next_length(COSTS)
        hits = [coins.random() < alpha for _ in range(k)]
        row.record(k, (hits + [False]).index(False))
        lengths.append(k)
    return lengths


def test_expected_tokens() -> None:
    """Catches a bonus token left out or a power too many."""
    assert expected_tokens(0.8, 5) == pytest.approx((1 - 0.8**6) / (1 - 0.8))
    assert expected_tokens(0.0, 5) == 1
    assert expected_tokens(1.0, 5) == 6


def test_the_length_grows_with_acceptance_and_falls_with_cost() -> None:
    """Catches milliseconds per token turned round. K = 0: no draft pays; all of them: each pays."""
    found = [fastest_length(alpha / 20, COSTS) for alpha in range(21)]
    assert found == sorted(found)
    assert (found[0], found[1], found[-1]) == (0, 0, 6)
    assert fastest_length(0.5, COSTS) == 3  # 1.875 / 34 is the largest of 1 / 27, 1.5 / 30, …
    dear = [27.0, 45.0, 63.0]
    assert fastest_length(0.6, dear) == 0
    assert fastest_length(0.0, [1.0, 1.0]) == 0  # of equals the shorter one


def test_a_row_learns_and_recovers() -> None:
    """Catches a row that never drafts again, one that never stops, and one whose first rounds count for ever."""
    row = RunningAcceptance()
    bad = run(row, 0.0, 60)
    assert bad[0] > 0
    assert sum(k > 0 for k in bad[10:]) <= 50 // PROBE_EVERY
    assert set(bad[10:]) == {0, 1}
    good = run(row, 0.95, 60)
    assert min(good[-25:]) >= 4
    again = run(row, 0.0, 60)
    assert sum(again[-20:]) <= 3


def test_positions_behind_a_rejection_do_not_count() -> None:
    """Catches acceptance ÷ drafted in place of α, which would fall with K."""
    row = RunningAcceptance(accepted=0.0, reached=0.0)
    row.record(6, 1)
    assert (row.accepted, row.reached) == (1, 2)
    row = RunningAcceptance(accepted=0.0, reached=0.0)
    row.record(3, 3)
    assert row.alpha == 1


def test_given_costs_go_on_as_a_line() -> None:
    assert extend_costs([10, 12, 13], 5) == [10, 12, 13, 14, 15, 16]
    assert extend_costs([10, 12, 13], 1) == [10, 12]
    assert extend_costs([10, 8], 3) == [10, 8, 8, 8]
    with pytest.raises(UserError, match="give the milliseconds"):
        extend_costs([10], 3)


def test_costs_are_measured_at_three_lengths() -> None:
    """Catches a first call (memory, tuning) that counts, lengths that are tried for ever, and a line through K = 0."""
    times, tried = RoundTimes(), []
    while (k := times.next_trial(6)) is not None:
        times.record(k, COSTS[k] if tried.count(k) else 1000.0)
        tried.append(k)
    assert sorted(tried) == [0] * TRIALS + [1] * TRIALS + [6] * TRIALS
    assert times.round_ms(6) == pytest.approx([27, *(30 + 2 * (k - 1) for k in range(1, 7))])


def test_noise_makes_no_longer_round_cheaper() -> None:
    times = RoundTimes()
    assert times.round_ms(2) == [1.0, 1.0, 1.0]  # nothing is known
    times.record(0, 20.0)
    times.record(1, 30.0)
    assert times.round_ms(2) == [20.0, 30.0, 30.0]
    times.record(2, 24.0)
    assert times.round_ms(2) == [20.0, 27.0, 27.0]
