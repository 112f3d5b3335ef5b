"""Continues one prompt and prints the text, each token coloured by where it came from.

    python decode/generate.py --prompt "def read_config(path):" --draft outputs/bundled/drafts/causal
    python decode/generate.py --prompt "Question: …" --draft ngram --sampling.temperature 1
    python decode/generate.py --prompt_file question.txt --draft outputs/draft --lookup ngram
    python decode/generate.py --prompt "What is this?" --image photo.jpg --target Qwen/Qwen2.5-VL-3B-Instruct
    python decode/generate.py --prompt "A user as JSON: " --draft grammar --json_schema user.schema.json

Green: drafted and accepted. Red, struck out: drafted and rejected. Blue: sampled from the target, instead of a
rejected token or as the bonus token after a fully accepted draft (Leviathan et al. 2023, figure 1). A character of
several tokens is printed when the last one completes it, in the colour of that one; of rejected tokens only whole
characters are shown.
"""

import sys
from functools import partial
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.command import run_command
from decode.drafts.settings import GenerateConfig


def main(s: GenerateConfig) -> None:
    from decode.continuation import generate  # these load torch: --help does without
    from decode.distributed.placement import run_placed

    run_placed(s.placement, partial(generate, s))


if __name__ == "__main__":
    run_command(main, GenerateConfig, __doc__)
