"""Examines a sampled set, or prompts before sampling: shows samples with the loss mask in colour and lists findings.

    python train/doctor.py outputs/samples --target T
    python train/doctor.py --target T --data '[{path: outputs/samples}, {path: outputs/more}]' --html doctor.html
    python train/doctor.py --target T --sources '[{kind: file, path: prompts.jsonl}]' --strict true

Each finding says how many rows have it, what it costs, and which setting mends it. stops: do not train on this; costs:
acceptance or compute is lost; note: good to know. Only the target's tokenizer, chat template and config are read. The
last line is JSON. With --strict true a finding that stops or costs ends the command with exit code 1.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.command import run_command
from train.settings.data import DoctorConfig


def main(s: DoctorConfig) -> None:
    from train.doctor_checks.report import report  # loads torch: --help does without

    report(s)


if __name__ == "__main__":
    run_command(main, DoctorConfig, __doc__, first="data")
