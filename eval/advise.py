"""Whether to switch speculation on, from a report's own numbers, with the production checklist filled in.

    python eval/advise.py outputs/quickstart/report/report.json
    python eval/advise.py report.json --tuned outputs/tune/tuned.json --rows 8 --length 4096 --memory_gb 24

Markdown on stdout; --out FILE writes it there as well. What was not measured is said to be missing.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.cli import run_command
from decode.common.errors import UserError
from decode.common.files import read_json, write_atomically
from eval.reporting.advice import advice_markdown, advise, read_report
from eval.reporting.formatting import target_name


@dataclass
class AdviseConfig:
    report: str
    """A report.json of eval/run.py; may stand first without its name."""
    tuned: str = ""
    """A tuned.json of eval/tune.py on the same target."""
    rows: int = 0
    """Requests at a time that are planned; 0: the report's batch size."""
    length: int = 0
    """Tokens of prompt and reply that each of them holds; 0: the mean reply of the report."""
    memory_gb: float = 0.0
    """Memory of the device in GB (1e9 bytes); 0: that of the report's GPU, if it is a known one."""
    out: str = ""
    """File for the text; empty writes none."""


def main(s: AdviseConfig) -> None:
    report = read_report(Path(s.report))
    tuned = read_json(Path(s.tuned)) if s.tuned else None
    for name in ("rows", "length", "memory_gb"):
        if getattr(s, name) < 0:
            raise UserError(f"{name} must not be negative")
    advice = advise(report, tuned, 1e9 * s.memory_gb or None, s.rows or None, s.length or None)
    text = advice_markdown(advice, target_name(report))
    if s.out:
        write_atomically(Path(s.out), text)
    sys.stdout.write(text)


if __name__ == "__main__":
    run_command(main, AdviseConfig, __doc__, first="report")
