"""A saturating power law fitted to measurements over data sizes, and its prediction for twice the largest size.

The law is y(n) = a − b · n^(−c), as scaling laws of losses have it (Kaplan et al., arXiv 2001.08361). It is written
around the largest size N: y(n) = level + slope · (1 − (n/N)^(−c)) / c, so that c = 0 is its limit, the straight line
level + slope · ln(n/N), and a = level + slope / c. For a given c it is linear in the other two parameters: least
squares are solved exactly for each c of a grid, and the best c is taken.

c is fitted only with MIN_SIZES_FOR_EXPONENT different sizes and a measurement to spare; else c = 0. Even then it is
often poorly determined, while the prediction for 2N is not: all c that fit the points agree there to within the
interval.
"""

from dataclasses import dataclass

import numpy as np

from decode.common.typed_json import Estimate
from eval.metrics.bootstrap import RESAMPLES, Array, Interval, percentile_interval

EXPONENTS = np.linspace(0.0, 2.0, 101)
"""From the straight line over ln n to a step behind the smallest size."""
MIN_SIZES_FOR_EXPONENT = 4
MIN_SIZES_FOR_INTERVAL = 3
"""Two sizes are joined by a line that nothing tests."""


@dataclass(frozen=True)
class PowerLaw:
    """y(n) = level + slope · growth(n / largest, exponent)."""

    largest: float
    """The largest size that was measured."""
    level: float
    """y there."""
    slope: float
    """dy / d ln n there."""
    exponent: float
    """c; 0: a straight line over ln n."""

    def at(self, size: float) -> float:
        """y of `size`, which is above 0."""
        return float(self.level + self.slope * growth(size / self.largest, self.exponent))

    @property
    def limit(self) -> float | None:
        """What y approaches with ever more data (a); None for a straight line."""
        return None if self.exponent == 0 else self.level + self.slope / self.exponent


@dataclass(frozen=True)
class LawForecast:
    """A law and what it says of twice the largest size. Intervals are None where the measurements allow none."""

    law: PowerLaw
    exponent_ci: Interval | None
    """None where c was not fitted, too."""
    at_double: Estimate
    gain: Estimate
    """at_double ÷ the law's level - 1; None if the level is not above 0."""

    @property
    def identified(self) -> bool:
        """Whether the data exclude both a straight line and a step, so that c and the limit mean something."""
        ci = self.exponent_ci
        return ci is not None and bool(EXPONENTS[0] < ci[0] <= ci[1] < EXPONENTS[-1])


def growth(ratio: Array | float, exponent: float) -> Array:
    """(1 − ratio^(−exponent)) / exponent, which is ln(ratio) for exponent 0."""
    if exponent == 0:
        return np.log(ratio)
    return np.asarray((1 - np.asarray(ratio, dtype=np.float64) ** -exponent) / exponent)


def fit(sizes: Array, values: Array) -> PowerLaw:
    """The law with the least squared error for `values` [P] at `sizes` [P], of which two differ at least."""
    level, slope, exponent = _fit_all(sizes, values[None])
    return PowerLaw(float(sizes.max()), float(level[0]), float(slope[0]), float(exponent[0]))


def forecast(
    sizes: Array,
    numerators: Array,
    denominators: Array,
    bounds: tuple[float, float],
    seed: int,
    resamples: int = RESAMPLES,
) -> LawForecast | None:
    """The law of Σ numerators ÷ Σ denominators, both [P measurements, n prompts], at `sizes` [P], and its prediction.

    Several measurements may have one size (other seeds); prompts are the same in all of them. Predictions are cut to
    `bounds`. None with fewer than two different sizes, or where a measurement has no denominator above 0.

    Intervals add two errors up. Prompts are resampled, the same ones in all measurements. The scatter around the law,
    which is the chance of training and the law's own misfit, is added as normal noise whose variance is itself drawn
    (residual sum of squares ÷ χ² with P − parameters degrees of freedom): for a straight line this is the t interval.
    """
    totals = denominators.sum(1)
    if len(np.unique(sizes)) < 2 or totals.min() <= 0:
        return None
    values = numerators.sum(1) / totals
    law = fit(sizes, values)
    level, at_double = (float(np.clip(x, *bounds)) for x in (law.level, law.at(2 * law.largest)))
    gain = at_double / level - 1 if level > 0 else None
    drawn = _resampled_values(sizes, values, law, numerators, denominators, seed, resamples)
    if drawn is None:
        return LawForecast(law, None, Estimate(at_double), Estimate(gain))
    levels, slopes, exponents = _fit_all(sizes, drawn)
    shifts = np.array([growth(2.0, c) for c in EXPONENTS])
    doubled = levels + slopes * shifts[np.searchsorted(EXPONENTS, exponents)]
    before, after = np.clip(levels, *bounds), np.clip(doubled, *bounds)
    gains = np.divide(after, before, out=np.full(before.shape, np.nan), where=before > 0) - 1
    return LawForecast(
        law,
        percentile_interval(exponents) if _fits_exponent(sizes) else None,
        Estimate(at_double, percentile_interval(after)),
        Estimate(gain, None if gain is None else percentile_interval(gains)),
    )


def _resampled_values(
    sizes: Array,
    values: Array,
    law: PowerLaw,
    numerators: Array,
    denominators: Array,
    seed: int,
    resamples: int,
) -> Array | None:
    """What else the measurements could have been, [resamples, P]; None if they do not say how far they scatter."""
    free = len(sizes) - (3 if _fits_exponent(sizes) else 2)
    prompts = numerators.shape[1]
    if free < 1 or prompts < 2 or len(np.unique(sizes)) < MIN_SIZES_FOR_INTERVAL:
        return None
    fitted = law.level + law.slope * growth(sizes / law.largest, law.exponent)
    rng = np.random.default_rng(seed)
    drawn = rng.integers(prompts, size=(resamples, prompts))
    sums = [[row[drawn].sum(1) for row in counts] for counts in (numerators, denominators)]
    tops, bottoms = np.array(sums[0]).T, np.array(sums[1]).T
    resampled = np.divide(tops, bottoms, out=np.full(tops.shape, np.nan), where=bottoms > 0)
    resampled = resampled[np.isfinite(resampled).all(1)]
    deviations = np.sqrt(((values - fitted) ** 2).sum() / rng.chisquare(free, len(resampled)))
    noise = deviations[:, None] * rng.standard_normal(resampled.shape)
    return fitted + (resampled - values) + noise


def _fit_all(sizes: Array, values: Array) -> tuple[Array, Array, Array]:
    """(level, slope, exponent), each [R], of the best law for each row of `values` [R, P].

    Of exponents that fit equally well the smallest is taken.
    """
    largest, rows = sizes.max(), len(values)
    best = np.full(rows, np.inf)
    level, slope, exponent = np.zeros(rows), np.zeros(rows), np.zeros(rows)
    tiny = 1e-12 * (values**2).sum(1)
    for c in EXPONENTS if _fits_exponent(sizes) else EXPONENTS[:1]:
        design = np.stack([np.ones(len(sizes)), growth(sizes / largest, c)], 1)
        solved = values @ np.linalg.pinv(design).T
        error = ((values - solved @ design.T) ** 2).sum(1)
        better = error < best - tiny
        best[better], exponent[better] = error[better], c
        level[better], slope[better] = solved[better].T
    return level, slope, exponent


def _fits_exponent(sizes: Array) -> bool:
    return len(np.unique(sizes)) >= MIN_SIZES_FOR_EXPONENT and len(sizes) > 3
