"""A turn is one batch of prompts decoded by every method: what was measured of it, and its records without stalls.

A turn in which a method stalled is repeated, for all methods, once the others are done (eval/benchmark/timing.py). The
attempt that stalled least is kept whole, so that its methods were timed within the same minutes. What stalls in every
attempt is the method's own cost and stays as it was measured. A stall that could not be repeated away is taken off.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from decode.engine.records import DecodeRecord
from eval.metrics.stalls import PassTime, SteadyTime, steady_times

EngineAnswer = dict[str, Any]
"""One prompt decoded by another engine, as JSON holds it: {ids, seconds, …}, or {error}."""
Column = tuple[str, str]  # A pass of every turn: (which part of an attempt, label)
MOST_REPEATS = 2  # of one turn
REPEATED_SHARE, ALWAYS_ALLOWED = 0.25, 3
"""Repeats are at most this share of all turns, but so many in a short run: a slow machine must not go on forever."""


@dataclass
class Attempt:
    """One time that a turn was measured."""

    records: dict[str, list[DecodeRecord]]  # by the method's label; a method that failed has none
    again: dict[str, list[DecodeRecord]]
    """The second passes of methods that are timed twice, which only plain decoding is."""
    answers: dict[str, list[EngineAnswer]] = field(default_factory=dict)
    """Of other engines by label, one for each prompt."""

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> "Attempt":
        """The inverse of `to_json`. Journals of earlier versions hold the mean of plain decoding's two passes."""
        records = {m: [DecodeRecord(**x) for x in own] for m, own in kept["records"].items()}
        again = {
            m: [replace(a, **clock) for a, clock in zip(records[m], clocks, strict=True)]
            for m, clocks in kept.get("again", {}).items()
        }
        return cls(records, again, kept["answers"])

    def passes(self) -> dict[Column, Sequence[DecodeRecord] | Sequence[EngineAnswer]]:
        return {
            (kind, label): own
            for kind in ("records", "again", "answers")
            for label, own in getattr(self, kind).items()
        }

    def to_json(self) -> dict[str, Any]:
        clock = ("seconds", "first_token_seconds", "round_seconds")
        return {
            "records": {m: [asdict(x) for x in own] for m, own in self.records.items()},
            "again": {
                m: [{name: getattr(x, name) for name in clock} for x in own]
                for m, own in self.again.items()
            },
            "answers": self.answers,
        }

    def outputs(self) -> dict[Column, list[Any]]:
        """The tokens of every method and engine."""
        ours = {("records", m): [x.output_ids for x in own] for m, own in self.records.items()}
        return ours | {("answers", m): [x.get("ids") for x in y] for m, y in self.answers.items()}


@dataclass
class Turn:
    """Every attempt that is comparable, and how often the turn was repeated."""

    attempts: list[Attempt]
    repeats: int = 0
    complete: bool = True
    """False if a method failed: the turn is not kept, and the same command tries it again."""

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> "Turn":
        attempts = [kept, *kept.get("more_attempts", [])]
        return cls([Attempt.from_json(x) for x in attempts], kept.get("repeats", 0))

    def add_repeat(self, attempt: Attempt) -> bool:
        """Whether the attempt gave the same tokens as the first: seconds of other texts do not compare."""
        self.repeats += 1
        found = attempt.outputs()
        if any(found.get(x, []) != own for x, own in self.attempts[0].outputs().items()):
            return False
        self.attempts.append(attempt)
        return True

    def to_json(self) -> dict[str, Any]:
        first, *others = [attempt.to_json() for attempt in self.attempts]
        return {**first, "repeats": self.repeats, "more_attempts": others}


@dataclass(frozen=True)
class SteadyTurn:
    """The attempt of a turn that is kept, without what stalled."""

    attempt: Attempt
    stall: float
    """How much longer its worst pass took, as a share of the rest: 0 if none stalled, or all attempts alike."""


def repeat_stalled_turns(
    turns: Sequence[Turn], repeat: Callable[[int], None], *, of_rounds: bool
) -> list[SteadyTurn]:
    """`steady_turns` when `repeat(number)` has added to turns that stalled: the worst first, while the limits allow."""
    allowed = max(ALWAYS_ALLOWED, int(REPEATED_SHARE * len(turns)))
    while True:
        steady = steady_turns(turns, of_rounds=of_rounds)
        waiting = {
            number: x.stall
            for number, (turn, x) in enumerate(zip(turns, steady, strict=True))
            if x.stall > 0 and turn.complete and turn.repeats < MOST_REPEATS
        }
        if not waiting or sum(turn.repeats for turn in turns) >= allowed:
            return steady
        repeat(max(waiting, key=lambda number: waiting[number]))


