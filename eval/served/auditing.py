"""What scripts/audit.py does: the files are checked, both sides decode, and readings are tried."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from decode.checkpoints import importers, layouts
from decode.checkpoints.draft_folder import trained_templates
from decode.common import provenance
from decode.common.errors import UserError
from decode.common.files import write_atomically
from decode.common.run_dir import open_run
from decode.common.typed_json import to_json
from decode.model.loading import Target, find_dtype, load_config, load_target
from decode.serving.checker import check_engine_rules
from decode.serving.running import vllm_client
from eval.served import audit as drafts
from eval.served import parity
from eval.served.audit import ServedCounts
from eval.served.scoring import read_log
from eval.settings.served import AuditConfig, RefereeConfig
from eval.tasks.loading import load_task_prompts

COMMAND = "scripts/audit.py"
OUTPUTS = ("audit.json", "copy-*/**")


def check(s: AuditConfig) -> None:
    """UserError for settings that would fail only after the target was loaded."""
    if not s.draft:
        raise UserError("give a draft's folder or Hub name")
    if not s.tasks:
        raise UserError("tasks is empty: give at least one")
    find_dtype(s.dtype)
    load_config(s.target, "target")
    layouts.read_config(importers.resolve_folder(s.draft))
    if s.served == "vllm":
        vllm_client.find_interpreter(s.python)


def parity_config(s: AuditConfig, draft: str, temperature: float = 0.0) -> RefereeConfig:
    """The settings with which both sides decode."""
    return RefereeConfig(
        draft=draft,
        target=s.target,
        python=s.python,
        k=s.k,
        max_new_tokens=s.max_new_tokens,
        temperature=temperature,
        draws=s.draws,
        seed=s.seed,
    )


def run_vllm(
    s: AuditConfig, draft: str, target: Target, prompts: Sequence[list[int]]
) -> tuple[ServedCounts, dict[str, Any] | None]:
    """What vLLM accepts, greedily and, as its answers, at the temperature (None: not asked for, or refused)."""
    temperatures = [0.0, s.temperature] if s.temperature else [0.0]
    jobs = [
        parity.vllm_job(parity_config(s, draft, t), target, prompts, s.dtype) for t in temperatures
    ]
    greedy, *sampled = vllm_client.run_jobs(s.python, jobs)
    counts = drafts.vllm_counts(greedy, exact=s.dtype == "float32")
    return counts, sampled[0] if sampled and "error" not in sampled[0] else None


def compare_sampled(
    s: AuditConfig,
    draft: str,
    target: Target,
    prompts: Sequence[list[int]],
    sampled: dict[str, Any],
) -> dict[str, Any]:
    """The permutation test of acceptance at the temperature; why it was left out, if our loader refuses the draft."""
    settings = parity_config(s, draft, s.temperature)
    try:
        ours = parity.run_ours(settings, target, prompts, s.dtype)
    except UserError as error:
        return {"left_out": str(error)}
    found = parity.compare_sampled(settings, ours, vllm_client.answer_counts(sampled))
    return {"repaired": sampled["repaired"], **found}


def print_audit(result: dict[str, Any]) -> None:
    """A table of all readings, the causes with their evidence, and the verdict."""
    console = Console(highlight=False, soft_wrap=True)
    table = Table("", "τ", "rounds", "accepted by position", "same prompts")
    rows = [("as written", result["written"])]
    rows = [("served", result["served"])] * (result["served"] is not None) + rows
    for name, row in [*rows, *((row["reading"], row) for row in result["readings"])]:
        same = f"{row['same']} of {row['prompts']}" if "same" in row else ""
        counts = ["–", "–", row.get("refused") or row.get("other_prompts") or ""]
        if "tau" in row:
            accepted = row["by_position"] or row["accepted"]
            counts = [f"{row['tau']:.3f}", str(row["rounds"]), str(accepted)]
        table.add_row(name, *counts, same)
    console.print(table)
    first = result["first_difference"]
    if first:
        shown = f"{first['served']} served, {first['ours']} here"
        console.print(f"first difference: {first['task']}/{first['id']}: {shown}", markup=False)
    for cause in result["causes"]:
        lines = [f"{cause['about']}:", *(f"  {text}" for text in cause["evidence"])]
        console.print(*lines, sep="\n", markup=False)
    sampled = result["sampled"]
    if sampled and "passed" in sampled:
        found = "not apart" if sampled["passed"] else "apart"
        at = f"at temperature {sampled['temperature']} acceptance is {found}"
        console.print(f"{at}, p = {sampled['p_value']:.2g}", markup=False)
    console.print(result["verdict"], markup=False)


def audit(s: AuditConfig) -> None:
    """Writes audit.json and prints what was found."""
    check(s)
    log = None if s.served in ("vllm", "none") else read_log(s.served)
    with open_run(s, COMMAND, OUTPUTS, [s.draft, s.target, s.served]) as run:
        folder = importers.resolve_folder(s.draft)
        target = load_target(s.target, s.device, s.dtype)
        target = target.with_template(s.template, trained_templates([folder]))
        target = replace(target, eos=frozenset())
        items = [item for task in s.tasks for item in load_task_prompts(task, target)]
        prompts = [item.prompt_ids for item in items]
        if s.served == "vllm" and s.temperature and len(prompts) < parity.MIN_PROMPTS:
            raise UserError(f"give at least {parity.MIN_PROMPTS} prompts, or --temperature 0")
        # A log does not say which engine's rules the files had to follow.
        findings = [] if log else check_engine_rules(folder, "vllm", target=s.target)
        served, sampled = None, None
        if log is not None:
            served = drafts.log_counts(log, prompts, s.k)
        elif s.served == "vllm":
            served, answers = run_vllm(s, folder, target, prompts)
            sampled = compare_sampled(s, folder, target, prompts, answers) if answers else None
        found = drafts.audit_draft(
            parity_config(s, folder), target, items, served, findings, s.dtype, s.out
        )
        result = {**found, "sampled": sampled, **to_json(provenance.collect())}
        text = json.dumps(result, indent=1, ensure_ascii=False)
        write_atomically(run.path / "audit.json", text + "\n")
    print_audit(result)
