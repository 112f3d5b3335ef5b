"""One training loop for every draft family, with the same batches after a crash, on one process or many.

The gradient is that of the summed loss divided by the number of supervised tokens of the *global* batch, so
micro-batches, processes and padding do not change the objective.
"""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.distributed.tensor import DTensor

from decode.common.command import DeferredStop
from decode.common.errors import UserError
from decode.common.machine import keep_freed_memory, return_freed_memory_if_scarce
from decode.common.progress import ProgressBars
from train.data import batching
from train.data.sample_store import SampleRow
from train.families.base import TrainableDraft
from train.settings.training import LoopConfig
from train.teacher.cached import Teacher
from train.trainer import checkpoint
from train.trainer.checkpoint import TrainingState
from train.trainer.muon import Muon
from train.trainer.throughput import FlopsByDtype, ThroughputMeter, report_out_of_memory
from train.trainer.tracking import NullTracker


def lr_multiplier(step: int, s: LoopConfig) -> float:
    """The learning rate as a share of its peak: linear warm-up, then a cosine to `min_lr` at the last step."""
    warmup = s.warmup if s.warmup >= 1 else round(s.warmup * s.steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, s.steps - warmup)
    return (1 + s.min_lr) / 2 + (1 - s.min_lr) / 2 * math.cos(math.pi * progress)


def build_optimizers(draft: TrainableDraft, s: LoopConfig) -> list[torch.optim.Optimizer]:
    """AdamW for what is trained of the draft; with `muon_lr` its `muon_parameters` get Muon instead."""
    matrices = draft.muon_parameters if s.muon_lr else []
    taken = {id(p) for p in [*matrices, *draft.low_lr_parameters]}
    rest = [p for p in draft.model.parameters() if p.requires_grad and id(p) not in taken]
    groups: list[dict[str, Any]] = [{"params": rest}]
    if draft.low_lr_parameters:
        groups.append({"params": list(draft.low_lr_parameters), "scale": 0.25})
    weights = [p for group in groups for p in group["params"]]
    # Its kernel is for weights that are all on a GPU; None leaves the choice to torch.
    fused = True if s.fused_adamw and weights and all(p.is_cuda for p in weights) else None
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=s.lr, weight_decay=s.weight_decay, fused=fused)
    ]
    if matrices:
        optimizers.append(Muon(matrices, s.muon_lr, s.weight_decay))
    return optimizers


@dataclass(frozen=True)
class Training:
    """The model with its optimisers and loss, and which samples each step trains on."""

    accelerator: Accelerator
    model: torch.nn.Module
    """The model as wrapped by `Accelerator.prepare`."""
    optimizers: Sequence[torch.optim.Optimizer]
    trainable: TrainableDraft
    """Gives the loss of `model`."""
    select_batch: Callable[[int], Sequence[SampleRow]]
    """Step (from 0) -> samples of its global batch, the same on every rank."""
    step_flops: Callable[[Sequence[SampleRow]], FlopsByDtype]
    """FLOPs of a training step over these samples, computed from the shapes of the models."""
    teacher: str = "the target"
    """The target and its dtype, for messages."""


@dataclass(frozen=True)
class StepResult:
    """One optimiser step. `sums` and `norm` are over all ranks."""

    rows: Sequence[SampleRow]
    """The global batch."""
    sums: dict[str, float]
    """Sums over its supervised positions, and their number under "tokens"."""
    norm: float
    """The gradient's norm before clipping."""
    stop: bool
    """SIGINT or SIGTERM was received on some rank."""
    seconds: float
    waited: float
    """Seconds of them that `select_batch` took."""


