"""A command that sweeps are tested with: it counts to `steps`, goes on where it was killed, and fails when told."""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from decode.common import lock
from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.ranges import CountOrZero, Seed, at_least


@dataclass
class StandInConfig:
    lr: Annotated[float, at_least(0, 1)] = 0.5
    kind: str = "plain"
    steps: CountOrZero = 2
    seconds: Annotated[float, at_least(0)] = 0
    """Of each step."""
    fails: CountOrZero = 0
    """Starts that fail before one succeeds."""
    seed: Seed = 0
    out: str = "outputs/stand_in"


def main(s: StandInConfig) -> None:
    """Writes metrics.jsonl, and a line into starts.txt and steps.txt for each start and each step."""
    out = Path(s.out)
    time.sleep(s.seconds)
    out.mkdir(parents=True, exist_ok=True)
    with lock.hold(out / lock.LOCK_FILE, out):
        append(out / "starts.txt", f"{os.getpid()} {os.environ.get('GPU', '-')}")
        if len((out / "starts.txt").read_text().splitlines()) <= s.fails:
            sys.stderr.write("a warning\n")
            raise UserError("no luck with lr: try another")
        for _ in range(s.steps - count(out / "steps.txt")):
            time.sleep(s.seconds)
            append(out / "steps.txt", "step")
        score = 1 - (s.lr - 0.3) ** 2 + 0.01 * s.seed
        rows = [
            {"step": 1, "score": 2.0},
            {"step": s.steps, "score": score},
            {"step": s.steps, "other": 1},
        ]
        (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    last = {"best": {"0.7": {"score": score}}, "list": [{"tau": 1.5}]}
    sys.stdout.write("a line\n" + json.dumps(last) + "\n")


def append(file: Path, line: str) -> None:
    with file.open("a") as opened:
        opened.write(line + "\n")


def count(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


if __name__ == "__main__":
    run_command(main, StandInConfig, __doc__)
