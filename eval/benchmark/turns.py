"""A turn is one batch of prompts decoded by every method: what was measured of it, and whether its seconds count.

A turn in which a method stalled or the machine was busy is repeated, for all methods, once the others are done
(eval/benchmark/timing.py). Its first attempt without either is kept whole, so that its methods were timed within the
same minutes. If there is none, its seconds count for no method. What stalls in every attempt is the method's own cost
and stays as it was measured. No second is ever changed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from decode.engine.records import DecodeRecord, read_record
from eval.benchmark.machine_load import (
    BUSY,
    CLOCK,
    TurnEvidence,
    all_busy,
    busy_reason,
    typical_probe,
)
from eval.metrics.stalls import PassTime, stalled_passes

EngineAnswer = dict[str, Any]
"""One prompt decoded by another engine, as JSON holds it: {ids, seconds, …}, or {error}; `untimed` as in a record."""
Column = tuple[str, str]  # A pass of every turn: (which part of an attempt, label)
MOST_REPEATS = 2  # of one turn
STALLED = "a method stalled"
VAIN_SHARE, ALWAYS_ALLOWED = 0.25, 3
"""Repeats that mended nothing are at most this share of all turns, but so many in a short run: a machine that is busy
all along must not go on forever."""


@dataclass
class Attempt:
    """One time that a turn was measured."""

    records: dict[str, list[DecodeRecord]]  # by the method's label; a method that failed has none
    again: dict[str, list[DecodeRecord]]
    """The second passes of methods that are timed twice, which only plain decoding is."""
    answers: dict[str, list[EngineAnswer]] = field(default_factory=dict)
    """Of other engines by label, one for each prompt."""
    evidence: TurnEvidence | None = None  # None in journals of earlier versions

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> "Attempt":
        """The inverse of `to_json`. Journals of earlier versions hold the mean of plain decoding's two passes."""
        records = {m: [read_record(x) for x in own] for m, own in kept["records"].items()}
        again = {
            m: [replace(a, **clock) for a, clock in zip(records[m], clocks, strict=True)]
            for m, clocks in kept.get("again", {}).items()
        }
        evidence = TurnEvidence(**kept["evidence"]) if kept.get("evidence") else None
        return cls(records, again, kept["answers"], evidence)

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
            "evidence": self.evidence and asdict(self.evidence),
        }

    def outputs(self) -> dict[Column, list[Any]]:
        """The tokens of every method and engine, ours with the rounds that they took: a draft that learns, or searches
        its layers, needs fewer for a text that it has seen."""
        ours = {
            ("records", m): [(x.output_ids, x.rounds) for x in own]
            for m, own in self.records.items()
        }
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
        """Whether the attempt gave the same tokens in the same rounds as the first: other seconds do not compare."""
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
class JudgedTurn:
    """The attempt of a turn that is kept, in which plain decoding has the mean of its passes."""

    attempt: Attempt
    trouble: str
    """Why its seconds do not count; "" if they do."""


def repeat_troubled_turns(
    turns: Sequence[Turn], repeat: Callable[[int], None], *, of_rounds: bool
) -> list[JudgedTurn]:
    """`judge_turns` when `repeat(number)` has added to turns whose seconds do not count, while the limits allow."""
    allowed = max(ALWAYS_ALLOWED, int(VAIN_SHARE * len(turns)))
    while True:
        judged = judge_turns(turns, of_rounds=of_rounds)
        waiting = [
            number
            for number, (turn, x) in enumerate(zip(turns, judged, strict=True))
            if x.trouble and turn.complete and turn.repeats < MOST_REPEATS
        ]
        vain = sum(turn.repeats for turn, x in zip(turns, judged, strict=True) if x.trouble)
        if not waiting or vain >= allowed:
            return judged
        repeat(min(waiting, key=lambda number: turns[number].repeats))


def judge_turns(turns: Sequence[Turn], *, of_rounds: bool) -> list[JudgedTurn]:
    """Of each turn the first attempt without trouble, or else its first one with its trouble.

    `of_rounds`: the records are made those of `rounds_only`, and prefill plays no part.
    """
    attempts = [attempt for turn in turns for attempt in turn.attempts]
    stalled = iter(stalled_columns(attempts, of_rounds))
    probe = typical_probe([x.evidence for x in attempts if x.evidence])
    chosen: list[tuple[Attempt, str]] = []
    for turn in turns:
        stalls = [next(stalled) for _ in turn.attempts]
        own_cost = set.intersection(*stalls) if len(stalls) > 1 else set()
        troubles = [
            _jump(attempt)
            or (busy_reason(attempt.evidence, probe) if attempt.evidence else "")
            or (STALLED if found - own_cost else "")
            for attempt, found in zip(turn.attempts, stalls, strict=True)
        ]
        best = troubles.index("") if "" in troubles else 0
        chosen.append((turn.attempts[best], troubles[best]))
    if all_busy([x.evidence for x, trouble in chosen if x.evidence and not trouble]):
        chosen = [(attempt, trouble or BUSY) for attempt, trouble in chosen]
    return [JudgedTurn(_kept(x, trouble, of_rounds), trouble) for x, trouble in chosen]


def stalled_columns(attempts: Sequence[Attempt], of_rounds: bool) -> list[set[Column]]:
    """The passes of each attempt that stalled."""
    columns = list(dict.fromkeys(column for attempt in attempts for column in attempt.passes()))
    clocks = [
        {column: pass_time(own, of_rounds) for column, own in attempt.passes().items()}
        for attempt in attempts
    ]
    table = stalled_passes([[clock.get(column) for column in columns] for clock in clocks])
    return [{c for c, found in zip(columns, row, strict=True) if found} for row in table]


def _jump(attempt: Attempt) -> str:
    """CLOCK if a clock went backwards within a pass."""
    ours = [x for own in (attempt.records, attempt.again) for y in own.values() for x in y]
    backwards = any(min([x.seconds, x.first_token_seconds, *x.round_seconds]) < 0 for x in ours)
    others = [x for own in attempt.answers.values() for x in own]
    return CLOCK if backwards or any(x.get("seconds", 0.0) < 0 for x in others) else ""


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


def _kept(attempt: Attempt, trouble: str, of_rounds: bool) -> Attempt:
    """The attempt with its trouble on every record and answer, and the mean of two passes in one."""
    records = {}
    for label, own in attempt.records.items():
        again = attempt.again.get(label, own)
        records[label] = [
            replace(
                rounds_only(a) if of_rounds else replace(a, seconds=(a.seconds + b.seconds) / 2),
                untimed=trouble,
            )
            for a, b in zip(own, again, strict=True)
        ]
    answers = {
        label: [{**x, "untimed": trouble} for x in own] for label, own in attempt.answers.items()
    }
    return Attempt(records, {}, answers, attempt.evidence)


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
