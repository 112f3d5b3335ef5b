"""What eval/rescore.py does: it scores one log or two, and prints tables."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from decode.common.files import write_atomically
from decode.common.run_dir import check_file
from eval.reporting.formatting import format_estimate, format_number
from eval.served.scoring import LogComparison, LogFigure, LogScore, compare, read_log, score

NAMES = {"tau": "τ", "alpha": "α", "acceptance_rate": "acceptance rate"}


def figures_table(scored: LogScore) -> Table:
    """The pooled figures beside the means over requests."""
    log = scored.log
    of = "totals of a server" if scored.requests is None else f"{scored.requests} requests"
    table = Table(title=f"{log.path}: {log.engine}, {of}", title_justify="left")
    table.add_column("", no_wrap=True)
    for column in ("pooled [95 %]", "mean of requests [95 %]"):
        table.add_column(column)
    for key, name in NAMES.items():
        x = scored.figures.get(key, LogFigure())
        table.add_row(name, format_estimate(x.pooled, 3), format_estimate(x.mean_of_requests, 3))
    for key, value in log.gauges.items():
        table.add_row(f"{key} (last interval)", format_number(value, 3), "–")
    return table


def positions_table(scored: LogScore) -> Table:
    table = Table("position", "accepted ÷ rounds [95 %]", "α [95 %]")
    for x in scored.by_position:
        shares = (format_estimate(x.unconditional, 3), format_estimate(x.alpha, 3))
        table.add_row(str(x.position), *shares)
    return table


def differences_table(found: LogComparison) -> Table:
    table = Table("", f"first − second, {found.prompts} prompts [95 %]")
    for key, name in NAMES.items():
        if key in found.differences:
            table.add_row(name, format_estimate(found.differences[key], 3, signed=True))
    return table


def rescore(
    path: str, other: str, before: str, method: str, temperature: float | None, out: str
) -> None:
    """Prints the figures of the log at `path` and of `other`, if it is given, and the verdict on two. `method` and
    `temperature` choose answers as in `read_outputs`."""
    check_file(out, [path, other, before], "--json")
    logs = [read_log(path, before, method, temperature)]
    logs += [read_log(other, "", method, temperature)] if other else []
    found = compare(*logs) if len(logs) > 1 else None
    console = Console(highlight=False, soft_wrap=True)
    scored = [score(log) for log in logs]
    for one in scored:
        console.print(figures_table(one))
        if one.by_position:
            console.print(positions_table(one))
        console.print(*one.log.notes, sep="\n", markup=False)
    if found is not None:
        console.print(differences_table(found))
        console.print(found.verdict, markup=False)
    if out:
        comparison = None if found is None else found.to_json()
        result = {"logs": [one.to_json() for one in scored], "comparison": comparison}
        text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
        write_atomically(Path(out), text + "\n")
