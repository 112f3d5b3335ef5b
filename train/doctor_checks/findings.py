"""DataFinding: a defect of the data with its cost; and Defect, which counts the rows that have it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from train.doctor_checks.seen_rows import SeenRow

Severity = Literal["stops", "costs", "note"]
"""stops: do not train on this; costs: acceptance or compute is lost; note: good to know."""
ORDER: tuple[Severity, ...] = ("stops", "costs", "note")
MAX_EXAMPLES = 3


@dataclass(frozen=True)
class DataFinding:
    """What is wrong, how often, what it costs and what to do."""

    name: str
    severity: Severity
    rows: int
    """Rows (or prompts) that have it."""
    of: int
    """Rows that were looked at for it."""
    cost: str
    """What it costs, in words, with a number of this data."""
    mend: str
    """The setting or the step that mends it."""
    examples: tuple[SeenRow, ...] = ()
    """Up to MAX_EXAMPLES of the rows."""


@dataclass
class Defect:
    """Counts the rows that have a defect, and their tokens."""

    rows: int = 0
    tokens: int = 0
    examples: list[SeenRow] = field(default_factory=list)

    def add(self, row: SeenRow, tokens: int = 0) -> None:
        """Counts the row; `tokens` of it are affected."""
        self.rows += 1
        self.tokens += tokens
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(row.kept())

    def finding(self, name: str, severity: Severity, of: int, cost: str, mend: str) -> DataFinding:
        """The finding about the counted rows, out of `of`."""
        return DataFinding(name, severity, self.rows, of, cost, mend, tuple(self.examples))


def percent(part: float, whole: float) -> str:
    """`part` of `whole` in percent with one digit, such as "12.5 %"."""
    return f"{100 * part / whole:.1f} %" if whole > 0 else "0.0 %"


def count(number: int, noun: str) -> str:
    """The number with its noun, such as "1 row" or "1,200 rows"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def cost_or_note(part: float, whole: float, worth: float) -> Severity:
    """costs if `part` is at least the share `worth` of `whole`, else note."""
    return "costs" if whole > 0 and part / whole >= worth else "note"


def stop_or_cost(part: float, whole: float, worth: float) -> Severity:
    """stops if `part` is at least the share `worth` of `whole`, else costs."""
    return "stops" if whole > 0 and part / whole >= worth else "costs"


def by_severity(findings: Sequence[DataFinding]) -> list[DataFinding]:
    """The findings with the gravest first; equally grave ones keep their order."""
    return sorted(findings, key=lambda finding: ORDER.index(finding.severity))
