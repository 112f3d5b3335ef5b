"""Distills a draft: trains it on the target's samples against the target's distributions.

    accelerate launch train/distill.py --config configs/bundled/causal.yaml
    accelerate launch train/distill.py --target T --data outputs/samples --draft.init small-lm --out DIR
    accelerate launch train/distill.py … --draft.init small-lm --draft.layers '[0, 1, 2, 5]' --draft.vocab 32000

Killed at any moment, the same command resumes from its last checkpoint and ends with exactly the weights that an
undisturbed run gives. The draft's folder in --out decodes with eval/run.py and decode/generate.py.
"""

import json
import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.command import run_command
from train.trainer.settings import DistillConfig


def main(s: DistillConfig) -> None:
    from train.training import DryRun, train_draft  # loads torch: --help does without

    made = train_draft(s)
    if isinstance(made, DryRun):
        print(json.dumps({"dry_run": True, **vars(made)}))
    elif made:
        print(json.dumps({"draft": made.folder, "steps": made.steps, **made.measured}))


if __name__ == "__main__":
    run_command(main, DistillConfig, __doc__)
