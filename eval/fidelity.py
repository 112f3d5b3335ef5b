"""Reports how much of a target a dtype changes, on the target's own answers: decoding is lossless to what is loaded.

    python eval/fidelity.py --target T --dtypes '[w8a8, bfloat16]' --tasks '[{name: mt-bench, path: question.jsonl}]'
    python eval/fidelity.py --target T --dtypes '[w8a8]' --samples outputs/samples

The target in `reference` answers the prompts at temperature 1, or the answers of a sampled set are taken, and both read
them. At each token of an answer it compares the two distributions: their total variation (TV), whether their most
probable tokens are one, KL(reference || dtype) and the perplexity of both. The first positions of a text are apart:
little is known there, a few channels are very large, and rounding is at its worst. Tasks `scored` are answered greedily
in each dtype, and the scores compared. Intervals are of the bootstrap over prompts, differences of dtypes over the same
ones. Both models are in memory. The last line is JSON.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.command import run_command
from eval.settings.evaluation import FidelityConfig


def main(s: FidelityConfig) -> None:
    from eval.dtype_fidelity import report_fidelity  # loads torch: --help does without

    report_fidelity(s)


if __name__ == "__main__":
    run_command(main, FidelityConfig, __doc__, first="target")
