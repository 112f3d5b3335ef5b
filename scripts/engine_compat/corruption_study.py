"""Decodes with corrupted drafts in vLLM: is each refused, or served without an error and with fewer tokens accepted?

    python scripts/engine_compat/corruption_study.py --drafts outputs/compare/drafts --python ~/vllm/bin/python \
      --out served_damage.json

Copies of good drafts, each with one mistake that exporters are known to make, are checked (scripts/check_draft.py) and
then used by vLLM, as are the good ones. A bad draft does not change vLLM's output and causes no error: only the
accepted counts show it. scripts/engine_compat/corruptions.py lists the mistakes; the checker's tests run all of them.
With --audit true the causes are named as scripts/audit.py does: by decoding here alone, and with the checker's rules;
`summary` says how many of them are right (EXPECTED_CAUSES), and in how many good drafts a cause is named.
"""

import difflib
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from rich.console import Console
from rich.table import Table

from decode.checkpoints import importers, layouts
from decode.common import lock, provenance
from decode.common.command import Terminated, run_command
from decode.common.errors import UserError
from decode.common.files import read_json_object, write_atomically
from decode.common.ranges import Count, DraftLength
from decode.common.run_dir import check_file
from decode.drafts.base import read_metadata
from decode.drafts.registry import draft_family
from decode.model.loading import Target, load_target
from eval.benchmark import vllm_client
from eval.tasks.loading import Task, TaskPrompt, load_task_prompts
from scripts.engine_compat import exporters, vllm_parity
from scripts.engine_compat.audit import naming
from scripts.engine_compat.audit.decoding import vllm_counts
from scripts.engine_compat.audit.draft_audit import decode_readings, first_difference, verdict
from scripts.engine_compat.checker import check_engine_rules
from scripts.engine_compat.corruptions import all_corruptions
from scripts.engine_compat.greedy_parity import COUNTS, sum_counts
from scripts.engine_compat.rules.checkpoint import Finding, read_draft, read_target
from scripts.engine_compat.vllm_parity import VllmParityConfig


@dataclass
class CorruptionStudyConfig:
    drafts: str = "outputs/compare/drafts"
    """Folder with one good draft of each family: eagle3, eagle1, medusa, and causal if it is there."""
    target: str = "assets/target"
    """The target's folder or Hub name."""
    python: str = ""
    """Interpreter with vLLM; empty: $VLLM_PYTHON or .venv-vllm/bin/python."""
    only: list[str] = field(default_factory=list)
    """Names of corruptions; empty: those with `run_in_vllm`."""
    tasks: list[Task] = field(
        default_factory=lambda: [Task("code", limit=2), Task("prose", limit=2), Task("arithmetic", limit=2)]
    )  # fmt: skip
    k: DraftLength = 4
    """Tokens drafted a round."""
    max_new_tokens: Count = 32
    """Tokens decoded for each prompt."""
    audit: bool = False
    """Name the cause of each damage; twelve prompts show small differences of acceptance too."""
    out: str = ""
    """File for the JSON, rewritten after each draft; drafts that it already contains are not decoded again."""


EXPECTED_CAUSES = {
    "tensors": (
        "a matrix is missing", "the last norm is missing", "a tensor is renamed", "norm_before_fc", "fc_norm",
        "a first norm", "a matrix is missing (1)", "a projection is missing",
    ),
    "vocabulary map": ("d2t holds ids", "d2t is one token off", "d2t is missing", "d2t in bfloat16"),
    "taps": ("taps of the other convention", "taps for SGLang alone"),
    "norms": ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm", "nested, flag unsaid"),
    "rope": ("rope_parameters",),
    "biases": ("attention_bias", "fc with a bias", "bias", "medusa_fc_bias is missing"),
    "matrices": ("original_lm_head",),
}  # fmt: skip
"""{cause: the corruptions for which it is right}. A flag that asks for a norm which is not there is both."""


