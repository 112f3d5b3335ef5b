"""A saved draft decoded by another engine and by ours on the same prompts: do both accept the same tokens?

Greedily each prompt is compared, at a temperature the acceptance by position over all prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from rich.table import Table

from decode.common import provenance
from decode.common.files import write_result
from decode.common.typed_json import to_json
from decode.drafts.base import Draft
from decode.drafts.registry import draft_family, load_draft
from decode.engine.engine import decode
from decode.model.loading import Target
from decode.serving.log_counts import RequestCounts, round_counts
from decode.serving.running import vllm_client
from decode.verification.sampling import SamplingParams
from decode.verification.tree import tree_from_paths
from eval.metrics.distribution_tests import (
    POWER,
    PermutationTestResult,
    run_permutation_test,
)
from eval.settings.evaluation import Task
from eval.settings.served import RefereeConfig
from eval.tasks.loading import TaskPrompt, load_task_prompts

SIGNIFICANCE_LEVEL = 1e-3  # the p-value below which the acceptance of two sides counts as different
MIN_PROMPTS = 24
"""Prompts at a temperature. With fewer, the permutation test has too few permutations for a small p-value."""
BATCH_ROWS = 16  # batch size of our engine at a temperature


def load_prompts(tasks: Sequence[Task], limit: int, target: Target) -> list[TaskPrompt]:
    """The prompts of the tasks, by default `limit` of each bundled one."""
    chosen = tasks or [Task(name, limit=limit) for name in ("code", "prose", "arithmetic")]
    return [item for task in chosen for item in load_task_prompts(task, target)]


def count_rounds(
    ids: Sequence[Sequence[int]], rounds: Sequence[Sequence[int]], k: int
) -> RequestCounts:
    """The counts of one prompt at `k` positions, from the ids of its answers and their (drafted, accepted) rounds."""
    found = with_positions(round_counts(rounds), k)
    return replace(found, output_ids=tuple(map(tuple, ids)))


def with_positions(x: RequestCounts, k: int) -> RequestCounts:
    """With what was accepted at `k` positions, 0 at those that no round drafted."""
    return replace(x, accepted_at=(*x.accepted_at, *[0] * k)[:k])


def tau(total: RequestCounts) -> float:
    return 1 + total.accepted / max(1, total.rounds)


def counts_json(x: RequestCounts) -> dict[str, Any]:
    at = list(x.accepted_at)
    return {"rounds": x.rounds, "drafted": x.drafted, "accepted": x.accepted, "by_position": at}


# ---- our side ----


def run_ours(
    s: RefereeConfig, target: Target, prompts: Sequence[list[int]], dtype: str = "float32"
) -> list[RequestCounts]:
    """Our engine's counts for each prompt; the draft computes in `dtype`."""
    greedy_drafts = s.temperature > 0 and draft_sampling(s)["ours"] == "likeliest"
    chain = tree_from_paths([[0] * n for n in range(1, s.k + 1)]) if greedy_drafts else None
    draft = load_draft(s.draft, target, dtype=dtype, shape=chain)
    return decode_counts(s, target, draft, prompts, BATCH_ROWS if s.temperature else 1)


def decode_counts(
    s: RefereeConfig, target: Target, draft: Draft, prompts: Sequence[list[int]], rows: int
) -> list[RequestCounts]:
    """The counts of each prompt, decoded with `draft` in batches of `rows`."""
    draws = s.draws if s.temperature else 1
    outputs = decode(
        target,
        draft,
        [prompt for prompt in prompts for _ in range(draws)],
        k=s.k,
        max_new_tokens=s.max_new_tokens,
        sampling=SamplingParams(s.temperature),
        rows=rows,
        seed=s.seed,
    )
    drawn = [outputs[start : start + draws] for start in range(0, len(outputs), draws)]
    return [
        count_rounds([x.output_ids for x in one], [pair for x in one for pair in x.rounds], s.k)
        for one in drawn
    ]


# ---- vLLM ----


def draft_sampling(s: RefereeConfig) -> dict[str, str]:
    """How each side drafts at a temperature: "drawn" (sampled from q) or "likeliest" (greedy)."""
    medusa = draft_family(s.draft) == "medusa"
    return {
        "ours": "likeliest" if medusa and not s.control else "drawn",
        "vllm": "likeliest" if medusa or s.control else "drawn",
    }


