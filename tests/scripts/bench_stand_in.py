"""A bench that tests of scripts/lab/cells.py start: each cell is a process of its own that writes a line into a log."""

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.files import write_result
from scripts.lab.cells import Cell, cells_beside, measure_apart, run_cells


@dataclass
class BenchStandInConfig:
    names: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Of each cell."""
    log: str = "log"
    out: str = ""
    one: bool = False


def main(s: BenchStandInConfig) -> None:
    """Two turns of every name."""
    if s.one:
        (name,) = s.names
        if name == "bad":
            raise UserError("bad has no cell: name another")
        with Path(s.log).open("a") as file:
            file.write(f"{name}\n")
        time.sleep(s.seconds)
        sys.stdout.write(json.dumps({"name": name, "time": time.time()}) + "\n")
        return
    cells = [Cell(x, lambda _, x=x: measure_apart(__file__, s, names=[x])) for x in s.names]
    with cells_beside(s.out, s) as kept:
        write_result(s.out, {"runs": run_cells(cells, kept, 2)})


if __name__ == "__main__":
    run_command(main, BenchStandInConfig, __doc__)
