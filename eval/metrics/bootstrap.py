"""Ratios of sums and their 95 % bootstrap intervals over prompts, also of a paired speed-up and a paired difference.

Prompts are resampled, not rounds: rounds of one prompt are correlated, and resampling them as if they were independent
gives intervals that are far too narrow.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Numbers = Array | Sequence[float]
Interval = tuple[float, float]

RESAMPLES = 2000
CONFIDENCE = 0.95


def ratio_interval(
    numerators: Numbers, denominators: Numbers, seed: int, resamples: int = RESAMPLES
) -> Interval | None:
    """95 % percentile bootstrap interval of Σ numerators ÷ Σ denominators, both [n prompts].

    None if fewer than two denominators are above 0, since one prompt says nothing about the spread. A resample whose
    denominators are all 0 is left out.
    """
    if np.count_nonzero(denominators) < 2:
        return None
    top, bottom = _resampled_sums([numerators, denominators], seed, resamples)
    return _percentile_interval(_safe_divide(top, bottom))


def paired_ratio_interval(
    plain_seconds: Numbers,
    plain_tokens: Numbers,
    seconds: Numbers,
    tokens: Numbers,
    seed: int,
    resamples: int = RESAMPLES,
) -> Interval | None:
    """Interval of the speed-up: plain seconds per token ÷ the method's, all four [n prompts].

    Both sides are resampled with the same prompts, so that easy and hard prompts cancel out.
    """
    if min(np.count_nonzero(plain_tokens), np.count_nonzero(tokens)) < 2:
        return None
    sums = _resampled_sums([plain_seconds, plain_tokens, seconds, tokens], seed, resamples)
    slow, fast = _safe_divide(sums[0], sums[1]), _safe_divide(sums[2], sums[3])
    return _percentile_interval(_safe_divide(slow, fast))


def paired_difference_interval(
    numerators_a: Numbers,
    denominators_a: Numbers,
    numerators_b: Numbers,
    denominators_b: Numbers,
    seed: int,
    resamples: int = RESAMPLES,
) -> Interval | None:
    """Interval of Σa ÷ Σa' − Σb ÷ Σb', all four [n prompts], the same prompts for both methods."""
    if min(np.count_nonzero(denominators_a), np.count_nonzero(denominators_b)) < 2:
        return None
    columns = [numerators_a, denominators_a, numerators_b, denominators_b]
    sums = _resampled_sums(columns, seed, resamples)
    return _percentile_interval(_safe_divide(sums[0], sums[1]) - _safe_divide(sums[2], sums[3]))


def mean_of_ratios(
    numerators: Numbers, denominators: Numbers, seed: int
) -> tuple[float | None, Interval | None]:
    """The mean over prompts of numerator ÷ denominator, both [n prompts], and its interval.

    It weighs a short answer like a long one, which pooling does not. Prompts without a denominator are left out; None
    where nothing is left, or too little for an interval.
    """
    top, bottom = (np.asarray(x, dtype=np.float64) for x in (numerators, denominators))
    ratios = top[bottom > 0] / bottom[bottom > 0]
    if len(ratios) == 0:
        return None, None
    return float(ratios.mean()), ratio_interval(ratios, np.ones(len(ratios)), seed)


def _safe_divide(numerators: Array, denominators: Array) -> Array:
    """Element by element; NaN where the denominator is 0, which `_percentile_interval` drops."""
    out: Array = np.full(numerators.shape, np.nan)
    np.divide(numerators, denominators, out=out, where=denominators != 0)
    return out


def _resampled_sums(columns: Sequence[Numbers], seed: int, resamples: int) -> list[Array]:
    """The sum of each column [n] over the same n prompts drawn with replacement, [resamples]."""
    arrays = [np.asarray(column, dtype=np.float64) for column in columns]
    n = len(arrays[0])
    drawn = np.random.default_rng(seed).integers(n, size=(resamples, n))
    return [array[drawn].sum(1) for array in arrays]


def _percentile_interval(values: Array) -> Interval | None:
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return None
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)


ALL_TASKS = "all"
"""Stands for all tasks (or domains) together where a report names a task."""
MS_PER_SECOND = 1000.0


def ratio_or_none(numerator: float, denominator: float) -> float | None:
    """None where the denominator is 0: a report holds no NaN."""
    return None if denominator == 0 else float(numerator) / float(denominator)
