"""What a training run is going to need, from shapes alone: parameters, memory, disk, arithmetic. Estimates, no more.

The coefficients of activations are read off the tensors that autograd keeps in bf16 (tests/train/planning/test_recipes.py counts them
again); allocators and kernels add to that. Time is arithmetic divided by a rate, and the rate is measured
(train/planning/dry_run.py) or said.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from decode.engine.engine import BUCKET
from decode.model.runner import PREFILL_CHUNK
from train.data import batching
from train.data.sample_store import SampleRow
from train.families.ttt_attention import BLOCK
from train.losses.divergences import max_chunk_rows
from train.planning.model_sizes import DraftShape, ModelShape
from train.trainer.on_policy import OnPolicyConfig


@dataclass(frozen=True)
class StepWorkload:
    """What a step reads."""

    samples: int
    tokens: float
    """Of a sample, on average."""
    learned: float
    """Those of them that the target wrote, on average."""
    longest: int
    most: int
    """Learned tokens of a sample, at most."""
    micro_batch: int
    processes: int = 1


def memory_breakdown(
    target: ModelShape, draft: DraftShape, load: StepWorkload, target_bytes: int, mixed: bool
) -> dict[str, int]:
    """Bytes on each device at the worst moment: a micro-batch of the longest samples.

    `mixed`: the forward pass is in bf16 while weights stay in fp32.
    """
    fixed = {
        "target's weights": target.parameters * target_bytes,
        "draft's weights, fp32": 4 * draft.parameters,
        "gradients, fp32": 4 * draft.trained,
        "AdamW's moments, fp32": 8 * draft.trained,
        "gradients in exchange": 4 * draft.trained if load.processes > 1 else 0,
    }
    passing = {
        "weights in bf16": 2 * draft.trained if mixed else 0,
        "states of the target": _target_state_bytes(target, draft, load, target_bytes),
        "activations of the draft": activation_bytes(target, draft, load, 1 if mixed else 2),
        "logits": logits_bytes(target, draft, load),
    }
    # The optimiser's own copies come when activations are gone.
    update = max(0, 4 * draft.trained - sum(passing.values()))
    return {**fixed, **passing, "optimiser's copies beyond that": update}


def activation_bytes(
    target: ModelShape, draft: DraftShape, load: StepWorkload, scale: int = 1
) -> int:
    """Bytes that autograd keeps of the draft for one micro-batch, logits excluded; `scale` 2 for fp32."""
    rows, tokens = load.micro_batch, load.micro_batch * load.longest
    slots = load.micro_batch * load.most
    layer = 30 * draft.hidden + 15 * draft.attention + 8 * draft.inner  # bytes a token, bf16
    if draft.family == "causal":
        return scale * tokens * draft.layers * layer
    if draft.family in ("medusa", "medusa2"):
        through = 30 * target.hidden + 15 * target.attention + 8 * target.inner
        live = tokens * target.layers * through if draft.family == "medusa2" else 0
        return scale * live + slots * target.hidden * (
            4 * draft.passes_per_slot + 2
        )  # what heads read; the rest comes again
    block = min(load.most, BLOCK)
    score = 8 * draft.heads * load.longest  # of one slot with all keys
    # Blocks of slots are computed again in backward, so one exists at a time, with its gradients.
    kept = draft.passes_per_slot * score * block if load.most <= BLOCK else 2 * score * block
    once = (33 if draft.family == "eagle3" else 4) * draft.hidden  # keys of every token
    return scale * (tokens * once + slots * draft.passes_per_slot * layer + rows * kept)


def logits_bytes(target: ModelShape, draft: DraftShape, load: StepWorkload) -> int:
    """Bytes of what is as wide as a vocabulary, for a piece of the learned rows."""
    rows = min(load.micro_batch * load.most, max_chunk_rows(target.vocab))
    if draft.family == "causal":
        return rows * 32 * target.vocab
    return rows * 4 * (2 * target.vocab + (3 * draft.passes_per_slot + 3) * draft.vocab)


def disk_breakdown(
    target: ModelShape, draft: DraftShape, target_bytes: int, keep: int
) -> dict[str, int]:
    """Bytes that a run writes: the draft, and its checkpoints, of which one more exists while it is written."""
    each = 4 * draft.parameters + 8 * draft.trained
    saved = 4 if draft.family == "causal" else target_bytes
    changed = target.parameters * target_bytes if draft.family == "medusa2" else 0
    return {
        "draft": saved * draft.parameters,
        "changed target": changed,
        f"{keep} checkpoints and one in the making": (keep + 1) * each,
    }


def total_step_flops(target: ModelShape, draft: DraftShape, load: StepWorkload) -> float:
    """Floating-point operations of one step with the live target, over all processes; what comes twice counts twice."""
    return sum(step_flops_parts(target, draft, load))


def step_flops_parts(
    target: ModelShape,
    draft: DraftShape,
    load: StepWorkload,
    again: bool = True,
    live: bool = True,
    labels: bool = True,
) -> tuple[float, float]:
    """Operations of one step, over all processes: (of the target's layers, of its head and the draft).

    `again`: what backward computes a second time counts, as it does for time but not for MFU. Not `live`: the target's
    states come from disk. Not `labels`: its laws do, and its head has nothing to do either.
    """
    # Medusa-2 runs the target twice and takes gradients through it, though not of its weights.
    passes = 3 if draft.family == "medusa2" else 1
    teacher = live * passes * load.tokens * forward_flops_per_token(target, load.tokens)
    pieces = load.micro_batch * load.learned > max_chunk_rows(
        target.vocab
    )  # logits in both directions
    twice = 2 if again and (pieces or draft.family != "causal") else 1
    # Forward and the gradients of states pass every weight, the gradients of weights only what is trained.
    own = load.tokens * (4 * draft.body + 2 * min(draft.body, draft.trained))
    own += labels * load.learned * twice * 2 * target.vocab * target.hidden
    projection = draft.vocab * draft.hidden
    adapted = draft.family == "causal" and draft.trained < draft.parameters  # LoRA spares the head
    head = (2 * twice + (2 if adapted else 4)) * projection
    own += load.learned * draft.passes_per_slot * (6 * draft.late + head)
    if draft.family == "causal":
        own += load.tokens * 6 * load.tokens * draft.attention * draft.layers
    elif draft.family.startswith("eagle"):
        own += load.learned * draft.passes_per_slot * 16 * load.tokens * draft.attention
    return load.samples * teacher, load.samples * own


def forward_flops_per_token(model: ModelShape, tokens: float) -> float:
    """Operations for a token of a text of `tokens`: it passes every weight and sees half of the text on average."""
    return 2 * model.body + 2 * tokens * model.attention * model.layers


def hours(steps: int, step_flops: float, rate: float, processes: int = 1) -> float:
    """Of `steps` steps at `rate` operations a second on each of `processes` devices."""
    return steps * step_flops / rate / processes / 3600


def format_bytes(count: float) -> str:
    """Of 10^9 bytes, or MB where that says little."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _target_state_bytes(
    target: ModelShape, draft: DraftShape, load: StepWorkload, target_bytes: int
) -> int:
    """Bytes for the target's forward and what is kept of it."""
    tokens = load.micro_batch * load.longest
    running = tokens * target_bytes * (4 * target.hidden + 3 * target.inner)
    kept = {"causal": 1, "medusa": 1, "medusa2": 2, "eagle1": 1, "eagle3": 4}[draft.family]
    copies = 4 * draft.hidden * 3 if draft.family == "eagle3" else 0  # in fp32 for the draft
    return running + tokens * (kept * target.hidden * target_bytes + copies)


