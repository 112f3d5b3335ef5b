"""What a training run needs, from shapes alone: parameters, memory, disk and arithmetic. These are estimates.

The activation coefficients are read off the tensors that autograd keeps in bf16 (tests/train/planning/test_recipes.py
counts them again); allocators and kernels add to that. Time is arithmetic divided by a rate, which is measured
(train/planning/dry_run.py) or given. Terms that depend on the draft family are methods of its `DraftShape`.
"""

from collections.abc import Sequence
from fractions import Fraction

from decode.engine.engine import BUCKET
from decode.engine.round_memory import round_bytes
from decode.model.runner import PREFILL_CHUNK
from train.data import batching
from train.data.sample_store import SampleRow
from train.families.model_sizes import DraftShape, ModelShape, StepWorkload
from train.losses.chunked_sums import max_chunk_rows
from train.trainer.on_policy import OnPolicyConfig


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
        "activations of the draft": draft.activation_bytes(target, load, 1 if mixed else 2),
        "logits": logits_bytes(target, draft, load),
    }
    # The optimiser's temporary copies exist after the activations are freed.
    update = max(0, 4 * draft.trained - sum(passing.values()))
    return {**fixed, **passing, "optimiser's copies beyond that": update}


def logits_bytes(target: ModelShape, draft: DraftShape, load: StepWorkload) -> int:
    """Bytes of all that is as wide as a vocabulary, for one piece of the supervised positions."""
    rows = min(load.micro_batch * load.max_supervised_tokens, max_chunk_rows(target.vocab))
    return draft.logits_bytes(target, rows)


def disk_breakdown(
    target: ModelShape, draft: DraftShape, target_bytes: int, keep: int
) -> dict[str, int]:
    """Bytes that a run writes: the draft and its checkpoints; while one is written there is one more than `keep`."""
    each = 4 * draft.parameters + 8 * draft.trained
    saved = 4 if draft.saved_in_float32 else target_bytes
    changed = target.parameters * target_bytes if draft.trains_target else 0
    return {
        "draft": saved * draft.parameters,
        "changed target": changed,
        f"{keep} checkpoints and one in the making": (keep + 1) * each,
    }


def total_step_flops(target: ModelShape, draft: DraftShape, load: StepWorkload) -> float:
    """Floating-point operations of one step with the live target, over all processes."""
    return sum(step_flops_parts(target, draft, load))


def step_flops_parts(
    target: ModelShape,
    draft: DraftShape,
    load: StepWorkload,
    live: bool = True,
    labels: bool = True,
) -> tuple[float, float]:
    """Operations of one step over all processes: (of the target's layers, of its LM head and the draft).

    `live`: the target runs; False: its hidden states come from disk. `labels`: its LM head runs; False: its
    distributions come from disk.
    """
    # A target that is trained runs twice and takes gradients of states, though not of its weights.
    passes = 3 if draft.trains_target else 1
    teacher = live * passes * load.tokens * forward_flops_per_token(target, load.tokens)
    # Forward and the gradients of states pass every weight, the gradients of weights only what is trained.
    body = draft.body_parameters
    flops = load.tokens * (4 * body + 2 * min(body, draft.trained))
    flops += labels * load.supervised_tokens * 2 * target.vocab * target.hidden
    head = (4 if draft.head_is_frozen else 6) * draft.vocab * draft.hidden
    passed = 6 * draft.parameters_per_pass + head
    flops += load.supervised_tokens * draft.passes_per_slot * passed
    flops += draft.attention_flops(load)
    return load.samples * teacher, load.samples * flops


def forward_flops_per_token(model: ModelShape, tokens: float) -> float:
    """Operations for a token of a text of `tokens`: it passes every weight and attends to half the text on average."""
    return 2 * model.body_parameters + 2 * tokens * model.attention * model.layers


def format_bytes(count: float) -> str:
    """In GB of 10^9 bytes, or in MB below that."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _target_state_bytes(
    target: ModelShape, draft: DraftShape, load: StepWorkload, target_bytes: int
) -> int:
    """Bytes of the target's forward pass and of the hidden states that are kept of it."""
    tokens = load.micro_batch * load.max_tokens
    running = tokens * target_bytes * (4 * target.hidden + 3 * target.intermediate)
    kept = draft.target_states * target.hidden * target_bytes
    copies = 4 * draft.hidden * draft.target_state_copies  # in fp32
    return running + tokens * (kept + copies)


def generation_memory(
    s: OnPolicyConfig, target: ModelShape, draft: ModelShape, load: StepWorkload, max_length: int
) -> dict[str, int]:
    """Bytes on each device while the draft generates rows, weights apart. The target has no K/V cache meanwhile.

    `max_length`: the length to which samples are cut. Weights and activations are in fp32. Probabilities are those of
    the target's tokens, also where the draft has a reduced vocabulary.
    """
    rows = min(s.batch_size, rows_per_round(s, load.samples) // load.processes or 1)
    length = min(load.max_tokens + s.max_new_tokens, max_length)
    slots = -(-(length + 5) // BUCKET) * BUCKET  # the engine reserves a few slots ahead
    prompt = length - s.max_new_tokens
    read = rows * min(prompt, PREFILL_CHUNK) if prompt > 0 else rows
    return {
        "draft's K/V cache": 4 * rows * slots * draft.layers * draft.kv_width,
        "states of the draft": 4 * read * (4 * draft.hidden + 3 * draft.intermediate),
        "logits and probabilities": round_bytes(rows, 1, target.vocab, s.sampling),
    }


def memory_beyond_step(needs: dict[str, int], step: dict[str, int]) -> int:
    """Bytes of `needs` beyond those of a training step, `step`, of which only weights stay between steps."""
    kept = ("target's weights", "draft's weights, fp32", "AdamW's moments, fp32")
    passing = sum(count for name, count in step.items() if name not in kept)
    return max(0, sum(needs.values()) - passing)


def rows_per_round(s: OnPolicyConfig, batch: int) -> int:
    """Rows that the draft generates per round at most, over all processes, for steps of `batch` rows."""
    return int(s.every * batch * Fraction(str(s.share)))


def generation_flops(draft: ModelShape, rows: Sequence[SampleRow]) -> float:
    """Operations of generating these rows: each token is read once, and only generated ones are projected."""
    return sum(
        len(row["input_ids"]) * forward_flops_per_token(draft, len(row["input_ids"]))
        + batching.supervised_token_count([row]) * 2 * draft.vocab * draft.hidden
        for row in rows
    )
