"""Recommends from a report whether to switch speculative decoding on, with a production checklist.

    python eval/advise.py outputs/quickstart/report/report.json
    python eval/advise.py report.json --tuned outputs/tune/tuned.json --rows 8 --length 4096 --memory_gb 24

Prints Markdown; --out FILE writes it to that file as well. Values that were not measured are listed as missing.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.command import run_command
from decode.common.files import write_atomically
from decode.common.ranges import CountOrZero, at_least
from decode.common.run_dir import check_file


@dataclass
class AdviseConfig:
    report: str
    """A report.json of eval/run.py; may be given first, without --report."""
    tuned: str = ""
    """A tuned.json of eval/tune.py on the same target."""
    rows: CountOrZero = 0
    """Planned number of concurrent requests; 0: the report's batch size."""
    length: CountOrZero = 0
    """Planned tokens of prompt and reply per request; 0: the report's mean reply."""
    memory_gb: Annotated[float, at_least(0)] = 0.0
    """Memory of the device in GB (1e9 bytes); 0: that of the report's GPU by its data sheet, if it is a known one."""
    out: str = ""
    """File that the advice is also written to; empty: none."""


def main(s: AdviseConfig) -> None:
    """Prints the advice on a report."""
    # --help does without. None of them loads torch.
    from eval.reporting.advice import advice_markdown, advise
    from eval.results.report import read_report
    from eval.results.tuned import read_tuned

    check_file(s.out, [s.report, s.tuned])
    report = read_report(Path(s.report))
    tuned = read_tuned(Path(s.tuned), report) if s.tuned else None
    advice = advise(report, tuned, 1e9 * s.memory_gb or None, s.rows or None, s.length or None)
    text = advice_markdown(advice, report.target_name)
    if s.out:
        write_atomically(Path(s.out), text)
    sys.stdout.write(text)


if __name__ == "__main__":
    run_command(main, AdviseConfig, __doc__, first="report")
