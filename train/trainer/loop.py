"""One training loop for every draft: the same batches after a crash, on one process or many.

Gradients are of the summed loss divided by the number of supervised tokens of the *global* batch, so neither
micro-batches nor processes nor padding change what is optimised.
"""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.distributed.tensor import DTensor

from decode.common.errors import UserError
from train.data import batching
from train.data.sample_store import SampleRow
from train.losses.objective import LossFn
from train.trainer import checkpoint
from train.trainer.checkpoint import TrainingState
from train.trainer.collective import SigtermHandler
from train.trainer.throughput import FlopsByDtype, ThroughputMeter, report_out_of_memory
from train.trainer.tracking import NullTracker, Tracker


@dataclass
class LoopConfig:
    """How the optimiser runs."""

    steps: int = 1000
    """Optimiser steps."""
    epochs: float = 0.0
    """Passes over the samples, in place of `steps`; 0: `steps` counts."""
    batch_size: int = 16
    """Samples a step, over all processes and micro-batches."""
    micro_batch: int = 16
    """Samples a forward pass, each process; lower it when memory runs out (same result)."""
    pack: bool = False
    """Samples of a forward pass share lines instead of being padded to the longest (same result)."""
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
    """Checkpoints to keep, the last ones."""
    keep_best: bool = False
    """The saved draft is the one whose measured τ was best, not the last; that checkpoint is kept too. Differences mean
    something if check.prompts is large."""

    def __post_init__(self) -> None:
        counts = ("batch_size", "micro_batch", "max_length", "log_every", "save_every", "keep")
        for name in counts:
            if vars(self)[name] < 1:
                raise UserError(f"loop.{name} is {vars(self)[name]}: need at least 1")
        if min(self.steps, self.epochs, self.eval_every, self.warmup) < 0:
            raise UserError("loop: need steps, epochs, eval_every and warmup >= 0")
        if self.keep_best and self.eval_every == 0:
            raise UserError("loop.keep_best needs measurements of τ: give loop.eval_every")

    def resolve_epochs(self, samples: int) -> "LoopConfig":
        """The same with `steps` counted, should `epochs` be given."""
        if self.epochs == 0:
            return self
        return replace(self, steps=math.ceil(self.epochs * samples / self.batch_size), epochs=0.0)


def lr_multiplier(step: int, s: LoopConfig) -> float:
    """Share of the peak learning rate: linear warm-up, then a cosine to a tenth at the last step."""
    if step < s.warmup:
        return (step + 1) / s.warmup
    done = (step - s.warmup) / max(1, s.steps - s.warmup)
    return 0.55 + 0.45 * math.cos(math.pi * done)


