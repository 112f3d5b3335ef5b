"""Counts of one request: what every engine's log is read into. Sums only, so that requests can be pooled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from decode.common.errors import UserError


@dataclass(frozen=True)
class RequestCounts:
    """Rounds and drafts of one request, or of a server's whole life. Neither prefill nor bonus tokens are drafts."""

    rounds: int | None
    """Verification steps; None: the log does not say."""
    drafted: int
    accepted: int
    """Drafted tokens that were accepted, without the token that the target adds in each round."""
    accepted_at: tuple[int, ...] = ()
    """Rounds that accepted position 1, 2, … K; empty if the log does not say."""
    reached_at: tuple[int, ...] = ()
    """Rounds that drafted position 1, 2, … K and accepted all before it; empty if the log does not say."""
    prompt: str = ""
    """What names the prompt in the log; empty: nothing does."""
    prompt_tokens: int | None = None
    engine_length: float | None = None
    """The acceptance length that the engine itself prints for this request."""


@dataclass(frozen=True)
class FailedRequest:
    """A request without an answer. It is in no figure."""

    where: str
    reason: str
    index: int
    """Its place among all requests of the log, from 0."""
    prompt: str = ""


@dataclass(frozen=True)
class EngineLog:
    """One log. `per_request` is False for totals of a server, which have no intervals."""

    path: str
    engine: str
    requests: list[RequestCounts]
    per_request: bool = True
    gauges: dict[str, float] = field(default_factory=dict)
    """Figures that the engine computed itself, of `gauges_of`; they cannot be pooled."""
    gauges_of: str = "last interval"
    given: dict[str, float] = field(default_factory=dict)
    """{figure of ours: value} that the engine printed for all that the log is about."""
    notes: tuple[str, ...] = ()
    failed: tuple[FailedRequest, ...] = ()


def checked(counts: RequestCounts, where: str) -> RequestCounts:
    """The counts. UserError if they contradict each other: then their fields are swapped, or mean something else."""
    histogram, rounds = counts.accepted_at, counts.rounds
    wrong = (
        counts.accepted > counts.drafted,
        counts.drafted > 0 and rounds == 0,
        len(histogram) > 0 and sum(histogram) != counts.accepted,
        rounds is not None and any(n > rounds for n in histogram),
    )
    if any(wrong):
        raise UserError(
            f"{where}: {counts.rounds} rounds, {counts.drafted} drafted and {counts.accepted} accepted tokens do not "
            "fit together: the log is damaged or of another version"
        )
    return counts


def check_answer(counts: RequestCounts, tokens: int, all_steps: bool, where: str) -> None:
    """UserError if an answer of `tokens` cannot have had these counts.

    Each round adds its accepted tokens and one more to that of prefill. Only the last round may be cut, at the end of
    the answer. With `all_steps` every step of the answer is among the rounds, so that they have to suffice for it.
    """
    if not counts.rounds:
        return
    depth = max(len(counts.accepted_at), -(-counts.drafted // counts.rounds))
    made, most = 1 + counts.rounds + counts.accepted, 1 + counts.rounds * (depth + 1)
    if made - depth > tokens or (all_steps and tokens > most):
        raise UserError(
            f"{where}: {counts.rounds} rounds with {counts.accepted} accepted of {counts.drafted} drafted tokens "
            f"contradict the answer's length of {tokens}: the counts are of another request, or the log is damaged"
        )


def pool(parts: Sequence[RequestCounts]) -> RequestCounts:
    """The sums of several counts. What one of them does not say, the sum does not say either."""
    rounds = [x.rounds for x in parts]
    return RequestCounts(
        None if None in rounds else sum(n for n in rounds if n is not None),
        sum(x.drafted for x in parts),
        sum(x.accepted for x in parts),
        _sum_columns([x.accepted_at for x in parts]),
        _sum_columns([x.reached_at for x in parts]),
    )


def _sum_columns(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(*rows, fillvalue=0))) if all(rows) else ()


def by_position(
    histograms: Mapping[int, Sequence[int]],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(accepted_at, reached_at) from {drafted tokens k: rounds that accepted 0, 1, … k of them}."""
    depth = max(histograms, default=0)
    accepted = [sum(sum(h[i:]) for h in histograms.values()) for i in range(1, depth + 1)]
    reached = [sum(sum(h[i:]) for k, h in histograms.items() if k > i) for i in range(depth)]
    return tuple(accepted), tuple(reached)


def read_count(values: Mapping[str, Any], key: str, where: str) -> int:
    """values[key]. UserError unless it is a whole number of at least 0."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value % 1:
        raise UserError(f"{where}: {key} is {str(value)[:40]!r}, not a count")
    return int(value)


def read_histogram(value: Any, key: str, where: str) -> list[int]:
    """A list of counts. UserError for anything else."""
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: {key} is {str(value)[:40]!r}, not a list of counts")
    return [read_count({key: x}, key, where) for x in value]
