"""The fit recovers known laws, its intervals cover the truth, and what cannot be known is not claimed."""

from typing import Any

import numpy as np
import pytest

from eval.metrics.bootstrap import Array
from eval.scaling import power_law
from eval.scaling.power_law import EXPONENTS, fit, forecast

SIZES = np.geomspace(600, 60_000, 5)
BOUNDS = (1.0, 5.0)


def counts(sizes: Array, values: Array, prompts: int = 30, seed: int = 0) -> tuple[Array, Array]:
    """(numerators, denominators) [P, prompts] with these ratios; easy and hard prompts are the same everywhere."""
    effect = np.random.default_rng(seed).normal(0, 0.3, prompts)
    rounds = np.full((len(sizes), prompts), 20.0)
    return rounds * (values[:, None] + effect - effect.mean()), rounds


@pytest.mark.parametrize(("a", "b", "c"), [(2.4, 8.0, 0.4), (3.1, 2.0, 0.16), (2.0, -5.0, 0.5)])
def test_a_known_law_is_recovered(a: float, b: float, c: float) -> None:
    law = fit(SIZES, a - b * SIZES**-c)
    assert (law.exponent, law.limit) == (pytest.approx(c), pytest.approx(a, abs=1e-6))
    assert law.slope / c * law.largest**c == pytest.approx(b, rel=1e-5)
    for size in (600, 7_000, 120_000, 10**7):
        assert law.at(size) == pytest.approx(a - b * size**-c)


def test_a_straight_line_over_the_logarithm_is_recovered() -> None:
    law = fit(SIZES, 0.3 + 0.05 * np.log(SIZES))
    assert (law.exponent, law.limit) == (0, None)
    assert law.at(120_000) == pytest.approx(0.3 + 0.05 * np.log(120_000))


def test_laws_meet_where_the_exponent_vanishes() -> None:
    """Catches a formula that is not the limit of the others, or loses its digits near it."""
    for ratio in (0.01, 0.5, 2.0):
        assert power_law.growth(ratio, 1e-7) == pytest.approx(np.log(ratio), rel=1e-5)


def test_every_exponent_of_the_grid_is_solved_exactly() -> None:
    """The fit is no worse than any law near it."""
    values = 2.4 - 8 * SIZES**-0.4 + np.array([0.01, -0.02, 0.01, 0.0, 0.01])
    law = fit(SIZES, values)

    def error(level: float, slope: float, exponent: float) -> float:
        fitted = level + slope * power_law.growth(SIZES / SIZES[-1], exponent)
        return float(((values - fitted) ** 2).sum())

    best = error(law.level, law.slope, law.exponent)
    for c in EXPONENTS:
        for up in (-1e-3, 0.0, 1e-3):
            assert error(law.level + up, law.slope, c) >= best - 1e-12
            assert error(law.level, law.slope * (1 + up), c) >= best - 1e-12


@pytest.mark.parametrize(
    ("a", "b", "c", "noise", "seeds"),
    [(2.4, 8.0, 0.4, 0.01, 1), (2.4, 2.0, 0.16, 0.02, 2), (2.0, 0.0, 0.4, 0.02, 2)],
)
def test_intervals_cover_the_truth(a: float, b: float, c: float, noise: float, seeds: int) -> None:
    """Catches intervals of prompts alone, which leave out the chance of training, and those of a fixed exponent."""
    sizes, covered, runs = np.repeat(SIZES, seeds), 0, 40
    truth = (a - b * 120_000**-c) / (a - b * 60_000**-c) - 1
    for run in range(runs):
        scatter = np.random.default_rng(run).normal(0, noise, len(sizes))
        tops, bottoms = counts(sizes, a - b * sizes**-c + scatter, seed=run)
        found = forecast(sizes, tops, bottoms, BOUNDS, run, resamples=300)
        assert found is not None
        assert found.gain.ci is not None
        covered += found.gain.ci[0] <= truth <= found.gain.ci[1]
    assert covered >= 0.85 * runs


