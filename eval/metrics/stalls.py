"""Which passes over a turn stalled. No second is changed: such a turn is measured again, or does not count.

A turn is one batch of prompts decoded by every method; each time that a method decodes it is a pass. The seconds of a
pass are taken to be its work × what the method costs × how slow this turn is for all methods alike, and the last two
are fitted by medians. So prompts whose drafts are accepted less, long prompts and a machine that drifts are no
stalls: the first take more rounds, the others slow every method of the turn.

Speed-ups stay ratios of sums. A median of the prompts' ratios would not mind a stall either, but it estimates
something else, since prompts differ in acceptance and length. An engine whose rounds have no clock (those of other
engines) and vary in cost can hide a stall smaller than that spread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eval.metrics.bootstrap import Array

LEAST_SHARE = 0.05  # A stall makes a pass at least this much longer
LEAST_SECONDS = 0.05
"""And takes at least these seconds. A shorter one is left in, as part of how machines are."""
DEVIATIONS = 5.0
"""And is this many standard deviations of the method's other passes away, by their median absolute deviation."""
LONG_ROUND = 8.0  # A round that takes this many times what its like take holds a stall
OWN_COST_SHARE = 0.25
"""A method with such rounds in a larger share of its passes does something in them: they are its cost, no stall."""
SWEEPS = 10


@dataclass(frozen=True)
class PassTime:
    """What the clock said of one pass, in seconds of the whole batch."""

    prefill: float  # 0 where an engine does not tell it from decoding
    decode: float
    rounds: tuple[tuple[int, float], ...] = ()
    """(drafted tokens, seconds) of each round of the row that had most; empty where rounds have no clock."""
    work: float = 0.0  # forward passes of the target where rounds have no clock


def stalled_passes(turns: Sequence[Sequence[PassTime | None]]) -> Array:
    """[turns, passes]: which stalled; the same methods in the same order in every turn, None for one that failed.

    A turn that was repeated may stand here several times, since what slows all methods is estimated for each.
    """
    shape = len(turns), len(turns[0]) if turns else 0
    if 0 in shape:
        return np.zeros(shape, dtype=bool)
    prefill, decode, work, long = (np.full(shape, np.nan) for _ in range(4))
    typical = [_typical_rounds([turn[j] for turn in turns]) for j in range(shape[1])]
    for i, turn in enumerate(turns):
        for j, x in enumerate(turn):
            if x is not None:
                prefill[i, j], decode[i, j] = x.prefill, x.decode
                work[i, j] = sum(typical[j][drafted] for drafted, _ in x.rounds) or x.work
                long[i, j] = _seconds_of_long_rounds(x, typical[j])
    in_rounds = _is_stall(long, prefill + decode - long)
    own_cost = in_rounds.sum(0) > np.maximum(1, OWN_COST_SHARE * len(turns))
    in_rounds = in_rounds & ~own_cost
    others = decode - np.where(in_rounds, long, 0.0)
    found: Array = (
        in_rounds
        | _far_above_the_fit(prefill, np.ones_like(prefill), others)
        | _far_above_the_fit(others, work, prefill)
    )
    return found


def _typical_rounds(passes: Sequence[PassTime | None]) -> dict[int, float]:
    """{drafted tokens: median seconds of a method's rounds that drafted so many}."""
    seconds: dict[int, list[float]] = {}
    for one in passes:
        for drafted, value in one.rounds if one is not None else ():
            seconds.setdefault(drafted, []).append(value)
    return {drafted: float(np.median(values)) for drafted, values in seconds.items()}


def _seconds_of_long_rounds(one: PassTime, typical: dict[int, float]) -> float:
    """What the pass's long rounds took beyond their like; its other rounds say how slow it is as a whole."""
    if not one.rounds:
        return 0.0
    expected = np.array([typical[drafted] for drafted, _ in one.rounds])
    seconds = np.array([value for _, value in one.rounds])
    expected = expected * np.median(seconds / expected) if expected.all() else expected
    return float((seconds - expected)[seconds > LONG_ROUND * expected].sum())


def _is_stall(extra: Array, rest: Array) -> Array:
    return (extra > LEAST_SECONDS) & (extra > LEAST_SHARE * rest)


def _far_above_the_fit(seconds: Array, work: Array, rest: Array) -> Array:
    """Which of `seconds` [turns, passes] are; `rest` is the other part of each pass."""
    usable = (seconds > 0) & (work > 0)
    passes = len(seconds[0])
    if passes < 2 or not usable.any():
        return np.zeros(seconds.shape, dtype=bool)
    x = np.full(seconds.shape, np.nan)
    np.log(np.divide(seconds, work, out=x, where=usable), out=x, where=usable)
    turn, method = np.zeros((len(x), 1)), _median(x, 0)
    for _ in range(SWEEPS):
        turn = _median(x - method, 1, lower=True)  # of two passes, the one that did not stall
        method = _median(x - turn, 0)
    noise = _median(np.abs(x - method - _median(x - method, 1)), 0)
    deviation = 1.4826 * noise * np.sqrt(passes / (passes - 1))
    expected = np.exp(turn + method) * work
    far: Array = (x - turn - method > DEVIATIONS * deviation) & _is_stall(
        seconds - expected, expected + rest
    )
    return far


def _median(values: Array, axis: int, *, lower: bool = False) -> Array:
    """Over the values that are there, with the axis kept; 0 where there is none. `lower`: of two in the middle."""
    ordered = np.sort(values, axis)  # NaN comes last
    count = np.isfinite(values).sum(axis, keepdims=True)
    low = np.take_along_axis(ordered, np.maximum(count - 1, 0) // 2, axis)
    high = (
        low
        if lower
        else np.take_along_axis(ordered, np.minimum(count // 2, np.maximum(count - 1, 0)), axis)
    )
    return np.where(count > 0, (low + high) / 2, 0.0)
