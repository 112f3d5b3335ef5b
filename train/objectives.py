"""What a draft family minimises, and how its acceptance is measured while it trains."""

from collections.abc import Sequence
from typing import Any

import torch

from decode.drafts.base import Draft
from decode.sampling import Sampling
from decode.speculate import decode
from decode.target import Target, logits_only_at
from eval import metrics
from train.batches import Batch
from train.features import Stored
from train.loop import Sums
from train.losses import LOSSES, acceptance
from train.teacher import Teacher


def causal_objective(teacher: Teacher | Stored, draft: torch.nn.Module, lm: Any, loss: str) -> Sums:
    """Divergence from the target at every supervised position.

    `draft` is what runs forward (perhaps wrapped for several processes), `lm` the bare model inside, whose
    output projection is asked for supervised positions only.
    """
    divergence = LOSSES[loss]

    def sums(batch: Batch) -> dict[str, torch.Tensor]:
        position = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)[None]
        inputs = {"input_ids": batch.input_ids, "position_ids": position, "use_cache": False}

        def pick(values: torch.Tensor) -> torch.Tensor:
            return values[batch.loss_mask]  # [N, ...]

        with torch.no_grad():
            p_logits = teacher.head(pick(teacher.look(batch).teacher))
        with logits_only_at(lm, pick):
            q_logits = draft(**inputs).logits
        values = divergence(p_logits, q_logits)  # [N]
        with torch.no_grad():
            overlap = acceptance(p_logits, q_logits)
            agree = (p_logits.argmax(-1) == q_logits.argmax(-1)).float()
        return {"loss": values.sum(), "overlap": overlap.sum(), "top1": agree.sum()}

    return sums


def head_objective(teacher: Teacher | Stored, trainer: torch.nn.Module) -> Sums:
    """The loss of heads over the target's states; `trainer` is of train/heads.py, perhaps wrapped."""
    return lambda batch: trainer(batch, teacher.look(batch))


def measure_acceptance(
    target: Target,
    draft: Draft,
    prompts: Sequence[list[int]],
    k: int,
    max_new_tokens: int,
    seed: int,
) -> dict[str, float]:
    """τ and α (also by position) of a draft as it is now, from the real decoder at temperature 1."""
    outputs = decode(
        target,
        draft,
        list(prompts),
        k=k,
        sampling=Sampling(temperature=1.0),
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    target.decoder.tap(None)  # training catches what it needs by itself
    samples = [
        metrics.Sample(
            "train", str(i), len(o.prompt_ids), len(o.output_ids), o.rounds, 0.0, 0.0, []
        )
        for i, o in enumerate(outputs)
    ]
    values = {"accept/tau": metrics.tau(samples), "accept/alpha": metrics.alpha(samples, k)}
    for i, alpha in enumerate(metrics.alpha_by_position(samples, k), 1):
        values[f"accept/alpha_{i}"] = alpha
    return {name: value for name, value in values.items() if value is not None}
