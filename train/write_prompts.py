"""Lets a chat model write the prompts that it is then sampled on, where no data set of prompts is at hand.

    python train/write_prompts.py --target T --count 3000 --out outputs/prompts
    python train/sample.py --target T --sources '[{kind: file, path: outputs/prompts/prompts.jsonl}]' --out DIR

The target gets a system message and the beginning of a user's turn, and goes on as the user (Magpie, Xu et al. 2024,
arXiv 2406.08464). Killed or stopped, the same command goes on, and writes the same prompts.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.command import run_command
from train.sampling.config import WritePromptsConfig


def main(s: WritePromptsConfig) -> None:
    from train.prompt_writing import write  # loads torch: --help does without

    write(s)


if __name__ == "__main__":
    run_command(main, WritePromptsConfig, __doc__)
