"""Sizes of the target and of the draft in training, from their configs alone: no weight is made."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from decode.checkpoints import layouts
from decode.drafts.eagle_model import Eagle1Model, Eagle3Model, llama_config
from decode.drafts.medusa import MedusaModel
from decode.model.hidden_states import HiddenStateSpec, layer_stack
from train.families.config import DraftConfig


@dataclass(frozen=True)
class ModelShape:
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
    kv_width: int
    """Numbers that the K/V cache keeps of a token in a layer; 0 for heads that write nothing by themselves."""
    vocab: int


@dataclass(frozen=True)
class DraftShape(ModelShape):
    """A draft in training. Its `body` is what every token passes; the rest only trained slots, `times` over."""

    family: str
    trained: int
    late: int
    """Parameters that a slot passes each time, before the projection to the vocabulary."""
    passes_per_slot: int


def target_shape(config: PretrainedConfig) -> ModelShape:
    """Of a causal LM with this config; no weight is made."""
    return _shape(_on_meta(config))


def draft_shape(s: DraftConfig, config: Any, vocab: int, small: Any = None) -> DraftShape:
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


def _on_meta(config: PretrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _shape(model: Any) -> ModelShape:
    config = model.config.get_text_config(decoder=True)
    has = config.to_dict()
    size = has.get("head_dim") or config.hidden_size // config.num_attention_heads
    count = next((has[k] for k in ("num_experts", "num_local_experts") if has.get(k)), 0)
    asked = (has.get("num_experts_per_tok") or 1) / count if count else 1.0
    body = sum(
        p.numel() * (asked if ".experts." in name else 1.0)
        for name, p in layer_stack(model).named_parameters()
    )
    return ModelShape(
        parameters=_count(model),
        body=int(body),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        inner=has.get("intermediate_size") or 4 * config.hidden_size,
        attention=config.num_attention_heads * size,
        heads=config.num_attention_heads,
        kv_width=2 * (has.get("num_key_value_heads") or config.num_attention_heads) * size,
        vocab=model.get_output_embeddings().weight.shape[0],
    )


def _causal(s: DraftConfig, config: Any, small: Any) -> DraftShape:
    model = _on_meta(config if small is None else small)
    fields = dict(vars(_shape(model)))
    if s.layers:
        less = fields["body"] - fields["body"] * len(s.layers) // fields["layers"]
        fields["parameters"] -= less
        fields["body"] -= less
    trained = fields["parameters"]
    if s.lora_rank:
        share = len(s.layers) / fields["layers"] if s.layers else 1.0
        trained = int(s.lora_rank * _lora_parameters_per_rank(model) * share)
        fields["parameters"] += trained
    if s.layers:
        fields["layers"] = len(s.layers)
    return DraftShape(**fields, family="causal", trained=trained, late=0, passes_per_slot=1)


def _medusa(s: DraftConfig, config: Any, vocab: int) -> DraftShape:
    net = MedusaModel(layouts.medusa_config(config, s.heads, s.head_layers, vocab))
    width, count = config.hidden_size, _count(net)
    if s.family == "medusa2":
        count += s.rank * _lora_parameters_per_rank(_on_meta(config))
    return DraftShape(
        parameters=count,
        body=0,
        layers=1,
        hidden=width,
        inner=width,
        attention=width,
        heads=1,
        kv_width=0,
        vocab=vocab,
        family=s.family,
        trained=count,
        late=_count(net.blocks) // s.heads,
        passes_per_slot=s.heads,
    )


def _lora_parameters_per_rank(model: Any) -> int:
    """Inputs and outputs of all linear layers but the LM head: parameters of an adapter of rank 1 to each."""
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    return sum(m.in_features + m.out_features for m in linear)


def _eagle(s: DraftConfig, config: Any, vocab: int) -> DraftShape:
    if s.family == "eagle1":
        fields = layouts.eagle1_config(config, vocab)
        net: Eagle1Model | Eagle3Model = Eagle1Model(llama_config(fields), lambda states: states)
        size, times, twice = vocab, 1, _count(net.fc)
    else:
        layers = tuple(s.taps) or layouts.default_aux_layers(config.num_hidden_layers)
        size = min(s.vocab or vocab, vocab)
        fields = layouts.eagle3_config(config, vocab, size, layers, s.width)
        ids = None if size == vocab else torch.arange(size)
        net, times, twice = (
            Eagle3Model(llama_config(fields), HiddenStateSpec(layers), ids),
            s.steps,
            0,
        )
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
        kv_width=0,
        vocab=size,
        family=s.family,
        trained=sum(p.numel() for p in net.parameters() if p.requires_grad),
        late=_count(net.layer) + twice,
        passes_per_slot=times,
    )


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
