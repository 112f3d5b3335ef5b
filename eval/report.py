"""Renders a report.json (schema 1) again: report.md and report.html (one page that needs no other file).

    python eval/report.py outputs/quickstart/report
    python eval/report.py DIR --tuned outputs/tune/tuned.json  # adds the plots of a tuning run

Speed-ups, tau, alpha and tokens/s of our methods have a 95 % interval and their number of prompts; what was not
measured is a dash or left out.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console

from decode.common.command import run_command
from decode.common.errors import UserError


@dataclass
class ReportConfig:
    folder: str
    """Output folder of eval/run.py; may be given first, without --folder."""
    tuned: str = ""
    """A tuned.json of eval/tune.py on the same target: adds its plots and tuned settings."""


def main(s: ReportConfig) -> None:
    """Renders the report in the folder and prints the path of its HTML page."""
    from decode.model.loading import load_tokenizer  # these load torch: --help does without
    from eval.reporting.render import write_pages
    from eval.reporting.token_traces import TokenTrace, read_outputs, select_traces
    from eval.results.report import read_report
    from eval.results.tuned import read_tuned

    folder = Path(s.folder)
    report = read_report(folder / "report.json")
    tuned = read_tuned(Path(s.tuned), report) if s.tuned else None
    traces: list[TokenTrace] = []
    if (folder / "outputs.jsonl").is_file():
        try:
            tokenizer = load_tokenizer(report.target.name)
        except UserError as error:
            Console(stderr=True).print(f"report without token traces: {error}", highlight=False)
        else:
            traces = select_traces(report, read_outputs(folder / "outputs.jsonl"), tokenizer)
    write_pages(report, folder, traces, tuned)
    sys.stdout.write(f"{folder / 'report.html'}\n")


if __name__ == "__main__":
    run_command(main, ReportConfig, __doc__, first="folder")
