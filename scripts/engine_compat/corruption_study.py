"""What a damaged draft does in vLLM: refused, or served in silence with fewer tokens accepted?

    python scripts/engine_compat/corruption_study.py --drafts outputs/compare/drafts --python ~/vllm/bin/python --out served_damage.json

Copies of good drafts, each with one mistake that exporters are known to make, are checked (scripts/check_draft.py) and
then decoded by vLLM, beside the good ones. A draft that proposes nonsense costs no output, so vLLM says nothing: only
what it accepts does. scripts/engine_compat/corruptions.py is the list, and the checker's tests run over all of it.
"""

import json
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from rich.console import Console
from rich.table import Table

from decode.checkpoints import importers, layouts
from decode.common import files, run_dir
from decode.common.cli import run_command
from decode.common.errors import UserError
from decode.drafts.base import read_metadata
from decode.drafts.registry import draft_family
from decode.model.loading import load_target
from eval.benchmark import vllm_client
from eval.tasks.loading import Task, load_task_prompts
from scripts import export
from scripts.check_draft import check_draft_files
from scripts.engine_compat import vllm_parity
from scripts.engine_compat.corruptions import all_corruptions


@dataclass
class CorruptionStudyConfig:
    drafts: str = "outputs/compare/drafts"
    """Folder with good drafts by family: eagle3, eagle1, medusa."""
    target: str = "assets/target"
    python: str = ""
    """Interpreter that has vLLM; empty: as in scripts/referee.py."""
    only: list[str] = field(default_factory=list)
    """Names of damages; empty: those that say something in vLLM."""
    tasks: list[Task] = field(
        default_factory=lambda: [Task("code", limit=2), Task("prose", limit=2), Task("arithmetic", limit=2)]
    )  # fmt: skip
    k: int = 4
    max_new_tokens: int = 32
    out: str = ""
    """File for the JSON, written anew after each draft; drafts that it holds are not served again."""


def copy_draft(draft: str, out: Path) -> None:
    """The files of a draft that engines read, in the layout that is saved today."""
    if draft_family(draft) == "causal":
        out.mkdir(parents=True)
        for pattern in ("*.json", "*.safetensors"):
            for file in Path(draft).glob(pattern):
                shutil.copyfile(file, out / file.name)
    else:
        layouts.write_checkpoint(out, *export.to_flat(importers.read_checkpoint(draft)))
        export.write_metadata(draft, read_metadata(draft), out)


def summarize_result(judge: dict[str, Any]) -> dict[str, Any]:
    """What vLLM accepts, or what it says instead."""
    if "error" in judge:
        return {"vllm": "refused", "says": " ".join(judge["error"].split())[:300]}
    total = vllm_parity.sum_counts(judge["answers"])
    return {
        "vllm": "served",
        "version": judge["vllm"],
        **total,
        "tau": 1 + total["accepted"] / total["rounds"],
        "acceptance_rate": total["accepted"] / total["drafted"],
    }


def load_rows(file: str, sizes: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of an earlier run of these sizes, which goes on."""
    if not file or not Path(file).is_file():
        return []
    held = files.read_json(Path(file))
    return held["rows"] if {key: held.get(key) for key in sizes} == sizes else []


def save_rows(file: str, sizes: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    if file:
        result = {**sizes, "rows": rows, **run_dir.provenance()}
        files.write_atomically(Path(file), json.dumps(result, indent=1) + "\n")


def main(s: CorruptionStudyConfig) -> None:
    target = load_target(s.target, "cpu")
    prompts = [item.prompt_ids for task in s.tasks for item in load_task_prompts(task, target)]
    context = vllm_parity.context_length(target, prompts, s.k, s.max_new_tokens)
    known = all_corruptions(target.decoder.config.num_hidden_layers)
    names = s.only or [name for name, damage in known.items() if damage.served]
    strange = [name for name in names if name not in known]
    if strange:
        raise UserError(f"no damage {strange[0]!r}: give some of {', '.join(known)}")
    todo = [(family, "none") for family in dict.fromkeys(known[name].family for name in names)]
    todo += [(known[name].family, name) for name in names]
    sizes = {"k": s.k, "prompts": len(prompts), "max_new_tokens": s.max_new_tokens}
    rows = load_rows(s.out, sizes)
    todo = [pair for pair in todo if pair not in [(row["family"], row["damage"]) for row in rows]]
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / f"draft{i}" for i in range(len(todo))]
        for folder, (family, name) in zip(folders, todo, strict=True):
            copy_draft(f"{s.drafts}/{family}", folder)
            if name != "none":
                known[name].edit(folder)
        jobs = [
            vllm_client.build_job(
                s.target,
                prompts,
                speculative=vllm_client.speculative_config(str(folder), s.k),
                max_new_tokens=s.max_new_tokens,
                max_model_len=context,
            )
            for folder in folders
        ]
        judged = vllm_client.run_jobs(s.python, jobs) if jobs else iter(())
        for folder, (family, name), judge in zip(folders, todo, judged, strict=True):
            seen = check_draft_files(str(folder), "vllm", target=s.target)
            said = [[f.rule, f.effect, f.what] for f in seen if f.rule != "changed-since-training"]
            rows.append(
                {"family": family, "damage": name, "checker": said, **summarize_result(judge)}
            )
            save_rows(s.out, sizes, rows)
    save_rows(s.out, sizes, rows)
    table = Table("family", "damage", "checker", "vLLM", "τ", "by position")
    for row in rows:
        rules = ", ".join(dict.fromkeys(rule for rule, _, _ in row["checker"])) or "–"
        tau = f"{row['tau']:.3f}" if "tau" in row else "–"
        positions = str(row.get("by_position", ""))
        table.add_row(row["family"], row["damage"], rules, row["vllm"], tau, positions)
    Console(stderr=True).print(table)


if __name__ == "__main__":
    run_command(main, CorruptionStudyConfig, __doc__)
