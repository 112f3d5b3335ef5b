"""Tests of distributions: whether two engines accept alike, and whether numbers are uniform on [0, 1].

The first is a permutation test on counts by prompt, for engines with different seeds; the second are
Kolmogorov-Smirnov tests, many at once, with their power.

Rounds of one prompt are correlated: an easy text accepts in every round. Taken as independent they would make equal
engines look different, so a prompt with all its rounds is the unit. If both engines draft and accept by the same
distributions, their counts on a prompt are exchangeable: labels are swapped prompt by prompt, and the observed
difference is ranked among those of swapped labels. The test assumes no distribution of the counts and is exact for any
number of prompts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eval.metrics.bootstrap import Array

PERMUTATIONS = 20_000
CHUNK_SIZE = 1000
POWER = 0.9
POWER_Z = 1.2816  # normal quantile of POWER


@dataclass(frozen=True)
class PermutationTestPart:
    """One quantity of both engines: an acceptance by position, or τ."""

    name: str
    a: float | None
    b: float | None  # None where no round reached the position
    error: float  # standard deviation of a - b when labels are swapped at random
    p_value: float  # of this part alone, two-sided
    detects: float
    """The true difference in this part that the whole test detects with a probability of about POWER (in simulations
    0.84 to 0.88)."""


@dataclass(frozen=True)
class PermutationTestResult:
    """`statistic`: the largest |a - b| ÷ error over all parts."""

    statistic: float
    p_value: float  # P(a statistic at least as large | both engines are alike)
    permutations: int
    parts: list[PermutationTestPart]


def run_permutation_test(
    a: Array, b: Array, *, level: float, permutations: int = PERMUTATIONS, seed: int = 0
) -> PermutationTestResult:
    """Tests counts [n prompts, 1 + K] of two engines: rounds, then those that accepted at position 1, 2, …, K.

    A prompt's counts are sums over equally many draws in both engines. All 2^n ways to swap labels are used if they are
    at most `permutations`; otherwise that many are drawn, and the unswapped labels count as one more. `level` is the
    p-value at which the caller rejects; `detects` depends on it.
    """
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 2 or len(a) == 0:
        raise ValueError(f"need equal shapes [prompts, 1 + K], got {a.shape} and {b.shape}")
    differences = _permuted_differences(a, b, permutations, seed)  # row 0: labels as they are
    error = np.sqrt((differences**2).mean(0))
    scaled = np.abs(differences) / np.where(error > 0, error, 1)
    largest = scaled.max(1)
    critical = float(np.quantile(largest, 1 - level, method="higher"))
    # A true difference also widens what swapped labels give: by its square, shared among the prompts.
    needed = POWER_Z + critical / math.sqrt(max(1 - critical**2 / len(a), 1e-9))
    names = [f"alpha_{i + 1}" for i in range(a.shape[1] - 1)] + ["tau"]
    of_a, of_b = alpha_and_tau(a.sum(0)), alpha_and_tau(b.sum(0))
    parts = [
        PermutationTestPart(
            name,
            _nan_to_none(of_a[i]),
            _nan_to_none(of_b[i]),
            float(error[i]),
            _permutation_p_value(scaled[:, i]),
            needed * float(error[i]),
        )
        for i, name in enumerate(names)
    ]
    return PermutationTestResult(
        float(largest[0]), _permutation_p_value(largest), len(largest), parts
    )


def alpha_and_tau(counts: Array) -> Array:
    """[..., K + 1] from counts [..., 1 + K]: α at each position, given that it was reached, then τ.

    NaN where no round reached the position.
    """
    alpha = np.full(counts[..., 1:].shape, math.nan)
    np.divide(counts[..., 1:], counts[..., :-1], out=alpha, where=counts[..., :-1] > 0)
    tau = 1 + counts[..., 1:].sum(-1, keepdims=True) / counts[..., :1]
    return np.concatenate([alpha, tau], -1)


def _permuted_differences(a: Array, b: Array, permutations: int, seed: int) -> Array:
    """[P, K + 1] differences of the rates, first with unswapped labels; 0 where a rate is unknown in one of them."""
    n, both = len(a), a.sum(0) + b.sum(0)
    rng = np.random.default_rng(seed)
    every = 2**n <= permutations
    total = 2**n if every else permutations + 1
    chunks = []
    for start in range(0, total, CHUNK_SIZE):
        count = min(CHUNK_SIZE, total - start)
        if every:
            swapped = (np.arange(start, start + count)[:, None] >> np.arange(n)) & 1
        else:
            swapped = rng.integers(2, size=(count, n))
            swapped[: int(start == 0)] = 0
        first = a.sum(0) + swapped @ (b - a)
        chunks.append(np.nan_to_num(alpha_and_tau(first) - alpha_and_tau(both - first)))
    return np.concatenate(chunks)


def _permutation_p_value(values: Array) -> float:
    """Share of values that are at least the first, up to rounding."""
    return float((values >= values[0] * (1 - 1e-9)).mean())


def _nan_to_none(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


SIGNIFICANCE_LEVEL = 1e-3
"""Probability of a false alarm over all tests of a report (Holm correction)."""
SHIFT_POWER_Z = 3.09  # normal quantile of a power of .999


def ks_distance(values: Array) -> float:
    """Largest distance of the values' distribution from the uniform one on [0, 1]."""
    ordered, n = np.sort(values), len(values)
    steps = np.arange(n + 1) / n
    return float(max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()))


def ks_p_value(distance: float, n: int) -> float:
    """P(a larger distance | uniform): Kolmogorov's series with Stephens' correction for finite n."""
    x = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    if x < 0.2:
        return 1.0
    terms = [(-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101)]
    return min(1.0, max(0.0, 2 * sum(terms)))


def minimum_detectable_shift(n: int, level: float) -> float:
    """The smallest shift of the distribution of n values that a test at `level` finds with probability .999."""
    critical = math.sqrt(-math.log(level / 2) / 2)
    return (critical + SHIFT_POWER_Z / 2) / math.sqrt(n)


def holm_passes(p_values: Sequence[float]) -> list[bool]:
    """Which of these tests pass at SIGNIFICANCE_LEVEL over all of them (Holm 1979)."""
    ranked = sorted(range(len(p_values)), key=lambda i: p_values[i])
    passed, failing = [True] * len(p_values), True
    for rank, i in enumerate(ranked):
        failing = failing and p_values[i] < SIGNIFICANCE_LEVEL / (len(p_values) - rank)
        passed[i] = not failing
    return passed
