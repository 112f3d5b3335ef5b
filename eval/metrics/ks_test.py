"""Kolmogorov-Smirnov tests of numbers that should be uniform on [0, 1], many at once, with their power."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from eval.metrics.bootstrap import Array

SIGNIFICANCE_LEVEL = 1e-3
"""Probability of a false alarm over all tests of a report (Holm correction)."""
MAX_IMPOSSIBLE_SHARE = 1e-3
"""Share of tokens that may lie just outside top-k or top-p, because two passes round differently."""
POWER_Z = 3.09
"""Normal quantile of a power of .999."""


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
    return (critical + POWER_Z / 2) / math.sqrt(n)


def holm_correction(tests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tests with `passed` (Holm 1979, SIGNIFICANCE_LEVEL over all) and `detects`, the minimum detectable shift.

    A test with too many tokens that p excludes (MAX_IMPOSSIBLE_SHARE) does not pass.
    """
    ranked = sorted(range(len(tests)), key=lambda i: tests[i]["p_value"])
    passed, failing = [True] * len(tests), True
    for rank, i in enumerate(ranked):
        failing = failing and tests[i]["p_value"] < SIGNIFICANCE_LEVEL / (len(tests) - rank)
        passed[i] = not failing
    return [
        {
            **test,
            "passed": ok and test["impossible"] <= MAX_IMPOSSIBLE_SHARE,
            "detects": minimum_detectable_shift(test["tokens"], SIGNIFICANCE_LEVEL / len(tests)),
        }
        for test, ok in zip(tests, passed, strict=True)
    ]
