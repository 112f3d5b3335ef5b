"""What a draft family minimises, and how its acceptance is measured while it trains."""

from collections.abc import Sequence

import torch

from decode.drafts.base import Draft
from decode.sampling import Sampling
from decode.speculate import decode
from decode.target import Target
from eval import metrics
from train.features import Stored
from train.loop import Sums
from train.teacher import Teacher


def objective(teacher: Teacher | Stored, trainer: torch.nn.Module) -> Sums:
    """The loss of a draft; `trainer` is of train/causal.py or train/heads.py, perhaps wrapped."""
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
