"""Enlarges a Llama to the shape of another one without changing its output probabilities.

A benchmark then has the cost of Llama-3.1-8B with the texts and the draft acceptance of a small model.
With d and D the old and new hidden size, the small model sits in the first d channels and:

* **width**: the other channels are zero, so a norm's mean square shrinks by d/D; its weight shrinks
  by sqrt(d/D) and its eps by d/D.
* **depth, heads, MLP**: new layers write nothing (`o_proj` and `down_proj` zero); new heads and new
  MLP rows are read by nothing.
* **head size** h to r·h: RoPE's frequency i is theta^(-2i/h) = (theta^r)^(-2i/(r·h)), so theta becomes
  theta^r; each half of a head goes to the start of the new half (rotate-half pairs i with i + r·h/2);
  the softmax divides by sqrt(r·h), so q grows by sqrt(r).
* **vocabulary**: channel d holds a constant c for every id, which no layer reads or writes. A norm
  adds c² where it added eps, so with D·eps' + c² = d·eps its factor is exactly the old one. After the
  last norm the channel is positive for every input, so a large negative entry of an output row at that
  channel excludes its id: the logit is -2^20·c·sqrt(D/d) over the rms of the last hidden state. With
  tied embeddings the real rows hold c there, which adds the same small number to all real logits and
  does not change the softmax.

Measured on the bundled models, three texts of 256 tokens, log-probabilities against the small model
in fp32. Wide model in fp32: within 2.1e-5, same argmax everywhere; logits of padded ids at most -1900
(target at 8B's width) and -7900 (draft at 1B's), their probability exactly 0. In bf16 the wide model is
as far off as the small one: 0.024 and 0.023 on average, argmax equal at 98.6 to 99.1 % and 98.6 % of
the tokens. So in bf16 greedy texts may differ from a near-tie on.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

PADDED_ROW_VALUE = -(
    2.0**15
)  # entry of a padded id's output row at the constant channel; fits float16
NORM_GAIN = 2.0**5  # weight of the last norm at the constant channel


@dataclass(frozen=True)
class LlamaShape:
    """The sizes that determine a Llama's cost."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool


SHAPES = {
    "llama-3.1-8b": LlamaShape(4096, 32, 32, 8, 128, 14336, 128256, tied=False),
    "llama-3.2-3b": LlamaShape(3072, 28, 24, 8, 128, 8192, 128256, tied=True),
    "llama-3.2-1b": LlamaShape(2048, 16, 32, 8, 64, 8192, 128256, tied=True),
}


