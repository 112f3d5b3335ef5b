"""Scores what was served by the definitions of the reports: τ, α and acceptance rate, and whether two runs are apart.

    python eval/rescore.py after.txt --before before.txt      # /metrics dumps of vLLM, SGLang or llama.cpp
    python eval/rescore.py a/outputs.jsonl b/outputs.jsonl --method eagle3   # of two runs on the same prompts

Of outputs.jsonl of eval/run.py the answers of one method at one temperature are scored: pooled figures stand beside the
means over requests, which weigh a short answer like a long one. Of two runs come the difference of τ, its p-value and
what these prompts would have shown. docs/engine_logs.md lists what is read of a dump.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.command import run_command
from decode.common.ranges import Temperature


@dataclass
class RescoreConfig:
    log: str
    """A /metrics dump or outputs.jsonl; may be given first, without --log."""
    other: str = ""
    """Another outputs.jsonl of the same prompts, to compare with; may be given second, without --other."""
    before: str = ""
    """An earlier /metrics dump of the same server, which is subtracted."""
    method: str = ""
    """Of outputs.jsonl: the method whose answers are scored; empty: the only one but plain decoding."""
    temperature: Temperature | None = None
    """Of outputs.jsonl: the temperature whose answers are scored; null: the only one."""
    json: str = ""
    """File for the result; empty: none."""


def main(s: RescoreConfig) -> None:
    from eval.served.rescoring import rescore  # loads torch: --help does without

    rescore(s.log, s.other, s.before, s.method, s.temperature, s.json)


if __name__ == "__main__":
    run_command(main, RescoreConfig, __doc__, first="log other")
