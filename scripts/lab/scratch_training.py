"""The training loop of models that scripts train from scratch: Muon and AdamW, resumable, with progress."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from decode.common.command import DeferredStop, stop
from decode.common.errors import UserError
from decode.common.ranges import Count, LearningRate, Share

REPORT_EVERY = 20


@dataclass
class ScratchTrainingSettings:
    tokens: Count = 8_000_000
    """Tokens to train on."""
    batch_tokens: Count = 8192
    """Tokens a step."""
    muon_lr: LearningRate = 0.02
    """Peak learning rate of Muon, which trains the matrices of the layers."""
    adam_lr: LearningRate = 0.004
    """Peak learning rate of AdamW, which trains embeddings and norms."""
    decay: Share = 0.5
    """Share of the run, at its end, over which the learning rate falls linearly to zero."""
    save_every: Count = 100
    """Steps between checkpoints."""


def lr_scale(step: int, steps: int, decay: float) -> float:
    """Factor of the learning rate: warm-up over 100 steps, plateau, linear fall to zero."""
    return min(1.0, (step + 1) / 100, (steps - step) / max(1, steps * decay))


def save_checkpoint(state: Mapping[str, Any], file: Path) -> None:
    """Replaces the checkpoint; what is there stays when it cannot be written."""
    scratch = file.with_suffix(".tmp")
    try:
        torch.save(state, scratch)
        scratch.replace(file)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def train_from_scratch(
    s: ScratchTrainingSettings,
    model: torch.nn.Module,
    matrices: Sequence[torch.nn.Parameter],
    loss_at: Callable[[int], torch.Tensor],
    checkpoint: Path,
) -> dict[str, Any]:
    """Trains `model` in place, from the checkpoint if there is one; {steps, tokens, minutes, train_loss}.

    `matrices` are the parameters that Muon trains, `loss_at(step)` is the mean loss of that step's batch, which must
    depend on the step alone. A signal ends the run after the current step with a checkpoint.
    """
    steps = s.tokens // s.batch_tokens
    own = {id(matrix) for matrix in matrices}
    optimizers = [
        torch.optim.Muon(matrices, lr=s.muon_lr, weight_decay=0.05, momentum=0.95, nesterov=True),
        torch.optim.AdamW(
            [p for p in model.parameters() if id(p) not in own],
            lr=s.adam_lr,
            betas=(0.9, 0.95),
            weight_decay=0.0,
        ),
    ]
    peaks = [s.muon_lr, s.adam_lr]
    step, spent, smooth = 0, 0.0, 0.0
    if checkpoint.is_file():
        state = torch.load(checkpoint, weights_only=True)
        step, spent, smooth = state["step"], state["seconds"], state["loss"]
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        print(f"resumed at step {step} of {steps}")
    start = time.perf_counter()
    with DeferredStop() as asked:
        while step < steps:
            for optimizer, peak in zip(optimizers, peaks, strict=True):
                optimizer.param_groups[0]["lr"] = peak * lr_scale(step, steps, s.decay)
            loss = loss_at(step)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            step += 1
            smooth = loss.item() if step == 1 else 0.98 * smooth + 0.02 * loss.item()
            if not math.isfinite(smooth):
                raise UserError("the loss is not finite: lower --muon_lr and --adam_lr")
            seconds = spent + time.perf_counter() - start
            if step % REPORT_EVERY == 0:
                speed = step * s.batch_tokens / seconds
                left = (steps - step) * seconds / step / 60
                print(
                    f"step {step}/{steps} loss {smooth:.3f} {speed:,.0f} tokens/s, {left:.0f} min left",
                    flush=True,
                )
            if step % s.save_every == 0 or step == steps or asked.received:
                state = {
                    "step": step,
                    "seconds": seconds,
                    "loss": smooth,
                    "model": model.state_dict(),
                    "optimizers": [o.state_dict() for o in optimizers],
                }
                save_checkpoint(state, checkpoint)
            if asked.received and step < steps:
                stop(asked.received, f"step {step} is saved")
    return {
        "steps": steps,
        "tokens": steps * s.batch_tokens,
        "minutes": round((spent + time.perf_counter() - start) / 60, 1),
        "train_loss": round(smooth, 4),
    }
