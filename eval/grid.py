"""A table whose cells are words already, and as Markdown."""

from dataclasses import dataclass

from eval.wording import markdown


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


def as_markdown(table: Table) -> str:
    """The table with its title as a heading."""
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    body = "\n".join("| " + " | ".join(markdown(cell) for cell in line) + " |" for line in lines)
    return f"## {markdown(table.title)}\n\n{body}"
