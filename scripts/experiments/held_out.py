"""The evaluation prompts of a comparison of trainings, and what a draft does to each of them."""

from collections.abc import Sequence

import numpy as np

from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.engine.engine import decode
from decode.model.loading import Target
from decode.verification.sampling import SamplingParams
from eval.metrics import acceptance
from eval.tasks.loading import Task, TaskPrompt, load_task_prompts
from train.data.sample_store import SampleRow

BATCH = 16
"""Prompts that are decoded together."""


def check_lists(settings: object, names: Sequence[str]) -> None:
    """UserError for a list among these settings that is empty or names one thing twice."""
    for name in names:
        values = list(map(str, vars(settings)[name]))
        if not values or len(set(values)) < len(values):
            raise UserError(f"{name} is empty or names one twice: give at least one, each once")


def load_prompts(tasks: Sequence[Task], target: Target) -> list[TaskPrompt]:
    """The prompts of all tasks, without those that are too long. UserError if none is left."""
    found = [item for task in tasks for item in load_task_prompts(task, target)]
    kept = [item for item in found if not item.error]
    if not kept:
        raise UserError("tasks have no prompt that fits the target's context: give others")
    return kept


def check_held_out(prompts: Sequence[TaskPrompt], rows: Sequence[SampleRow], data: str) -> None:
    """UserError for an evaluation prompt that is also the prompt of a row of the sampled set `data`."""
    known = {np.asarray(item.prompt_ids, dtype=np.int32).tobytes(): item for item in prompts}
    for row in rows:
        start = min(span[0] for span in row["loss_spans"])
        found = known.get(np.asarray(row["input_ids"][:start], dtype=np.int32).tobytes())
        if found is not None:
            raise UserError(
                f"prompt {found.id} of task {found.task!r} is in {data} too: give tasks that are held out"
            )


def count_acceptance(
    target: Target,
    draft: Draft,
    prompts: Sequence[TaskPrompt],
    temperatures: Sequence[float],
    k: int,
    max_new_tokens: int,
) -> dict[str, list[list[int]]]:
    """{temperature: [emitted, rounds, accepted, reached] of each prompt}, decoded with the same seeds every time."""
    counts = {}
    for temperature in temperatures:
        records = decode(
            target,
            draft,
            [item.prompt_ids for item in prompts],
            k=k,
            sampling=SamplingParams(temperature),
            max_new_tokens=max_new_tokens,
            rows=BATCH,
            seed=0,
        )
        columns = (
            acceptance.emitted_tokens(records),
            acceptance.round_counts(records),
            acceptance.accepted_by_position(records, k).sum(1),
            acceptance.reached_by_position(records, k).sum(1),
        )
        counts[str(temperature)] = np.stack(columns, 1).tolist()
    return counts
