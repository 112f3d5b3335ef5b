"""One training loop for every draft: the same batches after a crash, on one process or many.

Gradients are of the summed loss divided by the number of supervised tokens of the *global* batch, so neither
micro-batches nor processes nor padding change what is optimised.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from decode.settings import UserError
from train import batches, checkpoint
from train.batches import Batch
from train.shards import Row
from train.tracking import NullTracker, Tracker


@dataclass
class LoopSettings:
    """How the optimiser runs."""

    steps: int = 1000
    """Optimiser steps."""
    batch_size: int = 16
    """Samples a step, over all processes and micro-batches."""
    micro_batch: int = 16
    """Samples a forward pass, each process; lower it when memory runs out (same result)."""
    lr: float = 1e-3
    """Peak learning rate of AdamW."""
    muon_lr: float = 0.0
    """Peak learning rate of Muon for the matrices inside layers, 0.02 say; 0: AdamW trains them like the rest."""
    warmup: int = 50
    """Steps of linear warm-up; then a cosine falls to a tenth."""
    weight_decay: float = 0.0
    clip: float = 1.0
    """Largest norm of the gradient."""
    max_length: int = 512
    """Longer samples are cut."""
    log_every: int = 10
    """Steps between lines in the log."""
    eval_every: int = 100
    """Steps between measurements of τ and α with the real decoder; 0 never measures."""
    save_every: int = 100
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints to keep."""


class Sums(Protocol):
    """The objective: sums over the supervised positions of a batch, never means."""

    def __call__(self, batch: Batch) -> dict[str, torch.Tensor]:
        """{"loss": …, any other metric: …}, scalars; "loss" carries the gradient."""


def schedule(step: int, s: LoopSettings) -> float:
    """Share of the peak learning rate: linear warm-up, then a cosine to a tenth at the last step."""
    if step < s.warmup:
        return (step + 1) / s.warmup
    done = (step - s.warmup) / max(1, s.steps - s.warmup)
    return 0.55 + 0.45 * math.cos(math.pi * done)


def optimizers_of(
    model: torch.nn.Module,
    matrices: Sequence[torch.nn.Parameter],
    slow: Sequence[torch.nn.Parameter],
    s: LoopSettings,
) -> list[torch.optim.Optimizer]:
    """AdamW for what `model` trains, a quarter of the rate for `slow`; with `muon_lr` Muon for `matrices`."""
    if s.muon_lr == 0:
        matrices = []
    taken = {id(p) for p in [*matrices, *slow]}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in taken]
    groups: list[dict[str, Any]] = [{"params": rest}]
    if slow:
        groups.append({"params": list(slow), "scale": 0.25})
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=s.lr, weight_decay=s.weight_decay)
    ]
    if matrices:
        made.append(torch.optim.Muon(matrices, lr=s.muon_lr, weight_decay=s.weight_decay))
    return made


def train(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    objective: Sums,
    rows: Sequence[Row],
    s: LoopSettings,
    out: Path,
    seed: int,
    start: int,
    tracker: Tracker | NullTracker,
    measure: Callable[[], dict[str, float]],
    progress: Progress,
) -> None:
    """Steps `start` to `s.steps` in place; batches are a function of (seed, step) alone.

    `measure` decodes with the draft as it is and returns what to log. UserError when the loss is not finite: the
    last checkpoint stands.
    """
    world = accelerator.num_processes
    bar = progress.add_task(
        "distilling", total=s.steps, completed=start, loss="", alpha="", speed=""
    )
    began, seen, waited = time.perf_counter(), 0, 0.0
    window: dict[str, float] = {}
    for step in range(start, s.steps):
        for optimizer, peak in zip(optimizers, (s.lr, s.muon_lr), strict=False):
            for group in optimizer.param_groups:
                group["lr"] = peak * schedule(step, s) * group.get("scale", 1.0)
        fetch = time.perf_counter()
        chosen = [rows[i] for i in batches.step_indices(len(rows), s.batch_size, seed, step)]
        tokens = batches.token_count(chosen)
        mine = batches.split_for(accelerator.process_index, world, chosen)
        waited += time.perf_counter() - fetch
        sums = _accumulate(accelerator, model, objective, mine, s.micro_batch, world / tokens)
        norm = accelerator.clip_grad_norm_(model.parameters(), s.clip)
        totals = accelerator.reduce(
            torch.stack([sums[name] for name in sorted(sums)]), reduction="sum"
        )
        values = dict(zip(sorted(sums), totals.tolist(), strict=True))
        if not math.isfinite(values["loss"]):
            if accelerator.is_main_process:
                checkpoint.disown(out, step)
            raise UserError(
                f"the loss is {values['loss']} at step {step + 1}: lower loop.lr or raise loop.warmup; "
                f"the last good checkpoint in {out / 'checkpoints'} stands"
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen += tokens
        for name, value in [*values.items(), ("tokens", tokens)]:
            window[name] = window.get(name, 0.0) + value
        done = step + 1
        last = done == s.steps
        if done % s.log_every == 0 or done % s.save_every == 0 or last:
            seconds = time.perf_counter() - began
            means = means_of(window)
            tracker.log(
                done,
                {
                    **{f"train/{name}": value for name, value in means.items()},
                    "train/grad_norm": float(norm),
                    "train/lr": s.lr * schedule(step, s),
                    "train/tokens_per_second": seen / seconds,
                    "train/data_wait_share": waited / seconds,
                },
            )
            progress.update(
                bar, loss=f"loss {means['loss']:.3f}", speed=f"{seen / seconds:,.0f} tok/s"
            )
            window = {}
        if s.eval_every and (done % s.eval_every == 0 or last):
            measured = measure()
            tracker.log(done, measured)
            if "accept/alpha" in measured:
                progress.update(bar, alpha=f"α {measured['accept/alpha']:.3f}")
        if done % s.save_every == 0 or last:
            checkpoint.save(accelerator, out, done, s.keep)
        progress.update(bar, completed=done)


def means_of(window: dict[str, float]) -> dict[str, float]:
    """Sums divided by what they are of: "alpha_2" by "count_2" where there is one, else by "tokens"."""
    return {
        name: value / max(1.0, window.get(f"count_{name.rpartition('_')[2]}", window["tokens"]))
        for name, value in window.items()
        if name != "tokens" and not name.startswith("count_")
    }


def _accumulate(
    accelerator: Accelerator,
    model: torch.nn.Module,
    objective: Sums,
    rows: Sequence[Row],
    micro_batch: int,
    scale: float,
) -> dict[str, torch.Tensor]:
    """Backward through every micro-batch; returns this process's detached sums.

    `scale` is processes ÷ global tokens: data parallelism averages gradients over processes.
    """
    totals: dict[str, torch.Tensor] = {}
    rows = sorted(
        rows, key=lambda row: len(row["input_ids"])
    )  # those of one length pad each other least
    for at in range(0, len(rows), micro_batch):
        batch = batches.collate(rows[at : at + micro_batch], pad_id=0).to(accelerator.device)
        last = at + micro_batch >= len(rows)
        # processes exchange gradients once a step, with the last micro-batch
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            sums = objective(batch)
            accelerator.backward(sums["loss"] * scale)
        for name, value in sums.items():
            totals[name] = totals.get(name, torch.zeros_like(value)) + value.detach()
    return totals


def bar_of(console: Any, shown: bool) -> Progress:
    """The one progress bar of a training: loss, α, speed and time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]} {task.fields[alpha]} {task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not shown,
    )
