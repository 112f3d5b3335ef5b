"""The permutation test of two engines' acceptance: its size, its power, and a case done by hand."""

import math

import numpy as np
import pytest

from eval.metrics.bootstrap import Array
from eval.metrics.distribution_tests import POWER, ks_distance, ks_p_value, run_permutation_test

PROMPTS, DRAWS, ROUNDS, K = 48, 4, 20, 4


def simulated(
    dice: np.random.Generator, easy: Array, less: float = 0.0, first: float = 0.0
) -> Array:
    """Counts [n, 1 + K] of an engine on prompts that are so `easy` [n]: α by prompt.

    Each text that is drawn is easier or harder than its prompt, so its rounds are alike. `less` is taken from α
    everywhere, `first` at the first position."""
    counts = np.zeros((len(easy), 1 + K))
    for _ in range(DRAWS):
        alpha = np.clip(easy + dice.normal(0, 0.2, len(easy)) - less, 0.02, 0.98)
        alpha = np.repeat(alpha[:, None], K, 1)
        alpha[:, 0] -= first
        stays = dice.random((len(easy), ROUNDS, K)) < np.clip(alpha, 0, 1)[:, None]
        counts[:, 0] += ROUNDS
        counts[:, 1:] += stays.cumprod(-1).sum(1)
    return counts


def naive(a: Array, b: Array) -> float:
    """The planted bug: p-value of α at position 1 by a test that takes rounds as independent."""
    n, x, y = a[:, 0].sum(), a[:, 1].sum(), b[:, 1].sum()
    pooled = (x + y) / (2 * n)
    z = abs(x - y) / n / math.sqrt(2 * pooled * (1 - pooled) / n)
    return math.erfc(z / math.sqrt(2))


def test_by_hand() -> None:
    """Bug: a rank, a scale or a sum over swapped labels that is off; two prompts have four ways to be swapped.
    Accepted of 10 rounds each: 8 and 6 by a, 2 and 4 by b, so α differs by .4, and by -.2, .2, -.4 when swapped."""
    a, b = np.array([[10, 8], [10, 6]]), np.array([[10, 2], [10, 4]])
    found = run_permutation_test(a, b, level=0.5)
    alpha, tau = found.parts
    assert (found.permutations, found.p_value) == (4, 0.5)
    assert (alpha.name, alpha.a, alpha.b) == ("alpha_1", 0.7, 0.3)
    assert (tau.name, tau.a, tau.b) == ("tau", 1.7, 1.3)
    assert alpha.error == pytest.approx(math.sqrt(0.1))
    assert found.statistic == pytest.approx(0.4 / math.sqrt(0.1))
    assert run_permutation_test(b, a, level=0.5).p_value == found.p_value


def test_equal_engines_give_uniform_p() -> None:
    """Bug: a chi-square over rounds, which finds equal engines different since rounds of a text are alike. The naive
    test stands beside ours on the same counts and must be seen to fail, else these counts test nothing."""
    dice = np.random.default_rng(1)
    ps, naive_ps = [], []
    for trial in range(400):
        easy = dice.beta(4, 4, PROMPTS)
        a, b = simulated(dice, easy), simulated(dice, easy)
        ps.append(run_permutation_test(a, b, level=0.05, permutations=500, seed=trial).p_value)
        naive_ps.append(naive(a, b))
    assert ks_p_value(ks_distance(np.array(ps)), len(ps)) > 1e-3
    assert 0.02 < np.mean(np.array(ps) <= 0.05) < 0.08
    assert np.mean(np.array(naive_ps) <= 0.05) > 0.2


def test_a_planted_difference_is_found() -> None:
    """Bug: a test that passes everything. α lower by .15 everywhere is found in at least 95 of 100 runs at .001."""
    dice = np.random.default_rng(2)
    found = []
    for trial in range(100):
        easy = dice.beta(4, 4, PROMPTS)
        a, b = simulated(dice, easy), simulated(dice, easy, less=0.15)
        found.append(
            run_permutation_test(a, b, level=1e-3, permutations=3000, seed=trial).p_value < 1e-3
        )
    assert sum(found) >= 95


def test_what_it_says_to_detect_it_detects() -> None:
    """Bug: a stated power that the test does not have. A difference of that size at one position is found as often."""
    dice = np.random.default_rng(3)
    level, said, found = 0.01, [], []
    for trial in range(200):
        easy = dice.beta(4, 4, PROMPTS)
        test = run_permutation_test(
            simulated(dice, easy), simulated(dice, easy), level=level, permutations=1000
        )
        said.append(test.parts[0].detects)
        a, b = simulated(dice, easy), simulated(dice, easy, first=float(np.mean(said)))
        found.append(
            run_permutation_test(a, b, level=level, permutations=1000, seed=trial).p_value < level
        )
    assert POWER - 0.1 < np.mean(found) < POWER + 0.05


def test_a_position_that_nobody_reaches() -> None:
    """Bug: 0 ÷ 0 that makes every comparison false, so that nothing is ever found."""
    a = np.tile([10, 5, 0, 0], (12, 1))
    b = np.tile([10, 1, 0, 0], (12, 1))
    found = run_permutation_test(a, b, level=1e-3)
    assert found.p_value == 2 / 2**12
    assert [part.a for part in found.parts] == [0.5, 0.0, None, 1.5]
    assert run_permutation_test(a, a, level=1e-3).p_value == 1
    with pytest.raises(ValueError, match="equal shapes"):
        run_permutation_test(a, b[:3], level=1e-3)
