"""Counts of one request, into which every engine's log is read: sums only, so that requests can be pooled.

Some are behind a line that a server printed: it has whole numbers of drafted and accepted tokens, and beside them
1 + accepted ÷ rounds and, for each position, accepted there ÷ rounds, rounded to two and three digits. `recover` finds
which numbers of rounds print as these figures.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal

import numpy as np

from decode.common.errors import UserError

Format = Literal[
    "auto", "vllm", "sglang", "llamacpp", "draftsmith"
]  # who wrote a log; auto: found out
Response = Mapping[str, Any]  # an engine's answer to one request, as it came


@dataclass(frozen=True)
class RequestCounts:
    """Rounds and drafts of one request, or of a server's whole life. Neither prefill nor bonus tokens are drafts."""

    rounds: int | None  # verification steps; None: the log does not say
    drafted: int
    accepted: int
    """Drafted tokens that were accepted, without the token that the target adds in each round."""
    accepted_at: tuple[int, ...] = ()
    """Rounds that accepted position 1, 2, … K; empty if the log does not say."""
    reached_at: tuple[int, ...] = ()
    """Rounds that drafted position 1, 2, … K and accepted all before it; empty if the log does not say."""
    prompt: str = ""  # what names the prompt in the log; empty: nothing does
    prompt_tokens: int | None = None
    engine_length: float | None = None
    """The acceptance length that the engine itself prints for this request."""
    output_ids: tuple[tuple[int, ...], ...] = ()
    """Token ids of its answers, one for each time that it was drawn; empty: the log does not have them."""


@dataclass(frozen=True)
class FailedRequest:
    """A request without an answer. It is in no figure."""

    where: str
    reason: str
    index: int  # its place among all requests of the log, from 0
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
    at, rounds = counts.accepted_at, counts.rounds
    if (
        counts.accepted > counts.drafted
        or (counts.drafted > 0 and rounds == 0)
        or (at and sum(at) != counts.accepted)
        or (rounds is not None and any(n > rounds for n in at))
    ):
        raise UserError(
            f"{where}: {rounds} rounds, {counts.drafted} drafted and {counts.accepted} accepted tokens do not "
            "fit together: the log is damaged or of another version"
        )
    return counts


