"""The cells of an experiment: measured in alternating turns, kept one by one, summarised and compared in pairs.

Every command of the laboratory that measures several things one after the other is a list of cells for `run_cells`.
Each finished measurement is a JSON file of its own, so a command that was stopped or killed goes on with the next one.
"""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from decode.common import files, lock, provenance, run_dir
from decode.common.command import Terminated
from decode.common.errors import UserError
from decode.common.settings import to_dict
from decode.common.typed_json import to_json

Json = dict[str, Any]
BEGUN = "begun.json"
"""In the folder of a bench's cells: the settings, machine and commit that they are of."""
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t with 1, 2, 3, … degrees of freedom."""


@dataclass(frozen=True)
class Cell:
    """One thing to measure; its name, part of a file's name, tells it from the others of its experiment."""

    name: str
    measure: Callable[[int], Json]
    """What is measured in the turn of this number."""
    title: str = ""
    """Said on stderr before it is measured or read; empty: nothing is."""


def run_cells(
    cells: Sequence[Cell], folder: Path | None, turns: int = 1, keys: Sequence[str] = ()
) -> dict[str, list[Json]]:
    """{name: what each turn measured}: every cell `turns` times, those of a turn one after the other.

    What an earlier start kept in `folder` is read (None: nothing is kept). UserError for a file there that is damaged,
    or that has not all `keys`, and for two cells of one name.
    """
    console = Console(stderr=True)
    found: dict[str, list[Json]] = {cell.name: [] for cell in cells}
    if len(found) < len(cells):
        names = [cell.name for cell in cells]
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{twice} is to be measured twice: name each thing once")
    for turn in range(turns):
        # Every other turn backwards: what the machine does over time hits first and last cells alike.
        ordered = cells if turn % 2 == 0 else cells[::-1]
        for number, cell in enumerate(ordered, start=1):
            if cell.title:
                console.print(f"{number} of {len(cells)}: {cell.title}", highlight=False)
            name = f"{cell.name}.json" if turns == 1 else f"{cell.name}-{turn}.json"
            file = None if folder is None else folder / name
            found[cell.name].append(_kept_or_measured(file, cell, turn, keys))
    return found


def _kept_or_measured(file: Path | None, cell: Cell, turn: int, keys: Sequence[str]) -> Json:
    if file is None:
        return cell.measure(turn)
    if not file.is_file():
        files.write_atomically(file, json.dumps(cell.measure(turn)) + "\n")
    return files.read_json_object(file, "a measurement of this command: delete it", tuple(keys))


@contextmanager
def cells_beside(out: str, settings: Any) -> Iterator[Path | None]:
    """The folder OUT.cells for the cells of a bench whose result is the file `out`; None if that is "".

    It is deleted at the end of the block, by when the result must be written. A block that is left by an exception
    leaves it, and the next start finds it, unless settings, machine or commit are others: then all is measured again.
    UserError while another process measures for the same file.
    """
    if not out:
        yield None
        return
    folder = Path(f"{out}.cells")
    run_dir.check_folder(folder)
    kept = to_dict(settings) | {"out": ""}
    begun = json.dumps([kept, to_json(provenance.hardware()), provenance.git_sha()]) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with lock.hold(folder / lock.LOCK_FILE, folder):
            file = folder / BEGUN
            if not file.is_file() and any(folder.glob("*.json")):
                raise UserError(f"{folder} holds files that no run wrote: name another with --out")
            if not file.is_file() or files.read_text(file) != begun:
                _delete_cells(folder)
                files.write_atomically(file, begun)
            try:
                yield folder
            except BaseException as error:
                if [*folder.glob("*.json")] == [file]:  # nothing was measured
                    _delete_cells(folder)
                elif isinstance(error, KeyboardInterrupt | Terminated):
                    error.add_note(
                        f"what is measured is kept in {folder}, and the same command goes on"
                    )
                raise
            _delete_cells(folder)
    finally:
        with suppress(OSError):  # a folder that is not empty stays
            folder.rmdir()


def _delete_cells(folder: Path) -> None:
    for file in folder.glob("*.json"):
        file.unlink()


def measure_apart(script: str, settings: Any, **changes: Any) -> Json:
    """What the command `script` with its setting `one` prints last, in a process of its own. UserError if it fails.

    `changes` are settings that differ from `settings`. A process of its own has a peak of memory of its own.
    """
    s = replace(settings, one=True, out="", **changes)
    plain = type(s)()
    command = [sys.executable, script]
    for name in (field.name for field in fields(s)):
        value = getattr(s, name)
        if value != getattr(plain, name):
            command.append(f"--{name}={value if isinstance(value, str) else json.dumps(value)}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        what = ", ".join(f"{name} {json.dumps(value)}" for name, value in changes.items())
        raise UserError(f"{what}: {last.removeprefix('error: ')}")
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def finish(out: str, result: Json) -> None:
    """Writes the result as one line into the file `out`, if that is not "", and prints it."""
    line = json.dumps(result)
    if out:
        files.write_atomically(Path(out), line + "\n")
    print(line)


def middle(values: Sequence[float]) -> Json:
    """{median, least, most}."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


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