def test_prompts_alone_would_be_too_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug of the test above: without the scatter around the law the intervals miss the truth."""

    class Silent:
        def __init__(self, seed: int):
            self.real = np.random.Generator(np.random.PCG64(seed))
            self.integers, self.chisquare = self.real.integers, self.real.chisquare

        def standard_normal(self, shape: tuple[int, ...]) -> Array:
            return np.zeros(shape)

    real = np.random.default_rng
    covered, truth = 0, (2.4 - 8 * 120_000**-0.4) / (2.4 - 8 * 60_000**-0.4) - 1
    for run in range(40):
        tops, bottoms = counts(
            SIZES, 2.4 - 8 * SIZES**-0.4 + real(run).normal(0, 0.01, 5), seed=run
        )
        with monkeypatch.context() as patch:
            patch.setattr(np.random, "default_rng", Silent)
            found = forecast(SIZES, tops, bottoms, BOUNDS, run, resamples=300)
        assert found is not None
        assert found.gain.ci is not None
        covered += found.gain.ci[0] <= truth <= found.gain.ci[1]
    assert covered < 0.6 * 40


def found_for(values: Array, sizes: Array = SIZES, alpha: bool = False, prompts: int = 30) -> Any:
    """The forecast of these values, of τ or of `alpha`."""
    tops, bottoms = counts(sizes, values, prompts)
    found = forecast(sizes, tops, bottoms, (0.0, 1.0) if alpha else BOUNDS, 0)
    assert found is not None
    return found


def test_what_is_flat_gains_nothing() -> None:
    found = found_for(np.full(5, 2.0))
    assert found.gain.value == pytest.approx(0)
    assert found.gain.ci == pytest.approx((0, 0), abs=1e-9)
    assert not found.identified
    assert found.law.limit is None


def test_what_falls_is_predicted_to_fall() -> None:
    """Catches a law that may only grow."""
    scatter = np.array([0.002, -0.002, 0.001, -0.001, 0.001])
    assert found_for(2.5 - 0.1 * np.log(SIZES / 600) + scatter).gain.ci[1] < 0


def test_up_and_down_is_not_clear() -> None:
    """Catches a narrow interval around a law that does not fit."""
    low, high = found_for(np.array([1.5, 2.5, 1.5, 2.5, 1.5])).gain.ci
    assert low < -0.1 < 0.1 < high


def test_two_sizes_give_a_line_and_no_interval() -> None:
    """Also with several seeds: nothing says whether the curve bends."""
    for sizes in (SIZES[[0, 4]], np.repeat(SIZES[[0, 4]], 3)):
        found = found_for(2.0 + 0.1 * np.log(sizes / 600), sizes)
        assert found.law.exponent == 0
        assert found.at_double.value == pytest.approx(2.0 + 0.1 * np.log(200))
        assert (found.gain.ci, found.at_double.ci, found.exponent_ci) == (None, None, None)


def test_three_sizes_give_a_wide_interval_and_no_exponent() -> None:
    sizes = SIZES[[0, 2, 4]]
    found = found_for(2.4 - 8 * sizes**-0.4, sizes)
    assert (found.law.exponent, found.exponent_ci, found.identified) == (0, None, False)
    assert found.gain.ci[0] < 0.0103 < found.gain.ci[1]


@pytest.mark.parametrize("what", ["one size", "no rounds"])
def test_nothing_to_fit(what: str) -> None:
    sizes = np.full(3, 600.0) if what == "one size" else SIZES
    tops, bottoms = counts(sizes, np.full(len(sizes), 2.0))
    assert forecast(sizes, tops, bottoms * (what == "one size"), BOUNDS, 0) is None


def test_one_prompt_gives_no_interval() -> None:
    assert found_for(2.4 - 8 * SIZES**-0.4, prompts=1).gain.ci is None


def test_predictions_stay_possible() -> None:
    """Catches α above 1 and a gain that no draft can have."""
    found = found_for(np.array([0.2, 0.45, 0.7, 0.9, 0.99]), alpha=True, prompts=2)
    assert found.at_double.value <= 1
    assert found.gain.value <= 1 / 0.9
    assert 0 <= found.at_double.ci[0] <= found.at_double.ci[1] <= 1


def test_a_level_of_zero_has_no_relative_gain() -> None:
    tops, bottoms = counts(SIZES, np.zeros(5))
    found = forecast(SIZES, tops * 0, bottoms, (0.0, 1.0), 0)
    assert found is not None
    assert found.gain == (None, None)