def train(
    training: Training,
    s: LoopConfig,
    state: TrainingState,
    out: Path,
    tracker: NullTracker,
    measure: Callable[[], dict[str, float]],
    progress: ProgressBars,
) -> int:
    """Trains from step `state.step` to `s.steps`, updating `state` in place and writing checkpoints to `out`.

    `measure` decodes with the current draft and returns τ and α to log. Returns 0, or the number of the signal that
    ended the training early, after the current step was finished and saved. UserError when the loss, the gradient or
    a weight is not finite (the last good checkpoint is kept) or when memory runs out.
    """
    accelerator = training.accelerator
    if accelerator.device.type == "cpu":
        keep_freed_memory()
    meter = ThroughputMeter(accelerator.device, accelerator.num_processes, training.step_flops)
    bar = progress.add_task(
        "distilling", total=s.steps, completed=state.step, loss="", alpha="", speed=""
    )
    with DeferredStop() as stop, report_out_of_memory(out_of_memory_advice(s)):
        for step in range(state.step, s.steps):
            result = train_step(training, s, step, out, stop)
            if accelerator.device.type == "cpu":
                return_freed_memory_if_scarce()
            meter.add(result.rows, result.seconds, result.waited)
            state.learned += int(result.sums["tokens"])
            state.seconds += result.seconds
            for name, value in result.sums.items():
                state.sums[name] = state.sums.get(name, 0.0) + value
            state.step = done = step + 1
            last = done == s.steps
            measuring = s.eval_every > 0 and (done % s.eval_every == 0 or last)
            saving = done % s.save_every == 0 or last or result.stop
            if measuring or saving:
                _check_weights(training, done, out)
            if done % s.log_every == 0 or done % s.save_every == 0 or last:
                means, speed = window_means(state.sums), meter.flush()
                rate = s.lr * lr_multiplier(step, s)
                lines = {**means, "grad_norm": result.norm, "lr": rate, **speed}
                tracker.log(done, {f"train/{name}": value for name, value in lines.items()})
                tokens = f"{speed['tokens_per_second']:,.0f} tok/s"
                progress.update(bar, loss=f"loss {means['loss']:.3f}", speed=tokens)
                state.sums = {}
            if measuring:
                measured = measure()
                tracker.log(done, measured)
                best = state.measured.get("accept/tau", 0.0)
                if not s.keep_best or measured["accept/tau"] > best:
                    state.measured, state.measured_at = measured, done
                if "accept/alpha" in measured:
                    progress.update(bar, alpha=f"α {measured['accept/alpha']:.3f}")
            best_now = s.keep_best and state.measured_at == done
            if saving or best_now:
                best = state.measured_at if s.keep_best else 0
                checkpoint.save(accelerator, out, state, s.keep, best)
                tracker.artifact("checkpoint", "model", [checkpoint.checkpoint_dir(out, done)])
            progress.update(bar, completed=done)
            if result.stop and not last:
                stop.ranks_stop()
                return stop.received or signal.SIGTERM
    return 0


