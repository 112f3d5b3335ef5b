"""Mistakes that exporters of drafts are known to make: what each does to a folder, and which rules must see it."""

from dataclasses import dataclass

import torch

from scripts.engine_compat.checkpoint_edits import (
    Edit,
    add,
    add_query_bias,
    cast,
    combine,
    drop,
    edit_tensors,
    nest_config,
    offsets_to_ids,
    rename,
    set_aux_layers,
    set_config,
    set_fc_bias,
    set_layer_config,
    set_nan,
    set_rope_theta,
    shift_ids,
)


@dataclass(frozen=True)
class Corruption:
    """One mistake: of which family, what it does to a folder, and the rules of each engine that must see it."""

    family: str
    edit: Edit
    seen: dict[str, str]
    """The rule's name by engine; an engine that is left out reads the folder as it was meant."""
    served: bool = True
    """Shown in vLLM by the command: what it refuses is told by one or two examples."""


def by_engine(rule: str, *, but: tuple[str, ...] = ()) -> dict[str, str]:
    return {engine: rule for engine in ("vllm", "sglang", "trtllm") if engine not in but}


def lm_by_engine(rule: str) -> dict[str, str]:
    return by_engine(rule) | {"transformers": rule}


def all_corruptions(layers: int) -> dict[str, Corruption]:
    """All of them, for a target of so many layers."""
    mid = "midlayer"
    e3 = {
        "a matrix is missing": Corruption(
            "eagle3", drop(f"{mid}.self_attn.o_proj.weight"), by_engine("missing-tensor")
        ),
        "the last norm is missing": Corruption("eagle3", drop("norm.weight"), by_engine("missing-tensor")),
        "a tensor is renamed": Corruption(
            "eagle3", rename("fc.weight", "fusion.weight"), by_engine("unknown-tensor")
        ),
        "a second layer": Corruption(
            "eagle3",
            add(layers__1__mlp__up_proj__weight=f"{mid}.mlp.up_proj.weight"),
            by_engine("unknown-tensor"),
            served=False,
        ),
        "a layer too many is said": Corruption(
            "eagle3", set_config(num_hidden_layers=2), by_engine("layers"), served=False
        ),
        "d2t holds ids": Corruption("eagle3", edit_tensors(offsets_to_ids), by_engine("map")),
        "d2t is one token off": Corruption("eagle3", edit_tensors(shift_ids), by_engine("map")),
        "d2t is missing": Corruption("eagle3", drop("d2t"), by_engine("map-missing")),
        "d2t in bfloat16": Corruption("eagle3", cast("d2t", torch.bfloat16), by_engine("map-dtype")),
        "t2d in int64": Corruption(
            "eagle3", cast("t2d", torch.int64), by_engine("members-dtype", but=("trtllm",)), served=False
        ),
        "taps of the other convention": Corruption(
            "eagle3", set_aux_layers(layers, -1, None), {"vllm": "taps", "sglang": "taps-unread"}
        ),
        "taps counted from 1 for SGLang": Corruption(
            "eagle3",
            set_aux_layers(layers, 0, 0), by_engine("taps-disagree") | {"sglang": "taps"},
            served=False,
        ),
        "taps that differ by two": Corruption(
            "eagle3", set_aux_layers(layers, 0, -2), by_engine("taps-disagree"), served=False
        ),
        "taps for SGLang alone": Corruption("eagle3", set_aux_layers(layers, None, -1), {"vllm": "taps"}),
        "norm_before_residual": Corruption(
            "eagle3",
            set_config(norm_before_residual=True),
            by_engine("norm-before-residual") | {"vllm": "norm-flags"},
        ),
        "norm_output": Corruption("eagle3", set_config(norm_output=True), by_engine("norm-flags")),
        "norm_before_fc": Corruption(
            "eagle3",
            set_config(norm_before_fc=True),
            by_engine("missing-tensor") | {"trtllm": "norm-before-fc"},
        ),
        "fc_norm": Corruption("eagle3", set_config(fc_norm=True), by_engine("missing-tensor")),
        "draft_vocab_size is missing": Corruption(
            "eagle3", set_config(draft_vocab_size=None), by_engine("draft-vocabulary"), served=False
        ),
        "draft_vocab_size is wrong": Corruption(
            "eagle3", set_config(draft_vocab_size=17), by_engine("shapes"), served=False
        ),
        "vocab_size is the draft's": Corruption(
            "eagle3", set_config(vocab_size=17), by_engine("vocabulary"), served=False
        ),
        "head_dim": Corruption("eagle3", set_config(head_dim=2), by_engine("shapes"), served=False),
        "K/V heads": Corruption("eagle3", set_config(num_key_value_heads=1), by_engine("shapes"), served=False),
        "rope_parameters": Corruption("eagle3", set_rope_theta(1e6), by_engine("rope")),
        "no rope keys": Corruption(
            "eagle3",
            set_config(rope_parameters=None, rope_theta=None, rope_scaling=None),
            {"vllm": "rope", "sglang": "rope-keys", "trtllm": "rope-keys"},
            served=False,
        ),
        "another base, said twice": Corruption(
            "eagle3", combine(set_rope_theta(1e6), set_config(rope_theta=1e6)), by_engine("rope"), served=False
        ),
        "attention_bias": Corruption("eagle3", set_config(attention_bias=True), by_engine("bias-flags")),
        "a bias of the layer": Corruption(
            "eagle3",
            edit_tensors(add_query_bias),
            by_engine("dropped-bias"),
            served=False,
        ),
        "attention_bias is missing": Corruption(
            "eagle3", set_config(attention_bias=None), {"trtllm": "settings"}, served=False
        ),
        "a norm that no flag turns on": Corruption(
            "eagle3",
            add(input_norm__weight="norm.weight"),
            by_engine("unknown-tensor") | {"vllm": "skipped-tensor"},
            served=False,
        ),
        "tied embeddings": Corruption(
            "eagle3", set_config(tie_word_embeddings=True), {"sglang": "tied"}, served=False
        ),
        "another activation": Corruption("eagle3", set_config(hidden_act="gelu"), by_engine("activation"), served=False),
        "another width of target": Corruption(
            "eagle3", set_config(target_hidden_size=8), by_engine("target-width"), served=False
        ),
        "another architecture": Corruption(
            "eagle3",
            set_config(architectures=["MistralForCausalLM"]),
            {"vllm": "architecture", "sglang": "architecture"},
            served=False,
        ),
        "not a number": Corruption("eagle3", set_nan("fc.weight"), by_engine("finite"), served=False),
        "another dtype is said": Corruption("eagle3", set_config(dtype="float64"), by_engine("dtype"), served=False),
        "integers for weights": Corruption(
            "eagle3", cast("fc.weight", torch.int8), by_engine("floating"), served=False
        ),
        "nested, flag unsaid": Corruption(
            "eagle3",
            combine(nest_config, set_config(norm_before_residual=None)),
            by_engine("nested-config") | {"vllm": "nested-norm-flag"},
        ),
        "nested, model_type on top": Corruption(
            "eagle3",
            combine(nest_config, set_config(model_type="llama")),
            by_engine("nested-config"),
            served=False,
        ),
        "nested, layer of another kind": Corruption(
            "eagle3", combine(nest_config, set_layer_config("model_type", "qwen3")), by_engine("nested-config"), served=False
        ),
        "nested, without tokens to draft": Corruption(
            "eagle3", combine(nest_config, set_config(speculators_config={})), by_engine("nested-config"), served=False
        ),
        "nested, maps of a whole vocabulary": Corruption(
            "eagle3",
            combine(nest_config, set_config(draft_vocab_size=None), drop("lm_head.weight")),
            by_engine("map-superfluous") | {"trtllm": "nested-config"},
            served=False,
        ),
    }  # fmt: skip
    layer = "layers.0"
    e1 = {
        "a first norm": Corruption(
            "eagle1",
            add(layers__0__input_layernorm__weight=f"{layer}.post_attention_layernorm.weight"),
            by_engine("unknown-tensor", but=("trtllm",)),
        ),
        "a head of its own": Corruption(
            "eagle1",
            add(lm_head__weight="fc.weight"),
            by_engine("unknown-tensor", but=("trtllm",)),
            served=False,
        ),
        "fc with a bias": Corruption("eagle1", edit_tensors(set_fc_bias), {"vllm": "dropped-bias"}),
        "fc without its zeros": Corruption("eagle1", drop("fc.bias"), {"sglang": "fc-bias"}, served=False),
        "bias": Corruption("eagle1", set_config(bias=True), by_engine("bias-flags", but=("trtllm",))),
        "a matrix is missing (1)": Corruption(
            "eagle1",
            drop(f"{layer}.mlp.down_proj.weight"),
            by_engine("missing-tensor", but=("trtllm",)),
        ),
        "one architecture for both (1)": Corruption(
            "eagle1", set_config(architectures=["LlamaForCausalLM"]), {"sglang": "architecture"}, served=False
        ),
    }  # fmt: skip
    md = {
        "medusa_fc_bias is missing": Corruption(
            "medusa", set_config(medusa_fc_bias=None), {"vllm": "dropped-bias"}
        ),
        "original_lm_head": Corruption(
            "medusa", set_config(original_lm_head=True), {"vllm": "shared-projection"}
        ),
        "a projection is missing": Corruption(
            "medusa", drop("lm_heads.1.weight"), {"vllm": "missing-tensor"}
        ),
        "a block is renamed": Corruption(
            "medusa",
            rename("blocks.1.layers.0.weight", "blocks.1.linear.weight"),
            {"vllm": "unknown-tensor"},
            served=False,
        ),
        "hidden_size is missing": Corruption("medusa", set_config(hidden_size=None), {"vllm": "sizes"}, served=False),
        "hidden_size is wrong": Corruption("medusa", set_config(hidden_size=8), {"vllm": "shapes"}, served=False),
        "a setting that is renamed": Corruption(
            "medusa", set_config(num_attention_heads=1), {"vllm": "renamed-settings"}, served=False
        ),
        "truncated_vocab_size": Corruption(
            "medusa", set_config(truncated_vocab_size=8), {"vllm": "truncated-vocabulary"}, served=False
        ),
        "rows of another vocabulary": Corruption(
            "medusa",
            edit_tensors(lambda t: t.update({"lm_heads.0.weight": t["lm_heads.0.weight"][:-1]})),
            {"vllm": "vocabulary"},
            served=False,
        ),
    }  # fmt: skip
    lm = {
        "another vocabulary": Corruption(
            "causal", set_config(vocab_size=17), lm_by_engine("vocabulary"), served=False
        ),
        "a norm is missing": Corruption(
            "causal", drop("model.norm.weight"), lm_by_engine("missing-tensor"), served=False
        ),
        "an extra tensor": Corruption(
            "causal", add(model__extra__weight="model.norm.weight"), lm_by_engine("unknown-tensor"), served=False
        ),
        "no tokenizer": Corruption(
            "causal", lambda folder: (folder / "tokenizer_config.json").unlink(), lm_by_engine("tokenizer"), served=False
        ),
        "another width (LM)": Corruption(
            "causal", set_config(intermediate_size=8), lm_by_engine("shapes"), served=False
        ),
        "tied, with a matrix of its own": Corruption(
            "causal",
            combine(set_config(tie_word_embeddings=True), add(lm_head__weight="model.embed_tokens.weight")),
            lm_by_engine("tied"),
            served=False,
        ),
        "not a number (LM)": Corruption("causal", set_nan("model.norm.weight"), lm_by_engine("finite"), served=False),
        "integers for weights (LM)": Corruption(
            "causal", cast("model.norm.weight", torch.int8), lm_by_engine("floating"), served=False
        ),
        "another dtype is said (LM)": Corruption("causal", set_config(dtype="float64"), lm_by_engine("dtype"), served=False),
        "no rope keys (LM)": Corruption(
            "causal", set_config(rope_parameters=None, rope_theta=None), lm_by_engine("rope"), served=False
        ),
    }  # fmt: skip
    return e3 | e1 | md | lm
