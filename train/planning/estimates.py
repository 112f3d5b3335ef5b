"""Estimates of what the settings of train/distill.py need, from configs and samples alone; no weight is loaded."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from decode.model import compatibility
from decode.model.loading import find_dtype, load_config
from train.data import batching, mixture
from train.data.sample_store import SampleRow
from train.families.model_sizes import (
    DraftShape,
    ModelShape,
    StepWorkload,
    target_shape,
)
from train.families.registry import family_trainer
from train.planning import resources
from train.planning.resources import format_bytes
from train.trainer.loop import LoopConfig
from train.trainer.on_policy import OnPolicyBuffer
from train.trainer.throughput import FlopsByDtype

TABLE_WIDTH = 56


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


def model_shapes(s: Any) -> tuple[ModelShape, DraftShape]:
    """(target, draft) for the settings `s` of train/distill.py."""
    config = load_config(s.target, "target", s.revision)
    target = target_shape(config)
    text_config = config.get_text_config(decoder=True)
    return target, family_trainer(s.draft.family).draft_shape(s.draft, text_config, target.vocab)


class FlopsCounter:
    """Counts the operations of training steps; what is computed a second time to save memory does not count.

    Of the target only what runs counts: with stored features nothing, or its LM head alone. `mixed`: the draft
    computes in bf16. `on_policy`: where the draft generates rows, which takes operations too, in fp32 as its weights.
    """

    def __init__(self, s: Any, mixed: bool, on_policy: OnPolicyBuffer | None = None):
        self.settings, self.mixed, self.on_policy = s, mixed, on_policy

    @functools.cached_property
    def shapes(self) -> tuple[ModelShape, DraftShape]:
        return model_shapes(self.settings)

    def count(self, rows: Sequence[SampleRow]) -> FlopsByDtype:
        """{dtype: operations} of a step over these rows, and of generating rows since the last call."""
        s, (target, draft) = self.settings, self.shapes
        load = step_workload(rows, replace(s.loop, batch_size=len(rows)), 1)
        live = not s.features
        labels = live or s.features_top == 0
        teacher, own = resources.step_flops_parts(target, draft, load, live=live, labels=labels)
        new_rows = [] if self.on_policy is None else self.on_policy.take_new_rows()
        flops = {s.target_dtype: teacher}
        for dtype, count in (
            ("bfloat16" if self.mixed else "float32", own),
            ("float32", resources.generation_flops(draft, new_rows)),
        ):
            flops[dtype] = flops.get(dtype, 0.0) + count
        return flops


def estimate_resources(s: Any, processes: int, mixed: bool) -> tuple[Table, dict[str, float]]:
    """(table of estimates for the settings of train/distill.py, its sums by name); `mixed`: the draft is in bf16."""
    text = load_config(s.target, "target", s.revision).get_text_config(decoder=True)
    max_length = min(s.loop.max_length, compatibility.context_length(text))
    rows, _ = mixture.load(s.data, max_length, supervise=s.supervise, seed=s.seed)
    load, size = step_workload(rows, s.loop, processes), find_dtype(s.target_dtype).itemsize
    target, draft = model_shapes(s)
    memory = resources.memory_breakdown(target, draft, load, size, mixed)
    generation = {}
    if s.on_policy.share > 0:
        generation = resources.generation_memory(
            s.on_policy, target, draft, load, s.loop.max_length
        )
        memory["writing beyond a step"] = resources.memory_beyond_step(generation, memory)
    disk = resources.disk_breakdown(target, draft, size, s.loop.keep)
    flops = resources.total_step_flops(target, draft, load)
    table = Table(
        "estimated, not measured",
        "",
        title=f"{s.target}: {s.draft.family} draft",
        min_width=TABLE_WIDTH,
    )
    for name, count in [
        ("target's parameters", target.parameters),
        ("draft's parameters, trained", draft.trained),
        ("draft's parameters, frozen", draft.parameters - draft.trained),
    ]:
        table.add_row(name, f"{count / 1e6:,.2f} M")
    table.add_section()
    for part, parts in (("memory", memory), ("disk", disk)):
        for name, count in parts.items():
            if count > 0:
                table.add_row(f"{part}: {name}", format_bytes(count))
        table.add_row(f"[bold]{part}, sum[/]", f"[bold]{format_bytes(sum(parts.values()))}[/]")
        table.add_section()
    for name, count in generation.items():
        table.add_row(f"while it writes: {name}", format_bytes(count))
    if generation:
        table.add_row("while it writes: target's K/V cache", "none: it reads the texts in steps")
        rows_per_round = resources.rows_per_round(s.on_policy, load.samples)
        table.add_row(f"texts written every {s.on_policy.every} steps", f"{rows_per_round:,}")
        table.add_section()
    table.add_row("tokens a step", f"{load.samples * load.tokens:,.0f}")
    table.add_row("learned of them", f"{load.samples * load.supervised_tokens:,.0f}")
    table.add_row("floating-point operations a step", f"{flops:.2e}")
    sums = {"memory": sum(memory.values()), "disk": sum(disk.values()), "flops": flops}
    sums |= {"parameters": target.parameters, "trained": draft.trained}
    sums["frozen"] = draft.parameters - draft.trained
    return table, sums
