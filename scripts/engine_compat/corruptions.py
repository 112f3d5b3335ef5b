"""Mistakes that exporters of drafts are known to make, each with the rules that must find it."""

from dataclasses import dataclass

import torch

from decode.serving.edits import (
    Edit,
    NestConfig,
    RemoveFile,
    TensorEdit,
    add,
    add_query_bias,
    cast,
    combine,
    drop,
    drop_last_row,
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
    """One mistake in the files of a draft."""

    family: str
    edit: Edit
    expected_rules: dict[str, str]
    """{engine: name of the rule that must find it}; an engine that is left out serves the draft as it was trained.
    llama.cpp gets what scripts/export.py makes of the files, so that `decoder` may be the one."""


def by_engine(rule: str, *, but: tuple[str, ...] = ()) -> dict[str, str]:
    """The same rule in vLLM, SGLang, TensorRT-LLM and llama.cpp, except for the engines `but`."""
    engines = ("vllm", "sglang", "trtllm", "llamacpp")
    return {engine: rule for engine in engines if engine not in but}


def lm_by_engine(rule: str) -> dict[str, str]:
    """The same rule in all engines, which serve causal drafts."""
    return by_engine(rule) | {"transformers": rule}


def eagle3_corruptions(layers: int) -> dict[str, Corruption]:
    """For EAGLE-3 heads; `layers` is the number of the target's layers."""
    return {
        "a matrix is missing": Corruption(
            "eagle3", drop("midlayer.self_attn.o_proj.weight"), by_engine("missing-tensor")
        ),
        "the last norm is missing": Corruption("eagle3", drop("norm.weight"), by_engine("missing-tensor")),
        "a tensor is renamed": Corruption(
            "eagle3", rename("fc.weight", "fusion.weight"), by_engine("unknown-tensor")
        ),
        "a second layer": Corruption(
            "eagle3",
            add("layers.1.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight"),
            by_engine("unknown-tensor") | {"llamacpp": "decoder"},
        ),
        "num_hidden_layers is 2": Corruption(
            "eagle3", set_config(num_hidden_layers=2), by_engine("layers")
        ),
        "d2t holds ids": Corruption("eagle3", TensorEdit(offsets_to_ids), by_engine("map")),
        "d2t is one token off": Corruption("eagle3", TensorEdit(shift_ids), by_engine("map")),
        "d2t is missing": Corruption("eagle3", drop("d2t"), by_engine("map-missing")),
        "d2t in bfloat16": Corruption("eagle3", cast("d2t", torch.bfloat16), by_engine("map-dtype")),
        "t2d in int64": Corruption(
            "eagle3", cast("t2d", torch.int64), by_engine("members-dtype", but=("trtllm", "llamacpp")),
        ),
        "taps of the other convention": Corruption(
            "eagle3", set_aux_layers(layers, -1, None), {"vllm": "taps", "sglang": "taps-unread"}
        ),
        "taps counted from 1 for SGLang": Corruption(
            "eagle3",
            set_aux_layers(layers, 0, 0), by_engine("taps-disagree") | {"sglang": "taps"},
        ),
        "taps that differ by two": Corruption(
            "eagle3", set_aux_layers(layers, 0, -2), by_engine("taps-disagree")
        ),
        "taps for SGLang alone": Corruption("eagle3", set_aux_layers(layers, None, -1), {"vllm": "taps"}),
        "norm_before_residual": Corruption(
            "eagle3",
            set_config(norm_before_residual=True),
            by_engine("norm-before-residual") | dict.fromkeys(("vllm", "llamacpp"), "norm-flags"),
        ),
        "norm_output": Corruption(
            "eagle3", set_config(norm_output=True), by_engine("norm-flags") | {"llamacpp": "unwritten-norm"}
        ),
        "norm_before_fc": Corruption(
            "eagle3",
            set_config(norm_before_fc=True),
            by_engine("missing-tensor") | {"trtllm": "norm-before-fc"},
        ),
        "fc_norm": Corruption("eagle3", set_config(fc_norm=True), by_engine("missing-tensor")),
        "draft_vocab_size is missing": Corruption(
            "eagle3", set_config(draft_vocab_size=None), by_engine("draft-vocabulary") | {"llamacpp": "shapes"}
        ),
        "draft_vocab_size is wrong": Corruption(
            "eagle3", set_config(draft_vocab_size=17), by_engine("shapes")
        ),
        "vocab_size is the draft's": Corruption(
            "eagle3", set_config(vocab_size=17), by_engine("vocabulary")
        ),
        "head_dim": Corruption("eagle3", set_config(head_dim=2), by_engine("shapes")),
        "K/V heads": Corruption("eagle3", set_config(num_key_value_heads=1), by_engine("shapes")),
        "rope_parameters": Corruption("eagle3", set_rope_theta(1e6), by_engine("rope")),
        "no rope keys": Corruption(
            "eagle3",
            set_config(rope_parameters=None, rope_theta=None, rope_scaling=None),
            {"vllm": "rope", "sglang": "rope-keys", "trtllm": "rope-keys", "llamacpp": "rope"},
        ),
        "another rope_theta under both keys": Corruption(
            "eagle3", combine(set_rope_theta(1e6), set_config(rope_theta=1e6)), by_engine("rope")
        ),
        "attention_bias": Corruption("eagle3", set_config(attention_bias=True), by_engine("bias-flags")),
        "a bias of the layer": Corruption(
            "eagle3",
            TensorEdit(add_query_bias),
            by_engine("dropped-bias") | {"llamacpp": "unknown-tensor"},
        ),
        "attention_bias is missing": Corruption(
            "eagle3", set_config(attention_bias=None), {"trtllm": "settings"}
        ),
        "a norm that no flag turns on": Corruption(
            "eagle3",
            add("input_norm.weight", "norm.weight"),
            by_engine("unknown-tensor") | {"vllm": "skipped-tensor", "llamacpp": "decoder"},
        ),
        "tied embeddings": Corruption(
            "eagle3", set_config(tie_word_embeddings=True), {"sglang": "tied"}
        ),
        "another activation": Corruption(
            "eagle3", set_config(hidden_act="gelu"), by_engine("activation")
        ),
        "another width of target": Corruption(
            "eagle3", set_config(target_hidden_size=8), by_engine("target-width")
        ),
        "another architecture": Corruption(
            "eagle3",
            set_config(architectures=["MistralForCausalLM"]),
            {"vllm": "architecture", "sglang": "architecture"},
        ),
        "NaN": Corruption("eagle3", set_nan("fc.weight"), by_engine("finite")),
        "another dtype": Corruption("eagle3", set_config(dtype="float64"), by_engine("dtype")),
        "int8 weights": Corruption(
            "eagle3", cast("fc.weight", torch.int8), by_engine("floating")
        ),
        "nested, flag unsaid": Corruption(
            "eagle3",
            combine(NestConfig(), set_config(norm_before_residual=None)),
            by_engine("nested-config") | {"vllm": "nested-norm-flag", "llamacpp": "norm-flags"},
        ),
        "nested, model_type on top": Corruption(
            "eagle3",
            combine(NestConfig(), set_config(model_type="llama")),
            by_engine("nested-config", but=("llamacpp",)),
        ),
        "nested, layer of another kind": Corruption(
            "eagle3", combine(NestConfig(), set_layer_config(model_type="qwen3")),
            by_engine("nested-config") | {"llamacpp": "decoder"},
        ),
        "nested, without tokens to draft": Corruption(
            "eagle3", combine(NestConfig(), set_config(speculators_config={})),
            by_engine("nested-config", but=("llamacpp",)),
        ),
        "nested, maps of a whole vocabulary": Corruption(
            "eagle3",
            combine(NestConfig(), set_config(draft_vocab_size=None), drop("lm_head.weight")),
            by_engine("map-superfluous") | {"trtllm": "nested-config"},
        ),
    }  # fmt: skip


def eagle1_corruptions() -> dict[str, Corruption]:
    """For EAGLE-1 heads."""
    return {
        "a first norm": Corruption(
            "eagle1",
            add("layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight"),
            by_engine("unknown-tensor", but=("trtllm",)),
        ),
        "a head of its own": Corruption(
            "eagle1",
            add("lm_head.weight", "fc.weight"),
            by_engine("unknown-tensor", but=("trtllm",)),
        ),
        "fc with a bias": Corruption("eagle1", TensorEdit(set_fc_bias), {"vllm": "dropped-bias"}),
        "fc without its zeros": Corruption("eagle1", drop("fc.bias"), {"sglang": "fc-bias"}),
        "bias": Corruption("eagle1", set_config(bias=True), by_engine("bias-flags", but=("trtllm",))),
        "a matrix is missing (1)": Corruption(
            "eagle1",
            drop("layers.0.mlp.down_proj.weight"),
            by_engine("missing-tensor", but=("trtllm",)),
        ),
        "one architecture for both (1)": Corruption(
            "eagle1", set_config(architectures=["LlamaForCausalLM"]), {"sglang": "architecture"}
        ),
    }  # fmt: skip


def medusa_corruptions() -> dict[str, Corruption]:
    """For Medusa heads."""
    return {
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
        ),
        "hidden_size is missing": Corruption(
            "medusa", set_config(hidden_size=None), {"vllm": "sizes"}
        ),
        "hidden_size is wrong": Corruption("medusa", set_config(hidden_size=8), {"vllm": "shapes"}),
        "a setting that is renamed": Corruption(
            "medusa", set_config(num_attention_heads=1), {"vllm": "renamed-settings"}
        ),
        "truncated_vocab_size": Corruption(
            "medusa", set_config(truncated_vocab_size=8), {"vllm": "truncated-vocabulary"}
        ),
        "a projection with a row less": Corruption(
            "medusa",
            drop_last_row("lm_heads.0.weight"),
            {"vllm": "vocabulary"},
        ),
    }  # fmt: skip


