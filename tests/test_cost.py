"""Predicted speed-ups against worked examples and a brute-force walk."""

import itertools
import random

import pytest

from eval.cost import (
    RoundCost,
    best_k,
    expected_tokens,
    leviathan_speedup,
    leviathan_tokens,
    predicted_speedup,
    round_cost,
)


def test_worked_examples() -> None:
    """Catches a bonus token forgotten or an exponent off by one. Leviathan et al.; α 0.8, K 5 gives 3.69."""
    assert leviathan_tokens(0.8, 5) == pytest.approx(3.69, abs=0.005)
    assert leviathan_tokens(0.8, 5) == pytest.approx((1 - 0.8**6) / (1 - 0.8))
    assert leviathan_tokens(0.0, 5) == 1
    assert leviathan_tokens(1.0, 5) == 6
    assert leviathan_speedup(0.8, 8, 0.05) == pytest.approx(3.09, abs=0.005)
    assert leviathan_speedup(0.6, 2, 0.2) == pytest.approx(1.40, abs=0.005)


def test_expected_tokens_equals_every_outcome_walked() -> None:
    """Catches unconditional rates taken for conditional ones."""
    rng = random.Random(0)
    alphas = [rng.random() for _ in range(4)]
    total = 0.0
    for coins in itertools.product([True, False], repeat=4):
        weight = 1.0
        for coin, alpha in zip(coins, alphas, strict=True):
            weight *= alpha if coin else 1 - alpha
        accepted = next((i for i, coin in enumerate(coins) if not coin), 4)
        total += weight * (accepted + 1)
    assert expected_tokens(alphas) == pytest.approx(total)


def test_cost_line_and_best_k() -> None:
    """Catches slope and intercept swapped, and a best K that ignores what a longer draft costs."""
    cost = round_cost((2, 8.0), (6, 12.0))
    assert cost == RoundCost(6.0, 1.0)
    assert predicted_speedup([0.5, 0.5], 1, cost, 7.0) == pytest.approx(1.5)
    assert best_k([0.9, 0.9, 0.1, 0.1], cost, 5.0)[0] == 2
    assert best_k([0.9] * 8, RoundCost(6.0, 0.0), 5.0)[0] == 8
