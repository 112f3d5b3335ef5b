"""Draws how well SWIFT's sets of skipped sub-layers matched, from a folder in which eval/run.py kept a search.

    python eval/run.py --target T --methods '[{name: swift, state: outputs/swift}]' …
    python scripts/tables/swift_matchness.py --state outputs/swift --out docs/images/swift_matchness.svg

A set's matchness is the share of one answer's first tokens that the target predicts without these sub-layers. The best
of many tries is partly luck: whether the set found drafts better has to be measured on other prompts. The last line is
JSON.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from decode.common import files
from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.ranges import Count
from decode.drafts.self_speculation.swift import STATE_FILE
from decode.drafts.self_speculation.swift_search import read_search
from eval.reporting.plots import ChartSeries, Point, legend_entries, line_chart, recolor


@dataclass
class MatchnessConfig:
    """Settings of the command."""

    state: str
    """Folder of the search: the `state` of a method swift."""
    out: str = "outputs/swift_matchness.svg"
    """The SVG file."""
    every: Count = 50
    """Tries between two points."""


def curves(history: Sequence[float], every: int) -> list[ChartSeries]:
    """The best score so far and the mean of the last `every` tries, at the last of each `every` tries."""
    best = list(accumulate(history, max))
    ends = range(every, len(history) + 1, every)
    means = [Point(end, statistics.fmean(history[end - every : end])) for end in ends]
    highest = [Point(1, best[0]), *(Point(end, best[end - 1]) for end in ends if end > 1)]
    return [ChartSeries("best set so far", highest), ChartSeries(f"mean of {every} tries", means)]


def summary(history: Sequence[float]) -> dict[str, Any]:
    """{tries, first, best, best_at: the try that found it, mean}."""
    best = max(history)
    return {
        "tries": len(history),
        "first": history[0],
        "best": best,
        "best_at": history.index(best) + 1,
        "mean": statistics.fmean(history),
    }


def main(s: MatchnessConfig) -> None:
    history = read_search(Path(s.state) / STATE_FILE)[1].history
    if not history:
        raise UserError(
            f"{s.state}: the search has tried nothing yet: decode longer answers with it"
        )
    series = curves(history, s.every)
    names = [one.name for one in series]
    title = "   ".join(f"{glyph} {name}" for glyph, _, name in legend_entries(names))
    svg = line_chart(series, names, title, "sets tried", "matchness")
    files.write_atomically(Path(s.out), recolor(svg))
    print(json.dumps({"image": s.out, **summary(history)}))


if __name__ == "__main__":
    run_command(main, MatchnessConfig, __doc__)
