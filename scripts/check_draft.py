"""Checks a draft's files against the rules of a serving engine, without that engine.

    python scripts/check_draft.py outputs/bundled/drafts/eagle3 --engine vllm --target assets/target

Each finding says what the engine does: `refused` is an error at the start or at the first request; `silent` serves
another function than was trained, with few tokens accepted; `ignored` is harmless. Exit code 1 for the first two. The
rules are tables in decode/serving/, each rule with its source. Those of vLLM (docs/results/served_damage.json) and
llama.cpp (scripts/llamacpp_parity.py) were also run. The rule `decoder` is why this project's own decoder refuses the
draft.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console
from rich.table import Table

from decode.common.command import run_command
from decode.common.errors import UserError


@dataclass
class CheckDraftConfig:
    draft: str = ""
    """The draft's folder or Hub name; may stand first without --draft."""
    engine: str = ""
    """vllm, sglang, trtllm, llamacpp or transformers."""
    engine_version: str = ""
    """Empty: the newest that the rules describe (vLLM: the newest that they were run against)."""
    target: str = ""
    """Folder or Hub name of the target. Without it, what depends on the target is not checked."""
    json: bool = False
    """Print JSON instead of a table."""


def main(s: CheckDraftConfig) -> None:
    """Prints the findings; exit code 1 if one of them is `refused` or `silent`."""
    # These load torch: --help does without.
    from decode.serving.checker import ENGINES, check_draft_files
    from decode.serving.rules import IGNORED

    if not s.draft or not s.engine:
        raise UserError(f"give a draft's folder and --engine, one of {', '.join(ENGINES)}")
    findings = check_draft_files(s.draft, s.engine, s.engine_version, s.target)
    wrong = [finding for finding in findings if finding.effect != IGNORED]
    version = s.engine_version or ENGINES[s.engine].version
    if s.json:
        names = {"draft": s.draft, "engine": s.engine, "version": version}
        found = {"wrong": len(wrong), "findings": [asdict(f) for f in findings]}
        print(json.dumps({**names, "target": s.target or None, **found}))
    else:
        console = Console()
        if findings:
            table = Table("rule", "effect", "what", "source")
            for f in findings:
                table.add_row(f.rule, f.effect, f.what, f.source)
            console.print(table)
        note = "" if s.target else " (no --target: what depends on it was not checked)"
        console.print(f"{s.draft}: {len(wrong)} wrong by the rules of {s.engine} {version}{note}")
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    run_command(main, CheckDraftConfig, __doc__, first="draft")