def generation_memory(
    s: OnPolicyConfig, draft: ModelShape, load: StepWorkload, max_length: int
) -> dict[str, int]:
    """Bytes on each device while the draft writes, weights apart. It writes alone: the target has no cache then.

    `max_length`: to which samples are cut. Weights, and with them all else, are in fp32 then.
    """
    rows = min(s.batch_size, rows_per_round(s, load.samples) // load.processes or 1)
    text = min(load.longest + s.max_new_tokens, max_length)
    slots = -(-(text + 5) // BUCKET) * BUCKET  # the engine looks a few ahead
    read = rows * min(text - s.max_new_tokens, PREFILL_CHUNK) if text > s.max_new_tokens else rows
    return {
        "draft's K/V cache": 4 * rows * slots * draft.layers * draft.kv_width,
        "states of the draft": 4 * read * (4 * draft.hidden + 3 * draft.inner),
        "logits and probabilities": 2 * 4 * rows * draft.vocab,
    }


def memory_beyond_step(needs: dict[str, int], step: dict[str, int]) -> int:
    """Bytes of `needs` that go beyond what a step takes, by `estimate.memory`: between steps only weights stay."""
    kept = ("target's weights", "draft's weights, fp32", "AdamW's moments, fp32")
    passing = sum(count for name, count in step.items() if name not in kept)
    return max(0, sum(needs.values()) - passing)


def rows_per_round(s: OnPolicyConfig, batch: int) -> int:
    """Most rows that the draft writes at once, all processes together, for steps of `batch` rows."""
    return int(s.every * batch * Fraction(str(s.share)))


def generation_flops(draft: ModelShape, rows: Sequence[SampleRow]) -> float:
    """Operations of writing these rows: each token is read once, and only those that were written are projected."""
    return sum(
        len(row["input_ids"]) * forward_flops_per_token(draft, len(row["input_ids"]))
        + batching.supervised_token_count([row]) * 2 * draft.vocab * draft.hidden
        for row in rows
    )