def copy_draft(draft: str, out: Path) -> None:
    """Copies the files that engines read, in the layout that training saves today."""
    if draft_family(draft) == "causal":
        out.mkdir(parents=True)
        for pattern in ("*.json", "*.safetensors"):
            for file in Path(draft).glob(pattern):
                shutil.copyfile(file, out / file.name)
    else:
        layouts.write_checkpoint(out, *exporters.to_flat(importers.read_checkpoint(draft)))
        exporters.write_metadata(draft, read_metadata(draft), out)


def summarize_result(result: dict[str, Any]) -> dict[str, Any]:
    """vLLM's accepted counts, τ and acceptance rate; or "refused" with its error message."""
    if "error" in result:
        return {"vllm": "refused", "says": " ".join(result["error"].split())[:300]}
    total = sum_counts(result["answers"])
    return {
        "vllm": "served",
        "version": result["vllm"],
        **total,
        "tau": 1 + total["accepted"] / total["rounds"],
        "acceptance_rate": total["accepted"] / total["drafted"],
    }


def name_causes(
    s: CorruptionStudyConfig,
    target: Target,
    items: Sequence[TaskPrompt],
    folder: Path,
    result: dict[str, Any],
    findings: Sequence[Finding],
) -> dict[str, Any]:
    """What the audit finds without draftsmith.json and without the checker, `decoded`, and with both, `named`."""
    parity = VllmParityConfig(str(folder), s.target, k=s.k, max_new_tokens=s.max_new_tokens)
    served = vllm_counts(result, exact=True)
    files = replace(read_draft(str(folder), read_target(s.target, tokenizer=False)), facts={})
    written, outcomes = decode_readings(parity, target, files, items, served, "float32", str(folder))  # fmt: skip
    decoded = naming.name_causes(written, outcomes, served, [])
    named = naming.name_causes(written, outcomes, served, findings)
    return {
        "written": naming.outcome_row(written, served),
        "first_difference": first_difference(items, written, served),
        "decoded": [cause.about for cause in decoded],
        "named": [cause.about for cause in named],
        "evidence": [text for cause in named for text in cause.evidence],
        "verdict": verdict(written, outcomes, served, named),
    }


def is_right(damage: str, causes: Sequence[str]) -> bool:
    """Whether one of the named causes is what was done to the files."""
    return any(damage in EXPECTED_CAUSES.get(cause, ()) for cause in causes)


