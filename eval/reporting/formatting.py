"""Numbers, intervals and tables as text, and HTML pages; values that were not measured become a dash."""

import html
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jinja2

from decode.common.typed_json import Estimate
from eval.results.report import Measured

T = TypeVar("T")
NOT_MEASURED = "–"


def format_number(value: float | None, digits: int, unit: str = "", signed: bool = False) -> str:
    """The number with `digits` decimals and a comma between thousands, or – for None."""
    return NOT_MEASURED if value is None else f"{value:{'+' if signed else ''},.{digits}f}{unit}"


def format_positions(values: Iterable[float | None]) -> str:
    """`0.31, 0.30, 0.44`: α at each position, a dash at one that was never reached, and alone where there are none."""
    return ", ".join(format_number(value, 2) for value in values) or NOT_MEASURED


def format_estimate(x: Estimate, digits: int, unit: str = "", signed: bool = False) -> str:
    """The value followed by its [low, high]; alone if there is no interval; – if there is no value."""
    text = format_number(x.value, digits, unit, signed)
    if x.value is None or x.ci is None:
        return text
    low, high = (format_number(end, digits, signed=signed) for end in x.ci)
    return f"{text} [{low}, {high}]"


def format_percent(value: float | None) -> str:
    """A share (0 to 1) in whole per cent, or – for None."""
    return NOT_MEASURED if value is None else f"{100 * value:.0f} %"


def format_value(value: Any) -> str:
    """Any value of a report as text: – for None, yes or no for a bool, "key value, key value" for a dict."""
    if value is None:
        return NOT_MEASURED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {format_value(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(format_value, value)) or NOT_MEASURED
    return str(value)


def escape_markdown(text: str) -> str:
    """Escapes what would end a Markdown table cell or start an HTML tag; line breaks become spaces."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("\n", " ")


def or_void(m: Measured, text: str) -> str:
    """`void` where the seconds of the entry say nothing, else the text."""
    return "void" if m.void else text


def format_speedup(m: Measured) -> str:
    """With its interval."""
    return or_void(m, format_estimate(m.speedup, 2, "×"))


@dataclass(frozen=True)
class Table:
    """A table of text cells; every row has as many cells as the header.

    The HTML page aligns `prose` cells to the left and lets them wrap; it shows `detail` tables collapsed.
    """

    title: str
    header: list[str]
    rows: list[list[str]]
    prose: bool = False
    detail: bool = False

    @classmethod
    def of(
        cls,
        title: str,
        columns: Mapping[str, Callable[[T], str]],
        entries: Iterable[T],
        *,
        prose: bool = False,
        detail: bool = False,
    ) -> "Table":
        """A row for each entry, with its cell in each column."""
        rows = [[cell(x) for cell in columns.values()] for x in entries]
        return cls(title, [*columns], rows, prose, detail)


def table_markdown(table: Table) -> str:
    """The table as Markdown under a second-level heading with its title."""
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    body = "\n".join(
        "| " + " | ".join(escape_markdown(cell) for cell in line) + " |" for line in lines
    )
    return f"## {escape_markdown(table.title)}\n\n{body}"


def table_text(table: Table) -> str:
    """Header and rows in columns, without the title: as a result prints."""
    lines = [table.header, *table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    cells = [
        [f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)] for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in cells)


def table_html(table: Table) -> str:
    """The same in HTML, as a notebook draws it."""
    head, *rows = [
        "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line)
        for tag, line in [("th", table.header), *(("td", row) for row in table.rows)]
    ]
    return f"<table><tr>{'</tr><tr>'.join([head, *rows])}</tr></table>"


CONTROL_PICTURES = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n\r"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}
"""What stands for a control character, which HTML forbids and a model may write."""


def html_templates(folder: Path) -> jinja2.Environment:
    """The templates of a folder for HTML pages: every value is escaped, control characters are shown as pictures, and
    an unknown name is an error."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        finalize=lambda x: x.translate(CONTROL_PICTURES) if isinstance(x, str) else x,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
