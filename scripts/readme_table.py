"""Writes the table of a report into the README, or into another page, between its two markers, and draws a picture of
it. Prints the headline: each draft over plain decoding, and over the best arm of other engines.

python scripts/readme_table.py --picture docs/images/speedups.svg
python scripts/readme_table.py --layout positions --name families \
  --report docs/results/families_smollm2.json --readme docs/families.md
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.command import run_command


@dataclass
class ReadmeTableConfig:
    report: str = "docs/results/smollm2.json"
    """A report.json of eval/run.py."""
    engines: list[str] = field(default_factory=list)
    """Further reports on the same prompts, whose other engines have rows too."""
    requests: str = ""
    """A file of the report's requests, from which the headline over other engines comes where the report is older than
    its field `rivals`; empty: none."""
    name: str = "table"
    """Replaces the block between <!-- NAME: begin --> and <!-- NAME: end -->."""
    readme: str = "README.md"
    """The file with that block; empty: nothing is written."""
    layout: Literal["pooled", "positions"] = "pooled"
    """pooled: a row for each T and method, with pooled α and tokens/s; positions: α at each position and the draft's ms
    a round instead."""
    picture: str = ""
    """An .svg file to draw the speed-ups of all tasks together into, with their intervals; empty: none."""


def main(s: ReadmeTableConfig) -> None:
    # --help does without: they load torch.
    from eval.reporting.readme_table import headline_lines, rivals_of, write_table
    from eval.results.report import read_report

    if s.readme:
        others = [*map(Path, s.engines)]
        write_table(Path(s.report), others, s.name, Path(s.readme), s.layout, s.picture)
    report = read_report(Path(s.report))
    print(
        *headline_lines(report, rivals_of(report, Path(s.requests) if s.requests else None)),
        sep="\n",
    )


if __name__ == "__main__":
    run_command(main, ReadmeTableConfig, __doc__)
