"""Reads outputs.jsonl of eval/run.py, or a server's /metrics dump: figures of one log, and whether two are apart.

τ, α and acceptance rate are pooled over all rounds, and given as the mean of the requests' own figures too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np

from decode.common.errors import UserError
from decode.common.files import parse_jsonl, read_text
from decode.common.typed_json import Estimate, IntervalKey, to_json
from decode.serving.log_counts import EngineLog, RequestCounts, checked, pool, round_counts
from decode.serving.prometheus import DUMPS
from eval.metrics.bootstrap import Array, Ratio, mean_of_ratios, paired_difference
from eval.metrics.distribution_tests import POWER, run_permutation_test

NOTES = (
    "rounds are recorded before an answer is cut at its end",
    "report.json has τ cut at the end of answers, and α pooled.",
)
"""What to know of the figures of outputs.jsonl."""


def read_log(
    path: str, before: str = "", method: str = "", temperature: float | None = None
) -> EngineLog:
    """The log in a file; `before` is an earlier dump of the same server, which is subtracted. `method` and
    `temperature` choose answers as in `read_outputs`. UserError for a file of neither kind."""
    text = read_text(path)
    if text.lstrip().startswith("{"):
        if before:
            raise UserError(f"{path} holds answers: --before is for /metrics dumps, leave it out")
        return read_outputs(path, method, temperature)
    engines = [name for name in DUMPS if f"\n{name}:" in f"\n{text}"]
    if len(engines) != 1:
        raise UserError(
            f"{path} is neither outputs.jsonl nor a /metrics dump of vLLM, SGLang or llama.cpp: give one of these"
        )
    return DUMPS[engines[0]](path, before)


def read_outputs(path: str, method: str = "", temperature: float | None = None) -> EngineLog:
    """The answers in an outputs.jsonl of one method ("": the only one but plain decoding) at one temperature (None: the
    only one). UserError for other lines, for several methods or temperatures, and where none drafted a token."""
    lines = [(x, _line_counts(x, where)) for where, x in parse_jsonl(read_text(path), path)]
    chosen = [
        (x, counts)
        for x, counts in lines
        if (x.get("method") == method if method else x.get("method") != "plain")
        and temperature in (None, x.get("temperature"))
    ]
    seen = {f"{x.get('method', '')} {x.get('temperature', '')}".strip() for x, _ in chosen}
    if len(seen) > 1:  # their acceptance is not one figure
        raise UserError(
            f"{path} has lines of {' and '.join(sorted(seen))}: choose by --method and --temperature"
        )
    requests = [counts for _, counts in chosen]
    if all(r.drafted == 0 for r in requests):
        raise UserError(f"{path}: no answer drafted a token: choose a method that drafts")
    return EngineLog(path, "draftsmith", requests, notes=NOTES)


def _line_counts(line: Any, where: str) -> RequestCounts:
    try:
        counts = round_counts([(drafted, accepted) for drafted, accepted in line["rounds"]])
        name, ids = f"{line.get('task', '')}/{line.get('id', '')}", line.get("prompt_ids")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise UserError(
            f"{where} is no line of outputs.jsonl: its rounds are [drafted, accepted]"
        ) from None
    size = len(ids) if isinstance(ids, list) else None
    return replace(checked(counts, where), prompt=name, prompt_tokens=size)


SEED = 0
LEVEL = 0.05
"""Two numbers are apart if p is below it and their interval, of 1 − LEVEL, does not hold 0."""

Pairs = tuple[list[RequestCounts], list[RequestCounts]]


def ratios(requests: Sequence[RequestCounts]) -> dict[str, Ratio]:
    """{figure: its ratio over the requests}; a figure that the log does not give is left out. τ counts the token that
    the target adds: rounds + accepted ÷ rounds. α needs to know which positions were reached."""
    counts = np.array([(r.drafted, r.accepted) for r in requests], dtype=np.int64).reshape(-1, 2)
    drafted, accepted = counts.T
    found = {"acceptance_rate": Ratio(accepted, drafted)} if drafted.any() else {}
    rounds = np.array([r.rounds for r in requests])
    found["tau"] = Ratio(rounds + accepted, rounds)
    reached = positions([r.reached_at for r in requests], rounds)
    if reached is not None:
        found["alpha"] = Ratio(accepted, reached.sum(1))
    return found


def positions(rows: Sequence[Sequence[int]], rounds: Array) -> Array | None:
    """The rows of counts by position as [n, K]; None if a request that has rounds does not give them."""
    depth = max(map(len, rows), default=0)
    missing = [len(row) == 0 and n > 0 for row, n in zip(rows, rounds, strict=True)]
    if depth == 0 or any(missing):
        return None
    return np.array([[*row, *[0] * (depth - len(row))] for row in rows], dtype=np.int64)


@dataclass(frozen=True)
class LogFigure:
    """One figure of a log; without a value where the log does not give it, and with intervals only by request."""

    pooled: Annotated[Estimate, IntervalKey("ci")] = Estimate()
    mean_of_requests: Estimate = Estimate()


@dataclass(frozen=True)
class PositionFigures:
    """How often a position was accepted, of all rounds and of those that reached it."""

    position: int
    unconditional: Estimate
    alpha: Estimate


@dataclass(frozen=True)
class LogScore:
    """The figures of one log."""

    log: EngineLog
    rounds: int
    drafted: int
    accepted: int
    figures: dict[str, LogFigure]
    """By "tau", "alpha" and "acceptance_rate"; one that the log does not give is left out."""
    by_position: list[PositionFigures]  # empty if the log has no positions

    @property
    def requests(self) -> int | None:
        """None: the log is totals of a server."""
        return len(self.log.requests) if self.log.per_request else None

    def to_json(self) -> dict[str, Any]:
        counts = {"rounds": self.rounds, "drafted": self.drafted, "accepted": self.accepted}
        return {
            "log": self.log.path,
            "engine": self.log.engine,
            "requests": self.requests,
            "counts": counts,
            **to_json(self.figures),
            "by_position": to_json(self.by_position),
            "gauges": self.log.gauges,
            "notes": list(self.log.notes),
        }


def score(log: EngineLog) -> LogScore:
    requests, total, figures = log.requests, pool(log.requests), {}
    for name, ratio in ratios(requests).items():
        means = mean_of_ratios(*ratio, SEED) if log.per_request else Estimate()
        figures[name] = LogFigure(ratio.estimate(SEED), means)
    by_position = score_positions(requests)
    return LogScore(log, total.rounds, total.drafted, total.accepted, figures, by_position)


def score_positions(requests: Sequence[RequestCounts]) -> list[PositionFigures]:
    rounds = np.array([r.rounds for r in requests])
    accepted = positions([r.accepted_at for r in requests], rounds)
    reached = positions([r.reached_at for r in requests], rounds)
    return [
        PositionFigures(
            i + 1,
            Ratio(top, rounds).estimate(SEED),
            Estimate() if reached is None else Ratio(top, reached[:, i]).estimate(SEED),
        )
        for i, top in enumerate([] if accepted is None else accepted.T)
    ]


# ---- two logs ----


def match_prompts(a: EngineLog, b: EngineLog) -> Pairs:
    """The requests of both logs, prompt by prompt, by the names of the prompts. UserError if they are not of the same
    ones."""
    for log in (a, b):
        if not log.per_request:
            raise UserError(
                f"{log.path} holds totals of a server: two logs are compared by request, give outputs.jsonl"
            )
    first, second = map(_by_prompt, (a, b))
    alone = sorted(first.keys() ^ second.keys())
    if alone:
        raise UserError(
            f"{len(alone)} prompts are in one of {a.path} and {b.path} alone, the first is {alone[0][:40]!r}: "
            "give logs of the same prompts"
        )
    return list(first.values()), [second[name] for name in first]


def _by_prompt(log: EngineLog) -> dict[str, RequestCounts]:
    found = {x.prompt: x for x in log.requests}
    if len(found) < len(log.requests):
        raise UserError(f"{log.path} has a prompt twice: give one answer to each prompt")
    return found


@dataclass(frozen=True)
class LogComparison:
    """What two logs show of their difference."""

    prompts: int
    differences: dict[str, Estimate]
    """By the names of figures, what that of the first log has more than that of the second."""
    p_value: float  # of the difference in τ
    power: float
    detectable_difference: float | None
    """In τ: so many prompts show it with a probability of `power`. None: no number of swaps can give LEVEL."""
    prompts_needed: int | None  # by the difference in τ

    @property
    def verdict(self) -> str:
        """One sentence on the two values of τ."""
        tau, n, detects = self.differences["tau"], self.prompts, self.detectable_difference
        difference = tau.value
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
        apart = {name: {"difference": x.value, "ci": x.ci} for name, x in self.differences.items()}
        return {**to_json(self), "differences": apart, "verdict": self.verdict}


def compare(a: EngineLog, b: EngineLog) -> LogComparison:
    """What the logs show of their difference a − b in τ, with the power of the test, and the same figures' others."""
    pair = match_prompts(a, b)
    first, second = (ratios(requests) for requests in pair)
    shared = sorted(first.keys() & second.keys())
    differences = {name: paired_difference(first[name], second[name], SEED) for name in shared}
    n = len(pair[0])
    counts = [np.array([(r.rounds, r.accepted) for r in requests]) for requests in pair]
    if min(x[:, 0].sum() for x in counts) == 0:
        raise UserError("one of the logs has no round: there is nothing to compare")
    test = run_permutation_test(counts[0], counts[1], level=LEVEL, seed=SEED).parts[-1]
    detects = test.detects if 2.0 ** (1 - n) < LEVEL and test.error > 0 else None
    needed, tau = None, differences["tau"].value
    if detects is not None and tau:
        needed = math.ceil(n * (detects / abs(tau)) ** 2)
    return LogComparison(n, differences, test.p_value, POWER, detects, needed)
