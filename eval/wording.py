"""Values of a report as words: numbers with their intervals, dashes for what was not measured."""

from collections.abc import Sequence
from typing import Any

Report = dict[str, Any]
Entry = dict[str, Any]
Interval = Sequence[float] | None

NONE = "–"


def number(value: float | None, digits: int, unit: str = "", signed: bool = False) -> str:
    """The number with that many decimals, thousands set apart, or – for None."""
    return NONE if value is None else f"{value:{'+' if signed else ''},.{digits}f}{unit}"


def with_interval(
    value: float | None, interval: Interval, digits: int, unit: str = "", signed: bool = False
) -> str:
    """The number and its [low, high], or the number alone, or – for None."""
    text = number(value, digits, unit, signed)
    if value is None or interval is None:
        return text
    low, high = (number(end, digits, signed=signed) for end in interval)
    return f"{text} [{low}, {high}]"


def percent(value: float | None) -> str:
    """A share as whole per cent, or – for None."""
    return NONE if value is None else f"{100 * value:.0f} %"


def size(count: float) -> str:
    """Bytes in the unit that leaves few digits."""
    for unit, limit in (("B", 2**10), ("KiB", 2**20), ("MiB", 2**30)):
        if count < limit:
            return f"{count * 2**10 / limit:,.0f} {unit}"
    return f"{count / 2**30:,.1f} GiB"


def identical(lossless: Entry | None) -> str:
    """How many prompts decode to the reference's own ids, as 40/40 or 39/40 + 1 tie, or –."""
    if lossless is None or lossless["greedy_identical"] is None:
        return NONE
    ties = len(lossless["ties"])
    tied = f" + {ties} tie{'s' if ties > 1 else ''}" if ties > 0 else ""
    return f"{lossless['identical']}/{lossless['prompts']}{tied}"


def words(value: Any) -> str:
    """A value of the report as plain words: – for None, yes or no, "key value" for a dict."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {words(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(words, value)) or NONE
    return str(value)


def inside(entry: Entry, outer: str, inner: str) -> Any:
    """entry[outer][inner], or None where either is absent: reports gain fields over time."""
    return (entry.get(outer) or {}).get(inner)


def target_name(report: Report) -> str:
    """The target's name, whether the report gives it alone or with its revision and tokenizer."""
    target = report["target"]
    return str(target["name"]) if isinstance(target, dict) else words(target)


def markdown(text: str) -> str:
    """Text that cannot break a table row or turn into HTML."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("\n", " ")
