"""Scores the logs of serving engines by one definition: τ, α and acceptance rate, and whether two logs are apart.

    python eval/rescore.py responses.jsonl                    # of any engine, found out by content
    python eval/rescore.py a.jsonl outputs.jsonl --json both.json   # the same prompts: difference, p-value and power
    python eval/rescore.py after.txt --before before.txt      # /metrics dumps
    python eval/rescore.py server.log                         # what the server printed

Pooled figures stand beside the means over requests, which weigh a short answer like a long one; both are printed by
some engine under the same name. outputs.jsonl of eval/run.py is read as well. docs/engine_logs.md lists the formats and
how to have engines write them.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from decode.common.command import run_command
from decode.serving.log_counts import Format


@dataclass
class RescoreConfig:
    log: str
    """JSON lines of responses, saved streams of them, a /metrics dump, or the server's own log; may be given first,
    without --log."""
    other: str = ""
    """A log of the same prompts, to compare with; may be given second, without --other."""
    before: str = ""
    """An earlier /metrics dump of the same server, which is subtracted."""
    format: Format = "auto"
    """The engine that wrote the logs; auto: found out by their content."""
    json: str = ""
    """File for the result; empty: none."""


def main(s: RescoreConfig) -> None:
    from eval.served.rescoring import rescore  # loads torch: --help does without

    rescore(s.log, s.other, s.before, s.format, s.json)


if __name__ == "__main__":
    run_command(main, RescoreConfig, __doc__, first="log other")
