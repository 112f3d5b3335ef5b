"""draftsmith: outputs.jsonl of eval/run.py, whose lines list what each round drafted and accepted."""

from collections.abc import Mapping, Sequence
from typing import Any

from decode.common.errors import UserError
from eval.engine_logs.counts import RequestCounts, by_position, checked


def is_output_line(line: Mapping[str, Any]) -> bool:
    return isinstance(line.get("rounds"), list) and isinstance(line.get("output_ids"), list)


def from_output(line: Mapping[str, Any], where: str) -> RequestCounts:
    """The counts of one line, with positions. UserError for rounds that are no pairs of counts."""
    rounds = line.get("rounds")
    if not isinstance(rounds, list) or not all(_is_round(pair) for pair in rounds):
        raise UserError(f"{where} is no line of outputs.jsonl: its rounds are [drafted, accepted]")
    histograms: dict[int, list[int]] = {}
    for drafted, accepted in rounds:
        histograms.setdefault(drafted, [0] * (drafted + 1))[accepted] += 1
    drafted, accepted = (sum(pair[i] for pair in rounds) for i in (0, 1))
    counts = RequestCounts(len(rounds), drafted, accepted, *by_position(histograms))
    return checked(counts, where)


def check_one_method(lines: Sequence[Mapping[str, Any]], path: str) -> None:
    """UserError for lines of several methods or temperatures, whose acceptance is not one figure."""
    seen = sorted({f"{x.get('method', '')} {x.get('temperature', '')}".strip() for x in lines})
    if len(seen) > 1:
        raise UserError(f"{path} has lines of {' and '.join(seen)}: keep those of one")


def _is_round(pair: Any) -> bool:
    whole = isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
    return whole and 0 <= pair[1] <= pair[0]
