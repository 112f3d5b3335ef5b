"""Estimates of what the settings of train/distill.py need, from configs alone; no weight is loaded."""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.table import Table

from decode.common.progress import format_bytes
from decode.model import attention, compatibility
from decode.model.loading import find_dtype, load_config
from train.data import batching, mixture
from train.data.sample_store import SampleRow
from train.planning import resources
from train.planning.shape_run import ShapeRun, StepWorkload, made_up_rows
from train.settings.training import LoopConfig
from train.trainer.on_policy import OnPolicyBuffer
from train.trainer.settings import DistillConfig
from train.trainer.throughput import FlopsByDtype

TABLE_WIDTH = 56
TRIED = [(64, 32), (192, 32), (192, 160), (320, 32), (320, 160), (320, 288)]
"""(tokens, labels) of the samples from which operations of any other sample are computed."""


def step_workload(rows: Sequence[SampleRow], s: LoopConfig, processes: int) -> StepWorkload:
    """What one optimiser step over these samples reads."""
    lengths = [len(row["input_ids"]) for row in rows]
    supervised = [batching.supervised_token_count([row]) for row in rows]
    return StepWorkload(
        samples=s.batch_size,
        tokens=sum(lengths) / len(rows),
        supervised_tokens=sum(supervised) / len(rows),
        max_tokens=max(lengths),
        max_supervised_tokens=max(supervised),
        micro_batch=min(s.micro_batch, s.batch_size // processes),
        processes=processes,
    )


class FlopsCounter:
    """Counts the operations of training steps; what is computed a second time to save memory does not count.

    Of the target only what runs counts: with stored features nothing, or its LM head alone. `mixed`: the draft
    computes in bf16. `on_policy`: where the draft generates rows, which takes operations too, in fp32 as its weights.
    """

    def __init__(self, s: DistillConfig, mixed: bool, on_policy: OnPolicyBuffer | None = None):
        self.settings, self.mixed, self.on_policy = s, mixed, on_policy

    @functools.cached_property
    def run(self) -> ShapeRun:
        s = self.settings
        s = replace(s, draft=s.draft.having(activation_checkpointing=False))
        return ShapeRun(s, load_config(s.target, "target", s.revision))

    @functools.cached_property
    def sample_flops(self) -> Callable[[float, float], np.ndarray]:
        """(tokens of a sample, labels of it) -> operations of [target and draft, the target's layers].

        They are polynomials of second degree: attention is a product of tokens with tokens.
        """

        def terms(tokens: float, labels: float) -> list[float]:
            return [1, tokens, labels, tokens**2, tokens * labels, labels**2]

        with attention.training_attention("dense"):  # blocks are computed a second time
            costs = [self.run.step(made_up_rows(1, *x, self.run.vocab), False) for x in TRIED]
        found = [[cost.flops, cost.target_flops] for cost in costs]
        coefficients = np.linalg.solve(np.array([terms(*x) for x in TRIED]), np.array(found))
        return lambda tokens, labels: np.array(terms(tokens, labels)) @ coefficients

    @functools.cached_property
    def reading(self) -> resources.ReadingCost:
        return resources.reading_cost(self.run)

    def count(self, rows: Sequence[SampleRow]) -> FlopsByDtype:
        """{dtype: operations} of a step over these rows, and of generating rows since the last call."""
        s, labels = self.settings, batching.supervised_token_count(rows)
        mean = sum(len(row["input_ids"]) for row in rows) / len(rows), labels / len(rows)
        whole, teacher = len(rows) * self.sample_flops(*mean)
        own = whole - teacher
        if s.features and s.features_top > 0:  # the target's distributions come from disk
            head = self.run.target.runner.model.get_output_embeddings().weight
            own -= 2 * labels * head.numel()
        flops = defaultdict(float, {s.target_dtype: 0.0 if s.features else teacher})
        flops["bfloat16" if self.mixed else "float32"] += own
        if self.on_policy is not None:
            written = self.on_policy.take_new_rows()
            flops["float32"] += resources.generation_flops(self.reading, written)
        return flops


def planned_rows(s: DistillConfig, max_length: int) -> Sequence[SampleRow]:
    """The samples, cut to `max_length` tokens; while a set is not there yet, one of that length, half of it labels."""
    if not all(Path(part.path).exists() for part in mixture.mixture_parts(s.data)):
        return made_up_rows(1, max_length, max_length // 2, max_length)
    return mixture.load(s.data, max_length, supervise=s.supervise, seed=s.seed)[0]


def estimate_resources(
    s: DistillConfig, processes: int, mixed: bool
) -> tuple[Table, dict[str, float]]:
    """(table of estimates for the settings of train/distill.py, its sums by name); `mixed`: the draft is in bf16."""
    config = load_config(s.target, "target", s.revision)
    text = config.get_text_config(decoder=True)
    rows = planned_rows(s, min(s.loop.max_length, compatibility.context_length(text)))
    run = ShapeRun(s, config)
    load, size = step_workload(rows, s.loop, processes), find_dtype(s.target_dtype).itemsize
    memory = resources.memory_breakdown(run, load, mixed)
    disk = resources.disk_breakdown(run, size, s.loop.keep)
    flops = load.samples * resources.step_cost(run, load).flops
    parameters = {
        "target's parameters": run.target_parameters,
        "draft's parameters, trained": run.trained,
        "draft's parameters, frozen": run.frozen,
    }
    title = f"{s.target}: {s.draft.family} draft"
    table = Table("estimated, not measured", "", title=title, min_width=TABLE_WIDTH)
    for name, count in parameters.items():
        table.add_row(name, f"{count / 1e6:,.2f} M")
    table.add_section()
    for part, parts in (("memory", memory), ("disk", disk)):
        for name, count in parts.items():
            if count > 0:
                table.add_row(f"{part}: {name}", format_bytes(count))
        table.add_row(f"[bold]{part}, sum[/]", f"[bold]{format_bytes(sum(parts.values()))}[/]")
        table.add_section()
    if not isinstance(rows, mixture.Mixture):
        table.add_row("samples", "none yet: one of this length")
    table.add_row("tokens a step", f"{load.samples * load.tokens:,.0f}")
    table.add_row("learned of them", f"{load.samples * load.supervised_tokens:,.0f}")
    table.add_row("floating-point operations a step", f"{flops:.2e}")
    sums = {"memory": sum(memory.values()), "disk": sum(disk.values()), "flops": flops}
    names = ("parameters", "trained", "frozen")
    return table, {**sums, **dict(zip(names, parameters.values(), strict=True))}