def train_step(
    training: Training, s: LoopConfig, step: int, out: Path, stop: DeferredStop | None = None
) -> StepResult:
    """Takes optimiser step `step` (from 0) on the batch that `training.select_batch` gives for it.

    `out` is the folder of the run's checkpoints. UserError when the loss or the gradient is not finite.
    """
    accelerator = training.accelerator
    world = accelerator.num_processes
    for optimizer, peak in zip(training.optimizers, (s.lr, s.muon_lr), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = peak * lr_multiplier(step, s) * group.get("scale", 1.0)
    began = time.perf_counter()
    rows = training.select_batch(step)
    tokens = batching.supervised_token_count(rows)
    rank_rows = batching.rank_slice(accelerator.process_index, world, rows)
    waited = time.perf_counter() - began
    while True:
        sums = _accumulate_gradients(training, rank_rows, s, world / tokens, step)
        norm = accelerator.clip_grad_norm_(training.model.parameters(), s.clip)
        received = stop is not None and stop.received > 0
        values = _reduce_metrics(accelerator, {**sums, "stop": float(received)}, norm)
        stopped, total_norm = values.pop("stop") > 0, values.pop("norm")
        if not _lower_scale(accelerator.scaler, values["loss"], total_norm):
            break
        for optimizer in training.optimizers:
            optimizer.zero_grad(set_to_none=True)
    if not math.isfinite(values["loss"]):
        _blame_teacher(training, rank_rows, values["loss"], step)
        # The weights that were learned are to blame, so their checkpoint goes as well.
        if accelerator.is_main_process:
            checkpoint.discard_checkpoint(out, step)
        raise _diverged(f"the loss is {values['loss']} at step {step + 1}", out)
    if not math.isfinite(total_norm):
        raise _diverged(f"the gradient's norm is {total_norm} at step {step + 1}", out)
    for optimizer in training.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    values["tokens"] = tokens
    return StepResult(rows, values, total_norm, stopped, time.perf_counter() - began, waited)


def out_of_memory_advice(s: LoopConfig) -> str:
    """Advice on which setting to lower when a step does not fit in memory."""
    if s.micro_batch > 1:
        return f"lower loop.micro_batch from {s.micro_batch} to {s.micro_batch // 2}, the result is the same"
    return (
        f"loop.micro_batch is 1, so lower loop.max_length from {s.max_length}, train fewer weights "
        "(draft.lora_rank, fewer layers or heads), or give the target target_dtype bfloat16 or --features"
    )


def window_means(window: dict[str, float]) -> dict[str, float]:
    """Means from sums: "alpha_2" is divided by "count_2" if there is such a sum, everything else by "tokens"."""
    return {
        name: value / max(1.0, window.get(f"count_{name.rpartition('_')[2]}", window["tokens"]))
        for name, value in window.items()
        if name != "tokens" and not name.startswith("count_")
    }


def _reduce_metrics(accelerator: Accelerator, sums: dict[str, Any], norm: Any) -> dict[str, float]:
    """`sums` added up over all ranks, with `norm` (already global) under "norm"; waits for the device once."""
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    names = sorted(sums)
    device = accelerator.device
    stacked = torch.stack([torch.as_tensor(sums[name], device=device).float() for name in names])
    total = accelerator.reduce(stacked, reduction="sum")
    values = torch.cat([total, torch.as_tensor(norm, device=device).float().reshape(1)])
    return dict(zip([*names, "norm"], values.tolist(), strict=True))


def _lower_scale(scaler: torch.amp.GradScaler | None, loss: float, norm: float) -> bool:
    """Lowers the scale of fp16's gradients if they overflowed; True if the step is to be computed again with it.

    Repeating the step, where it is usual to leave it out, trains on every batch once.
    """
    if scaler is None or math.isfinite(norm) or not math.isfinite(loss) or scaler.get_scale() < 1:
        return False
    scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
    return True


def _blame_teacher(training: Training, rows: Sequence[SampleRow], loss: float, step: int) -> None:
    """UserError, on all ranks, for a loss that is no number and is not due to what was learned: the teacher gives none
    for a row either, or no weight has changed yet."""
    teacher = training.trainable.teacher
    named = [] if teacher is None else _rows_without_numbers(teacher, rows, training.accelerator)
    bad = sorted(gather_object(named))
    if bad:
        raise UserError(
            f"the loss is {loss} at step {step + 1}, because {training.teacher} gives NaN or infinity for row "
            f"{bad[0]}: change target_dtype (float16 overflows where bfloat16 and float32 do not), or leave it out"
        )
    if step == 0:
        taught = "" if teacher is None else f" {training.teacher} gives numbers for each row:"
        raise UserError(
            f"the loss is {loss} at step 1, before any weight has changed:{taught} the draft began with weights that "
            "give none; take other weights (draft.init), or mixed_precision bf16 or no instead of fp16"
        )


def _rows_without_numbers(
    teacher: Teacher, rows: Sequence[SampleRow], accelerator: Accelerator
) -> list[str]:
    """The ids and sources of the rows for which the teacher's states or logits are NaN or infinite."""
    bad = []
    for row in rows:
        batch = batching.collate([row], pad_id=0).to(accelerator.device)
        output = teacher.get_output(batch)
        logits = teacher.head(output.head_inputs[batch.loss_mask])
        states = output.features[0, : len(row["input_ids"])]
        # A logit may be -inf: the token cannot come.
        if not ((logits < math.inf).all() & states.isfinite().all()):
            bad.append(f"{row['id']} of {row['source']}")
    return bad


def _check_weights(training: Training, step: int, out: Path) -> None:
    """UserError, on all ranks, if step `step` made a weight NaN or infinite: its loss was computed before that."""
    trained = [p.detach() for p in training.model.parameters() if p.requires_grad]
    local = [p.to_local() if isinstance(p, DTensor) else p for p in trained]
    ruined = torch.stack([~weight.isfinite().all() for weight in local]).any()
    if training.accelerator.reduce(ruined.float(), reduction="sum") > 0:
        raise _diverged(f"weights are NaN or infinite after step {step}", out)


def _diverged(what: str, out: Path) -> UserError:
    latest = checkpoint.latest_checkpoint(out)
    return UserError(
        f"{what}: lower loop.lr or raise loop.warmup; "
        + (f"the last good checkpoint is {latest}" if latest else "there is no good checkpoint")
    )


def _accumulate_gradients(
    training: Training, rows: Sequence[SampleRow], s: LoopConfig, scale: float, step: int
) -> dict[str, torch.Tensor]:
    """Runs forward and backward of every micro-batch; returns this rank's detached sums.

    `scale` is ranks ÷ supervised tokens of the global batch, because data parallelism averages gradients over ranks.
    """
    accelerator, model = training.accelerator, training.model
    totals: dict[str, torch.Tensor] = {}
    # Rows of similar length need the least padding.
    rows = sorted(rows, key=lambda row: len(row["input_ids"]))
    make_batch = batching.pack if s.pack else batching.collate
    for at in range(0, len(rows), s.micro_batch):
        batch = make_batch(rows[at : at + s.micro_batch], pad_id=0).to(accelerator.device)
        batch.draw = step
        last = at + s.micro_batch >= len(rows)
        # ranks exchange gradients once a step, with the last micro-batch
        accelerator.sync_gradients = last  # DeepSpeed updates the weights where this is set
        with contextlib.nullcontext() if last else accelerator.no_sync(model):
            sums = training.trainable.loss(model, batch)
            accelerator.backward(sums["loss"] * scale)
        for name, value in sums.items():
            totals[name] = totals.get(name, torch.zeros_like(value)) + value.detach()
    return totals
