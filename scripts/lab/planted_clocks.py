"""Whether a report's speed-ups mislead when the machine does: eval/run.py beside planted trouble, in turns.

    python scripts/lab/planted_clocks.py --rounds 10 --out outputs/clocks.json

Each round runs the same evaluation quietly and once with each trouble: a neighbour on one CPU, one on each CPU, the run
stopped for two seconds now and then, and a clock that jumps by half a second. A speed-up misleads if it is not void and
differs by more than `tolerance` from the median of the quiet runs. Needs an idle machine.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from decode.common.command import run_command
from decode.common.errors import UserError
from decode.common.files import write_atomically
from decode.common.provenance import hardware, versions
from decode.common.ranges import Count

METHODS = "[{name: ngram}, {name: causal, draft: assets/draft}]"
TASKS = "[{name: code, limit: 6}, {name: prose, limit: 6}]"
EVALUATION = ["eval/run.py", "--target", "assets/target", "--methods", METHODS, "--tasks", TASKS]
OPTIONS = [
    "--temperatures",
    "[0.0]",
    "--max_new_tokens",
    "32",
    "--phase_prompts",
    "0",
    "--overwrite",
    "true",
]
JUMPING = """
import runpy, sys, time
real, start = time.perf_counter, time.perf_counter()
time.perf_counter = lambda: real() + 0.5 * int((real() - start) / 5)
sys.argv = sys.argv[1:]
sys.path[0] = "."
runpy.run_path(sys.argv[0], run_name="__main__")
"""
STALL_SECONDS, BETWEEN_STALLS = 2.0, 6.0


@dataclass
class PlantedConfig:
    """Runs of one evaluation, quiet and in trouble."""

    rounds: Count = 10
    """Runs of each kind, in turns; a run takes some 25 seconds."""
    tolerance: float = 0.05
    """Share by which a speed-up that is not void may differ from the quiet runs' median."""
    out: str = "outputs/clocks.json"
    """Where the result is written after each run."""


@contextmanager
def neighbours(cpus: list[int]) -> Iterator[None]:
    """A process that computes on each of the CPUs."""
    code = "import os\nos.sched_setaffinity(0, {%d})\nwhile True: pass"
    working = [subprocess.Popen([sys.executable, "-c", code % cpu]) for cpu in cpus]
    try:
        yield
    finally:
        for process in working:
            process.kill()
            process.wait()


def evaluate(folder: Path, before: list[str], stalled: bool = False) -> dict[str, dict[str, Any]]:
    """{method: its row over all tasks} of one run."""
    command = [sys.executable, *before, *EVALUATION, *OPTIONS, "--out", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while stalled and process.poll() is None:
        time.sleep(BETWEEN_STALLS)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(STALL_SECONDS)
            os.kill(process.pid, signal.SIGCONT)
    if process.wait() != 0:
        raise UserError(f"{' '.join(command)} failed")
    rows = json.loads((folder / "report.json").read_text())["methods"]
    return {row["name"]: row for row in rows if row["task"] == "all"}


def run(s: PlantedConfig) -> None:
    out = Path(s.out)
    folder = out.with_suffix("")
    cpus = sorted(os.sched_getaffinity(0))
    clock = ["-c", JUMPING]

    def beside(names: list[int]) -> dict[str, dict[str, Any]]:
        with neighbours(names):
            return evaluate(folder, [])

    troubles: dict[str, Callable[[], dict[str, dict[str, Any]]]] = {
        "quiet": lambda: evaluate(folder, []),
        "a neighbour on one CPU": lambda: beside(cpus[:1]),
        "a neighbour on each CPU": lambda: beside(cpus),
        "stalls of two seconds": lambda: evaluate(folder, [], stalled=True),
        "a clock that jumps": lambda: evaluate(folder, clock),
    }
    found: list[dict[str, Any]] = []
    for number in range(s.rounds):
        for trouble, measure in troubles.items():
            for method, row in measure().items():
                if method != "plain":
                    kept = {key: row[key] for key in ("speedup", "speedup_ci", "tau", "void")}
                    found.append({"trouble": trouble, "round": number, "method": method, **kept})
            print(f"round {number + 1}/{s.rounds}: {trouble}", flush=True)
            write_atomically(out, json.dumps(summary(found, s.tolerance), indent=1))


def summary(found: list[dict[str, Any]], tolerance: float) -> dict[str, Any]:
    """Of each trouble and method: how many speed-ups are void, and which others are off the quiet median."""
    rows = []
    for trouble, method in dict.fromkeys((x["trouble"], x["method"]) for x in found):
        quiet = statistics.median(
            x["speedup"] for x in found if x["method"] == method and x["trouble"] == "quiet"
        )
        own = [x for x in found if (x["trouble"], x["method"]) == (trouble, method)]
        counted = [x["speedup"] for x in own if not x["void"]]
        off = [x for x in counted if abs(x / quiet - 1) > tolerance]
        rows.append(
            {
                "trouble": trouble,
                "method": method,
                "quiet": quiet,
                "runs": len(own),
                "void": len(own) - len(counted),
                "counted": counted,
                "misleading": off,
            }
        )
    return {
        "rows": rows,
        "runs": found,
        "tolerance": tolerance,
        "hardware": asdict(hardware()),
        "versions": versions(),
    }


if __name__ == "__main__":
    run_command(run, PlantedConfig, __doc__)