def vllm_job(
    s: RefereeConfig, target: Target, prompts: Sequence[list[int]], dtype: str = "float32"
) -> dict[str, Any]:
    """The job in which vLLM decodes as `run_ours` does."""
    options = {}
    if s.temperature and draft_sampling(s)["vllm"] == "drawn":
        options = {"draft_sample_method": "probabilistic"}
    context = vllm_client.context_length(prompts, s.k, s.max_new_tokens)
    return vllm_client.build_job(
        s.target,
        prompts,
        speculative=vllm_client.speculative_config(s.draft, s.k, **options),
        max_new_tokens=s.max_new_tokens,
        max_model_len=min(target.runner.context, context),
        dtype=dtype,
        sampling=SamplingParams(s.temperature),
        seed=s.seed,
        draws=s.draws if s.temperature else 1,
        repair=s.repair and s.temperature > 0,
    )


# ---- comparisons ----


@torch.inference_mode()
def logit_gap(
    target: Target, prompt: list[int], a: Sequence[int], b: Sequence[int]
) -> float | None:
    """Gap of the target's two best logits where the outputs `a` and `b` first differ; None if they do not."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if at is None:
        return None
    text = torch.tensor([[*prompt, *a[:at]]])
    target.runner.allocate(1, text.shape[1] + 1)
    logits = target.runner.prefill(text, torch.tensor([text.shape[1]]))
    best = logits[0].float().topk(2).values
    return float(best[0] - best[1])


def compare_greedy(
    engine: str,
    margin: float,
    target: Target,
    items: Sequence[TaskPrompt],
    ours: Sequence[RequestCounts],
    theirs: Sequence[RequestCounts],
    ignored: str,
) -> dict[str, Any]:
    """{prompts, same, ties, differ}; `ties` and `differ` list prompts with both sides' counts and the gap. A prompt is
    a tie if the gap of the target's two best logits at the first difference is below `margin`. The count `ignored` is
    shown only."""
    found: dict[str, list[dict[str, Any]]] = {"ties": [], "differ": []}
    for item, *pair in zip(items, ours, theirs, strict=True):
        a, b = ({"output_ids": list(x.output_ids[0])} | counts_json(x) for x in pair)
        if a | {ignored: None} == b | {ignored: None}:
            continue
        gap = logit_gap(target, item.prompt_ids, a["output_ids"], b["output_ids"])
        entry = {"task": item.task, "id": item.id, "gap": gap, "ours": a, engine: b}
        found["ties" if gap is not None and gap < margin else "differ"].append(entry)
    same = len(items) - len(found["differ"]) - len(found["ties"])
    return {"prompts": len(items), "same": same, **found}


def compare_sampled(
    s: RefereeConfig, ours: Sequence[RequestCounts], vllm: Sequence[RequestCounts]
) -> dict[str, Any]:
    """At a temperature: the result of the permutation test; `passed` if it detects no difference in acceptance."""
    test = permutation_test(ours, vllm, SIGNIFICANCE_LEVEL, s.seed)
    renamed = {"a": "ours", "b": "vllm"}
    return {
        "temperature": s.temperature,
        "prompts": len(ours),
        "draws": s.draws,
        "drafts": draft_sampling(s),
        "passed": test.p_value >= SIGNIFICANCE_LEVEL,
        "level": SIGNIFICANCE_LEVEL,
        "power": POWER,
        "statistic": test.statistic,
        "p_value": test.p_value,
        "permutations": test.permutations,
        "parts": [
            {renamed.get(key, key): value for key, value in asdict(part).items()}
            for part in test.parts
        ],
    }


def permutation_test(
    ours: Sequence[RequestCounts], theirs: Sequence[RequestCounts], level: float, seed: int = 0
) -> PermutationTestResult:
    """Of counts by position, or of all accepted tokens where one side has no positions."""
    positions = all(x.accepted_at for side in (ours, theirs) for x in side)
    a, b = (
        np.array([[x.rounds, *(x.accepted_at if positions else (x.accepted,))] for x in side])
        for side in (ours, theirs)
    )
    return run_permutation_test(a, b, level=level, seed=seed)


def totals_table(totals: Mapping[str, RequestCounts]) -> Table:
    table = Table("", "rounds", "accepted", "by position", "τ")
    for name, x in totals.items():
        counts = (str(x.rounds), str(x.accepted), str(list(x.accepted_at)))
        table.add_row(name, *counts, f"{tau(x):.3f}")
    return table


def write_comparison(
    head: dict[str, Any], found: dict[str, Any], totals: Mapping[str, RequestCounts], out: str
) -> None:
    """Prints the result's JSON, and writes it to the file `out`; empty: to none."""
    sums = {name: counts_json(x) for name, x in totals.items()}
    write_result(out, {**head, **found, "totals": sums, **to_json(provenance.collect())})
