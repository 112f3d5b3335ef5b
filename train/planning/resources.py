"""What a training run needs besides a step's own memory and operations (shape_run.py): copies, disk, and the operations
of on-policy generation, whose memory a dry run measures.

These are estimates: allocators and kernels add to them. Time is operations divided by a rate, which is measured
(train/planning/dry_run.py) or given.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decode.model.hidden_states import HiddenStateSpec
from train.data import batching
from train.data.sample_store import SampleRow
from train.planning import shape_run
from train.planning.shape_run import ShapeRun, StepWorkload, TrainingCost, made_up_rows
from train.teacher.live import compute_hidden_states

WEIGHTS = (shape_run.TARGET, shape_run.DRAFT, shape_run.STATES)
"""What stays in memory between steps."""


def memory_breakdown(run: ShapeRun, load: StepWorkload, mixed: bool) -> dict[str, int]:
    """Bytes on each device at the worst moment: a micro-batch of the longest samples.

    `mixed`: the forward pass is in bf16 while weights stay in fp32.
    """
    rows = made_up_rows(load.micro_batch, load.max_tokens, load.max_supervised_tokens, run.vocab)
    accumulates = load.samples > load.micro_batch * load.processes
    memory = run.step(rows, mixed, accumulates).memory
    if load.processes > 1:
        memory["gradients in exchange"] = 4 * run.trained
    # Unless it is fused, AdamW makes copies of all gradients on CUDA, which exist after the activations are freed.
    update = sum(memory[name] for name in WEIGHTS) + (0 if run.fused else 8 * run.trained)
    return memory | {"optimiser's copies beyond that": max(0, update - sum(memory.values()))}


def step_cost(run: ShapeRun, load: StepWorkload) -> TrainingCost:
    """The cost of one sample of average length."""
    lengths = round(load.tokens), round(load.supervised_tokens)
    return run.step(made_up_rows(1, *lengths, run.vocab), False)


def disk_breakdown(run: ShapeRun, target_bytes: int, keep: int) -> dict[str, int]:
    """Bytes that a run writes: the draft and its checkpoints; while one is written there is one more than `keep`."""
    saved = 4 if run.saved_in_float32 else target_bytes
    changed = run.target_parameters * target_bytes if run.trains_target else 0
    each = 4 * (run.trained + run.frozen) + run.state_bytes
    return {
        "draft": saved * (run.trained + run.frozen),
        "changed target": changed,
        f"{keep} checkpoints and one in the making": (keep + 1) * each,
    }


@dataclass(frozen=True)
class ReadingCost:
    """Operations of a draft that writes text without the target."""

    token_flops: float
    """Of reading a token, attention and LM head apart."""
    pair_flops: float
    """Of attention, for a token and a token that it sees."""
    head_flops: float
    """Of the LM head, for a token."""

    def flops(self, tokens: int) -> float:
        """Operations of reading a text of `tokens` tokens, each of which sees half of them on average."""
        return tokens * self.token_flops + tokens**2 / 2 * self.pair_flops


def reading_cost(run: ShapeRun, tokens: int = 64) -> ReadingCost:
    """What reading a text costs, by a trial with one of `tokens` tokens."""
    batch = batching.collate(made_up_rows(1, tokens, 1, run.vocab), 0)
    with run.without_data():
        model = run.trainable.language_model().model
        with torch.no_grad(), shape_run.count_flops() as flops:
            compute_hidden_states(model, batch, HiddenStateSpec(final=True))
    run.trainable.model.train()
    fused = flops.get_flop_counts()["Global"].get(shape_run.FUSED, 0)
    head = 2 * model.get_output_embeddings().weight.numel()
    return ReadingCost((flops.get_total_flops() - fused) / tokens, fused / tokens**2, head)


def generation_flops(cost: ReadingCost, rows: Sequence[SampleRow]) -> float:
    """Operations of generating these rows: each token is read once, and only generated ones are projected."""
    return sum(
        cost.flops(len(row["input_ids"])) + batching.supervised_token_count([row]) * cost.head_flops
        for row in rows
    )
