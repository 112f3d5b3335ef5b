"""The cells of an experiment: measured in alternating turns, kept one by one, summarised and compared in pairs.

Every command of the laboratory that measures several things one after the other is a list of cells for `run_cells`.
Each finished measurement is a line of a journal, so a command that was stopped or killed goes on with the next one.
"""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from decode.common import lock, provenance, run_dir
from decode.common.command import Terminated
from decode.common.errors import UserError
from decode.common.journal import Journal
from decode.common.settings import to_dict
from decode.common.typed_json import to_json

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t with 1, 2, 3, … degrees of freedom."""


@dataclass(frozen=True)
class Cell:
    """One thing to measure; its name, part of a file's name, tells it from the others of its experiment."""

    name: str
    measure: Callable[[int], object]
    """What is measured in the turn of this number, as JSON holds it."""
    title: str = ""
    """Said on stderr before it is measured or read; empty: nothing is."""


def run_cells(
    cells: Sequence[Cell], journal: Journal | None, turns: int = 1
) -> dict[str, list[Any]]:
    """{name: what each turn measured}: every cell `turns` times, those of a turn one after the other.

    What an earlier start kept in the journal is read (None: nothing is kept). UserError for two cells of one name.
    """
    console = Console(stderr=True)
    found: dict[str, list[Any]] = {cell.name: [] for cell in cells}
    for name in found if len(found) < len(cells) else ():
        if sum(cell.name == name for cell in cells) > 1:
            raise UserError(f"{name} is to be measured twice: name each thing once")
    for turn in range(turns):
        # Every other turn backwards: what the machine does over time hits first and last cells alike.
        for number, cell in enumerate(cells if turn % 2 == 0 else cells[::-1], start=1):
            if cell.title:
                console.print(f"{number} of {len(cells)}: {cell.title}", highlight=False)
            measure = partial(cell.measure, turn)
            kept = (
                measure() if journal is None else journal.get_or_measure([cell.name, turn], measure)
            )
            found[cell.name].append(kept)
    return found


@contextmanager
def cells_beside(out: str, settings: Any) -> Iterator[Journal | None]:
    """The journal of a bench whose result is the file `out`, in the folder OUT.cells; None if `out` is "".

    It is deleted at the end of the block, by when the result must be written. A block that is left by an exception
    leaves it, and the next start finds it, unless settings, machine or commit are others: then all is measured again.
    UserError while another process measures for the same file.
    """
    if not out:
        yield None
        return
    folder = Path(f"{out}.cells")
    run_dir.check_folder(folder)
    file = folder / run_dir.JOURNAL
    measured_by = {"settings": to_dict(settings) | {"out": ""}, "git": provenance.git_sha()}
    measured_by |= to_json(provenance.hardware())
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with lock.hold(folder / lock.LOCK_FILE, folder):
            try:
                journal = Journal(file, measured_by)
            except UserError:  # of other settings, another machine or another commit
                file.unlink()
                journal = Journal(file, measured_by)
            try:
                yield journal
            except BaseException as error:
                if not journal.measured:
                    file.unlink()
                elif isinstance(error, KeyboardInterrupt | Terminated):
                    error.add_note(
                        f"what is measured is kept in {folder}, and the same command goes on"
                    )
                raise
            file.unlink()
    finally:
        with suppress(OSError):  # a folder that holds other files stays
            folder.rmdir()


def measure_apart(script: str, settings: Any, **changes: Any) -> Any:
    """What the command `script` with its setting `one` prints last, in a process of its own. UserError if it fails.

    `changes` are settings that differ from `settings`. A process of its own has a peak of memory of its own.
    """
    s = replace(settings, one=True, out="", **changes)
    own = {name: x for name, x in vars(s).items() if x != getattr(type(s)(), name)}
    texts = {name: x if isinstance(x, str) else json.dumps(x) for name, x in own.items()}
    command = [sys.executable, script, *(f"--{name}={text}" for name, text in texts.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        what = ", ".join(f"{name} {json.dumps(value)}" for name, value in changes.items())
        raise UserError(f"{what}: {last.removeprefix('error: ')}")
    return json.loads(done.stdout.strip().splitlines()[-1])


@dataclass
class BenchSettings:
    out: str = ""
    """File for the JSON of the last line; empty: none."""


def mean_and_spread(values: Sequence[float]) -> tuple[float | None, float | None]:
    """The mean and the standard deviation over seeds; None where there are too few values."""
    mean = statistics.mean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None


def paired_difference(
    own: Sequence[float], base: Sequence[float]
) -> tuple[float, tuple[float, float]] | None:
    """The mean of own − base, pair by pair, and its 95 % interval by Student's t; None for fewer than two pairs.

    Runs that share a seed share their data's order and their prompts, which cancel out in the difference.
    """
    differences = [a - b for a, b in zip(own, base, strict=True)]
    degrees = len(differences) - 1
    if degrees < 1:
        return None
    # Beyond the table 1.96 + 2.6 ÷ degrees is within 0.3 % of the quantile.
    t = T_975[degrees - 1] if degrees <= len(T_975) else 1.96 + 2.6 / degrees
    mean = statistics.mean(differences)
    half = t * statistics.stdev(differences) / math.sqrt(len(differences))
    return mean, (mean - half, mean + half)