def build_optimizers(
    model: torch.nn.Module,
    matrices: Sequence[torch.nn.Parameter],
    slow: Sequence[torch.nn.Parameter],
    s: LoopConfig,
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


@dataclass(frozen=True)
class Training:
    """What is trained, and on what."""

    accelerator: Accelerator
    model: torch.nn.Module
    """As `prepare` wrapped it."""
    optimizers: Sequence[torch.optim.Optimizer]
    objective: LossFn
    select_batch: Callable[[int], Sequence[SampleRow]]
    """The global batch of a step (from 0), the same in every process."""
    step_flops: Callable[[Sequence[SampleRow]], FlopsByDtype]
    """Operations of a step over these samples, by the shapes of the models."""


def train(
    training: Training,
    s: LoopConfig,
    state: TrainingState,
    out: Path,
    tracker: Tracker | NullTracker,
    measure: Callable[[], dict[str, float]],
    progress: Progress,
) -> bool:
    """Steps on from `state`, in place, to `s.steps`, each on the batch that `training.select_batch` gives for it.

    `measure` decodes with the draft as it is and returns what to log. False if SIGTERM came first: the step was
    finished and saved. UserError when loss or gradient is not finite, the last good checkpoint stands; or when memory
    runs out.
    """
    accelerator = training.accelerator
    main, world = accelerator.is_main_process, accelerator.num_processes
    meter = ThroughputMeter(accelerator.device, world, training.step_flops)
    bar = progress.add_task(
        "distilling", total=s.steps, completed=state.step, loss="", alpha="", speed=""
    )
    with SigtermHandler() as stop, report_out_of_memory(out_of_memory_advice(s)):
        for step in range(state.step, s.steps):
            for optimizer, peak in zip(training.optimizers, (s.lr, s.muon_lr), strict=False):
                for group in optimizer.param_groups:
                    group["lr"] = peak * lr_multiplier(step, s) * group.get("scale", 1.0)
            began = time.perf_counter()
            chosen = training.select_batch(step)
            tokens = batching.supervised_token_count(chosen)
            mine = batching.rank_slice(accelerator.process_index, world, chosen)
            waited = time.perf_counter() - began
            sums = _accumulate_gradients(training, mine, s.micro_batch, world / tokens, s.pack)
            norm = accelerator.clip_grad_norm_(training.model.parameters(), s.clip)
            values = _reduce_metrics(accelerator, {**sums, "stop": float(stop.received)}, norm)
            stopping = values.pop("stop") > 0
            norm = values.pop("norm")
            _check_finite(values["loss"], norm, step, out, main)
            for optimizer in training.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            took = time.perf_counter() - began
            meter.add(chosen, took, waited)
            state.learned += tokens
            state.seconds += took
            values["tokens"] = tokens
            for name, value in values.items():
                state.sums[name] = state.sums.get(name, 0.0) + value
            state.step = done = step + 1
            last = done == s.steps
            if done % s.log_every == 0 or done % s.save_every == 0 or last:
                means, speed = window_means(state.sums), meter.flush()
                lines = {**means, "grad_norm": norm, "lr": s.lr * lr_multiplier(step, s), **speed}
                tracker.log(done, {f"train/{name}": value for name, value in lines.items()})
                rate = f"{speed['tokens_per_second']:,.0f} tok/s"
                progress.update(bar, loss=f"loss {means['loss']:.3f}", speed=rate)
                state.sums = {}
            if s.eval_every and (done % s.eval_every == 0 or last):
                measured = measure()
                tracker.log(done, measured)
                best = state.measured.get("accept/tau", 0.0)
                if not s.keep_best or measured["accept/tau"] > best:
                    state.measured, state.measured_at = measured, done
                if "accept/alpha" in measured:
                    progress.update(bar, alpha=f"α {measured['accept/alpha']:.3f}")
            best_now = s.keep_best and state.measured_at == done
            if done % s.save_every == 0 or last or stopping or best_now:
                best = state.measured_at if s.keep_best else 0
                checkpoint.save(accelerator, out, state, s.keep, best)
            progress.update(bar, completed=done)
            if stopping and not last:
                return False
    return True


def out_of_memory_advice(s: LoopConfig) -> str:
    """What to lower when a step does not fit in memory."""
    if s.micro_batch > 1:
        return f"lower loop.micro_batch from {s.micro_batch} to {s.micro_batch // 2}, the result is the same"
    return (
        f"loop.micro_batch is 1, so lower loop.max_length from {s.max_length}, train fewer weights "
        "(draft.lora_rank, fewer layers or heads), or give the target target_dtype bfloat16 or --features"
    )


def window_means(window: dict[str, float]) -> dict[str, float]:
    """Sums divided by what they are of: "alpha_2" by "count_2" where there is one, else by "tokens"."""
    return {
        name: value / max(1.0, window.get(f"count_{name.rpartition('_')[2]}", window["tokens"]))
        for name, value in window.items()
        if name != "tokens" and not name.startswith("count_")
    }


def _reduce_metrics(accelerator: Accelerator, sums: dict[str, Any], norm: Any) -> dict[str, float]:
    """Sums over all processes, and the norm, which is theirs already: one wait for the device."""
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    names = sorted(sums)
    device = accelerator.device
    mine = torch.stack([torch.as_tensor(sums[name], device=device).float() for name in names])
    total = accelerator.reduce(mine, reduction="sum")
    every = torch.cat([total, torch.as_tensor(norm, device=device).float().reshape(1)])
    return dict(zip([*names, "norm"], every.tolist(), strict=True))


def _check_finite(loss: float, norm: float, step: int, out: Path, main: bool) -> None:
    """UserError if loss or gradient are not finite. Weights that give no loss are ruined: their checkpoint goes."""
    if math.isfinite(loss) and math.isfinite(norm):
        return
    what = f"the gradient's norm is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
    if main and not math.isfinite(loss):
        checkpoint.discard_checkpoint(out, step)
    left = checkpoint.latest_checkpoint(out)
    raise UserError(
        f"{what} at step {step + 1}: lower loop.lr or raise loop.warmup; "
        + (f"the last good checkpoint, {left}, stands" if left else "there is no good checkpoint")
    )


def _accumulate_gradients(
    training: Training, rows: Sequence[SampleRow], micro_batch: int, scale: float, pack: bool
) -> dict[str, torch.Tensor]:
    """Backward through every micro-batch; returns this process's detached sums.

    `scale` is processes ÷ global tokens: data parallelism averages gradients over processes.
    """
    accelerator, model = training.accelerator, training.model
    totals: dict[str, torch.Tensor] = {}
    rows = sorted(
        rows, key=lambda row: len(row["input_ids"])
    )  # those of one length pad each other least
    lay = batching.pack if pack else batching.collate
    for at in range(0, len(rows), micro_batch):
        batch = lay(rows[at : at + micro_batch], pad_id=0).to(accelerator.device)
        last = at + micro_batch >= len(rows)
        # processes exchange gradients once a step, with the last micro-batch
        accelerator.sync_gradients = last  # DeepSpeed updates the weights where this is set
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            sums = training.objective(batch)
            accelerator.backward(sums["loss"] * scale)
        for name, value in sums.items():
            totals[name] = totals.get(name, torch.zeros_like(value)) + value.detach()
    return totals


def make_progress_bar(console: Any, shown: bool) -> Progress:
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
