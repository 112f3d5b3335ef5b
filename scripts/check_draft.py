"""A draft held against what a serving engine does with its files, without that engine.

    python scripts/check_draft.py outputs/quickstart/drafts/eagle3 --engine vllm --target assets/target

Each finding says what the engine does: `refused` stops it at the start or at the first request; `silent` serves
something else than was trained, with few tokens accepted; `ignored` is harmless. Exit code 1 for the first two. The
rules are tables in scripts/engine_compat/rules/, each with its source. Of them vLLM's were also run (scripts/engine_compat/corruption_study.py).
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.console import Console
from rich.table import Table

from decode.common.cli import run_command
from decode.common.errors import UserError
from scripts.engine_compat.rules import hf, sglang, trtllm, vllm
from scripts.engine_compat.rules.checkpoint import (
    IGNORED,
    Finding,
    check_rules,
    read_draft,
    read_target,
)

ENGINES: dict[str, Any] = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm, "transformers": hf}


@dataclass
class CheckDraftConfig:
    draft: str = ""
    """The draft's folder or hub name; may stand first without --draft."""
    engine: str = ""
    """vllm, sglang, trtllm or transformers."""
    engine_version: str = ""
    """Empty: the newest that the rules speak of (vLLM: the newest that they were run against)."""
    target: str = ""
    """Folder or hub name of the target. Without it, what depends on the target is not checked."""
    json: bool = False
    """Print JSON instead of a table."""


def check_draft_files(
    path: str, engine: str, engine_version: str = "", target: str = ""
) -> list[Finding]:
    """What this engine would make of a draft's files; [] for a draft that it serves as it was trained."""
    if engine not in ENGINES:
        raise UserError(f"no engine {engine!r}: give one of {', '.join(ENGINES)}")
    rules = ENGINES[engine]
    draft = read_draft(path)
    if target:
        model = read_target(target, tokenizer=draft.family == "causal")
        draft = read_draft(path, model)
    return check_rules(draft, rules.RULES, engine_version or rules.NEWEST)


def main(s: CheckDraftConfig) -> None:
    if not s.draft or not s.engine:
        raise UserError("give a draft's folder and --engine")
    found = check_draft_files(s.draft, s.engine, s.engine_version, s.target)
    wrong = [finding for finding in found if finding.effect != IGNORED]
    used = s.engine_version or ENGINES[s.engine].NEWEST
    if s.json:
        facts = {"draft": s.draft, "engine": s.engine, "version": used, "target": s.target or None}
        print(json.dumps(facts | {"wrong": len(wrong), "findings": [asdict(f) for f in found]}))
    else:
        console = Console()
        if found:
            table = Table("rule", "effect", "what", "source")
            for f in found:
                table.add_row(f.rule, f.effect, f.what, f.source)
            console.print(table)
        without = "" if s.target else " (no --target: what depends on it was not checked)"
        console.print(f"{s.draft}: {len(wrong)} wrong by the rules of {s.engine} {used}{without}")
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    run_command(main, CheckDraftConfig, __doc__, first="draft")