def steady_turns(turns: Sequence[Turn], *, of_rounds: bool) -> list[SteadyTurn]:
    """The records of each turn with steady seconds, in which plain decoding has the mean of its passes.

    `of_rounds`: the records are made those of `rounds_only`, and prefill plays no part.
    """
    attempts = [attempt for turn in turns for attempt in turn.attempts]
    columns = list(dict.fromkeys(column for attempt in attempts for column in attempt.passes()))
    clocks = [
        {column: pass_time(own, of_rounds) for column, own in attempt.passes().items()}
        for attempt in attempts
    ]
    table = steady_times([[clock.get(column) for column in columns] for clock in clocks])
    options = zip(attempts, clocks, table, strict=True)
    found = []
    for turn in turns:
        own = [next(options) for _ in turn.attempts]
        stalls = [
            {c: x.stall for c, x in zip(columns, row, strict=True) if x is not None and x.stall > 0}
            for _, _, row in own
        ]
        own_cost = set.intersection(*map(set, stalls)) if len(own) > 1 else set()
        worst = [max((x for c, x in s.items() if c not in own_cost), default=0.0) for s in stalls]
        best = worst.index(min(worst))
        attempt, clock, row = own[best]
        steady = {
            c: x
            for c, x in zip(columns, row, strict=True)
            if c in stalls[best] and c not in own_cost and x is not None
        }
        found.append(SteadyTurn(_steady_attempt(attempt, clock, steady, of_rounds), worst[best]))
    return found


def pass_time(
    own: Sequence[DecodeRecord] | Sequence[EngineAnswer], of_rounds: bool = False
) -> PassTime | None:
    """The clock of one pass: of a batch's records, or of answers that were given one by one. None if any failed."""
    records = [x for x in own if isinstance(x, DecodeRecord)]
    if not records:
        answers = [x for x in own if isinstance(x, dict)]
        if any("error" in x for x in answers):
            return None
        prefill = sum(x.get("first_token_seconds", 0.0) for x in answers)
        work = sum(len(x["ids"]) if x["rounds"] is None else x["rounds"] + 1 for x in answers)
        return PassTime(prefill, sum(x["seconds"] for x in answers) - prefill, work=work)
    longest = max(records, key=lambda record: len(record.rounds))
    prefill = longest.first_token_seconds
    rounds: tuple[tuple[int, float], ...] = ()
    if len(longest.rounds) == len(longest.round_seconds):
        drafted = [count for count, _ in longest.rounds]
        rounds = tuple(zip(drafted, longest.round_seconds, strict=True))
    if of_rounds:
        return PassTime(0.0, sum(longest.round_seconds), rounds)
    whole = sum(record.seconds for record in records)
    return PassTime(prefill, whole - prefill, rounds, len(longest.rounds))


def _steady_attempt(
    attempt: Attempt,
    clocks: Mapping[Column, PassTime | None],
    steady: Mapping[Column, SteadyTime],
    of_rounds: bool,
) -> Attempt:
    """The attempt without the stalls of the passes in `steady`; `measured_seconds` are those of the clock."""
    kept = Attempt({}, {}, {})
    for column, own in attempt.passes().items():
        kind, label = column
        clock, time = clocks[column], steady.get(column)
        getattr(kept, kind)[label] = [
            answer_without_stall(x, clock, time)
            if isinstance(x, dict)
            else record_without_stall(rounds_only(x) if of_rounds else x, clock, time, of_rounds)
            for x in own
        ]
    for label, again in kept.again.items():
        kept.records[label] = [
            replace(
                a,
                seconds=(a.seconds + b.seconds) / 2,
                measured_seconds=(a.measured_seconds + b.measured_seconds) / 2,
            )
            for a, b in zip(kept.records[label], again, strict=True)
        ]
    return kept


def answer_without_stall(
    answer: EngineAnswer, clock: PassTime | None, steady: SteadyTime | None
) -> EngineAnswer:
    """The answer with its share of the steady seconds of its pass; one that failed as it is."""
    if "error" in answer:
        return answer
    share = 1.0 if clock is None or steady is None else steady.seconds / clock.seconds
    return {**answer, "seconds": share * answer["seconds"], "measured_seconds": answer["seconds"]}


def record_without_stall(
    record: DecodeRecord, clock: PassTime | None, steady: SteadyTime | None, of_rounds: bool
) -> DecodeRecord:
    """The record with steady seconds. What the rounds took beyond steady decoding is taken off the longest of them."""
    if clock is None or steady is None:
        return replace(record, measured_seconds=record.seconds)
    most = _highest([seconds for _, seconds in clock.rounds], steady.decode)
    rounds = [min(seconds, most) for seconds in record.round_seconds]
    return replace(
        record,
        first_token_seconds=min(record.first_token_seconds, steady.prefill)
        if not of_rounds
        else record.first_token_seconds,
        round_seconds=rounds,
        seconds=sum(rounds) if of_rounds else record.seconds * steady.seconds / clock.seconds,
        measured_seconds=record.seconds,
    )


def _highest(seconds: Sequence[float], total: float) -> float:
    """The bound on each of these seconds with which they sum to at most `total`."""
    left = total
    for count, value in zip(range(len(seconds), 0, -1), sorted(seconds), strict=True):
        if value * count > left:
            return left / count
        left -= value
    return max(seconds, default=float("inf"))


def rounds_only(record: DecodeRecord) -> DecodeRecord:
    """The record under its domain's name, with the seconds of its own rounds as `seconds`.

    Prefill is the same for every setting. A row of a batch that has ended early does not wait for the others: a server
    would fill its place.
    """
    return replace(
        record,
        task=record.domain or record.task,
        id=f"{record.task}/{record.id}",
        seconds=sum(record.round_seconds),
    )
