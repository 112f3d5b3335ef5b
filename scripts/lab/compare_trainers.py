"""This project's training beside widely used trainers: tokens per second and peak memory on the same batches.

    python scripts/lab/compare_trainers.py --out docs/results/trainers.json
    python scripts/lab/compare_trainers.py --arms '[ours-on-policy, gkd-on-policy]'
    python scripts/lab/compare_trainers.py --target T --data D \\
      --arms '[eagle3, eagle3-features, eagle3-trainer]'

The trainers (--arms):
  ours: train/trainer/loop.py with a causal draft and the live target as teacher
  ours-features: the same with the target's hidden states read from disk (--features of train/distill.py); the pass
    that stores them is timed too, and spread over --epochs
  trainer: transformers' Trainer with the KL at supervised positions as its loss
  gkd: TRL's GKDTrainer at lmbda 0 and beta 0, which is the same KL; skipped unless trl is installed
  ours-on-policy, gkd-on-policy: the draft writes the texts that it is trained on, GKD before every step (lmbda 1),
    ours for on_policy_every steps at once
  eagle3, eagle3-features: as the first two, with an EAGLE-3 head instead of --draft
  eagle3-trainer: transformers' Trainer with the loss as public trainers compute it (reference_trainers.py)

All of them train every weight of the same draft, or head, on the same samples in the same order. Each run is a process
of its own, and the trainers take turns; stopped, the same command goes on (OUT.cells). Memory added is the peak minus
what was in use before the first step. The last line is JSON.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from decode.common.command import run_command
from scripts.lab.settings import CompareTrainersConfig


def main(s: CompareTrainersConfig) -> None:
    from scripts.lab.trainer_runs import compare  # loads torch: --help does without

    compare(s)


if __name__ == "__main__":
    run_command(main, CompareTrainersConfig, __doc__)
