"""Greedy decoding here and in another engine, prompt by prompt: what scripts/referee.py compares for every engine."""

from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table

from decode.engine.records import DecodeRecord
from decode.model.loading import Target
from eval.tasks.loading import Task, TaskPrompt, load_task_prompts

PromptCounts = dict[str, Any]
"""{ids, rounds, drafted, accepted, by_position} of one prompt: `ids` has the output ids of each draw."""
COUNTS = ("rounds", "drafted", "accepted", "by_position")


def load_prompts(tasks: Sequence[Task], limit: int, target: Target) -> list[TaskPrompt]:
    """The prompts of the tasks, by default `limit` of each bundled one."""
    chosen = tasks or [Task(name, limit=limit) for name in ("code", "prose", "arithmetic")]
    return [item for task in chosen for item in load_task_prompts(task, target)]


def count_rounds(
    ids: Sequence[Sequence[int]], rounds: Sequence[Sequence[int]], k: int
) -> PromptCounts:
    """The counts of one prompt from its (drafted, accepted) rounds."""
    return {
        "ids": [list(drawn) for drawn in ids],
        "rounds": len(rounds),
        "drafted": sum(drafted for drafted, _ in rounds),
        "accepted": sum(accepted for _, accepted in rounds),
        "by_position": [sum(accepted > i for _, accepted in rounds) for i in range(k)],
    }


def sum_counts(side: Sequence[PromptCounts]) -> PromptCounts:
    """Sums of the counts over all prompts, without `ids`."""
    sums = {key: sum(x[key] for x in side) for key in ("rounds", "drafted", "accepted")}
    columns = zip(*(x["by_position"] for x in side), strict=True)
    return sums | {"by_position": [sum(column) for column in columns]}


@torch.inference_mode()
def logit_gap(target: Target, prompt: list[int], a: list[int], b: list[int]) -> float | None:
    """Gap of the target's two best logits where the outputs `a` and `b` first differ; None if they do not."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if at is None:
        return None
    text = torch.tensor([prompt + a[:at]])
    target.runner.allocate(1, text.shape[1] + 1)
    logits = target.runner.prefill(text, torch.tensor([text.shape[1]]))
    best = logits[0].float().topk(2).values
    return float(best[0] - best[1])


def comparable_fields(answer: PromptCounts) -> PromptCounts:
    """The part of a greedy result that both sides report."""
    return {"output_ids": answer["ids"][0]} | {name: answer[name] for name in COUNTS}


def compare_greedy(
    engine: str,
    margin: float,
    target: Target,
    items: Sequence[TaskPrompt],
    ours: Sequence[PromptCounts],
    theirs: Sequence[PromptCounts],
    compared: Sequence[str] = ("ids", "rounds", "accepted", "by_position"),
) -> dict[str, Any]:
    """{prompts, same, ties, differ}; `ties` and `differ` list prompts with both sides' counts and the gap.

    A prompt is a tie if the gap of the target's two best logits at the first difference is below `margin`.
    """
    found: dict[str, list[dict[str, Any]]] = {"ties": [], "differ": []}
    for item, a, b in zip(items, ours, theirs, strict=True):
        if all(a[key] == b[key] for key in compared):
            continue
        gap = logit_gap(target, item.prompt_ids, a["ids"][0], b["ids"][0])
        entry = {
            "task": item.task,
            "id": item.id,
            "gap": gap,
            "ours": comparable_fields(a),
            engine: comparable_fields(b),
        }
        found["ties" if gap is not None and gap < margin else "differ"].append(entry)
    same = len(items) - len(found["differ"]) - len(found["ties"])
    return {"prompts": len(items), "same": same, **found}


def totals_table(totals: dict[str, PromptCounts]) -> Table:
    """Both sides' sums."""
    table = Table("", "rounds", "accepted", "by position", "τ")
    for name, t in totals.items():
        tau = 1 + t["accepted"] / max(1, t["rounds"])
        table.add_row(
            name, str(t["rounds"]), str(t["accepted"]), str(t["by_position"]), f"{tau:.3f}"
        )
    return table


def records_counts(outputs: Sequence[DecodeRecord], draws: int, k: int) -> list[PromptCounts]:
    """Our engine's counts for each prompt, which has `draws` records one after the other."""
    drawn = [outputs[start : start + draws] for start in range(0, len(outputs), draws)]
    return [
        count_rounds(
            [out.output_ids for out in one], [pair for out in one for pair in out.rounds], k
        )
        for one in drawn
    ]
