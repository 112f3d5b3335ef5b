"""Passes of their own beside the timed ones: acceptance in large batches, milliseconds of each phase, GPU utilisation.

Each of them would disturb a measured request: by its batch size, its clocks, or its questions to the driver.
"""

import time
from collections.abc import Callable, Sequence

import torch

from decode.engine.engine import SpeculativeEngine, row_seeds
from decode.engine.records import DecodeRecord, collect_outputs
from decode.engine.round import PhaseTimes
from decode.verification.sampling import SamplingParams
from eval.benchmark.methods import Method
from eval.benchmark.timing import TimingContext
from eval.metrics.common import MS_PER_SECOND
from eval.tasks.loading import TaskPrompt
from eval.tasks.stop_strings import collect_until_stop

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
        prompts, rows=rows, max_new_tokens=context.max_new_tokens, seed=context.seed
    )
    return collect_until_stop(items, rounds, context.target.tokenizer, lambda _: progress())


def measure_phase_ms(
    context: TimingContext, method: Method, items: Sequence[TaskPrompt], sampling: SamplingParams
) -> dict[str, float]:
    """Mean milliseconds a round of {draft, verify, overhead}, one prompt at a time."""
    phases = PhaseTimes()
    engine = context.build_engine(method, sampling)
    for row, item in enumerate(items):
        seeds = [row_seeds(context.seed, row + 1)[row]]
        rounds = engine.speculate(
            [item.prompt_ids], max_new_tokens=context.max_new_tokens, seeds=seeds, phases=phases
        )
        collect_outputs([item.prompt_ids], rounds)
    count = max(1, phases.rounds)
    parts = {"draft": phases.draft, "verify": phases.verify, "overhead": phases.overhead}
    return {name: MS_PER_SECOND * seconds / count for name, seconds in parts.items()}


def measure_gpu_utilisation(
    context: TimingContext,
    items: Sequence[TaskPrompt],
    sampling: SamplingParams,
    batch_size: int,
) -> float | None:
    """Mean share of time, in percent, that the GPU was busy during plain decoding in eager mode, as NVML reports it.

    None without a GPU or without NVML. NVML calls a GPU busy while any kernel runs, however small.
    """
    device = context.target.decoder.device
    if device.type != "cuda":
        return None
    engine = SpeculativeEngine(context.target, sampling=sampling)
    seen: list[int] = []
    try:
        for start in range(0, len(items), batch_size):
            batch = [item.prompt_ids for item in items[start : start + batch_size]]
            last = time.perf_counter()
            for _ in engine.speculate(batch, max_new_tokens=context.max_new_tokens):
                if time.perf_counter() - last > NVML_PERIOD:
                    seen.append(torch.cuda.utilization(device))
                    last = time.perf_counter()
    except (ImportError, RuntimeError):  # no NVML bindings, or none for this GPU
        return None
    return sum(seen) / len(seen) if seen else None
