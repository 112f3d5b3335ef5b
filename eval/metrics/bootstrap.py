"""Ratios of sums and their 95 % bootstrap intervals over prompts, also of a paired speed-up and a paired difference.

Prompts are resampled, not rounds: rounds of one prompt are correlated, and resampling them as if they were independent
gives intervals that are far too narrow.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from decode.common.typed_json import Estimate

Array = npt.NDArray[Any]
Numbers = Array | Sequence[float]
Interval = tuple[float, float]

RESAMPLES = 2000
CONFIDENCE = 0.95
ALL_TASKS = "all"  # stands for all tasks (or domains) together where a report names a task
MS_PER_SECOND = 1000.0


class Ratio(NamedTuple):
    """Σ numerators ÷ Σ denominators, both [n prompts]. Paired with another one, both have the same prompts."""

    numerators: Numbers
    denominators: Numbers

    @property
    def value(self) -> float | None:
        return ratio_or_none(sum(self.numerators), sum(self.denominators))

    def estimate(self, seed: int) -> Estimate:
        return Estimate(self.value, ratio_interval(*self, seed))

    @property
    def has_interval(self) -> bool:
        """Whether two prompts count: one says nothing about the spread."""
        return bool(np.count_nonzero(self.denominators) >= 2)


def ratio_or_none(numerator: float, denominator: float) -> float | None:
    """None where the denominator is 0: a report holds no NaN."""
    return None if denominator == 0 else float(numerator) / float(denominator)


def quotient(slow: float | None, fast: float | None) -> float | None:
    """slow ÷ fast; None where one of them is missing, or the second is 0."""
    return None if slow is None or fast is None else ratio_or_none(slow, fast)


def ratio_interval(numerators: Numbers, denominators: Numbers, seed: int) -> Interval | None:
    """95 % percentile bootstrap interval of Σ numerators ÷ Σ denominators, both [n prompts].

    None if fewer than two denominators are above 0. A resample whose denominators are all 0 is left out.
    """
    if not Ratio(numerators, denominators).has_interval:
        return None
    return percentile_interval(_safe_divide(*_resampled_sums([numerators, denominators], seed)))


def paired_ratio(slow: Ratio, fast: Ratio, seed: int) -> Estimate:
    """slow ÷ fast: of seconds per token, the speed-up. The same prompts are drawn for both, so that easy and hard ones
    cancel out. Without a value where one of the three divisions has none."""
    value = quotient(slow.value, fast.value)
    return Estimate(value, _paired_interval(slow, fast, _safe_divide, seed))


def paired_difference(a: Ratio, b: Ratio, seed: int) -> Estimate:
    """a − b, with the same prompts drawn for both."""
    one, other = a.value, b.value
    value = None if one is None or other is None else one - other
    return Estimate(value, _paired_interval(a, b, np.subtract, seed))


def _paired_interval(
    a: Ratio, b: Ratio, combine: Callable[[Array, Array], Array], seed: int
) -> Interval | None:
    if not (a.has_interval and b.has_interval):
        return None
    sums = _resampled_sums([*a, *b], seed)
    return percentile_interval(combine(_safe_divide(*sums[:2]), _safe_divide(*sums[2:])))


def mean_of_ratios(numerators: Numbers, denominators: Numbers, seed: int) -> Estimate:
    """The mean over prompts of numerator ÷ denominator, both [n prompts].

    It weighs a short answer like a long one, which pooling does not. Prompts without a denominator are left out.
    """
    top, bottom = (np.asarray(x, dtype=np.float64) for x in (numerators, denominators))
    ratios = top[bottom > 0] / bottom[bottom > 0]
    if len(ratios) == 0:
        return Estimate()
    return Estimate(float(ratios.mean()), ratio_interval(ratios, np.ones(len(ratios)), seed))


def _safe_divide(numerators: Array, denominators: Array) -> Array:
    """Element by element; NaN where the denominator is 0, which `percentile_interval` drops."""
    out: Array = np.full(numerators.shape, np.nan)
    np.divide(numerators, denominators, out=out, where=denominators != 0)
    return out


def _resampled_sums(columns: Sequence[Numbers], seed: int) -> list[Array]:
    """The sum of each column [n] over the same n prompts drawn with replacement, [RESAMPLES]."""
    arrays = [np.asarray(column, dtype=np.float64) for column in columns]
    n = len(arrays[0])
    drawn = np.random.default_rng(seed).integers(n, size=(RESAMPLES, n))
    return [array[drawn].sum(1) for array in arrays]


def percentile_interval(values: Array) -> Interval | None:
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return None
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)
