"""Writes the sampled set that drafts are distilled on: the target's answers to prompts, or texts as they stand.

    accelerate launch train/sample.py --config configs/quickstart/sample.yaml
    accelerate launch train/sample.py --target T --sources '[{kind: file, path: prompts.jsonl}]' --out DIR
    python train/sample.py --engine openai --url http://localhost:8000/v1 --target T --sources … --out DIR
    python train/sample.py --engine vllm --vllm_python .venv-vllm/bin/python --target T --sources … --out DIR
    python train/sample.py --engine draftsmith --target T --sources … --out DIR   # by our engine, also beside vLLM
    python train/sample.py --origin text --target T --sources '[{kind: file, path: traces.jsonl}]' --turns all --out DIR

Several processes share the prompts. After a kill the same command resumes: what was answered in the last minute may be
answered again, and our engine's answers are the same as without the kill, because the random numbers of each depend on
`seed` and its id alone. A server gets the same seeds, and may round otherwise beside other requests.
"""

import json
import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.command import run_command
from train.sampling.config import SampleConfig


def main(s: SampleConfig) -> None:
    from train.answering import answer  # loads torch: --help does without

    made = answer(s)
    if made and made.served:
        print(json.dumps({**made.counts, "too_long": made.too_long, "failures": made.failures}))


if __name__ == "__main__":
    run_command(main, SampleConfig, __doc__)
