"""Counts of one request: what every engine's log is read into. Sums only, so that requests can be pooled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from decode.common.errors import UserError


@dataclass(frozen=True)
class RequestCounts:
    """Rounds and drafts of one request, or of a server's whole life. Neither prefill nor bonus tokens are drafts."""

    rounds: int
    """Verification steps."""
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
class EngineLog:
    """One log. `per_request` is False for totals of a server, which have no intervals."""

    path: str
    engine: str
    requests: list[RequestCounts]
    per_request: bool = True
    gauges: dict[str, float] = field(default_factory=dict)
    """Figures of the last interval that the engine computed itself, by their name."""
    notes: tuple[str, ...] = ()


def checked(counts: RequestCounts, where: str) -> RequestCounts:
    """The counts. UserError if they contradict each other: then their fields are swapped, or mean something else."""
    histogram = counts.accepted_at
    wrong = (
        counts.accepted > counts.drafted,
        counts.drafted > 0 and counts.rounds == 0,
        len(histogram) > 0 and sum(histogram) != counts.accepted,
        any(n > counts.rounds for n in histogram),
    )
    if any(wrong):
        raise UserError(
            f"{where}: {counts.rounds} rounds, {counts.drafted} drafted and {counts.accepted} accepted tokens do not "
            "fit together: the log is damaged or of another version"
        )
    return counts


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
