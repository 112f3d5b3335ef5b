"""Measures drafts: acceptance, speed-up and losslessness, for each task and temperature.

    python eval/run.py --config configs/quickstart/eval.yaml
    python eval/run.py --target T --methods '[{name: causal, draft: DIR}, {name: ngram}]' --out outputs/eval

Writes report.json, report.md, report.html and outputs.jsonl into --out; the last line on stdout is JSON. The same
command goes on with a run that was stopped by Ctrl-C or a crash.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.command import run_command
from eval.settings.evaluation import EvalConfig


def main(s: EvalConfig) -> None:
    from eval.measuring import format_summary_line, measure  # loads torch: --help does without

    if measured := measure(s):
        print(measured)
        print(format_summary_line(measured.report, measured.folder))


if __name__ == "__main__":
    run_command(main, EvalConfig, __doc__)