@torch.no_grad()
def widen(
    model: LlamaForCausalLM,
    shape: LlamaShape,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> LlamaForCausalLM:
    """A model of that shape with `model`'s probabilities up to rounding; ids beyond `model`'s have probability 0.

    Exact in real arithmetic; in bf16 two factors round: sqrt(r) and, unless D/d is a power of 4,
    sqrt(d/D). `dtype` is the model's own unless given. Weights are allocated on `device` only.
    ValueError for a shape that cannot hold the model.
    """
    old = read_shape(model.config)
    check_shape(model.config, shape)
    wide = _zero_model(_widened_config(model.config, shape), device, dtype or model.dtype)
    norm = math.sqrt(old.hidden / shape.hidden)
    _fill(wide.model.embed_tokens.weight, model.model.embed_tokens.weight)
    _fill(wide.lm_head.weight, model.lm_head.weight)
    _fill(wide.model.norm.weight, model.model.norm.weight, norm)
    if shape.hidden > old.hidden:
        wide.model.embed_tokens.weight[:, old.hidden] = _constant_channel_value(model.config)
        wide.lm_head.weight[old.vocab :, old.hidden] = PADDED_ROW_VALUE
        wide.model.norm.weight[old.hidden] = NORM_GAIN
    for new, layer in zip(wide.model.layers, model.model.layers, strict=False):
        _fill(new.input_layernorm.weight, layer.input_layernorm.weight, norm)
        _fill(new.post_attention_layernorm.weight, layer.post_attention_layernorm.weight, norm)
        _fill_attention(new.self_attn, layer.self_attn, old, shape)
        for name in ("gate_proj", "up_proj", "down_proj"):
            _fill(getattr(new.mlp, name).weight, getattr(layer.mlp, name).weight)
    return wide


@torch.no_grad()
def randomise_(model: torch.nn.Module, seed: int) -> None:
    """Overwrites every weight with Llama's initialisation: matrices N(0, 0.02), norms 1. All are on one device.

    For timing: multiplying by zeros draws less power, so that a GPU would clock higher than in real use.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for value in model.parameters():
        value.fill_(1.0) if value.ndim == 1 else value.normal_(0.0, 0.02, generator=generator)


def read_shape(config: LlamaConfig) -> LlamaShape:
    """The shape of such a model."""
    c: Any = config
    heads = (c.num_attention_heads, c.num_key_value_heads, c.head_dim)
    sizes = (c.intermediate_size, c.vocab_size, c.tie_word_embeddings)
    return LlamaShape(c.hidden_size, c.num_hidden_layers, *heads, *sizes)


def check_shape(config: LlamaConfig, shape: LlamaShape) -> None:
    """ValueError that names every reason if the shape cannot hold such a model."""
    old, rope = read_shape(config), dict(config.rope_parameters or {})
    copies = math.ceil(old.heads / old.kv_heads / max(1, shape.heads // shape.kv_heads))
    wider = shape.hidden > old.hidden
    reasons = {
        "a smaller hidden size": shape.hidden < old.hidden,
        "fewer layers": shape.layers < old.layers,
        "a narrower MLP": shape.intermediate < old.intermediate,
        "fewer ids": shape.vocab < old.vocab,
        "more ids without a spare channel": shape.vocab > old.vocab and not wider,
        "a head size that is no multiple": shape.head_dim % old.head_dim != 0,
        "heads that are no multiple of the K/V heads": shape.heads % shape.kv_heads != 0,
        "too few K/V heads for the groups": shape.kv_heads < copies * old.kv_heads,
        "tied embeddings for untied ones": shape.tied and not old.tied,
        "an eps of 0": wider and config.rms_norm_eps <= 0,
        "biases": bool(config.attention_bias or config.mlp_bias),
        "scaled RoPE": rope.get("rope_type") != "default",
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise ValueError(f"cannot widen to {shape}: {', '.join(found)}")


def _widened_config(config: LlamaConfig, shape: LlamaShape) -> LlamaConfig:
    """`config` with the shape's sizes, and with the eps and theta that leave the output unchanged."""
    old, rope, values = read_shape(config), dict(config.rope_parameters or {}), config.to_dict()
    constant = _constant_channel_value(config) if shape.hidden > old.hidden else 0.0
    theta = rope["rope_theta"] ** (shape.head_dim // old.head_dim)
    values |= {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": (old.hidden * config.rms_norm_eps - constant**2) / shape.hidden,
        "rope_parameters": rope | {"rope_theta": theta},
    }
    return LlamaConfig(**values)


def _constant_channel_value(config: LlamaConfig) -> float:
    """c: the largest power of 2, so exact in every dtype, with c² <= d·eps; the rest stays in eps."""
    return 2.0 ** math.floor(math.log2(config.hidden_size * config.rms_norm_eps) / 2)


def _zero_model(
    config: LlamaConfig, device: torch.device | str, dtype: torch.dtype
) -> LlamaForCausalLM:
    """A model in eval mode on `device` in `dtype` whose weights are all zero."""
    with torch.device("meta"):
        model: Any = LlamaForCausalLM._from_config(config, dtype=dtype)
    model.to_empty(device=device)
    model.tie_weights()  # to_empty separated the tied weights
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(
        device
    )  # to_empty leaves buffers uninitialised
    for value in model.parameters():
        value.zero_()
    return model.eval()  # type: ignore[no-any-return]


def _fill(new: torch.Tensor, old: torch.Tensor, factor: float = 1.0) -> None:
    """Writes factor·old into the leading corner of `new`."""
    new[tuple(slice(size) for size in old.shape)] = (old.float() * factor).to(new)


def _fill_attention(new: Any, layer: Any, old: LlamaShape, shape: LlamaShape) -> None:
    """Copies the attention of one layer. Each old query head is put into a group with its own K/V head; an old
    group larger than the new groups is spread over several of them, each with a copy of the K/V head."""
    group, size = old.heads // old.kv_heads, shape.heads // shape.kv_heads
    copies, heads = math.ceil(group / size), range(old.heads)
    slots = [(j // group * copies + j % group // size) * size + j % group % size for j in heads]
    source = [head for head in range(old.kv_heads) for _ in range(copies)]
    device, d = new.q_proj.weight.device, old.hidden
    query = _head_rows(slots, old.head_dim, shape.head_dim).to(device)
    key = _head_rows(list(range(len(source))), old.head_dim, shape.head_dim).to(device)
    scaled = layer.q_proj.weight.float() * math.sqrt(shape.head_dim / old.head_dim)
    new.q_proj.weight[query, :d] = scaled.to(new.q_proj.weight)
    new.o_proj.weight[:d, query] = layer.o_proj.weight.to(new.o_proj.weight)
    for name in ("k_proj", "v_proj"):
        weight = getattr(layer, name).weight.unflatten(0, (-1, old.head_dim))[source].flatten(0, 1)
        getattr(new, name).weight[key, :d] = weight.to(getattr(new, name).weight)


def _head_rows(slots: list[int], old_dim: int, new_dim: int) -> torch.Tensor:
    """Row numbers in the new matrix of the heads at those slots: each half of a head starts a new half."""
    i = torch.arange(old_dim)
    within = i + (i >= old_dim // 2) * (new_dim - old_dim) // 2
    return (torch.tensor(slots)[:, None] * new_dim + within).flatten()
