"""Distills a draft: trains it on the target's samples against the target's distributions.

    accelerate launch train/distill.py --config configs/bundled/causal.yaml
    accelerate launch train/distill.py --target T --data outputs/samples --draft.init small-lm --out DIR
    accelerate launch train/distill.py … --draft.init small-lm --draft.layers '[0, 1, 2, 5]' --draft.vocab 32000

Killed at any moment, the same command resumes from its last checkpoint and ends with exactly the weights that an
undisturbed run gives. The draft's folder in --out decodes with eval/run.py and decode/generate.py.
"""

import sys
from functools import partial
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.command import run_command
from train.trainer.settings import DistillConfig


def main(s: DistillConfig) -> None:
    from decode.distributed.placement import run_placed  # these load torch: --help does without
    from train.training import train_draft

    run_placed(s.placement, partial(train_draft, s))


if __name__ == "__main__":
    run_command(main, DistillConfig, __doc__)
