"""Passes of their own beside the timed ones: answers before later turns, acceptance in large batches, milliseconds of
steps, GPU utilisation.

Each of them would disturb a measured request: by its batch size, its clocks, or its questions to the driver.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from decode.common.journal import Journal
from decode.drafts.mirror import MirrorDraft, OverlapCounts
from decode.engine.engine import SpeculativeEngine, row_seeds
from decode.engine.records import DecodeRecord
from decode.engine.round import PhaseTimes
from decode.engine.warm_up import share_buffers
from decode.model.loading import Target
from decode.verification.sampling import SamplingParams
from eval.benchmark.methods import Method
from eval.benchmark.timing import TimingContext, decode_batch, run_every_shape
from eval.metrics.bootstrap import MS_PER_SECOND
from eval.metrics.round_cost import fit_step_cost
from eval.results.report import FailedPrompt
from eval.tasks.loading import (
    Task,
    TaskPrompt,
    load_task_prompts,
    read_images,
    with_later_turns,
)
from eval.tasks.stop_strings import collect_until_stop

BATCH_SIZE = 16  # of prompts whose later turns need an answer
NVML_PERIOD = 0.2
"""Seconds between two questions to NVML, whose own window is between 1/6 s and 1 s."""


def decode_untimed(
    context: TimingContext,
    method: Method,
    items: Sequence[TaskPrompt],
    sampling: SamplingParams,
    rows: int,
    progress: Callable[[], None],
) -> list[DecodeRecord]:
    """One record for each prompt, decoded `rows` at a time: tokens and rounds are right, seconds mean nothing."""
    prompts = [item.prompt_ids for item in items]
    engine = context.build_engine(method, sampling)
    rounds = engine.speculate(
        prompts,
        rows=rows,
        max_new_tokens=context.max_new_tokens,
        seed=context.seed,
        images=[item.images for item in items],
    )
    return collect_until_stop(items, rounds, context.target.tokenizer, lambda _: progress())


def measure_steps(
    context: TimingContext,
    methods: Sequence[Method],
    batches: Sequence[Sequence[TaskPrompt]],
    sampling: SamplingParams,
) -> dict[str, dict[str, Any]]:
    """{method's label: {phases, cost, mirror}}: mean milliseconds a round of draft, verify and overhead, its StepCost,
    and the OverlapCounts' rates of a MirrorDraft.

    The methods take turns on each batch. A batch that fails is left out; None for a method without any round.
    """
    engines = {m: context.build_engine(m, sampling) for m in methods}
    phases = {m: PhaseTimes() for m in methods}
    records: dict[Method, list[DecodeRecord]] = {m: [] for m in methods}
    prompts = [[item.prompt_ids for item in batch] for batch in batches]
    share_buffers([*engines.values()], prompts, context.max_new_tokens)
    for method in methods:
        run_every_shape(engines[method], method, batches, context.max_new_tokens, tolerant=True)
        if isinstance(method.draft, MirrorDraft):
            method.draft.counts = OverlapCounts()
    first = 0
    for batch in batches:
        seeds = row_seeds(context.seed, first + len(batch))[first:]
        first += len(batch)
        for method in methods:
            arguments = engines[method], method, batch, seeds, context.max_new_tokens
            with contextlib.suppress(Exception):  # the timed pass has named what fails
                own = decode_batch(*arguments, phases[method])
                if context.target.runner.device.type == "cuda":
                    own = decode_batch(*arguments)  # clocks of phases make rounds slower there
                records[method] += own
    found = {}
    for method in methods:
        cost = fit_step_cost(records[method])
        found[method.label] = {
            "phases": phase_ms(phases[method]),
            "cost": None if cost is None else asdict(cost),
            "mirror": method.draft.counts.rates()
            if isinstance(method.draft, MirrorDraft)
            else None,
        }
    return found


def phase_ms(phases: PhaseTimes) -> dict[str, float] | None:
    """Mean milliseconds a round of {draft, verify, overhead}; None for no round."""
    if phases.rounds == 0:
        return None
    parts = {"draft": phases.draft, "verify": phases.verify, "overhead": phases.overhead}
    return {name: MS_PER_SECOND * seconds / phases.rounds for name, seconds in parts.items()}


def measure_gpu_utilisation(
    context: TimingContext,
    items: Sequence[TaskPrompt],
    sampling: SamplingParams,
    batch_size: int,
) -> float | None:
    """Mean share of time, in percent, that the GPU was busy during plain decoding in eager mode, as NVML reports it.

    None without a GPU or without NVML. NVML calls a GPU busy while any kernel runs, however small.
    """
    device = context.target.runner.device
    if device.type != "cuda":
        return None
    engine = SpeculativeEngine(context.target, sampling=sampling)
    seen: list[int] = []
    try:
        for start in range(0, len(items), batch_size):
            batch = items[start : start + batch_size]
            prompts, images = [item.prompt_ids for item in batch], read_images(batch)
            last = time.perf_counter()
            for _ in engine.speculate(
                prompts, max_new_tokens=context.max_new_tokens, images=images
            ):
                if time.perf_counter() - last > NVML_PERIOD:
                    seen.append(torch.cuda.utilization(device))
                    last = time.perf_counter()
    except (ImportError, RuntimeError):  # no NVML bindings, or none for this GPU
        return None
    return sum(seen) / len(seen) if seen else None


def load_eval_prompts(
    tasks: Sequence[Task], target: Target, max_new_tokens: int, journal: Journal
) -> tuple[list[TaskPrompt], list[FailedPrompt]]:
    """(every prompt of the tasks in their order, those that are too long for the context).

    The history of a chat holds plain greedy decoding's answers, whatever the temperature, so that all methods and
    temperatures are measured on the same prompts.
    """

    def answers(items: Sequence[TaskPrompt]) -> list[list[int]]:
        keys = [["answer", item.task, item.id] for item in items]
        missing = [i for i, key in enumerate(keys) if journal.get(key) is None]
        for start in range(0, len(missing), BATCH_SIZE):
            part = missing[start : start + BATCH_SIZE]
            batch = [items[i] for i in part]
            rounds = SpeculativeEngine(target).speculate(
                [item.prompt_ids for item in batch], max_new_tokens=max_new_tokens
            )
            records = collect_until_stop(batch, rounds, target.tokenizer)
            for i, record in zip(part, records, strict=True):
                journal.put(keys[i], record.output_ids)
        return [journal.get(key) for key in keys]

    loaded = [item for task in tasks for item in load_task_prompts(task, target, True)]
    policy: dict[str, str] = {task.name: task.too_long for task in tasks}
    items = with_later_turns(loaded, target, policy, answers)
    failed = [FailedPrompt(item.task, item.id, item.error) for item in items if item.error]
    return [item for item in items if not item.error], failed
