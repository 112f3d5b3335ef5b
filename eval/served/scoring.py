"""Figures of engines' logs: of one log, and whether two logs of the same prompts are apart.

τ, α and acceptance rate are pooled over all rounds, and given as the mean of the requests' own figures too.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import numpy as np

from decode.common.errors import UserError
from decode.serving.log_counts import EngineLog, RequestCounts
from decode.serving.logs import READERS
from eval.metrics.bootstrap import (
    Array,
    Ratio,
    mean_of_ratios,
    paired_difference,
    ratio_interval,
    ratio_or_none,
)
from eval.metrics.distribution_tests import POWER, run_permutation_test

SEED = 0
LEVEL = 0.05
"""Two numbers are apart if p is below it and their interval, of 1 − LEVEL, does not hold 0."""

Pairs = tuple[list[RequestCounts], list[RequestCounts]]
Interval = tuple[float, float] | None


def ratios(requests: Sequence[RequestCounts]) -> dict[str, tuple[Array, Array]]:
    """{figure: (numerators, denominators) [n requests]}; a figure that the log does not give is left out. τ counts the
    token that the target adds: rounds + accepted ÷ rounds. α needs to know which positions were reached."""
    counts = np.array([(r.drafted, r.accepted) for r in requests], dtype=np.int64).reshape(-1, 2)
    drafted, accepted = counts.T
    found = {"acceptance_rate": (accepted, drafted)} if drafted.any() else {}
    rounds = known_rounds(requests)
    if rounds is None:
        return found
    found["tau"] = rounds + accepted, rounds
    reached = positions([r.reached_at for r in requests], rounds)
    if reached is not None:
        found["alpha"] = accepted, reached.sum(1)
    return found


def known_rounds(requests: Sequence[RequestCounts]) -> Array | None:
    """Rounds of the requests [n]; None if one of them does not say, or if there is no request."""
    rounds = [r.rounds for r in requests]
    return None if None in rounds or not rounds else np.array(rounds)


def positions(rows: Sequence[Sequence[int]], rounds: Array) -> Array | None:
    """The rows of counts by position as [n, K]; None if a request that has rounds does not give them."""
    depth = max(map(len, rows), default=0)
    missing = [len(row) == 0 and n > 0 for row, n in zip(rows, rounds, strict=True)]
    if depth == 0 or any(missing):
        return None
    return np.array([[*row, *[0] * (depth - len(row))] for row in rows], dtype=np.int64)


@dataclass(frozen=True)
class LogFigure:
    """One figure of a log; None where the log does not give it, and intervals only by request."""

    pooled: float | None
    ci: Interval = None
    mean_of_requests: float | None = None
    mean_of_requests_ci: Interval = None


@dataclass(frozen=True)
class PositionFigures:
    """How often a position was accepted, of all rounds and of those that reached it."""

    position: int
    unconditional: float | None
    unconditional_ci: Interval
    alpha: float | None
    alpha_ci: Interval


@dataclass(frozen=True)
class LogScore:
    """The figures of one log."""

    log: EngineLog
    rounds: int | None
    drafted: int
    accepted: int
    figures: dict[str, LogFigure]
    """By "tau", "alpha" and "acceptance_rate"; one that the log does not give is left out."""
    by_position: list[PositionFigures]  # empty if the log has no positions
    engine_mean_length: float | None  # of the lengths that the engine gives for each request

    @property
    def requests(self) -> int | None:
        """None: the log is totals of a server."""
        return len(self.log.requests) if self.log.per_request else None

    @property
    def notes(self) -> list[str]:
        return [*self.log.notes, READERS[self.log.engine].figures]

    def to_json(self) -> dict[str, Any]:
        failed = self.log.failed
        counts = {"rounds": self.rounds, "drafted": self.drafted, "accepted": self.accepted}
        return {
            "log": self.log.path,
            "engine": self.log.engine,
            "requests": self.requests,
            "failed": [{"where": x.where, "reason": x.reason, "prompt": x.prompt} for x in failed],
            "counts": counts,
            **{name: asdict(figure) for name, figure in self.figures.items()},
            "by_position": [asdict(x) for x in self.by_position],
            "engine_mean_length": self.engine_mean_length,
            "gauges": self.log.gauges,
            "gauges_of": self.log.gauges_of,
            "notes": self.notes,
        }


def score(log: EngineLog) -> LogScore:
    requests, rounds = log.requests, known_rounds(log.requests)
    figures = {name: LogFigure(value) for name, value in log.given.items()}
    for name, (top, bottom) in ratios(requests).items():
        means = mean_of_ratios(top, bottom, SEED) if log.per_request else (None, None)
        pooled = ratio_or_none(top.sum(), bottom.sum())
        figures[name] = LogFigure(pooled, ratio_interval(top, bottom, SEED), *means)
    lengths = [r.engine_length for r in requests if isinstance(r.engine_length, int | float)]
    return LogScore(
        log,
        None if rounds is None else int(rounds.sum()),
        sum(r.drafted for r in requests),
        sum(r.accepted for r in requests),
        figures,
        [] if rounds is None else score_positions(requests, rounds),
        ratio_or_none(sum(lengths), len(lengths)),
    )


def score_positions(requests: Sequence[RequestCounts], rounds: Array) -> list[PositionFigures]:
    accepted = positions([r.accepted_at for r in requests], rounds)
    reached = positions([r.reached_at for r in requests], rounds)
    return [
        PositionFigures(
            i + 1,
            ratio_or_none(top.sum(), rounds.sum()),
            ratio_interval(top, rounds, SEED),
            None if reached is None else ratio_or_none(top.sum(), reached[:, i].sum()),
            None if reached is None else ratio_interval(top, reached[:, i], SEED),
        )
        for i, top in enumerate([] if accepted is None else accepted.T)
    ]


# ---- two logs ----


def match_prompts(a: EngineLog, b: EngineLog) -> Pairs:
    """The requests of both logs, prompt by prompt. UserError if they are not of the same prompts. By the names of the
    prompts if both logs have them, else by their order; then the lengths of the prompts have to agree where both logs
    have them. A prompt whose request failed in one log is left out."""
    for log in (a, b):
        if not log.per_request:
            raise UserError(
                f"{log.path} holds totals of a server: two logs are compared by request, give responses"
            )
    failed = {x.prompt for log in (a, b) for x in log.failed}
    named = all(failed) and all(x.prompt for log in (a, b) for x in log.requests)
    first, second = (_by_prompt(log, named) for log in (a, b))
    totals = [len(log.requests) + len(log.failed) for log in (a, b)]
    alone = sorted((first.keys() ^ second.keys()) - failed)
    if named and alone:
        raise UserError(
            f"{len(alone)} prompts are in one of {a.path} and {b.path} alone, the first is {alone[0][:40]!r}: "
            "give logs of the same prompts"
        )
    if not named and totals[0] != totals[1]:
        raise UserError(
            f"{a.path} has {totals[0]} requests and {b.path} {totals[1]}: give logs of the same prompts"
        )
    shared = [name for name in first if name in second]
    if not shared:
        raise UserError(f"no prompt was answered in both {a.path} and {b.path}: ask again")
    for name in () if named else shared:
        lengths = [side[name].prompt_tokens for side in (first, second)]
        if None not in lengths and lengths[0] != lengths[1]:
            raise UserError(
                f"request {name} has {lengths[0]} prompt tokens in {a.path} and {lengths[1]} in {b.path}: "
                "give logs of the same prompts in the same order"
            )
    return [first[name] for name in shared], [second[name] for name in shared]


def _by_prompt(log: EngineLog, named: bool) -> dict[str, RequestCounts]:
    """The requests by the names of their prompts, or by their numbers among all requests, from 1."""
    gone = {x.index for x in log.failed}
    numbers = (str(i + 1) for i in count() if i not in gone)
    found = {x.prompt if named else number: x for x, number in zip(log.requests, numbers)}  # noqa: B905 (endless)
    if len(found) < len(log.requests):
        raise UserError(f"{log.path} has a prompt twice: give one response for each prompt")
    return found


@dataclass(frozen=True)
class LogDifference:
    """What a figure of the first log has more than that of the second."""

    difference: float | None
    ci: Interval


@dataclass(frozen=True)
class LogComparison:
    """What two logs show of their difference."""

    prompts: int
    differences: dict[str, LogDifference]  # by the names of figures
    p_value: float  # of the difference in τ
    power: float
    detectable_difference: float | None
    """In τ: so many prompts show it with a probability of `power`. None: no number of swaps can give LEVEL."""
    prompts_needed: int | None  # by the difference in τ

    @property
    def verdict(self) -> str:
        """One sentence on the two values of τ."""
        tau, n, detects = self.differences["tau"], self.prompts, self.detectable_difference
        difference = tau.difference
        if tau.ci is None or detects is None:
            if difference == 0:
                return "these two numbers are the same: the difference is 0"
            return f"{n} prompts are too few to tell these two numbers apart: the difference is {difference:.3f}"
        low, high = tau.ci
        where = f"[{low:.3f}, {high:.3f}]"
        if self.p_value < LEVEL and not low <= 0 <= high:
            text = f"these two numbers are apart: the difference {difference:.3f} has the interval"
            return f"{text} {where}, p = {self.p_value:.2g}"
        text = f"these two numbers are not apart: the difference {difference:.3f} is within {where}"
        needed = self.prompts_needed
        more = "" if needed is None else f"{needed:,} prompts would show it; "
        return f"{text}, p = {self.p_value:.2g}; {more}these {n} would show one of {detects:.3f}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def compare(a: EngineLog, b: EngineLog) -> LogComparison:
    """What the logs show of their difference a − b in τ, with the power of the test, and the same figures' others."""
    pair = match_prompts(a, b)
    first, second = (ratios(requests) for requests in pair)
    for log, found in ((a, first), (b, second)):
        if "tau" not in found:
            raise UserError(
                f"{log.path} does not tell the rounds, so τ cannot be compared: give responses"
            )
    differences = {}
    for name in sorted(first.keys() & second.keys()):
        apart = paired_difference(Ratio(*first[name]), Ratio(*second[name]), SEED)
        differences[name] = LogDifference(*apart)
    n = len(pair[0])
    counts = [np.array([(r.rounds, r.accepted) for r in requests]) for requests in pair]
    if min(x[:, 0].sum() for x in counts) == 0:
        raise UserError("one of the logs has no round: there is nothing to compare")
    test = run_permutation_test(counts[0], counts[1], level=LEVEL, seed=SEED).parts[-1]
    detects = test.detects if 2.0 ** (1 - n) < LEVEL and test.error > 0 else None
    needed, tau = None, differences["tau"].difference
    if detects is not None and tau:
        needed = math.ceil(n * (detects / abs(tau)) ** 2)
    return LogComparison(n, differences, test.p_value, POWER, detects, needed)
