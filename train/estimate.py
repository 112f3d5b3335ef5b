"""What a training run is going to need, from shapes alone: parameters, memory, disk, arithmetic. Estimates, no more.

The coefficients of activations are read off the tensors that autograd keeps in bf16 (tests/test_recipes.py counts them
again); allocators and kernels add to that. Time is arithmetic divided by a rate, and the rate is measured
(train/rehearsal.py) or said.
"""

from dataclasses import dataclass

from train.losses import rows_for
from train.sizes import DraftShape, Shape
from train.ttt import BLOCK


@dataclass(frozen=True)
class Load:
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


def memory(
    target: Shape, draft: DraftShape, load: Load, target_bytes: int, mixed: bool
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
        "states of the target": _states(target, draft, load, target_bytes),
        "activations of the draft": activations(target, draft, load, 1 if mixed else 2),
        "logits": logits(target, draft, load),
    }
    # The optimiser's own copies come when activations are gone.
    update = max(0, 4 * draft.trained - sum(passing.values()))
    return {**fixed, **passing, "optimiser's copies beyond that": update}


def activations(target: Shape, draft: DraftShape, load: Load, scale: int = 1) -> int:
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
            4 * draft.times + 2
        )  # what heads read; the rest comes again
    block = min(load.most, BLOCK)
    score = 8 * draft.heads * load.longest  # of one slot with all keys
    # Blocks of slots are computed again in backward, so one exists at a time, with its gradients.
    kept = draft.times * score * block if load.most <= BLOCK else 2 * score * block
    once = (33 if draft.family == "eagle3" else 4) * draft.hidden  # keys of every token
    return scale * (tokens * once + slots * draft.times * layer + rows * kept)


def logits(target: Shape, draft: DraftShape, load: Load) -> int:
    """Bytes of what is as wide as a vocabulary, for a piece of the learned rows."""
    rows = min(load.micro_batch * load.most, rows_for(target.vocab))
    if draft.family == "causal":
        return rows * 32 * target.vocab
    return rows * 4 * (2 * target.vocab + (3 * draft.times + 3) * draft.vocab)


def disk(target: Shape, draft: DraftShape, target_bytes: int, keep: int) -> dict[str, int]:
    """Bytes that a run writes: the draft, and its checkpoints, of which one more exists while it is written."""
    each = 4 * draft.parameters + 8 * draft.trained
    saved = 4 if draft.family == "causal" else target_bytes
    changed = target.parameters * target_bytes if draft.family == "medusa2" else 0
    return {
        "draft": saved * draft.parameters,
        "changed target": changed,
        f"{keep} checkpoints and one in the making": (keep + 1) * each,
    }


def flops(target: Shape, draft: DraftShape, load: Load) -> float:
    """Floating-point operations of one step with the live target, over all processes; what comes twice counts twice."""
    return sum(work(target, draft, load))


def work(
    target: Shape,
    draft: DraftShape,
    load: Load,
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
    teacher = live * passes * load.tokens * forward(target, load.tokens)
    pieces = load.micro_batch * load.learned > rows_for(target.vocab)  # logits in both directions
    twice = 2 if again and (pieces or draft.family != "causal") else 1
    # Forward and the gradients of states pass every weight, the gradients of weights only what is trained.
    own = load.tokens * (4 * draft.body + 2 * min(draft.body, draft.trained))
    own += labels * load.learned * twice * 2 * target.vocab * target.hidden
    projection = draft.vocab * draft.hidden
    adapted = draft.family == "causal" and draft.trained < draft.parameters  # LoRA spares the head
    head = (2 * twice + (2 if adapted else 4)) * projection
    own += load.learned * draft.times * (6 * draft.late + head)
    if draft.family == "causal":
        own += load.tokens * 6 * load.tokens * draft.attention * draft.layers
    elif draft.family.startswith("eagle"):
        own += load.learned * draft.times * 16 * load.tokens * draft.attention
    return load.samples * teacher, load.samples * own


def forward(model: Shape, tokens: float) -> float:
    """Operations for a token of a text of `tokens`: it passes every weight and sees half of the text on average."""
    return 2 * model.body + 2 * tokens * model.attention * model.layers


def hours(steps: int, step_flops: float, rate: float, processes: int = 1) -> float:
    """Of `steps` steps at `rate` operations a second on each of `processes` devices."""
    return steps * step_flops / rate / processes / 3600


def gigabytes(count: float) -> str:
    """Of 10^9 bytes, or MB where that says little."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _states(target: Shape, draft: DraftShape, load: Load, target_bytes: int) -> int:
    """Bytes for the target's forward and what is kept of it."""
    tokens = load.micro_batch * load.longest
    running = tokens * target_bytes * (4 * target.hidden + 3 * target.inner)
    kept = {"causal": 1, "medusa": 1, "medusa2": 2, "eagle1": 1, "eagle3": 4}[draft.family]
    copies = 4 * draft.hidden * 3 if draft.family == "eagle3" else 0  # in fp32 for the draft
    return running + tokens * (kept * target.hidden * target_bytes + copies)
