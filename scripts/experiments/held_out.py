"""The evaluation prompts of a comparison of trainings, and what a draft does to each of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from decode.common.errors import UserError
from decode.drafts.base import check_request
from decode.drafts.registry import load_draft
from decode.engine.active_request import check_draft_length
from decode.model.loading import load_target
from decode.verification.sampling import SamplingParams
from eval.checks.transfer import count_acceptance
from eval.tasks.loading import Task, TaskPrompt, load_fitting_prompts
from train import distill
from train.data.sample_store import SampleRow
from train.distill import DistillConfig, RunComponents
from train.families.registry import family_trainer


class Comparison(Protocol):
    """The settings of a comparison of trainings that this module reads."""

    distill: DistillConfig
    seeds: list[int]
    tasks: list[Task]
    k: int
    temperatures: list[float]
    max_new_tokens: int


def check_comparison(s: Comparison, run: DistillConfig) -> RunComponents:
    """The parts of a training with the settings `run`, which reads no features and writes nothing.

    UserError for what would fail only after a training, and for an evaluation prompt that is in the data.
    """
    for name in ("seeds", "temperatures", "tasks"):
        values = list(map(str, vars(s)[name]))
        if not values or len(set(values)) < len(values):
            raise UserError(f"{name} is empty or names one twice: give at least one, each once")
    run = replace(run, features="", overwrite=True)
    run, accelerator = distill.init_accelerator(run)
    if accelerator.num_processes > 1:
        raise UserError("several processes: start this command with python, in one process")
    _, parts = distill.load_components(run, accelerator)
    check_draft_length(parts.target, s.k)
    for temperature in s.temperatures:
        check_request(parts.trainable.to_draft(), s.k, SamplingParams(temperature))
    rows, _ = distill.load_rows(replace(run, supervise="answers"), parts.target)  # as they are
    check_held_out(load_fitting_prompts(s.tasks, parts.target), rows, str(s.distill.data))
    return parts


def input_paths(s: Comparison) -> list[str]:
    """What the command reads: folders and files, or names on the Hub."""
    return [*distill.input_paths(s.distill), *(task.path for task in s.tasks)]


def measure_draft(s: Comparison, folder: str) -> dict[str, list[list[int]]]:
    """What `count_acceptance` returns of the draft in `folder`."""
    trainer, name, revision = (
        family_trainer(s.distill.draft.family),
        s.distill.target,
        s.distill.revision,
    )
    if trainer.trains_target:
        name, revision = str(Path(folder) / trainer.target_folder), None
    target = load_target(name, "auto", s.distill.target_dtype, revision)
    prompts = load_fitting_prompts(s.tasks, target)
    draft = load_draft(folder, target)
    return count_acceptance(target, draft, prompts, s.temperatures, s.k, s.max_new_tokens)


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