def causal_corruptions() -> dict[str, Corruption]:
    """For causal drafts."""
    return {
        "another vocabulary": Corruption(
            "causal", set_config(vocab_size=17), lm_by_engine("vocabulary")
        ),
        "a norm is missing": Corruption(
            "causal", drop("model.norm.weight"), lm_by_engine("missing-tensor")
        ),
        "an extra tensor": Corruption(
            "causal", add("model.extra.weight", "model.norm.weight"), lm_by_engine("unknown-tensor")
        ),
        "no tokenizer": Corruption(
            "causal", RemoveFile("tokenizer_config.json"), lm_by_engine("tokenizer")
        ),
        "another width (LM)": Corruption(
            "causal", set_config(intermediate_size=8), lm_by_engine("shapes")
        ),
        "tied, with another lm_head": Corruption(
            "causal",
            combine(set_config(tie_word_embeddings=True), add("lm_head.weight", "model.embed_tokens.weight")),
            by_engine("tied", but=("llamacpp",)) | {"transformers": "tied"},
        ),
        "NaN (LM)": Corruption("causal", set_nan("model.norm.weight"), lm_by_engine("finite")),
        "int8 weights (LM)": Corruption(
            "causal", cast("model.norm.weight", torch.int8), lm_by_engine("floating")
        ),
        "another dtype (LM)": Corruption(
            "causal", set_config(dtype="float64"), lm_by_engine("dtype")
        ),
        "no rope keys (LM)": Corruption(
            "causal", set_config(rope_parameters=None, rope_theta=None), lm_by_engine("rope")
        ),
    }  # fmt: skip


def all_corruptions(layers: int) -> dict[str, Corruption]:
    """{name: corruption} of all families; `layers` is the number of the target's layers."""
    return (
        eagle3_corruptions(layers)
        | eagle1_corruptions()
        | medusa_corruptions()
        | causal_corruptions()
    )
