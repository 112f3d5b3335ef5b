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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import AutoConfig

from decode import formats, support
from decode.drafts.base import FACTS, load_draft
from decode.settings import UserError
from decode.target import DTYPES, Target, check_path
from train import batches, drafts, estimate, mixture
from train.checkpoint import State
from train.estimate import gigabytes
from train.families import Trainee
from train.loop import LoopSettings, Training, train
from train.meter import peak_memory
from train.shards import Row
from train.tracking import NullTracker

WIDTH = 56  # of both tables


class _Enough(Exception):
    """Raised behind a step that was asked for: the loop would save a checkpoint behind its last one."""


class Watch(NullTracker):
    """Ends the loop at the first line of its log, and keeps that and the seconds until then."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.seconds = 0.0
        self.values: Mapping[str, float] = {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds, self.values = time.perf_counter() - self.began, values
        raise _Enough


def load_of(rows: Sequence[Row], s: LoopSettings, processes: int) -> estimate.Load:
    """What a step over these samples reads."""
    lengths = [len(row["input_ids"]) for row in rows]
    learned = [batches.token_count([row]) for row in rows]
    return estimate.Load(
        samples=s.batch_size,
        tokens=sum(lengths) / len(rows),
        learned=sum(learned) / len(rows),
        longest=max(lengths),
        most=max(learned),
        micro_batch=min(s.micro_batch, s.batch_size // processes),
        processes=processes,
    )


def shapes(s: Any) -> tuple[estimate.Shape, estimate.DraftShape]:
    """Of target and draft for the settings of train/distill.py, from their configs; loads no weight."""
    config = _config(s.target, "target", s.revision)
    text = config.get_text_config(decoder=True)
    target = estimate.target_shape(config)
    family, chosen, small = s.draft.family, s.draft, None
    if family == "causal" and s.draft.init:
        small = _config(s.draft.init, "draft")
        small.get_text_config(decoder=True).vocab_size = target.vocab  # as it will be resized
    elif family == "causal" and s.draft.scratch:
        small = drafts.scratch_config(s.draft.scratch, text, target.vocab)
    elif s.draft.init:
        fields = formats.read_config(s.draft.init)
        old = {"heads": fields.get("num_heads"), "head_layers": fields.get("num_hidden_layers")}
        old |= {"vocab": fields.get("draft_vocab_size"), "width": fields.get("hidden_size")}
        old["taps"] = list(fields.get("eagle_aux_hidden_state_layer_ids") or [])
        chosen = replace(s.draft, **{k: v for k, v in old.items() if v is not None})
    own = text if small is None else small
    return target, estimate.draft_shape(chosen, own, target.vocab, small)


def work_of(s: Any) -> Callable[[Sequence[Row]], float]:
    """Operations of a step over some samples, without what is computed a second time to save memory."""
    sizes = functools.cache(lambda: shapes(s))

    def work(rows: Sequence[Row]) -> float:
        target, draft = sizes()
        load = load_of(rows, replace(s.loop, batch_size=len(rows)), 1)
        return estimate.flops(target, draft, load, again=False, live=not s.features)

    return work


def forecast(s: Any, processes: int, mixed: bool) -> tuple[Table, dict[str, float]]:
    """The table of estimates for the settings of train/distill.py, and its sums; loads no weight."""
    text = _config(s.target, "target", s.revision).get_text_config(decoder=True)
    rows, _ = mixture.load(s.data, min(s.loop.max_length, support.context(text)))
    load, size = load_of(rows, s.loop, processes), DTYPES[s.target_dtype].itemsize
    family = s.draft.family
    target, draft = shapes(s)
    memory = estimate.memory(target, draft, load, size, mixed)
    disk = estimate.disk(target, draft, size, s.loop.keep)
    flops = estimate.flops(target, draft, load)
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
                table.add_row(f"{part}: {name}", gigabytes(count))
        table.add_row(f"[bold]{part}, sum[/]", f"[bold]{gigabytes(sum(parts.values()))}[/]")
        table.add_section()
    table.add_row("tokens a step", f"{load.samples * load.tokens:,.0f}")
    table.add_row("learned of them", f"{load.samples * load.learned:,.0f}")
    table.add_row("floating-point operations a step", f"{flops:.2e}")
    sums = {"memory": sum(memory.values()), "disk": sum(disk.values()), "flops": flops}
    sums |= {"parameters": target.parameters, "trained": draft.trained}
    sums["frozen"] = draft.parameters - draft.trained
    return table, sums


def try_export(
    s: Any, trainee: Trainee, target: Target, measure: Callable[[Any], dict[str, float]]
) -> dict[str, float]:
    """Saves the draft elsewhere, loads it as decoding does, and lets it draft if training will measure.

    After the steps, since Medusa-2 merges its adapters when it saves.
    """
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        trainee.save(Path(folder))
        facts = {"family": s.draft.family, "tokenizer_hash": target.fingerprint}
        facts |= {k: v for k, v in trainee.facts.items() if k == "family"}
        (Path(folder) / FACTS).write_text(json.dumps(facts))
        draft = load_draft(folder, target, dtype=s.target_dtype)
        found = measure(draft) if s.loop.eval_every else {}
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return {**found, "draft_bytes": float(size)}


def try_steps(training: Training, rows: Sequence[Row], s: LoopSettings) -> dict[str, float]:
    """Two steps of the real loop, the first on the longest of `rows`: seconds and tokens of the second, and memory."""
    device = training.accelerator.device
    sizes = [(len(row["input_ids"]), batches.token_count([row]), i) for i, row in enumerate(rows)]
    long = [rows[i] for *_, i in sorted(sizes)[-s.batch_size :]]
    once = replace(s, steps=max(2, s.steps), log_every=1, eval_every=0, keep_best=False)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        for step, choose in enumerate((lambda _: long, training.choose)):
            watch, state = Watch(), State("", step)
            with contextlib.suppress(_Enough):
                train(
                    replace(training, choose=choose),
                    once,
                    state,
                    Path(folder),
                    watch,
                    dict,
                    Progress(disable=True),
                )
    batch = training.choose(1)
    return {
        "seconds": watch.seconds,
        "loss": watch.values["train/loss"],
        "tokens_per_second": sum(len(row["input_ids"]) for row in batch) / watch.seconds,
        "learned_per_second": batches.token_count(batch) / watch.seconds,
        "hours": watch.seconds * s.steps / 3600,
        "peak_bytes": float(peak_memory(device)),
    }


def report(console: Console, found: dict[str, float], steps: int, cuda: bool) -> None:
    """The table of what was measured."""
    table = Table(
        "measured", "", title="two steps, the first on the longest samples", min_width=WIDTH
    )
    table.add_row("the second step", f"{found['seconds']:,.2f} s")
    table.add_row("tokens a second", f"{found['tokens_per_second']:,.0f}")
    table.add_row("learned tokens a second", f"{found['learned_per_second']:,.0f}")
    name = "peak memory of the GPU" if cuda else "peak memory of the process"
    table.add_row(name, gigabytes(found["peak_bytes"]))
    table.add_row("draft on disk", gigabytes(found["draft_bytes"]))
    if "accept/tau" in found:
        table.add_row("τ of the draft as yet", f"{found['accept/tau']:.2f}")
    table.add_section()
    table.add_row(f"{steps:,} steps at that rate", f"{found['hours']:,.2f} h")
    console.print(table)
    console.print("Measurements and checkpoints come on top. Nothing was kept.")


def _config(name: str, what: str, revision: str | None = None) -> Any:
    check_path(name, what)
    try:
        return AutoConfig.from_pretrained(name, revision=revision)
    except Exception as error:  # any of a dozen kinds
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{what} {name!r} cannot be loaded: {reason}") from error
