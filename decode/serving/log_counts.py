"""Counts of one request or server, into which a /metrics dump, outputs.jsonl and answers are read: sums only, so that
they can be pooled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from decode.common.errors import UserError


@dataclass(frozen=True)
class RequestCounts:
    """Rounds and drafts of one request, or of a server's whole life. Neither prefill nor bonus tokens are drafts."""

    rounds: int  # verification steps
    drafted: int
    accepted: int
    """Drafted tokens that were accepted, without the token that the target adds in each round."""
    accepted_at: tuple[int, ...] = ()
    """Rounds that accepted position 1, 2, … K; empty if nothing says so."""
    reached_at: tuple[int, ...] = ()
    """Rounds that drafted position 1, 2, … K and accepted all before it; empty if nothing says so."""
    prompt: str = ""  # what names the prompt; empty: nothing does
    prompt_tokens: int | None = None
    output_ids: tuple[tuple[int, ...], ...] = ()
    """Token ids of its answers, one for each time that it was drawn; empty: they are not known."""


@dataclass(frozen=True)
class EngineLog:
    """One log. `per_request` is False for totals of a server, which have no intervals."""

    path: str
    engine: str
    requests: list[RequestCounts]
    per_request: bool = True
    gauges: dict[str, float] = field(default_factory=dict)
    """Figures that the engine computed itself, of its last interval; they cannot be pooled."""
    notes: tuple[str, ...] = ()


def checked(counts: RequestCounts, where: str) -> RequestCounts:
    """The counts. UserError if they contradict each other: then their fields are swapped, or mean something else."""
    at, rounds = counts.accepted_at, counts.rounds
    if (
        counts.accepted > counts.drafted
        or (counts.drafted > 0 and rounds == 0)
        or (at and sum(at) != counts.accepted)
        or any(n > rounds for n in at)
    ):
        raise UserError(
            f"{where}: {rounds} rounds, {counts.drafted} drafted and {counts.accepted} accepted tokens do not "
            "fit together: the log is damaged or of another version"
        )
    return counts


def pool(parts: Sequence[RequestCounts]) -> RequestCounts:
    """The sums of several counts. What one of them does not say, the sum does not say either."""

    def columns(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(map(sum, zip_longest(*rows, fillvalue=0))) if all(rows) else ()

    return RequestCounts(
        sum(x.rounds for x in parts),
        sum(x.drafted for x in parts),
        sum(x.accepted for x in parts),
        columns([x.accepted_at for x in parts]),
        columns([x.reached_at for x in parts]),
    )


def round_counts(rounds: Sequence[Sequence[int]]) -> RequestCounts:
    """The counts of these (drafted, accepted) rounds. IndexError for a round that accepted more than it drafted."""
    histograms: dict[int, list[int]] = {}
    for drafted, accepted in rounds:
        histograms.setdefault(drafted, [0] * (drafted + 1))[range(drafted + 1)[accepted]] += 1
    drafted, accepted = (sum(pair[i] for pair in rounds) for i in (0, 1))
    return RequestCounts(len(rounds), drafted, accepted, *by_position(histograms))


def by_position(histograms: Mapping[int, Sequence[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(accepted_at, reached_at) from {drafted tokens k: rounds that accepted 0, 1, … k of them}."""
    depth = max(histograms, default=0)
    accepted = [sum(sum(h[i:]) for h in histograms.values()) for i in range(1, depth + 1)]
    reached = [sum(sum(h[i:]) for k, h in histograms.items() if k > i) for i in range(depth)]
    return tuple(accepted), tuple(reached)
