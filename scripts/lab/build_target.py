"""Trains the bundled target (`assets/target`) or the small base draft (`assets/draft`) from scratch.

The corpus is Python's standard library and language reference, which every Python installation has, and the training
questions of GSM8K. Muon trains the matrices of the layers, AdamW the rest. The run saves checkpoints (--save_every) and
the same command continues it. provenance.json beside the weights has the settings, the corpus and the results.

    python scripts/lab/build_target.py --model target --gsm8k openai/gsm8k
    python scripts/lab/build_target.py --model draft  --gsm8k path/to/train.jsonl
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from decode.common.command import run_command
from scripts.lab.settings import BuildTargetConfig


def main(s: BuildTargetConfig) -> None:
    from scripts.lab.bundled_model import build_bundled  # loads torch: --help does without

    build_bundled(s)


if __name__ == "__main__":
    run_command(main, BuildTargetConfig, __doc__)
