"""Checks whether a draft still fits a changed target: fine-tuned, merged, quantised. Keep, fine-tune or retrain it?

    python eval/transfer.py outputs/draft --targets '[org/model, org/model-finetuned]'
    python eval/transfer.py outputs/draft --targets '[T, T]' --dtype '[float32, int8]'
    python eval/transfer.py outputs/draft --targets '[T, T.Q4_1.gguf]' --data_curve outputs/data_curve/data_curve.json

The first target is the one that the draft was trained for. The draft decodes the same prompts with each; τ, α and the
share of accepted tokens that is left are compared prompt by prompt. With the data curve of that draft
(scripts/lab/data_curve.py) it also says how many supervised tokens the loss is worth, a guide to how many are
needed to fine-tune. Decoding stays lossless in any case: a draft that does not fit is slow, not wrong.
The last line is JSON.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.command import run_command
from eval.settings.evaluation import TransferConfig


def main(s: TransferConfig) -> None:
    from eval.scaling.transfer import transfer  # loads torch: --help does without

    transfer(s)


if __name__ == "__main__":
    run_command(main, TransferConfig, __doc__, first="draft")
