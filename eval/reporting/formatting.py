"""Values of a report as words: numbers with their intervals, dashes for what was not measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Report = dict[str, Any]
ReportEntry = dict[str, Any]
Interval = Sequence[float] | None

NOT_MEASURED = "–"


def format_number(value: float | None, digits: int, unit: str = "", signed: bool = False) -> str:
    """The number with that many decimals, thousands set apart, or – for None."""
    return NOT_MEASURED if value is None else f"{value:{'+' if signed else ''},.{digits}f}{unit}"


def format_with_interval(
    value: float | None, interval: Interval, digits: int, unit: str = "", signed: bool = False
) -> str:
    """The number and its [low, high], or the number alone, or – for None."""
    text = format_number(value, digits, unit, signed)
    if value is None or interval is None:
        return text
    low, high = (format_number(end, digits, signed=signed) for end in interval)
    return f"{text} [{low}, {high}]"


def format_percent(value: float | None) -> str:
    """A share as whole per cent, or – for None."""
    return NOT_MEASURED if value is None else f"{100 * value:.0f} %"


def format_bytes(count: float) -> str:
    """Bytes in the unit that leaves few digits."""
    for unit, limit in (("B", 2**10), ("KiB", 2**20), ("MiB", 2**30)):
        if count < limit:
            return f"{count * 2**10 / limit:,.0f} {unit}"
    return f"{count / 2**30:,.1f} GiB"


def format_identical(lossless: ReportEntry | None) -> str:
    """How many prompts decode to the reference's own ids, as 40/40 or 39/40 + 1 tie, or –."""
    if lossless is None or lossless["greedy_identical"] is None:
        return NOT_MEASURED
    ties = len(lossless["ties"])
    tied = f" + {ties} tie{'s' if ties > 1 else ''}" if ties > 0 else ""
    return f"{lossless['identical']}/{lossless['prompts']}{tied}"


def format_value(value: Any) -> str:
    """A value of the report as plain words: – for None, yes or no, "key value" for a dict."""
    if value is None:
        return NOT_MEASURED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {format_value(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(format_value, value)) or NOT_MEASURED
    return str(value)


def get_nested(entry: ReportEntry, outer: str, inner: str) -> Any:
    """entry[outer][inner], or None where either is absent: reports gain fields over time."""
    return (entry.get(outer) or {}).get(inner)


def target_name(report: Report) -> str:
    """The target's name, whether the report gives it alone or with its revision and tokenizer."""
    target = report["target"]
    return str(target["name"]) if isinstance(target, dict) else format_value(target)


def escape_markdown(text: str) -> str:
    """Text that cannot break a table row or turn into HTML."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("\n", " ")


@dataclass(frozen=True)
class Table:
    """One table of the report; every row is as long as the header.

    `prose` tables hold text, which is set left and may wrap; the others hold numbers. `detail` tables are folded away
    on the page.
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    prose: bool = False
    detail: bool = False


def table_markdown(table: Table) -> str:
    """The table with its title as a heading."""
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    body = "\n".join(
        "| " + " | ".join(escape_markdown(cell) for cell in line) + " |" for line in lines
    )
    return f"## {escape_markdown(table.title)}\n\n{body}"