def summarize_audit(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Numbers of drafts: damaged ones that vLLM serves, damaged ones that it refuses, and good ones.

    Of the damaged ones those whose cause is named by decoding alone (`decoded`) and with the rules (`named`); of the
    good ones those in which anything is named. A draft is `spared` if vLLM serves it with the counts of the good one.
    """
    good = {row["family"]: row for row in rows if row["damage"] == "none"}
    damaged = [row for row in rows if row["damage"] != "none"]
    served = [row for row in damaged if row["vllm"] == "served"]
    refused = [row for row in damaged if row["vllm"] != "served"]

    def right(some: Sequence[dict[str, Any]], kind: str) -> int:
        return sum(is_right(row["damage"], row["audit"][kind]) for row in some)

    alike = [row for row in served if all(row[x] == good[row["family"]][x] for x in COUNTS)]
    return {
        "served": {
            "drafts": len(served),
            "spared": len(alike),
            "decoded": right(served, "decoded"),
            "named": right(served, "named"),
        },
        "refused": {"drafts": len(refused), "named": right(refused, "named")},
        "good": {
            "drafts": len(good),
            "alarms": sum(bool(row["audit"]["named"]) for row in good.values()),
        },
    }


def load_rows(file: str, sizes: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier run, which this run continues; [] if there is none. UserError for other settings."""
    if not file or not Path(file).is_file():
        return []
    earlier = read_json_object(file, "a result of this command", ("rows", *sizes))
    if {key: earlier[key] for key in sizes} != sizes:
        raise UserError(
            f"{file} was measured with other settings than {sizes}: name another file with --out"
        )
    rows: list[dict[str, Any]] = earlier["rows"]
    return rows


def save_rows(file: str, sizes: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Writes the rows with the settings and the provenance of this run; nothing without a file name."""
    if file:
        summary = {"summary": summarize_audit(rows)} if all("audit" in row for row in rows) else {}
        result = {**sizes, **summary, "rows": rows, **provenance.collect()}
        write_atomically(Path(file), json.dumps(result, indent=1) + "\n")


def main(s: CorruptionStudyConfig) -> None:
    """Checks and decodes with every corrupted draft and prints a table. UserError while another run writes `out`."""
    check_file(s.out)
    if not s.out:
        return study(s)
    out = Path(s.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with lock.hold(out.with_name(f".{out.name}.lock"), out):
        try:
            study(s)
        except (KeyboardInterrupt, Terminated) as error:
            error.add_note(f"finished drafts are kept in {out}, and the same command goes on")
            raise


def study(s: CorruptionStudyConfig) -> None:
    """The whole study, without what earlier runs finished."""
    target = replace(load_target(s.target, "cpu"), eos=frozenset())
    items = [item for task in s.tasks for item in load_task_prompts(task, target)]
    prompts = [item.prompt_ids for item in items]
    context = vllm_parity.context_length(target, prompts, s.k, s.max_new_tokens)
    known = all_corruptions(target.decoder.config.num_hidden_layers)
    names = s.only or [name for name, corruption in known.items() if corruption.run_in_vllm]
    unknown = [name for name in names if name not in known]
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, cutoff=0.0)
        raise UserError(f"only: no corruption {unknown[0]!r}; the closest are {'; '.join(close)}")
    good = dict.fromkeys(known[name].family for name in names)
    if not s.only and (Path(s.drafts) / "causal").is_dir():
        good["causal"] = None
    todo = [(family, "none") for family in good]
    todo += [(known[name].family, name) for name in names]
    sizes = {"k": s.k, "prompts": len(prompts), "max_new_tokens": s.max_new_tokens}
    rows = load_rows(s.out, sizes)
    todo = [pair for pair in todo if pair not in [(row["family"], row["damage"]) for row in rows]]
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / f"draft{i}" for i in range(len(todo))]
        for folder, (family, name) in zip(folders, todo, strict=True):
            copy_draft(f"{s.drafts}/{family}", folder)
            if name != "none":
                known[name].edit.apply(folder)
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
        results = vllm_client.run_jobs(s.python, jobs) if jobs else iter(())
        for folder, (family, name), result in zip(folders, todo, results, strict=True):
            found = check_engine_rules(str(folder), "vllm", target=s.target)
            findings = [f for f in found if f.rule != "changed-since-training"]
            row = {
                "family": family,
                "damage": name,
                "checker": [[f.rule, f.effect, f.what] for f in findings],
                **summarize_result(result),
            }
            if s.audit:
                row["audit"] = name_causes(s, target, items, folder, result, findings)
            rows.append(json.loads(json.dumps(row).replace(str(folder), "DRAFT")))
            save_rows(s.out, sizes, rows)
    save_rows(s.out, sizes, rows)
    table = Table("family", "corruption", "checker", "vLLM", "τ", "by position", "named")
    for row in rows:
        rules = ", ".join(dict.fromkeys(rule for rule, _, _ in row["checker"])) or "–"
        tau = f"{row['tau']:.3f}" if "tau" in row else "–"
        positions = str(row.get("by_position", ""))
        named = ", ".join(row["audit"]["named"]) if "audit" in row else ""
        table.add_row(row["family"], row["damage"], rules, row["vllm"], tau, positions, named)
    Console(stderr=True).print(table)


if __name__ == "__main__":
    run_command(main, CorruptionStudyConfig, __doc__)
