"""`--dry_run true`: what a run is going to need, then its first steps on the real thing. Nothing is kept.

Estimates come first and from configs alone, so they are there even if the target does not fit. Then one step runs on
the longest samples (memory) and one on a batch like any other (time), and the draft, as good as untrained, is saved
and loaded as the finished one will be.
"""

import contextlib
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoConfig

from decode.checkpoints import layouts
from decode.common.errors import UserError, first_line
from decode.drafts.base import METADATA_FILE
from decode.drafts.registry import load_draft
from decode.model import compatibility
from decode.model.loading import DTYPES, Target, check_model_path
from train.data import batching, mixture
from train.data.sample_store import SampleRow
from train.families import causal
from train.families.base import TrainableDraft
from train.planning import model_sizes, resources
from train.planning.resources import format_bytes
from train.trainer import collective
from train.trainer.checkpoint import TrainingState
from train.trainer.loop import LoopConfig, Training, train
from train.trainer.throughput import FlopsByDtype, peak_memory_bytes
from train.trainer.tracking import NullTracker

WIDTH = 56  # of both tables


class _StopLoop(Exception):
    """Raised behind a step that was asked for: the loop would save a checkpoint behind its last one."""


class SingleStepTracker(NullTracker):
    """Ends the loop at the first line of its log, and keeps that and the seconds until then."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.seconds = 0.0
        self.values: Mapping[str, float] = {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds, self.values = time.perf_counter() - self.began, values
        raise _StopLoop


def step_workload(
    rows: Sequence[SampleRow], s: LoopConfig, processes: int
) -> resources.StepWorkload:
    """What a step over these samples reads."""
    lengths = [len(row["input_ids"]) for row in rows]
    learned = [batching.supervised_token_count([row]) for row in rows]
    return resources.StepWorkload(
        samples=s.batch_size,
        tokens=sum(lengths) / len(rows),
        learned=sum(learned) / len(rows),
        longest=max(lengths),
        most=max(learned),
        micro_batch=min(s.micro_batch, s.batch_size // processes),
        processes=processes,
    )


def model_shapes(s: Any) -> tuple[model_sizes.ModelShape, model_sizes.DraftShape]:
    """Of target and draft for the settings of train/distill.py, from their configs; loads no weight."""
    config = _config(s.target, "target", s.revision)
    text = config.get_text_config(decoder=True)
    target = model_sizes.target_shape(config)
    family, chosen, small = s.draft.family, s.draft, None
    if family == "causal" and s.draft.init:
        small = _config(s.draft.init, "draft")
        small.get_text_config(decoder=True).vocab_size = target.vocab  # as it will be resized
    elif family == "causal" and s.draft.scratch:
        small = causal.random_init_config(s.draft.scratch, text, target.vocab)
    elif s.draft.init:
        fields = layouts.read_config(s.draft.init)
        old = {"heads": fields.get("num_heads"), "head_layers": fields.get("num_hidden_layers")}
        old |= {"vocab": fields.get("draft_vocab_size"), "width": fields.get("hidden_size")}
        old["taps"] = list(fields.get("eagle_aux_hidden_state_layer_ids") or [])
        chosen = replace(s.draft, **{k: v for k, v in old.items() if v is not None})
    own = text if small is None else small
    return target, model_sizes.draft_shape(chosen, own, target.vocab, small)


def make_flops_counter(
    s: Any, mixed: bool, fresh: Callable[[], Sequence[SampleRow]]
) -> Callable[[Sequence[SampleRow]], FlopsByDtype]:
    """Operations of a step over some samples, without what is computed a second time to save memory.

    Of the target only what it runs itself: with stored features nothing, or its head alone. `fresh` gives the rows
    that the draft wrote since it was last asked: they took time as well. It writes in fp32, as its weights are.
    """
    shapes_of = functools.cache(lambda: model_shapes(s))

    def work(rows: Sequence[SampleRow]) -> FlopsByDtype:
        target, draft = shapes_of()
        load = step_workload(rows, replace(s.loop, batch_size=len(rows)), 1)
        live = not s.features
        labels = live or s.features_top == 0
        read, own = resources.step_flops_parts(
            target, draft, load, again=False, live=live, labels=labels
        )
        found = {s.target_dtype: read}
        own_dtype, wrote = (
            "bfloat16" if mixed else "float32",
            resources.generation_flops(draft, fresh()),
        )
        for dtype, count in ((own_dtype, own), ("float32", wrote)):
            found[dtype] = found.get(dtype, 0.0) + count
        return found

    return work


def estimate_resources(s: Any, processes: int, mixed: bool) -> tuple[Table, dict[str, float]]:
    """The table of estimates for the settings of train/distill.py, and its sums; loads no weight."""
    text = _config(s.target, "target", s.revision).get_text_config(decoder=True)
    rows, _ = mixture.load(s.data, min(s.loop.max_length, compatibility.context_length(text)))
    load, size = step_workload(rows, s.loop, processes), DTYPES[s.target_dtype].itemsize
    family = s.draft.family
    target, draft = model_shapes(s)
    memory = resources.memory_breakdown(target, draft, load, size, mixed)
    writing = {}
    if s.on_policy.share > 0:
        writing = resources.generation_memory(s.on_policy, draft, load, s.loop.max_length)
        memory["writing beyond a step"] = resources.memory_beyond_step(writing, memory)
    disk = resources.disk_breakdown(target, draft, size, s.loop.keep)
    flops = resources.total_step_flops(target, draft, load)
    table = Table(
        "estimated, not measured", "", title=f"{s.target}: {family} draft", min_width=WIDTH
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
    for name, count in writing.items():
        table.add_row(f"while it writes: {name}", format_bytes(count))
    if writing:
        table.add_row("while it writes: target's K/V cache", "none: it reads the texts in steps")
        rows_a_round = resources.rows_per_round(s.on_policy, load.samples)
        table.add_row(f"texts written every {s.on_policy.every} steps", f"{rows_a_round:,}")
        table.add_section()
    table.add_row("tokens a step", f"{load.samples * load.tokens:,.0f}")
    table.add_row("learned of them", f"{load.samples * load.learned:,.0f}")
    table.add_row("floating-point operations a step", f"{flops:.2e}")
    sums = {"memory": sum(memory.values()), "disk": sum(disk.values()), "flops": flops}
    sums |= {"parameters": target.parameters, "trained": draft.trained}
    sums["frozen"] = draft.parameters - draft.trained
    return table, sums


def try_export(
    s: Any, trainee: TrainableDraft, target: Target, measure: Callable[[Any], dict[str, float]]
) -> dict[str, float]:
    """Saves the draft elsewhere, loads it as decoding does, and lets it draft if training will measure.

    After the steps, since Medusa-2 merges its adapters when it saves.
    """
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        trainee.save(Path(folder))
        facts = {"family": s.draft.family, "tokenizer_hash": target.fingerprint}
        facts |= {k: v for k, v in trainee.facts.items() if k == "family"}
        (Path(folder) / METADATA_FILE).write_text(json.dumps(facts))
        draft = load_draft(folder, target, dtype=s.target_dtype)
        found = measure(draft) if s.loop.eval_every else {}
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return {**found, "draft_bytes": float(size)}


def try_steps(
    training: Training, rows: Sequence[SampleRow], s: LoopConfig, every: int = 0
) -> dict[str, float]:
    """Two steps of the real loop, the first on the longest of `rows`: seconds and tokens of the second, and memory.

    `every`: steps for which a draft writes at a time; it does so between the two, once.
    """
    device = training.accelerator.device
    lengths = [
        (len(row["input_ids"]), batching.supervised_token_count([row]), i)
        for i, row in enumerate(rows)
    ]
    long = [rows[i] for *_, i in sorted(lengths)[-s.batch_size :]]
    once = replace(s, steps=max(2, s.steps), log_every=1, eval_every=0, keep_best=False)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        for step, choose in enumerate((lambda _: long, training.select_batch)):
            if every:  # the draft writes here, and has ready what the loop then asks for
                began = time.perf_counter()
                choose(step)
                writing = time.perf_counter() - began
            watch, state = SingleStepTracker(), TrainingState("", step)
            with contextlib.suppress(_StopLoop):
                train(
                    replace(training, select_batch=choose),
                    once,
                    state,
                    Path(folder),
                    watch,
                    dict,
                    Progress(disable=True),
                )
    batch = training.select_batch(1)
    each = writing / min(every, once.steps) if every else 0.0
    wrote = {"writing_seconds": writing} if every else {}
    return {
        **wrote,
        "seconds": watch.seconds,
        "loss": watch.values["train/loss"],
        "tokens_per_second": sum(len(row["input_ids"]) for row in batch) / watch.seconds,
        "learned_per_second": batching.supervised_token_count(batch) / watch.seconds,
        "hours": (watch.seconds + each) * s.steps / 3600,
        "peak_bytes": float(peak_memory_bytes(device)),
    }


@contextlib.contextmanager
def shared_temp_folder(wait: Callable[[], None]) -> Iterator[str]:
    """A folder for all processes of this machine that is gone behind it; `wait` lets them catch up."""
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        yield collective.broadcast(folder)
        wait()


def print_measurements(console: Console, found: dict[str, float], steps: int, cuda: bool) -> None:
    """The table of what was measured."""
    table = Table(
        "measured", "", title="two steps, the first on the longest samples", min_width=WIDTH
    )
    table.add_row("the second step", f"{found['seconds']:,.2f} s")
    table.add_row("tokens a second", f"{found['tokens_per_second']:,.0f}")
    table.add_row("learned tokens a second", f"{found['learned_per_second']:,.0f}")
    if "writing_seconds" in found:
        table.add_row("the draft writing one round", f"{found['writing_seconds']:,.2f} s")
    name = "peak memory of the GPU" if cuda else "peak memory of the process"
    table.add_row(name, format_bytes(found["peak_bytes"]))
    table.add_row("draft on disk", format_bytes(found["draft_bytes"]))
    if "accept/tau" in found:
        table.add_row("τ of the draft as yet", f"{found['accept/tau']:.2f}")
    table.add_section()
    table.add_row(f"{steps:,} steps at that rate", f"{found['hours']:,.2f} h")
    console.print(table)
    console.print("Measurements and checkpoints come on top. Nothing was kept.")


def _config(name: str, what: str, revision: str | None = None) -> Any:
    check_model_path(name, what)
    try:
        return AutoConfig.from_pretrained(name, revision=revision)
    except Exception as error:  # any of a dozen kinds
        reason = first_line(error)
        raise UserError(f"{what} {name!r} cannot be loaded: {reason}") from error
