"""Finds the fastest draft length, tree and batch size for each domain and temperature, and tests predictions of them.

    python eval/tune.py --target T --methods '[{name: causal, draft: DIR}, {name: ngram}]' --out outputs/tune
    python eval/tune.py --target T --methods '[{name: early-exit}]' --layers '[4, 8, 12]' --ks '[1, 2, 4, 6]'
    python eval/run.py --config outputs/tune/tuned.yaml

Every setting is timed on the same prompts, interleaved; speed-ups are of rounds, without prefill. Speed-ups on one half
of the prompts are also predicted from two draft lengths on the other half. Writes tuned.json and tuned.md, tuned.yaml
(the first temperature, all domains, batch 1) and settings/*.yaml (each temperature, batch size and domain) into --out.
The same command goes on with a run that was stopped.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.command import run_command
from eval.settings.evaluation import TuneConfig


def main(s: TuneConfig) -> None:
    from eval.tuning.search import search  # loads torch: --help does without

    search(s)


if __name__ == "__main__":
    run_command(main, TuneConfig, __doc__)
