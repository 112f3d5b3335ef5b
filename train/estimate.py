"""What a training run is going to need, from shapes alone: parameters, memory, disk, arithmetic. Estimates, no more.

The coefficients of activations are read off the tensors that autograd keeps in bf16 (tests/test_recipes.py counts them
again); allocators and kernels add to that. Time is arithmetic divided by a rate, and the rate is measured
(train/rehearsal.py) or said.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from decode import formats
from decode.drafts.eagle_net import Eagle1, Eagle3, llama_config
from decode.drafts.medusa import MedusaNet
from decode.taps import Taps, layer_stack
from train.drafts import DraftSettings
from train.losses import rows_for
from train.ttt import BLOCK


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder: the target, or the draft with what it runs how often."""

    parameters: int
    """All of them, vision towers included."""
    body: int
    """Those that every token passes once; of experts the ones that are asked."""
    layers: int
    hidden: int
    inner: int
    attention: int
    """Query heads times their size."""
    heads: int
    vocab: int


@dataclass(frozen=True)
class DraftShape(Shape):
    """A draft in training. Its `body` is what every token passes; the rest only trained slots, `times` over."""

    family: str
    trained: int
    late: int
    """Parameters that a slot passes each time, before the projection to the vocabulary."""
    times: int


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


def target_shape(config: PretrainedConfig) -> Shape:
    """Of a causal LM with this config; no weight is made."""
    return _shape(_on_meta(config))


def draft_shape(s: DraftSettings, config: Any, vocab: int, small: Any = None) -> DraftShape:
    """Of the draft that settings `s` make for a target of text `config` with `vocab` logits.

    `small` is the config of a causal draft that is not cut from the target.
    """
    with torch.device("meta"):
        if s.family == "causal":
            return _causal(s, config, small)
        if s.family in ("medusa", "medusa2"):
            return _medusa(s, config, vocab)
        if s.family in ("eagle1", "eagle3"):
            return _eagle(s, config, vocab)
    raise ValueError(f"family {s.family!r} has no estimate")


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


def flops(
    target: Shape, draft: DraftShape, load: Load, again: bool = True, live: bool = True
) -> float:
    """Floating-point operations of one step, over all processes.

    `again`: what backward computes a second time counts, as it does for time but not for MFU. `live`: the target
    runs; its laws are not read from disk.
    """
    half = load.tokens / 2  # keys that a token sees on average
    # Medusa-2 runs the target twice and takes gradients through it, though not of its weights.
    passes = 3 if draft.family == "medusa2" else 1
    forward = load.tokens * (2 * target.body + 4 * half * target.attention * target.layers)
    pieces = load.micro_batch * load.learned > rows_for(target.vocab)  # logits in both directions
    twice = 2 if again and (pieces or draft.family != "causal") else 1
    teacher = passes * forward + load.learned * twice * 2 * target.vocab * target.hidden
    # Forward and the gradients of states pass every weight, the gradients of weights only what is trained.
    own = load.tokens * (4 * draft.body + 2 * min(draft.body, draft.trained))
    projection = draft.vocab * draft.hidden
    adapted = draft.family == "causal" and draft.trained < draft.parameters  # LoRA spares the head
    head = (2 * twice + (2 if adapted else 4)) * projection
    own += load.learned * draft.times * (6 * draft.late + head)
    if draft.family == "causal":
        own += load.tokens * 12 * half * draft.attention * draft.layers
    elif draft.family.startswith("eagle"):
        own += load.learned * draft.times * 16 * load.tokens * draft.attention
    return load.samples * (live * teacher + own)


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


def _on_meta(config: PretrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _shape(model: Any) -> Shape:
    config = model.config.get_text_config(decoder=True)
    has = config.to_dict()
    size = has.get("head_dim") or config.hidden_size // config.num_attention_heads
    count = next((has[k] for k in ("num_experts", "num_local_experts") if has.get(k)), 0)
    asked = (has.get("num_experts_per_tok") or 1) / count if count else 1.0
    body = sum(
        p.numel() * (asked if ".experts." in name else 1.0)
        for name, p in layer_stack(model).named_parameters()
    )
    return Shape(
        parameters=_count(model),
        body=int(body),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        inner=has.get("intermediate_size") or 4 * config.hidden_size,
        attention=config.num_attention_heads * size,
        heads=config.num_attention_heads,
        vocab=model.get_output_embeddings().weight.shape[0],
    )


def _causal(s: DraftSettings, config: Any, small: Any) -> DraftShape:
    model = _on_meta(config if small is None else small)
    fields = dict(vars(_shape(model)))
    if s.layers:
        less = fields["body"] - fields["body"] * len(s.layers) // fields["layers"]
        fields["parameters"] -= less
        fields["body"] -= less
    trained = fields["parameters"]
    if s.lora_rank:
        share = len(s.layers) / fields["layers"] if s.layers else 1.0
        trained = int(s.lora_rank * _widths(model) * share)
        fields["parameters"] += trained
    if s.layers:
        fields["layers"] = len(s.layers)
    return DraftShape(**fields, family="causal", trained=trained, late=0, times=1)


def _medusa(s: DraftSettings, config: Any, vocab: int) -> DraftShape:
    net = MedusaNet(formats.medusa_config(config, s.heads, s.head_layers, vocab))
    width, count = config.hidden_size, _count(net)
    if s.family == "medusa2":
        count += s.rank * _widths(_on_meta(config))
    return DraftShape(
        parameters=count,
        body=0,
        layers=1,
        hidden=width,
        inner=width,
        attention=width,
        heads=1,
        vocab=vocab,
        family=s.family,
        trained=count,
        late=_count(net.blocks) // s.heads,
        times=s.heads,
    )


def _widths(model: Any) -> int:
    """Inputs and outputs of all linear layers but the LM head: parameters of an adapter of rank 1 to each."""
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    return sum(m.in_features + m.out_features for m in linear)


def _eagle(s: DraftSettings, config: Any, vocab: int) -> DraftShape:
    if s.family == "eagle1":
        fields = formats.eagle1_config(config, vocab)
        net: Eagle1 | Eagle3 = Eagle1(llama_config(fields), lambda states: states)
        size, times, twice = vocab, 1, _count(net.fc)
    else:
        layers = tuple(s.taps) or formats.default_layers(config.num_hidden_layers)
        size = min(s.vocab or vocab, vocab)
        fields = formats.eagle3_config(config, vocab, size, layers, s.width)
        ids = None if size == vocab else torch.arange(size)
        net, times, twice = Eagle3(llama_config(fields), Taps(layers), ids), s.steps, 0
    attention = net.layer.self_attn
    return DraftShape(
        parameters=_count(net),
        # Every token gives keys; of trained slots the layer gives them again.
        body=_count(net.fc) + _count(attention.k_proj) + _count(attention.v_proj),
        layers=1,
        hidden=fields["hidden_size"],
        inner=fields["intermediate_size"],
        attention=fields["num_attention_heads"] * fields["head_dim"],
        heads=fields["num_attention_heads"],
        vocab=size,
        family=s.family,
        trained=sum(p.numel() for p in net.parameters() if p.requires_grad),
        late=_count(net.layer) + twice,
        times=times,
    )


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