def check_answer(counts: RequestCounts, tokens: int | None, all_steps: bool, where: str) -> None:
    """UserError if an answer of `tokens` (None: it is not known) cannot have had these counts. Each round adds its
    accepted tokens and one more to that of prefill. Only the last round may be cut, at the end of the answer. With
    `all_steps` every step of the answer is among the rounds, so that they have to suffice for it."""
    if not counts.rounds or tokens is None:
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

    def columns(rows: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(map(sum, zip_longest(*rows, fillvalue=0))) if all(rows) else ()

    rounds = [x.rounds for x in parts]
    return RequestCounts(
        None if None in rounds else sum(n for n in rounds if n is not None),
        sum(x.drafted for x in parts),
        sum(x.accepted for x in parts),
        columns([x.accepted_at for x in parts]),
        columns([x.reached_at for x in parts]),
    )


def by_position(histograms: Mapping[int, Sequence[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(accepted_at, reached_at) from {drafted tokens k: rounds that accepted 0, 1, … k of them}."""
    depth = max(histograms, default=0)
    accepted = [sum(sum(h[i:]) for h in histograms.values()) for i in range(1, depth + 1)]
    reached = [sum(sum(h[i:]) for k, h in histograms.items() if k > i) for i in range(depth)]
    return tuple(accepted), tuple(reached)


# ---- fields of a response ----


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


def part(value: Any, key: str) -> Response:
    """value[key] if both are JSON objects; else {}."""
    found = value.get(key) if isinstance(value, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def first_choice(body: Response) -> Response:
    choices = body.get("choices")
    return part({"choice": choices[0]}, "choice") if isinstance(choices, list) and choices else {}


def answer_tokens(body: Response, usage: Response) -> int | None:
    """Tokens of the answer by its `usage`; None if that does not say, or counts several answers."""
    choices, length = body.get("choices"), usage.get("completion_tokens")
    several = isinstance(choices, list) and len(choices) > 1
    return length if type(length) is int and not several else None


def prompt_tokens(usage: Response) -> int | None:
    length = usage.get("prompt_tokens")
    return length if isinstance(length, int) else None


# ---- lines that a server printed ----

LENGTH_ERROR, RATE_ERROR = 0.005 + 1e-9, 0.0005 + 1e-9
"""Half of the last digit of a mean length, and of a rate by position."""


@dataclass(frozen=True)
class PrintedLine:
    drafted: int
    accepted: int
    length: float | None = None
    """1 + accepted ÷ rounds with a draft, to two digits; None: not printed."""
    rates: tuple[float, ...] = ()
    """Accepted at position 1, 2, … ÷ rounds with a draft, to three digits; empty: not printed."""


@dataclass(frozen=True)
class Recovered:
    counts: RequestCounts
    """With the rounds that drafted something; None if the line does not tell them."""
    fewest: int = 0  # between this and `most` lies the number of rounds
    most: int = 0


def recover(line: PrintedLine, where: str) -> Recovered:
    """The counts of a line. UserError if no number of rounds prints as its figures. If several do, the rounds are those
    in which each drafts all positions, or else those in the middle. α is given only where rounds and positions are
    certain and every round drafted all positions."""
    drafted, accepted, depth = line.drafted, line.accepted, len(line.rates)
    if line.length is None and accepted <= drafted:
        return Recovered(RequestCounts(None, drafted, accepted))
    # Each round drafted at least one token, and at most one for each position.
    rounds = np.arange(-(-drafted // depth) if depth else 1, drafted + 1)
    rates = np.array(line.rates)[:, None]
    # Least and greatest accepted tokens [K, n] that print as each rate over each number of rounds.
    low = np.ceil(np.maximum(rates - RATE_ERROR, 0) * rounds).astype(np.int64)
    high = np.floor((rates + RATE_ERROR) * rounds).astype(np.int64)
    fits = abs(1 + accepted / rounds - (line.length or 0)) <= LENGTH_ERROR
    if depth:
        fits &= (low <= high).all(0) & (low.sum(0) <= accepted) & (accepted <= high.sum(0))
    possible = rounds[fits]
    if accepted > drafted or len(possible) == 0:
        length = "" if line.length is None else f" at a mean length of {line.length:g}"
        shown = f" and rates {', '.join(f'{x:g}' for x in line.rates)}" if depth else ""
        raise UserError(
            f"{where}: {accepted} accepted of {drafted} drafted tokens{length}{shown} do not fit together: the line is "
            "damaged or of another version"
        )
    full = drafted // depth if depth and drafted % depth == 0 else -1
    chosen = full if full in possible else int(possible[len(possible) // 2])
    low, high = low[:, chosen - rounds[0]], high[:, chosen - rounds[0]]
    low, high = (
        np.maximum(low, accepted - high.sum() + high),
        np.minimum(high, accepted - low.sum() + low),
    )
    at = np.clip(np.round(rates[:, 0] * chosen).astype(np.int64), low, high)
    for i in range(depth):  # moved within what their rates allow until they add up
        at[i] = np.clip(at[i] + accepted - at.sum(), low[i], high[i])
    accepted_at = tuple(at.tolist())
    certain = depth > 0 and len(possible) == 1 and bool((low == high).all())
    reached = (chosen, *accepted_at[:-1]) if certain and chosen * depth == drafted else ()
    counts = RequestCounts(chosen, drafted, accepted, accepted_at, reached)
    return Recovered(counts, int(possible[0]), int(possible[-1]))


def number(pattern: str, line: str, where: str, kind: Callable[[str], float] = int) -> float | None:
    """What `pattern` finds in the line, as a number; None if it finds nothing."""
    found = re.search(pattern, line)
    if found is None:
        return None
    try:
        return kind(found[1])
    except ValueError:
        raise UserError(f"{where}: {found[1][:40]!r} is no number: the line is damaged") from None


def numbers(pattern: str, line: str) -> tuple[float, ...]:
    """The numbers of a list that `pattern` finds in the line; empty if it finds nothing."""
    found = re.search(pattern, line)
    return tuple(float(x) for x in re.findall(r"\d+\.\d+|\d+", found[1])) if found else ()


def log_lines(text: str, path: str) -> list[tuple[str, str]]:
    return [(f"{path}:{n}", line.rstrip("\r")) for n, line in enumerate(text.split("\n"), 1)]
